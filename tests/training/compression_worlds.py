"""What the ranks of the compression tests run: importable by the processes that are spawned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from strategy_worlds import VOCABULARY, Run
from torch.nn.parallel import DistributedDataParallel

from hybrid.config import CheckpointConfig, TrainingConfig
from hybrid.training.checkpoint import Checkpoints
from hybrid.training.compression import Compression
from hybrid.training.data import Batch
from hybrid.training.onebit import OneBit
from hybrid.training.powersgd import PowerSGD


def batch(step: int, index: int) -> Batch:
    """Eight rows in which each token follows from the one before: something to learn."""
    rows = np.random.default_rng((step, index)).integers(0, VOCABULARY, (8, 17))
    for at in range(1, 17):
        rows[:, at] = (3 * rows[:, at - 1] + 1) % VOCABULARY
    return {"input_ids": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}


class CompressedRun(Run):
    """With gradients compressed as its settings say."""

    def __init__(self, settings: TrainingConfig) -> None:
        super().__init__(settings)
        self.compression = Compression(self.model, settings.strategy, settings.compression)

    def train(self, first: int, last: int) -> list[float]:
        """The loss of each step."""
        losses = []
        for step in range(first, last):
            with self.compression.step(step):
                losses.append(self.step(step, batch, micro_batches=2).loss)
        return losses


def outcome(settings: TrainingConfig, steps: int) -> dict[str, Any]:
    """Losses, bytes and how much is kept of what was left out."""
    run = CompressedRun(settings)
    warm = run.train(0, 2)
    before = run.compression.figures()
    losses = warm + run.train(2, steps)
    ddp = isinstance(run.model, DistributedDataParallel)
    return {
        "losses": losses,
        "first": before,
        "figures": run.compression.figures(),
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "kept": sorted(run.compression.state_dict().get("residual", {})) if ddp else [],
    }


def resumed(settings: TrainingConfig, folder: Path, steps: int) -> dict[str, Any]:
    """Losses of a run that saves half way, of one that goes on from there, and how far what that
    one has kept of error feedback is from what was saved."""
    half = steps // 2
    whole = CompressedRun(settings)
    checkpoints = Checkpoints(folder, whole.world, CheckpointConfig(every=1))
    checkpoints.restore(whole.model, whole.optimizer)
    whole.train(0, half)
    extra = {"compression": whole.compression}
    checkpoints.save(half, whole.model, whole.optimizer, extra=extra, wait=True)
    kept = {k: v.clone() for k, v in whole.compression.state_dict()["residual"].items()}
    losses = whole.train(half, steps)
    again = CompressedRun(settings)
    checkpoints = Checkpoints(folder, again.world, CheckpointConfig(every=1))
    extra = {"compression": again.compression}
    restored = checkpoints.restore(again.model, again.optimizer, extra=extra)
    assert restored.step == half
    found = again.compression.state_dict()["residual"]
    assert found.keys() == kept.keys() and all(bool(v.any()) for v in kept.values())
    off = max(float((found[name] - kept[name]).abs().max()) for name in kept)
    return {
        "unbroken": losses,
        "again": again.train(half, steps),
        "off": off,
        "figures": again.compression.figures(),
    }


def nothing_is_lost() -> dict[str, float]:
    """How far the sum of what was sent, and of what is kept, is from the sum of the gradients."""
    import torch
    import torch.distributed as dist

    off = {}
    method: OneBit | PowerSGD
    for name, method in (("onebit", OneBit()), ("powersgd", PowerSGD(2))):
        torch.manual_seed(dist.get_rank())
        given, sent = torch.zeros(40, 30), torch.zeros(40, 30)
        for _ in range(5):
            gradient = torch.randn(40, 30)
            mean = gradient.clone()
            dist.all_reduce(mean)
            given += mean / dist.get_world_size()
            method.reduce([("w", gradient)])
            sent += gradient
        method.fold()
        off[name] = float((given - sent - method.residual["w"]).abs().max())
    return off


def everything(
    settings: list[TrainingConfig], steps: int, again: list[TrainingConfig], folder: Path
) -> dict[str, Any]:
    """All of it in one world: processes are dear to start."""
    return {
        "outcomes": [outcome(one, steps) for one in settings],
        "resumed": [resumed(one, folder / str(n), 8) for n, one in enumerate(again)],
        "lost": nothing_is_lost(),
    }
