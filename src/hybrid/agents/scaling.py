"""How many hosts there should be, from what waits in the mailboxes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hybrid.agents.upkeep import Backlog

_HOST_STARTS_S = 5.0
"""A host takes this long to come up on a node that is there; a deadline nearer than twice that is
a reason to start one now."""


@dataclass
class Scaler:
    """Between `low` and `high` hosts.

    Up at once: to hold all unfinished work in hosts' slots, and by one more when the oldest ready
    task waits longer than `wait_s` or a ready task's deadline is near. Down by one host at a time,
    after `idle_s` in which fewer were enough.

    Attributes:
        slots: tasks in flight on one host.
        wait_s, idle_s: seconds.
    """

    low: int
    high: int
    slots: int
    wait_s: float = 1.0
    idle_s: float = 30.0
    _enough_since: float | None = field(default=None, init=False)

    def wanted(self, backlog: Backlog, present: int, starting: int, now: float) -> int:
        """How many hosts there should be.

        Args:
            present: hosts there are, those that still start included.
            starting: hosts that still start; while some do, waiting is no reason for yet more.
            now: seconds of a monotonic clock.
        """
        need = math.ceil((backlog.ready + backlog.leased) / self.slots)
        if backlog.ready and not starting:
            near = backlog.nearest_s is not None and backlog.nearest_s < 2 * _HOST_STARTS_S
            if backlog.oldest_s > self.wait_s or (near and present == 0):
                need = max(need, present + 1)
        need = max(self.low, min(self.high, need))
        if need >= present:
            self._enough_since = None
            return need
        if self._enough_since is None:
            self._enough_since = now
        if now - self._enough_since < self.idle_s:
            return present
        self._enough_since = now
        return present - 1
