"""TensorBoard files of a run, written by rank 0: `tensorboard --logdir .hybrid/runs`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

FLUSH_S = 2
"""Seconds after which written scalars are on disk: what a killed run may lose of them."""
TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "memory_bytes": "speed/memory_bytes",
}


class Scalars:
    """Writes the figures of progress records as scalars, by step.

    Every attempt appends a file of its own; TensorBoard drops what an earlier one wrote of the
    steps that are done again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def take(self, record: dict[str, Any]) -> None:
        """Write what a `step` or `eval` record holds; `start` opens a file."""
        step, at = record.get("step"), record["time"]
        if record["event"] == "start":
            from tensorboardX import SummaryWriter  # only where it is used: it is slow to import

            self._writer = SummaryWriter(
                str(self._folder),
                purge_step=record["step"] + 1 if record["step"] else None,
                max_queue=1000,  # the writer's thread may be slow without the loop waiting for it
                flush_secs=FLUSH_S,
                filename_suffix=f".{time.time_ns()}",  # attempts may begin in the same second
            )
        elif record["event"] == "step":
            for key, tag in TAGS.items():
                if record.get(key) is not None:
                    self._writer.add_scalar(tag, record[key], step, walltime=at)
        elif record["event"] == "eval":
            self._writer.add_scalar("eval/loss", record["eval_loss"], step, walltime=at)
        elif record["event"] == "finished":
            self._writer.close()
