"""What is done about a step whose numbers are bad: stop the run, leave the step out, or note it.

Decided from numbers that are the same on every rank, so that all of them do the same. A step left
out changes neither parameters nor optimiser state, and the step number goes on, so that the next
step has other data and the learning rate is what it would have been.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from hybrid.config import FaultConfig

WINDOW = 100
"""Steps that `recent` in "recent median" means."""
FEWEST = 10
"""Norms without which no step is called a spike."""

Action = Literal["stop", "skip", "record"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is done about a bad step, and what is bad about it."""

    action: Action
    reason: str


class Policy:
    """Judges every step of a run by `training.faults`.

    Its state, the recent gradient norms and the number of steps left out, belongs in the run's
    checkpoint (`state_dict`, `load_state_dict`): a resumed run then judges as if it had never
    stopped. Without it the norms are gathered anew, and no spike is seen for `FEWEST` steps.

    Attributes:
        verdict: on the step judged last; None if nothing was wrong with it.
        skipped: steps left out so far.
    """

    def __init__(self, settings: FaultConfig) -> None:
        self._settings = settings
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self.skipped = 0
        self.verdict: Verdict | None = None

    def accept(self, loss: float, grad_norm: float) -> bool:
        """Whether the update is to be made.

        Args:
            loss: mean of the step, of all ranks.
            grad_norm: global and before clipping.
        """
        self.verdict = self._judge(loss, grad_norm)
        if math.isfinite(grad_norm):
            self._norms.append(grad_norm)
        return self.verdict is None or self.verdict.action == "record"

    def _judge(self, loss: float, grad_norm: float) -> Verdict | None:
        faults = self._settings
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            reason = f"loss {loss:g}, gradient norm {grad_norm:g}: not finite"
            return self._counted(faults.not_finite, reason)
        if faults.spike is None or len(self._norms) < FEWEST:
            return None
        median = statistics.median(self._norms)
        if grad_norm <= faults.spike * median:
            return None
        reason = (
            f"gradient norm {grad_norm:.4g} is {grad_norm / median:.1f} times the recent median"
            f" {median:.4g} (training.faults.spike: {faults.spike:g})"
        )
        return self._counted(faults.on_spike, reason)

    def _counted(self, action: Action, reason: str) -> Verdict:
        """Stop after all once too many steps were left out."""
        if action == "skip":
            if self.skipped >= self._settings.max_skipped:
                return Verdict(
                    action="stop",
                    reason=f"{reason}; {self.skipped} steps were left out before"
                    f" (training.faults.max_skipped: {self._settings.max_skipped})",
                )
            self.skipped += 1
        return Verdict(action=action, reason=reason)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; the same on every rank."""
        return {"norms": list(self._norms), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._norms = deque(state["norms"], maxlen=WINDOW)
        self.skipped = int(state["skipped"])
