"""What a worker is told of its future: room elsewhere or for more, or a node that is taken away."""

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
        kind: nothing; `move`: they are better started anew, elsewhere or more of them; `reclaim`: a
            node of theirs is taken away and there is no room elsewhere yet.
        why: for the record.
        deadline: UNIX seconds at which the node is gone, where that is known.
    """

    kind: Literal["", "move", "reclaim"] = ""
    why: str = ""
    deadline: float | None = None

    def hold(self, step_s: float) -> bool:
        """Whether another step, which takes `step_s`, would come too near the deadline."""
        if self.kind != "reclaim" or self.deadline is None:
            return False
        return time.time() > self.deadline - max(HOLD_S, 2 * step_s)


NOTHING = Notice()
