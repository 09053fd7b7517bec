"""What the ranks of the trials' tests run: importable by the processes that are started."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from hybrid.training import trial_loop
from hybrid.training.loop import Job, train


def killed_under(strategy: str, job: Job, book: Path) -> None:
    """The trials, but the last rank is killed amid one of `strategy`, as for want of memory."""

    def trial(made: Job, place: str = "") -> dict[str, Any]:
        def report(metrics: dict[str, Any]) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        dies = made.config.training.strategy == strategy and os.environ.get("LAST") == "yes"
        return train(made, report if dies else lambda metrics: None, place=place)

    trial_loop.train = trial  # type: ignore[assignment]
    trial_loop.run_trials(job, book)
