"""What a decoder looks like: dimensions, its family's options, rotary embeddings.

Llama, Mistral, Qwen2 and Qwen3 differ in a few switches and share one path (`model.Decoder`). What
is not listed here is not guessed: `Shape.read` raises Unsupported, and names what it met.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.errors import Unsupported

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_BY_TRANSFORMERS = ("linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions of a decoder.

    windows: for each layer how many last tokens it attends to, itself included; None is all.
    qkv_bias, o_bias, mlp_bias: which projections have one. qk_norm: queries and keys are
    normalised by head. rope_frequencies: radians a position for each pair, `head_dim / 2` floats;
    rope_scaling multiplies cosines and sines.
    """

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    tied: bool
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope_frequencies: tuple[float, ...]
    rope_scaling: float

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """From a Hugging Face config.json.

        Raises:
            Unsupported: another family, or an option of it that this path does not compute.
        """
        family = json.loads((folder / "config.json").read_text()).get("model_type")
        if family not in _FAMILIES:
            raise Unsupported(f"{folder}: model_type {family!r} is not {', '.join(_FAMILIES)}")
        from transformers import AutoConfig  # it knows each family's defaults

        config = AutoConfig.from_pretrained(folder)
        raw: dict[str, Any] = config.to_dict()
        if raw.get("hidden_act", "silu") != "silu":
            raise Unsupported(f"{folder}: activation {raw['hidden_act']!r}")
        if raw.get("quantization_config"):
            raise Unsupported(f"{folder}: quantised weights")
        heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
        # Options of another family are ignored, as transformers ignores them.
        bias = family in ("llama", "qwen3") and bool(raw.get("attention_bias"))
        frequencies, scaling = _rope(folder, config, raw)
        return cls(
            family=family,
            layers=layers,
            hidden=raw["hidden_size"],
            intermediate=raw["intermediate_size"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            vocab=raw["vocab_size"],
            context=raw["max_position_embeddings"],
            eps=raw["rms_norm_eps"],
            tied=bool(raw.get("tie_word_embeddings")),
            windows=_windows(folder, family, raw, layers),
            qkv_bias=family == "qwen2" or bias,
            o_bias=bias,
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias")),
            qk_norm=family == "qwen3",
            rope_frequencies=frequencies,
            rope_scaling=scaling,
        )

    @property
    def q_dim(self) -> int:
        """Columns of all queries."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Columns of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    def projections(self) -> dict[str, tuple[int, int, str, int]]:
        """Each adaptable projection: (in, out, its fused matrix, its first column there)."""
        q, kv, i, h = self.q_dim, self.kv_dim, self.intermediate, self.hidden
        return {
            "q_proj": (h, q, "qkv", 0),
            "k_proj": (h, kv, "qkv", q),
            "v_proj": (h, kv, "qkv", q + kv),
            "o_proj": (q, h, "o", 0),
            "gate_proj": (h, i, "gate_up", 0),
            "up_proj": (h, i, "gate_up", i),
            "down_proj": (i, h, "down", 0),
        }

    def rotations(self, device: torch.device) -> Tensor:
        """complex64 [context, head_dim / 2]: by what a pair of a head is multiplied."""
        frequencies = torch.tensor(self.rope_frequencies, dtype=torch.float32)
        angles = torch.arange(self.context, dtype=torch.float32)[:, None] * frequencies
        return (torch.polar(torch.ones_like(angles), angles) * self.rope_scaling).to(device)

    def paired(self, heads: int) -> Tensor:
        """int64 [heads * head_dim]: rows of a query or key matrix, so that a rotation's pair lies
        side by side. Hugging Face keeps the halves of a head apart; products of queries with keys
        do not change when both are put in another order."""
        half = torch.arange(self.head_dim // 2)
        head = torch.stack([half, half + self.head_dim // 2], 1).flatten()
        return (torch.arange(heads)[:, None] * self.head_dim + head).flatten()


def _windows(folder: Path, family: str, raw: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    kind = {"llama": "full_attention", "mistral": "sliding_attention"}.get(family)
    kinds = [kind] * layers if kind else raw["layer_types"]
    for unknown in set(kinds) - {"full_attention", "sliding_attention"}:
        raise Unsupported(f"{folder}: layers of type {unknown!r}")
    return tuple(raw["sliding_window"] if k == "sliding_attention" else None for k in kinds)


def _rope(folder: Path, config: Any, raw: dict[str, Any]) -> tuple[tuple[float, ...], float]:
    rope = raw.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if (rope.get("partial_rotary_factor") or 1) != 1:
        raise Unsupported(f"{folder}: rotary embeddings of a part of each head")
    if kind == "default":
        dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        half = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return tuple((1.0 / rope["rope_theta"] ** half).tolist()), 1.0
    if kind not in _ROPE_BY_TRANSFORMERS:  # those that change with the length of what is read
        raise Unsupported(f"{folder}: RoPE type {kind!r}")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(scaling)
