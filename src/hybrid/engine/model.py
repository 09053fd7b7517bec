"""A decoder of the Llama, Mistral and Qwen families, lean: what is not a matrix product is little.

Fused projections with weights packed for the processor, rotary embeddings as one complex product,
residuals added inside the products that make them, LoRA over mixed rows. One `forward` serves
prefill, decoding, scoring and embedding: it runs a flat list of tokens and leaves attention to a
callback, because only attention knows which tokens belong together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages: weights and cache are read whole

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from hybrid.engine.kernels import rms_norm, silu_mul
from hybrid.engine.lora_plan import LoraPlan
from hybrid.engine.shape import Shape
from hybrid.errors import IntegrityError

Attend = Callable[[int, Tensor], Tensor]
"""(layer, [T, heads + 2 * kv_heads, hd]: queries, keys, values) → [T, heads * hd]."""


class Linear:
    """x [T, in] → [T, out], weight packed for the processor once (oneDNN) where that exists.

    Exact float32. On a GPU, in other dtypes, or where oneDNN is missing, a plain product.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        packable = (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        )
        self.packed = packable
        self.shape = tuple(weight.shape)
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 256)
            if packable
            else weight.contiguous()
        )
        self.bias = bias

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """The product, and `onto` [T, out] added to it."""
        if not self.packed:
            y = F.linear(x, self.weight, self.bias)
            return y if onto is None else y + onto
        ops = torch.ops.mkldnn._linear_pointwise
        if onto is None:
            plain: Tensor = ops(x, self.weight, self.bias, "none", [], "")
            return plain
        added: Tensor = ops.binary(x, onto, self.weight, self.bias, "add")
        return added


@dataclass(frozen=True)
class Block:
    """One layer's weights. `qk_norm`: [heads + kv_heads, hd] or None."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    norm1: Tensor
    norm2: Tensor
    qk_norm: Tensor | None


class Decoder:
    """Weights of one base on one device.

    Args:
        folder: Hugging Face layout: config.json and safetensors.
        device: where it runs.
        dtype: of the weights; float32 on the CPU.

    Raises:
        Unsupported: see `Shape.read`. IntegrityError: a weight is missing or misshapen, or there is
            one that config.json does not announce and that would not be used.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        shape = Shape.read(folder)
        self.device, self.dtype = device, dtype
        state = _weights(folder)

        def take(name: str, *dims: int) -> Tensor:
            weight = state.pop(name, None)
            if weight is None or tuple(weight.shape) != dims:
                found = "missing" if weight is None else f"shaped {tuple(weight.shape)}"
                raise IntegrityError(f"{folder}: weight {name} is {found}, expected {dims}")
            return weight.to(device, dtype)

        def linear(at: str, dims: dict[str, int], n_in: int, bias: bool) -> Linear:
            """Projections side by side; rows of queries and keys in pairs."""
            weights = [take(f"{at}{n}_proj.weight", d, n_in) for n, d in dims.items()]
            biases = [take(f"{at}{n}_proj.bias", d) for n, d in dims.items()] if bias else []
            for i, name in enumerate(dims):
                if name in pairs:
                    weights[i] = weights[i][pairs[name]]
                    if bias:
                        biases[i] = biases[i][pairs[name]]
            return Linear(torch.cat(weights), torch.cat(biases) if bias else None)

        h, q, kv, inner = shape.hidden, shape.q_dim, shape.kv_dim, shape.intermediate
        pairs = {"q": shape.paired(shape.heads), "k": shape.paired(shape.kv_heads)}
        head = shape.paired(1)
        self.embedding = take("model.embed_tokens.weight", shape.vocab, h)
        self.norm = take("model.norm.weight", h)
        own = (
            None
            if shape.tied and "lm_head.weight" not in state
            else take("lm_head.weight", shape.vocab, h)
        )
        if shape.tied and own is not None:
            # Tied by config.json alone: as transformers does, what the checkpoint holds is used.
            shape = replace(shape, tied=torch.equal(own, self.embedding))
        self.shape = shape
        self.head = Linear(self.embedding if own is None or shape.tied else own)
        self.blocks: list[Block] = []
        for i in range(shape.layers):
            at = f"model.layers.{i}."
            attn, mlp = at + "self_attn.", at + "mlp."
            norms = [
                take(attn + f"{n}_norm.weight", shape.head_dim)[head].expand(count, -1)
                for n, count in (("q", shape.heads), ("k", shape.kv_heads))
                if shape.qk_norm
            ]
            self.blocks.append(
                Block(
                    qkv=linear(attn, {"q": q, "k": kv, "v": kv}, h, shape.qkv_bias),
                    o=linear(attn, {"o": h}, q, shape.o_bias),
                    gate_up=linear(mlp, {"gate": inner, "up": inner}, h, shape.mlp_bias),
                    down=linear(mlp, {"down": h}, inner, shape.mlp_bias),
                    norm1=take(at + "input_layernorm.weight", h),
                    norm2=take(at + "post_attention_layernorm.weight", h),
                    qk_norm=torch.cat(norms) if norms else None,
                )
            )
        unused = [name for name in state if not name.endswith("rotary_emb.inv_freq")]
        if unused:
            raise IntegrityError(
                f"{folder}: {len(unused)} weights would not be used, config.json announces none"
                f" of them: {', '.join(sorted(unused)[:4])}"
            )
        self._rotations = shape.rotations(device)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, plan: LoraPlan) -> Tensor:
        """Last hidden states, normalised.

        Args:
            ids: int64 [T], tokens in the order `plan` says.
            positions: int64 [T].
            attend: computes attention and keeps keys and values.
            plan: which rows get which adapter.

        Returns:
            [T, hidden]
        """
        shape = self.shape
        rotation = self._rotations[positions][:, None]
        rotated, n = shape.heads + shape.kv_heads, ids.shape[0]
        h = plan.embed(ids, self.embedding)
        for layer, block in enumerate(self.blocks):
            x = rms_norm(h, block.norm1, shape.eps)
            y = plan.apply(layer, "qkv", x, block.qkv(x))
            heads = y.view(n, -1, shape.head_dim)
            if block.qk_norm is not None:
                qk = heads[:, :rotated]
                qk.copy_(F.rms_norm(qk, (shape.head_dim,), None, shape.eps) * block.qk_norm)
            _rotate(heads[:, :rotated], rotation)
            o = attend(layer, heads)
            h = plan.apply(layer, "o", o, block.o(o, h))
            x = rms_norm(h, block.norm2, shape.eps)
            y = plan.apply(layer, "gate_up", x, block.gate_up(x))
            z = silu_mul(y)
            h = plan.apply(layer, "down", z, block.down(z, h))
        return rms_norm(h, self.norm, shape.eps)

    def logits(self, hidden: Tensor, plan: LoraPlan, rows: Tensor) -> Tensor:
        """[T, hidden] → float32 [N, vocab] of the rows that are asked for, int64 [N]."""
        chosen = hidden[rows]
        return plan.head(rows, chosen, self.head(chosen)).float()


def _weights(folder: Path) -> dict[str, Tensor]:
    """Those of the index, of model.safetensors, or else of all files. A folder may hold the same
    weights twice, in its maker's own format."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        files = sorted({folder / f for f in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    state: dict[str, Tensor] = {}
    for path in files:
        if not path.exists():
            raise IntegrityError(f"{path} is missing, which {index.name} names")
        state |= load_file(path)
    return state


def _rotate(x: Tensor, rotation: Tensor) -> None:
    """Rotary position embedding (Su et al. 2021), in place: x [T, heads, hd], pairs side by side;
    rotation complex64 [T, 1, hd / 2]."""
    if x.dtype == torch.float32:
        torch.view_as_complex(_pairs(x)).mul_(rotation)
    else:
        turned = torch.view_as_complex(_pairs(x.float())) * rotation
        x.copy_(torch.view_as_real(turned).flatten(-2))


def _pairs(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, 2)
