"""Four and eight bits: how near the weights stay, what gradients flow, what memory is taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybrid.training.quantize import BLOCK, QuantizedLinear, pack_nf4, unpack_nf4


@pytest.mark.parametrize(("kind", "within", "bits"), [("int8", 0.012, 8.6), ("nf4", 0.12, 4.7)])
@pytest.mark.parametrize("shape", [(128, 96), (7, 33)])
def test_a_layer_in_few_bits_computes_nearly_the_same(
    kind: str, within: float, bits: float, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(*shape)
    layer = QuantizedLinear(plain, kind, torch.float32)  # type: ignore[arg-type]
    error = (layer.weight - plain.weight).norm() / plain.weight.norm()
    assert 0 < error < within
    x = torch.randn(5, shape[0], requires_grad=True)
    assert torch.allclose(layer(x), x @ layer.weight.T + plain.bias)
    layer(x).square().sum().backward()
    got, x.grad = x.grad, None
    assert got is not None
    (x @ layer.weight.T + plain.bias).square().sum().backward()
    assert torch.allclose(got, x.grad, atol=1e-4)  # type: ignore[arg-type]
    if shape[0] * shape[1] > 1000:
        held = (layer.codes.nbytes + layer.scales.nbytes) * 8
        assert held / plain.weight.numel() < bits


def test_the_levels_of_nf4_come_back_exactly() -> None:
    levels = QuantizedLinear(nn.Linear(2, 2), "nf4", torch.float32).levels
    weight = torch.cat([levels, levels.flip(0)]).repeat(4).view(2, BLOCK) * 3
    codes, scales = pack_nf4(weight)
    assert torch.allclose(unpack_nf4(codes, scales, levels, (2, BLOCK)), weight, atol=1e-6)
    assert scales.tolist() == [3.0, 3.0]


def test_zeros_and_a_change_of_dtype_do_no_harm() -> None:
    plain = nn.Linear(70, 3, bias=False)
    nn.init.zeros_(plain.weight)
    for kind in ("int8", "nf4"):
        layer = QuantizedLinear(plain, kind, torch.bfloat16).to(torch.bfloat16)  # type: ignore[arg-type]
        assert layer.scales.dtype == torch.float32
        assert torch.equal(layer.weight, torch.zeros(3, 70, dtype=torch.bfloat16))


def test_backward_keeps_no_unpacked_weight() -> None:
    layer = QuantizedLinear(nn.Linear(64, 64), "nf4", torch.float32)
    kept: list[torch.Size] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.shape) or t,  # type: ignore[func-returns-value]
        lambda t: t,
    )
    with hooks:
        layer(torch.randn(2, 64, requires_grad=True)).sum().backward()
    assert torch.Size([64, 64]) not in kept
