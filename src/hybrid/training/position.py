"""Where a rank is in its run: step and phase, written by the training thread, read by others."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A step (counted from 1, as in messages), what is done in it, and since when (monotonic)."""

    step: int
    phase: str
    since: float


class Position:
    """The current `Place` of one rank.

    `at` costs a clock and an assignment; a reader in another thread sees a whole `Place`.
    """

    def __init__(self) -> None:
        self.now = Place(0, "start", time.monotonic())

    def at(self, phase: str, step: int | None = None) -> None:
        """Say what is done from here on, in the same step or in `step`."""
        self.now = Place(self.now.step if step is None else step, phase, time.monotonic())

    def wait(self, phase: str) -> None:
        """Say that nothing is to happen from here on, for as long as it takes."""
        self.now = Place(self.now.step, phase, math.inf)

    def within(self, name: str) -> AbstractContextManager[None]:
        """A part of the current phase, for a profiler; nothing is said to readers."""
        return nullcontext()

    def watch(self, model: Any, optimizer: Any) -> None:
        """What the steps work on, for a profiler."""

    def as_record(self) -> dict[str, Any]:
        """`step`, `phase` and `seconds` in it so far."""
        step, phase, since = self.now
        return {
            "step": step,
            "phase": phase,
            "seconds": round(max(time.monotonic() - since, 0.0), 3),
        }
