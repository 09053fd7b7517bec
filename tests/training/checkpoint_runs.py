"""Runs with checkpoints of their own, in the test's process, and what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoint_worlds import model_and_optimizer, step, weights

from hybrid.config import CheckpointConfig
from hybrid.training.checkpoint import Checkpoints
from hybrid.training.parallel import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


class Run:
    """A model in training with checkpoints of its own, in this process."""

    def __init__(
        self,
        url: Path | str,
        hidden: int = 32,
        retry_s: tuple[float, ...] = (0, 0),
        **settings: Any,
    ) -> None:
        self.records: list[dict[str, Any]] = []
        self.checkpoints = Checkpoints(
            url, ALONE, CheckpointConfig(**{"every": 1, **settings}), self._record, retry_s
        )
        self.model, self.optimizer = model_and_optimizer(hidden=hidden)
        self.done = 0

    def _record(self, event: str, **fields: Any) -> None:
        self.records.append({"event": event, **fields})

    def restore(self, **more: Any) -> Run:
        self.restored = self.checkpoints.restore(self.model, self.optimizer, **more)
        self.done = self.restored.step
        return self

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            step(self.model, self.optimizer, self.done)
            self.done += 1

    def save(self, **more: Any) -> None:
        self.checkpoints.save(self.done, self.model, self.optimizer, **more)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [r for r in self.records if r["event"] == kind]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def state_of(run: Run) -> dict[str, Any]:
    moments = run.optimizer.state_dict()["state"]
    flat = {f"{i}.{k}": v.clone() for i, s in moments.items() for k, v in s.items()}
    return {**weights(run.model), **flat}
