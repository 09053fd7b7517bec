"""Tiny models for tests: a random base in Hugging Face layout, and random adapters for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TEXT = ["the quick brown fox jumps over the lazy dog", "een héél kleine proef 123", "ABC; def!"]


def tiny_base(
    folder: Path, *, seed: int = 0, family: str = "llama", noise: float = 0.0, **dims: Any
) -> Path:
    """Make a random decoder of some 100 K parameters with a byte-level BPE tokenizer.

    Args:
        family: a model_type of transformers.
        noise: deviation of what is added to biases and norms, which are all zeros or ones at first.
        dims: fields of the family's configuration to change.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    settings = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.3,
        **dims,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **settings), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if noise and parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=noise)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def tiny_adapter(
    base: Path,
    folder: Path,
    *,
    rank: int = 4,
    targets: Sequence[str] = ALL_LINEAR,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Make a random LoRA adapter in PEFT's format, with B far from zero.

    Args:
        config: fields of PEFT's LoraConfig to change.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **config}
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    peft.save_pretrained(folder)
    return folder
