"""The kernels that stand for one operation of torch's."""

from __future__ import annotations

import pytest
import torch

from hybrid.engine.kernels import argmax, kernels


@pytest.mark.skipif(kernels() is None, reason="no C compiler here")
@pytest.mark.parametrize("dim", [1, 2, 255, 256, 257, 1000, 8192])
def test_argmax(dim: int) -> None:
    torch.manual_seed(dim)
    many = torch.randn(5, dim)
    assert argmax(many).tolist() == many.argmax(-1).tolist()
    assert argmax(many[:, : dim // 2 + 1]).tolist() == many[:, : dim // 2 + 1].argmax(-1).tolist()
    ties = torch.zeros(2, dim)
    ties[1, dim // 2 :] = 1
    assert argmax(ties).tolist() == [0, dim // 2]  # the first of them
    masked = torch.full((1, dim), -torch.inf)
    assert argmax(masked).tolist() == [0]
    masked[0, -1] = -1e30
    assert argmax(masked).tolist() == [dim - 1]
