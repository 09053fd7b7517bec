"""The base model: a Llama made from its dimensions, or one loaded from a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hybrid.config import ModelConfig
from hybrid.errors import ConfigError


def build_model(config: ModelConfig, tokenizer: Any, seed: int) -> nn.Module:
    """A causal language model in float32 on the CPU, the same on every rank.

    A new model is drawn from `seed` (normal, standard deviation 0.02) and its vocabulary is the
    tokenizer's.

    Returns:
        A transformers causal LM: `model(input_ids=[rows, tokens] int64).logits` is
        [rows, tokens, vocabulary].

    Raises:
        ConfigError: `model.source` holds no causal LM, or one whose embedding is smaller than
            its tokenizer's vocabulary.
    """
    if config.source is not None:
        return _load(config.source, tokenizer)
    torch.manual_seed(seed)
    return LlamaForCausalLM(  # type: ignore[no-any-return]
        architecture(
            config,
            len(tokenizer),
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def architecture(config: ModelConfig, vocabulary: int, **tokens: int | None) -> Any:
    """The transformers configuration of the base.

    Args:
        vocabulary: of a new model; a loaded one has its own.

    Raises:
        ConfigError: `model.source` has no config.json.
    """
    if config.source is None:
        return LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context,
            tie_word_embeddings=config.tie_embeddings,
            use_cache=False,
            **tokens,
        )
    if not (config.source / "config.json").exists():
        raise ConfigError(
            f"model.source: {config.source}: no config.json there", param="model.source"
        )
    return AutoConfig.from_pretrained(config.source, local_files_only=True)


def _load(source: Path, tokenizer: Any) -> nn.Module:
    vocabulary = architecture(ModelConfig(name="base", source=source), 0).vocab_size
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"model.source: {source}: the tokenizer has {len(tokenizer)} tokens, the model's"
            f" embedding {vocabulary} rows",
            param="model.source",
        )
    try:
        return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
            source, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
    except (OSError, ValueError) as e:
        raise ConfigError(f"model.source: {source}: {e}", param="model.source") from None


def save_model(model: nn.Module, state: dict[str, torch.Tensor], tokenizer: Any, to: Path) -> None:
    """Write Hugging Face layout: config, float32 safetensors, tokenizer.

    Args:
        model: the trained model, however it is wrapped; only its configuration is read.
        state: the full (gathered) state dict on the CPU.
    """
    config: Any = getattr(model, "module", model).config  # DDP keeps it one level down
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict({name: t.float() for name, t in state.items()}, assign=True)
    plain.tie_weights()
    plain.config.use_cache = True
    plain.save_pretrained(to)
    tokenizer.save_pretrained(to)
