"""How many steps lie between checkpoints: as told, or by Young's and Daly's formula.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974) 530.
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22 (2006) 303.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Literal

FIRST = 10
"""With `auto`: the step of the first checkpoint, which measures what one costs."""
_RECENT = 64


def young(cost_s: float, mtbf_s: float) -> float:
    """The interval that loses the least time, to first order: sqrt(2 x cost x MTBF).

    Args:
        cost_s: seconds that one checkpoint holds the work up.
        mtbf_s: mean seconds between failures of the whole run.

    Returns:
        Seconds of work between the end of one checkpoint and the beginning of the next.
    """
    return math.sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Daly's higher-order estimate of the same (his equation 37); it holds for dear ones too.

    From a cost of twice the MTBF on, the interval is the MTBF itself.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return young(cost_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def run_mtbf(node_mtbf_s: float, nodes: int) -> float:
    """Mean seconds between failures of a run that any of its nodes' failures ends.

    Failures are taken as independent of one another and of the node's age.
    """
    return node_mtbf_s / nodes


class Cadence:
    """When the next checkpoint is due. What it is told by rank 0 decides for all ranks.

    Args:
        every: steps between checkpoints, or `auto`.
        mtbf_s: mean seconds between failures of the whole run, for `auto`.
        start: the step that training goes on from.
    """

    def __init__(self, every: int | Literal["auto"], mtbf_s: float, start: int = 0) -> None:
        self.auto = every == "auto"
        self.interval = FIRST if every == "auto" else every
        self.mtbf_s = mtbf_s
        self._last = start
        self._free: deque[float] = deque(maxlen=_RECENT)
        self._busy: deque[float] = deque(maxlen=_RECENT)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps."""
        if self.auto:
            return step - self._last >= self.interval
        return step % self.interval == 0

    def begun(self, step: int) -> None:
        """A save of the state after `step` steps has begun."""
        self._last = step
        self._busy.clear()

    def step_took(self, seconds: float, *, saving: bool) -> None:
        """One step's time, and whether a checkpoint was being written beside it."""
        (self._busy if saving else self._free).append(seconds)

    def cost_s(self, stall_s: float) -> float:
        """What the last save cost: its stall, and what steps beside it took longer than others."""
        if not (self._free and self._busy):
            return stall_s
        usual = statistics.median(self._free)
        slowed = (statistics.fmean(self._busy) - usual) * len(self._busy)
        return stall_s + max(0.0, slowed)

    def best(self, stall_s: float, write_s: float) -> int:
        """Steps between checkpoints after one that stalled and took that long, for `auto`.

        Never less than a checkpoint takes to be written: the next would have to wait for it.
        """
        step_s = statistics.median(self._free or self._busy or [1.0])
        seconds = max(daly(self.cost_s(stall_s), self.mtbf_s), write_s)
        return max(1, round(seconds / max(step_s, 1e-6)))
