"""What the ranks of the trials' tests run: importable by the processes that are started."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybrid.training import trial_loop
from hybrid.training.loop import Job, train


def killed_under(strategy: str, job: Job, book: Path) -> None:
    """The trials, but rank 1 is killed in one of `strategy`, as the kernel does without memory."""

    def trial(made: Job, place: str = "") -> dict[str, Any]:
        if made.config.training.strategy == strategy and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(made, place=place)

    trial_loop.train = trial  # type: ignore[assignment]
    trial_loop.run_trials(job, book)
