"""What a worker is told of its future: a node to be taken away, or room for more workers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

HOLD_S = 3.0
"""Before a node's deadline the workers stand still for this long: one that is lost amid a
collective would look like a failure of the others."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """What is coming to the workers of a run.

    Attributes:
        kind: nothing; more workers, at any moment; or one of their nodes is reclaimed.
        deadline: UNIX seconds at which the node is gone, where that is known.
    """

    kind: Literal["", "grow", "reclaim"] = ""
    deadline: float | None = None

    def hold(self, step_s: float) -> bool:
        """Whether another step, which takes `step_s`, would come too near the deadline."""
        if self.kind != "reclaim" or self.deadline is None:
            return False
        return time.time() > self.deadline - max(HOLD_S, 2 * step_s)


NOTHING = Notice()
