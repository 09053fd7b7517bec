"""PowerSGD (Vogels et al. 2019): each gradient matrix travels as two thin factors.

With what an earlier step left out added (error feedback), M is multiplied by last step's Q; the
mean of P = M Q over ranks is made orthonormal, the mean of Q = Mᵀ P is taken, and P Qᵀ is what all
ranks use. State is kept by parameter, not by bucket as in torch's hook, so that it outlives DDP's
regrouping of buckets, a checkpoint, and another number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

Named = Sequence[tuple[str, torch.Tensor]]
"""Gradients of one bucket with their parameters' names, the same on all ranks."""


class PowerSGD:
    """Averages gradients over ranks, matrices approximately.

    Attributes:
        residual: by name, what has been left out so far: of the parameter's shape and dtype.
        factor: by name, Q of the last step, [columns, rank]: the next one's start. The same on
            all ranks.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.residual: dict[str, torch.Tensor] = {}
        self.factor: dict[str, torch.Tensor] = {}

    def applies(self, gradient: torch.Tensor) -> bool:
        """Whether two factors are at most half of the matrix; else it is sent whole."""
        if gradient.ndim < 2:
            return False
        rows, columns = gradient.shape[0], gradient[0].numel()
        return 2 * self.rank * (rows + columns) <= rows * columns

    def reduce(self, gradients: Named) -> None:
        """Replace each rank's gradients by what stands for their mean. Collective."""
        size = dist.get_world_size()
        whole = [gradient for _, gradient in gradients if not self.applies(gradient)]
        names = [name for name, gradient in gradients if self.applies(gradient)]
        matrices = []
        for name, gradient in gradients:
            if self.applies(gradient):
                if name not in self.residual:
                    self.residual[name] = torch.zeros_like(gradient)
                    self.factor[name] = _start(name, gradient, self.rank)
                matrices.append((gradient + self.residual[name]).flatten(1))

        # One message for the first factors and for what is sent whole, one for the second ones.
        ps = [m @ self.factor[name] for name, m in zip(names, matrices, strict=True)]
        _mean([*ps, *whole], size)
        ps = _orthonormal(ps)
        qs = [m.T @ p for m, p in zip(matrices, ps, strict=True)]
        _mean(qs, size)

        targets = {name: gradient for name, gradient in gradients if name in self.residual}
        for name, m, p, q in zip(names, matrices, ps, qs, strict=True):
            product = p @ q.T
            # A step that is not finite is left out or ends the run; it must not stay in here.
            finite = torch.isfinite(product).all()
            left = (m - product).view_as(targets[name])
            self.residual[name] = torch.where(finite, left, self.residual[name])
            self.factor[name] = torch.where(finite, q, self.factor[name])
            targets[name].copy_(product.view_as(targets[name]))

    def fold(self) -> None:
        """Give all ranks the mean of their residuals, which is what the mean gradient lacks.

        Nothing is lost by it, and then any number of ranks can go on from one rank's. Collective.
        """
        for name in sorted(self.residual):
            _mean([self.residual[name]], dist.get_world_size())

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks once folded."""
        return {"residual": dict(self.residual), "factor": dict(self.factor)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take up what `state_dict` gave, on as many ranks or others."""
        self.residual = {k: v.to(device, copy=True) for k, v in state.get("residual", {}).items()}
        self.factor = {k: v.to(device, copy=True) for k, v in state.get("factor", {}).items()}


def _start(name: str, gradient: torch.Tensor, rank: int) -> torch.Tensor:
    """A random Q, the same on all ranks and whatever else draws random numbers."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(gradient[0].numel(), rank, generator=generator, dtype=gradient.dtype)
    basis: torch.Tensor = torch.linalg.qr(q).Q
    return basis.to(gradient.device)


def _mean(tensors: Sequence[torch.Tensor], size: int) -> None:
    """The mean over ranks, in place, as one message."""
    if not tensors:
        return
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    flat /= size
    parts = torch.split(flat, [t.numel() for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _orthonormal(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """An orthonormal basis of each one's columns; those of one shape together."""
    found: list[torch.Tensor] = [torch.empty(0)] * len(matrices)
    order = sorted(range(len(matrices)), key=lambda i: matrices[i].shape)
    for _, group in groupby(order, key=lambda i: matrices[i].shape):
        same = list(group)
        for i, q in zip(
            same, torch.linalg.qr(torch.stack([matrices[i] for i in same])).Q, strict=True
        ):
            found[i] = q
    return found
