"""A Llama-family decoder, lean: fused projections, packed weights, LoRA over mixed rows.

One `forward` serves prefill, decoding, scoring and embedding: it runs a flat list of tokens and
leaves attention to a callback, because only attention knows which tokens belong together.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from hybrid.engine.lora import LoraPlan
from hybrid.errors import IntegrityError, Unsupported

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, hd], k [T, kv_heads, hd], v [T, kv_heads, hd]) → [T, heads * hd]."""


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    theta: float
    tied: bool

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """From a Hugging Face config.json.

        Raises:
            Unsupported: not a plain Llama: another family, scaled RoPE, biases.
        """
        raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
        kind = raw.get("model_type")
        if kind != "llama":
            raise Unsupported(f"{folder}: the engine serves llama models, not {kind!r}")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise Unsupported(f"{folder}: RoPE type {rope['rope_type']!r} is not supported")
        if raw.get("attention_bias") or raw.get("mlp_bias"):
            raise Unsupported(f"{folder}: biases in attention or MLP are not supported")
        if raw.get("hidden_act", "silu") != "silu":
            raise Unsupported(f"{folder}: activation {raw['hidden_act']!r} is not supported")
        heads = raw["num_attention_heads"]
        return cls(
            layers=raw["num_hidden_layers"],
            hidden=raw["hidden_size"],
            intermediate=raw["intermediate_size"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            vocab=raw["vocab_size"],
            context=raw["max_position_embeddings"],
            eps=raw["rms_norm_eps"],
            theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            tied=bool(raw.get("tie_word_embeddings")),
        )

    def projections(self) -> dict[str, tuple[int, int, str, int]]:
        """Each adaptable projection: (in, out, its fused matrix, its first column there)."""
        q, kv, i, h = (
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.intermediate,
            self.hidden,
        )
        return {
            "q_proj": (h, q, "qkv", 0),
            "k_proj": (h, kv, "qkv", q),
            "v_proj": (h, kv, "qkv", q + kv),
            "o_proj": (q, h, "o", 0),
            "gate_proj": (h, i, "gate_up", 0),
            "up_proj": (h, i, "gate_up", i),
            "down_proj": (i, h, "down", 0),
        }


class Linear:
    """x [T, in] → [T, out], weight packed for the processor once (oneDNN) where that exists.

    Exact float32. On a GPU, in other dtypes, or where oneDNN is missing, a plain product.
    """

    def __init__(self, weight: Tensor) -> None:
        packable = (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        )
        self.packed = packable
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 32)
            if packable
            else weight.contiguous()
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
            return y
        return F.linear(x, self.weight)


class Decoder:
    """Weights of one base on one device.

    Args:
        folder: Hugging Face layout: config.json and safetensors.
        device: where it runs.
        dtype: of the weights; float32 on the CPU.

    Raises:
        Unsupported: see `Shape.read`. IntegrityError: a weight is missing or misshapen.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape = Shape.read(folder)
        self.device, self.dtype = device, dtype
        state: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            state |= load_file(path)

        def take(name: str, *dims: int) -> Tensor:
            weight = state.get(name)
            if weight is None or tuple(weight.shape) != dims:
                found = "missing" if weight is None else f"shaped {tuple(weight.shape)}"
                raise IntegrityError(f"{folder}: weight {name} is {found}, expected {dims}")
            return weight.to(device, dtype)

        h, q = shape.hidden, shape.heads * shape.head_dim
        kv, inner = shape.kv_heads * shape.head_dim, shape.intermediate
        self.embedding = take("model.embed_tokens.weight", shape.vocab, h)
        self.norm = take("model.norm.weight", h)
        self.head = Linear(self.embedding if shape.tied else take("lm_head.weight", shape.vocab, h))
        self.blocks: list[dict[str, Any]] = []
        for i in range(shape.layers):
            at = f"model.layers.{i}."
            attn, mlp = at + "self_attn.", at + "mlp."
            qkv = [
                take(attn + f"{n}_proj.weight", d, h) for n, d in (("q", q), ("k", kv), ("v", kv))
            ]
            gate_up = [take(mlp + f"{n}_proj.weight", inner, h) for n in ("gate", "up")]
            self.blocks.append(
                {
                    "qkv": Linear(torch.cat(qkv)),
                    "o": Linear(take(attn + "o_proj.weight", h, q)),
                    "gate_up": Linear(torch.cat(gate_up)),
                    "down": Linear(take(mlp + "down_proj.weight", h, inner)),
                    "norm1": take(at + "input_layernorm.weight", h),
                    "norm2": take(at + "post_attention_layernorm.weight", h),
                }
            )
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angle = torch.arange(shape.context, dtype=torch.float32)[:, None] / shape.theta**half
        self.cos = torch.cat([angle.cos()] * 2, -1).to(device, dtype)
        self.sin = torch.cat([angle.sin()] * 2, -1).to(device, dtype)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, plan: LoraPlan) -> Tensor:
        """Last hidden states, normalised.

        Args:
            ids: int64 [T], tokens sorted by adapter as `plan` says.
            positions: int64 [T].
            attend: computes attention and keeps keys and values.
            plan: which rows get which adapter.

        Returns:
            [T, hidden]
        """
        shape = self.shape
        q_dim, kv_dim = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        n = ids.shape[0]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        h = self.embedding[ids]
        for layer, block in enumerate(self.blocks):
            x = F.rms_norm(h, (shape.hidden,), block["norm1"], shape.eps)
            y = block["qkv"](x)
            plan.apply(layer, "qkv", x, y)
            q = _rotate(y[:, :q_dim].view(n, shape.heads, shape.head_dim), cos, sin)
            k = _rotate(
                y[:, q_dim : q_dim + kv_dim].view(n, shape.kv_heads, shape.head_dim), cos, sin
            )
            v = y[:, q_dim + kv_dim :].view(n, shape.kv_heads, shape.head_dim)
            o = attend(layer, q, k, v)
            y = block["o"](o)
            plan.apply(layer, "o", o, y)
            h = h + y
            x = F.rms_norm(h, (shape.hidden,), block["norm2"], shape.eps)
            y = block["gate_up"](x)
            plan.apply(layer, "gate_up", x, y)
            z = F.silu(y[:, : shape.intermediate]) * y[:, shape.intermediate :]
            y = block["down"](z)
            plan.apply(layer, "down", z, y)
            h = h + y
        return F.rms_norm(h, (shape.hidden,), self.norm, shape.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → float32 [N, vocab]."""
        return self.head(hidden).float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split layout of Hugging Face's Llama."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
