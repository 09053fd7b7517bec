"""AdamW, its learning rate from the step number alone, and clipping over any mesh."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hybrid.config import TrainingConfig
from hybrid.training.zero import ZeroModel


def learning_rate(step: int, settings: TrainingConfig) -> float:
    """Linear warm-up, then half a cosine (Loshchilov & Hutter 2017) down to the floor.

    Args:
        step: counted from 0.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    span = max(1, settings.steps - settings.warmup_steps - 1)
    share = min(1.0, (step - settings.warmup_steps) / span)
    floor = settings.lr * settings.min_lr_ratio
    return floor + (settings.lr - floor) * 0.5 * (1 + math.cos(math.pi * share))


def parameter_groups(model: nn.Module, settings: TrainingConfig) -> list[dict[str, Any]]:
    """Weight decay on matrices, none on gains and biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {
            "params": [p for p in parameters if p.ndim >= 2],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_optimizer(model: nn.Module, settings: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019), each rank for its own shards."""
    if isinstance(model, ZeroModel):
        optimizer: torch.optim.Optimizer = model.optimizer  # AdamW within
        return optimizer
    return adamw(parameter_groups(model, settings), settings)


def adamw(groups: list[dict[str, Any]], settings: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over groups of parameters."""
    fused = settings.parallel.fused_optimizer  # not fused: several kernels, each over all
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        fused=fused,
        foreach=not fused,
    )


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float) -> torch.Tensor:
    """Scale gradients in place so that their global L2 norm is `limit` at most (Pascanu et al.
    2013).

    Shards of parameters are measured where they lie, each once, however many ranks keep a copy; one
    number then crosses the wire. Parameters may be on several meshes.

    Returns:
        The norm before, a float64 scalar on the gradients' device, the same on every rank.
    """
    if isinstance(model, ZeroModel):
        return model.clip_gradients(limit)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    counted = [g for g, whole in zip(local, grads, strict=True) if _counts_here(whole)]
    squares = torch.zeros((), dtype=torch.float64, device=local[0].device)
    if counted:
        squares += torch.stack(torch._foreach_norm(counted)).double().square().sum()
    if any(isinstance(g, DTensor) for g in grads):
        dist.all_reduce(squares)
    norm = squares.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0).to(local[0].dtype)
    torch._foreach_mul_(local, scale)
    return norm


def _counts_here(grad: torch.Tensor) -> bool:
    """Of a gradient that several ranks keep whole, the first one's is counted."""
    if not isinstance(grad, DTensor):
        return True
    at = grad.device_mesh.get_coordinate()
    return at is not None and all(
        at[dim] == 0 for dim, placement in enumerate(grad.placements) if placement.is_replicate()
    )
