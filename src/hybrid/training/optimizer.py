"""AdamW and its learning rate, both from the step number alone."""

from __future__ import annotations

import math

import torch
from torch import nn

from hybrid.config import TrainingConfig


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


def make_optimizer(model: nn.Module, settings: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019); weight decay on matrices, none on gains."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in parameters if p.ndim >= 2],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
