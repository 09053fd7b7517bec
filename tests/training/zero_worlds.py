"""What the ranks of DeepSpeed's tests run: importable by the processes that are spawned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from strategy_worlds import Run, batch, relay, run_each

from hybrid.config import TrainingConfig
from hybrid.training.step import train_step
from hybrid.training.zero import ZeroModel


def looked_at(settings: TrainingConfig) -> dict[str, Any]:
    """What a rank holds of the model, before and after a step that was refused, and all of it."""
    run = Run(settings)
    model = run.model
    assert isinstance(model, ZeroModel)
    held = sum(p.ds_tensor.numel() for p in model.module.parameters())
    whole = sum(p.ds_numel for p in model.module.parameters())
    free = sum(p.numel() for p in model.module.parameters() if not p.ds_persist)
    before = model.full_state(run.world.rank)
    made = [
        train_step(
            model, run.optimizer, lambda index: batch(0, index), step=0, seed=0, micro_batches=3,
            clip=1.0, world=run.world, accept=lambda loss, norm: False,
        )
        for _ in range(2)
    ]  # fmt: skip
    after = model.full_state(run.world.rank)
    return {
        "held": held, "whole": whole, "gathered": free,
        "names": sorted(before),
        "kept": all(torch.equal(before[name], after[name]) for name in before),
        "norms": [one.grad_norm for one in made],
        "dtypes": sorted({str(t.dtype) for t in before.values()}),
    }  # fmt: skip


def everything(
    strategies: list[TrainingConfig], legs: list[TrainingConfig], folder: Path
) -> dict[str, Any]:
    """All of it in one world: processes are dear to start."""
    return {
        "numbers": run_each(strategies, 3),
        "relay": relay(legs, folder / "checkpoints", 1),
        "looked at": looked_at(strategies[0]),
    }
