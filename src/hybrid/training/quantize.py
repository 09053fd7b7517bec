"""A frozen base in 4 or 8 bits while adapters are trained on it: NF4 or int8 weights, torch alone.

Weights are unpacked for each product, forward and backward, and never kept: between the two only
the inputs are held. NF4 is QLoRA's data type (Dettmers et al. 2023): 16 levels at the quantiles of
a normal distribution, one scale a block of 64 weights.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["int8", "nf4"]
BLOCK = 64
"""Weights of NF4 that share a scale."""
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weight is kept in few bits.

    Buffers: codes uint8 [out * in / 2, rounded up to blocks] (nf4: two a byte) or int8 [out, in];
    scales float32, one a block (nf4) or a row (int8).

    Args:
        linear: what is replaced; its weight is read, its bias taken over.
        dtype: of what weights are unpacked to, and of the product.
    """

    codes: Tensor
    scales: Tensor
    levels: Tensor

    def __init__(self, linear: nn.Linear, kind: Kind, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kind, self.dtype = kind, dtype
        self.bias = linear.bias
        codes, scales = (pack_nf4 if kind == "nf4" else pack_int8)(linear.weight.detach())
        device = linear.weight.device
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("levels", torch.tensor(_NF4, device=device), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight [out, in] as it is computed with, unpacked anew."""
        if self.kind == "int8":
            return (self.codes * self.scales[:, None]).to(self.dtype)
        shape = (self.out_features, self.in_features)
        return unpack_nf4(self.codes, self.scales, self.levels, shape).to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in] → [..., out]."""
        made: Tensor = _Product.apply(input, self)  # type: ignore[no-untyped-call]
        return made if self.bias is None else made + self.bias

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # `.to(dtype)` may move it, but its scales stay what they were rounded with.
        scales = self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scales = scales.to(self.codes.device)
        return self


class _Product(torch.autograd.Function):
    """input @ weight.T, unpacking the weight again in backward instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(input, layer.weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ ctx.layer.weight, None


def pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """codes int8 [out, in] and scales float32 [out]: the largest of a row is 127."""
    weight = weight.float()
    scales = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


def pack_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """codes uint8, two a byte, and scales float32, one a block of the flattened weight."""
    flat = weight.float().flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    levels = torch.tensor(_NF4, device=weight.device)
    # The nearest level: where a number falls between the middles of neighbouring levels.
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(blocks / scales[:, None], middles).to(torch.uint8).view(-1, 2)
    return codes[:, 0] | (codes[:, 1] << 4), scales


def unpack_nf4(codes: Tensor, scales: Tensor, levels: Tensor, shape: tuple[int, int]) -> Tensor:
    """float32 [out, in] of what `pack_nf4` made."""
    indices = torch.stack([codes & 15, codes >> 4], 1).long()
    blocks = levels[indices].view(-1, BLOCK) * scales[:, None]
    return blocks.flatten()[: shape[0] * shape[1]].view(shape)


def quantize(model: Any, kind: Kind, dtype: torch.dtype) -> None:
    """Replace the linear layers of a transformers model below its head, one at a time."""
    for module in model.base_model.modules():
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, QuantizedLinear(child, kind, dtype))
