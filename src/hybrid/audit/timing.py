"""How long work takes on a device: each call timed to its end, for as long as the budget lasts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Times:
    """Seconds of each call, in order."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        """The shortest: what the hardware can do when nobody disturbs it."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The usual one: what it does over the budget, throttling included."""
        return statistics.median(self.seconds)


def measure(
    work: Callable[[], object],
    synchronize: Callable[[], None],
    *,
    budget_s: float,
    fewest: int = 3,
    most: int = 1000,
) -> Times:
    """Call `work` until `budget_s` is spent; wall clock, for a device's own timer can be patched.

    Args:
        work: queues or does the work.
        synchronize: returns once everything queued is done.
        fewest: calls whatever the budget says.
    """
    synchronize()
    seconds: list[float] = []
    end = time.perf_counter() + budget_s
    while len(seconds) < fewest or (time.perf_counter() < end and len(seconds) < most):
        start = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return Times(tuple(seconds))
