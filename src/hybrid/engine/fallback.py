"""Bases without a lean path: transformers' own forward, one request at a time.

Right before fast. What `model.Decoder` does not know is loaded by AutoModelForCausalLM. A running
request has a cache of its own and is run by itself, its adapter's deltas added by hooks on the
layers it targets. Nothing is known here about any family, so at load a made prompt is run whole
and in pieces: a model for which that is not the same is refused.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.engine.fallback_lora import Deltas, ModuleAdapter, linears
from hybrid.engine.lora import Adapter
from hybrid.engine.model import Decoder
from hybrid.engine.scheduler import Item, Sequence
from hybrid.engine.shape import Shape
from hybrid.errors import IntegrityError, Unsupported

log = logging.getLogger(__name__)

_CONTEXT = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length")
_PIECES = (7, 1, 1, 7)
"""How the made prompt of the check at load is cut."""


def load_decoder(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> Decoder | FallbackDecoder:
    """A base, on the lean path where it has one; says in the log when it has not.

    Raises:
        Unsupported: neither can run it. IntegrityError: its weights are not those of its
            configuration.
    """
    try:
        return Decoder(folder, device, dtype)
    except Unsupported as e:
        why = e.message
    decoder = FallbackDecoder(folder, device, dtype)
    log.warning(
        "no lean path for model_type %r: transformers' own forward is used, for one request at a"
        " time, which is slower; the context is %d tokens (%s)",
        decoder.shape.family,
        decoder.shape.context,
        why,
    )
    return decoder


@dataclass(eq=False)
class _Kept:
    """Keys and values of a request's first `tokens` tokens."""

    cache: Any
    tokens: int = 0


class FallbackDecoder:
    """A base that transformers runs.

    Attributes:
        shape: names, vocabulary and context; without layers, since the engine's cache keeps none of
            its keys and values, and only counts tokens.

    Args:
        folder: Hugging Face layout: config.json and safetensors.
        device: where it runs.
        dtype: of the weights.

    Raises:
        Unsupported: an encoder-decoder, code of its own, quantised weights, other input than text,
            no causal language model, or one whose cache does not do what its forward does.
        IntegrityError: weights are missing, misshapen or not used.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM, DynamicCache

        config = _config(folder)
        self.device, self.dtype = device, dtype
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (OSError, RuntimeError) as e:
            raise IntegrityError(f"{folder}: cannot be loaded: {e}") from None
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, report[kind])):
                raise IntegrityError(
                    f"{folder}: {len(names)} {kind.replace('_', ' ')}: {', '.join(names[:4])}"
                )
        self.model: Any = model.to(device).eval()
        self.linears = linears(self.model)
        self.shape = _shape(folder, config)
        accepted = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        new_cache: Any = DynamicCache
        self._new_cache: Callable[[], Any] = lambda: new_cache(config=config)
        self._kept: dict[Sequence, _Kept] = {}
        self._deltas: Deltas = {}
        for name, module in self.linears.items():
            module.register_forward_hook(self._hook(name), with_kwargs=True)
        self._check(folder)

    # --- what the engine asks for ------------------------------------------------------------

    def run(self, items: Seq[Item]) -> tuple[list[Sequence], Tensor]:
        """Run each item, and count it as computed.

        Returns:
            (the sequences for which a token is to be chosen, their logits float32 [N, vocab])
        """
        for s in [s for s in self._kept if s.row is None]:  # preempted, or taken out
            del self._kept[s]
        chosen: list[Sequence] = []
        logits = []
        for item in items:
            s, end = item.sequence, item.sequence.computed + item.count
            kept = self._kept.get(s)
            if kept is None or kept.tokens > s.computed:
                kept = self._kept[s] = _Kept(self._new_cache())
            # From where its own cache ends, whatever the engine's holds.
            last = self._logits(s.tokens(kept.tokens, end), s.adapter, kept)[-1:]
            s.computed = end
            if item.last:
                chosen.append(s)
                logits.append(last)
        empty = torch.empty(0, self.shape.vocab, device=self.device)
        return chosen, torch.cat(logits) if logits else empty

    def release(self, sequence: Sequence) -> None:
        """Let go of what is kept for a request that has ended."""
        self._kept.pop(sequence, None)

    def score(
        self, adapter: Adapter | None, prompt: Seq[int], choices: Seq[Seq[int]]
    ) -> list[float]:
        """Natural-log probability of each choice's tokens after the prompt, one pass for each."""
        values = []
        for choice in choices:
            table = self._logits([*prompt, *choice[:-1]], adapter, None)[len(prompt) - 1 :]
            tokens = torch.tensor(choice, device=self.device)
            values.append(float(torch.log_softmax(table, -1).gather(1, tokens[:, None]).sum()))
        return values

    def embed(self, adapter: Adapter | None, ids: Seq[int]) -> list[float]:
        """Mean of the last hidden states over the tokens, L2-normalised: `hidden` floats."""
        out = self._forward(self.model.base_model, ids, adapter, None)
        vector: list[float] = F.normalize(out[0][0].float().mean(0), dim=0).tolist()
        return vector

    # --- running ---------------------------------------------------------------------------

    def _logits(self, ids: Seq[int], adapter: Adapter | None, kept: _Kept | None) -> Tensor:
        """Float32 [T, vocab] of tokens that follow what is kept, and are kept too."""
        logits: Tensor = self._forward(self.model, ids, adapter, kept).logits[0]
        return logits.float()

    def _forward(
        self, part: Any, ids: Seq[int], adapter: Adapter | None, kept: _Kept | None
    ) -> Any:
        """The output of the model, or of the part of it below its head."""
        assert adapter is None or isinstance(adapter, ModuleAdapter)
        before = kept.tokens if kept else 0
        seen = torch.ones(1, before + len(ids), dtype=torch.long, device=self.device)
        state = {self._cache_name: kept.cache} if kept else {}
        self._deltas = adapter.deltas if adapter else {}
        try:
            out = part(
                input_ids=torch.tensor([list(ids)], device=self.device),
                attention_mask=seen,
                use_cache=kept is not None,
                **state,
            )
        finally:
            self._deltas = {}
        if kept:
            kept.tokens += len(ids)
        return out

    def _hook(self, name: str) -> Any:
        def add(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
            delta = self._deltas.get(name)
            if delta is None:
                return None
            a, b = delta
            x: Tensor = (*args, *kwargs.values())[0]
            return output + (x @ a) @ b

        return add

    @torch.inference_mode()
    def _check(self, folder: Path) -> None:
        """Whole and in pieces must be the same: causal, and all of its state in the cache."""
        length, vocab = min(sum(_PIECES), self.shape.context), self.shape.vocab
        ids = [(i * 7919 + 13) % vocab for i in range(length)]
        pieces: list[Tensor] = []
        try:
            whole = self._logits(ids, None, None)
            kept = _Kept(self._new_cache())
            for count in _PIECES:
                if piece := ids[kept.tokens : kept.tokens + count]:
                    pieces.append(self._logits(piece, None, kept))
            hidden = self._forward(self.model.base_model, ids, None, None)[0]
        except Exception as e:  # whatever another's code raises, it cannot be served
            raise Unsupported(
                f"{folder}: model_type {self.shape.family!r} does not run with a cache: {e!r}"
            ) from e
        fits = whole.shape == (length, vocab) and hidden.shape == (1, length, self.shape.hidden)
        limit = 1e-3 if self.dtype == torch.float32 else 0.1
        if not fits or float((torch.cat(pieces) - whole).norm()) > limit * float(whole.norm()):
            raise Unsupported(
                f"{folder}: model_type {self.shape.family!r} gives other logits in pieces than"
                " whole"
            )


def _config(folder: Path) -> Any:
    """transformers' configuration of a model that can be right here. Raises Unsupported."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as e:
        raise Unsupported(
            f"{folder}: transformers knows its model_type only with code of its own, which is not"
            f" run, or not at all: {e}"
        ) from None
    what = f"{folder}: model_type {config.model_type!r}"
    if config.is_encoder_decoder:
        raise Unsupported(f"{what} is an encoder-decoder")
    if config.get_text_config() is not config:
        parts = ", ".join(config.sub_configs)
        raise Unsupported(f"{what} is more than a model of text ({parts})")
    if getattr(config, "quantization_config", None):
        raise Unsupported(f"{what}: quantised weights")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Unsupported(f"{what} has no causal language model in transformers")
    kinds = config.architectures or []
    if kinds and not any(k.endswith(("ForCausalLM", "LMHeadModel")) for k in kinds):
        raise Unsupported(f"{what}: {', '.join(kinds)} has no causal language model head")
    return config


def _shape(folder: Path, config: Any) -> Shape:
    """What the engine needs to know of it."""
    context = next((n for name in _CONTEXT if (n := getattr(config, name, None))), None)
    if context is None:
        raise Unsupported(f"{folder}: config.json names no context length ({', '.join(_CONTEXT)})")
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        # Beyond this the frequencies change, and keys that are kept would have the old ones.
        if isinstance(part, dict) and part.get("rope_type") in ("longrope", "dynamic"):
            context = min(context, part.get("original_max_position_embeddings") or context)
    return Shape(
        family=config.model_type,
        layers=0,
        hidden=config.hidden_size,
        intermediate=0,
        heads=1,
        kv_heads=1,
        head_dim=0,
        vocab=config.vocab_size,
        context=context,
        eps=0.0,
        tied=bool(config.tie_word_embeddings),
        windows=(),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope_frequencies=(),
        rope_scaling=1.0,
    )
