"""A sweep over numbers of workers: what was measured, and all that follows, as one record."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hybrid.errors import DataError
from hybrid.planning.scaling import CONFIDENCE, Fit, Interval, Point, fit
from hybrid.planning.scaling_advice import (
    Check,
    Recommendation,
    Row,
    recommend,
    table,
    two_worker_check,
)

Mode = Literal["strong", "weak"]
MODES: dict[Mode, str] = {
    "strong": "the step is the same whatever the workers (Amdahl 1967)",
    "weak": "the step grows with the workers, so that each has as much to do (Gustafson 1988)",
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of the training job with one number of workers.

    Attributes:
        step_s: seconds of each step after the warm-up, in order.
        tokens_per_step: of all workers.
        nodes: how many nodes of the cluster the workers were on.
        machines: how many addresses those nodes have.
        cores: of the machine, where it is one and the driver's own.
        when: UNIX time of its end.
    """

    mode: Mode
    workers: int
    step_s: tuple[float, ...]
    tokens_per_step: int
    nodes: int
    machines: int
    cores: int | None = None
    when: float

    @property
    def median_s(self) -> float:
        """Of a step."""
        return statistics.median(self.step_s)

    @property
    def point(self) -> Point:
        """Tokens a second at the median step; spread is half of the middle half of the steps."""
        if not self.step_s or not all(math.isfinite(s) and s > 0 for s in self.step_s):
            raise DataError(f"scaling: {self.workers} workers took {list(self.step_s)} s a step")
        half = 0.0
        if len(self.step_s) > 1:
            low, _, high = statistics.quantiles(self.step_s, n=4, method="inclusive")
            half = (high - low) / 2 / self.median_s
        return Point(workers=self.workers, rate=self.tokens_per_step / self.median_s, spread=half)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One mode's measurements and what they say."""

    mode: Mode
    measured: tuple[Measured, ...]
    fit: Fit
    rows: tuple[Row, ...]
    check: Check
    recommendation: Recommendation
    usd_per_worker_hour: float | None


def assess(
    measured: Sequence[Measured],
    facts: Mapping[str, Any],
    usd_per_worker_hour: float | None = None,
) -> Sweep:
    """What measurements of one mode say.

    Args:
        facts: see `two_worker_check`.

    Raises:
        DataError: of two modes, or no measurements.
    """
    modes = {m.mode for m in measured}
    if len(modes) != 1:
        raise DataError(f"scaling: {len(modes)} modes at once; a sweep is of one")
    [mode] = modes
    found = fit([m.point for m in measured])
    return Sweep(
        mode=mode,
        measured=tuple(sorted(measured, key=lambda m: m.workers)),
        fit=found,
        rows=tuple(table(found, usd_per_worker_hour)),
        check=two_worker_check(found.points, {**facts, "mode": mode}),
        recommendation=recommend(found),
        usd_per_worker_hour=usd_per_worker_hour,
    )


def as_json(sweep: Sweep) -> dict[str, Any]:
    """The whole record as plain data."""
    steps = {m.workers: m for m in sweep.measured}
    return {
        "mode": sweep.mode,
        "meaning": MODES[sweep.mode],
        "confidence": CONFIDENCE,
        "usd_per_worker_hour": sweep.usd_per_worker_hour,
        "points": [
            {
                "workers": r.workers,
                "nodes": steps[r.workers].nodes,
                "machines": steps[r.workers].machines,
                "steps": len(steps[r.workers].step_s),
                "step_s": steps[r.workers].median_s,
                "spread": r.spread,
                "tokens_per_step": steps[r.workers].tokens_per_step,
                "tokens_per_s": r.rate,
                "speedup": r.speedup,
                "efficiency": r.efficiency,
                "tokens_per_usd": r.tokens_per_usd,
                "predicted_tokens_per_s": r.predicted,
            }
            for r in sweep.rows
        ],
        "fit": {
            "model": sweep.fit.model,
            "gamma": sweep.fit.gamma,
            "sigma": _interval(sweep.fit.sigma),
            "kappa": _interval(sweep.fit.kappa),
            "knee": _interval(sweep.fit.knee),
            "residual": sweep.fit.residual,
            "notes": list(sweep.fit.notes),
        },
        "check": asdict(sweep.check),
        "recommendation": asdict(sweep.recommendation),
    }


def _interval(given: Interval | None) -> dict[str, float | None] | None:
    """Infinity has no form in JSON: null."""
    if given is None:
        return None
    return {k: v if math.isfinite(v) else None for k, v in asdict(given).items()}


def law(found: Fit) -> str:
    """The fit in a sentence, with how far to believe it."""
    if found.model == "none" or found.sigma is None:
        return "no law is fitted"
    name = "Universal Scalability Law" if found.model == "usl" else "Amdahl's law"
    parts = [f"contention {_told(found.sigma, 100, ' %')}"]
    if found.kappa is not None:
        parts.append(f"coherency {_told(found.kappa, 100, ' %')}")
    if found.knee is not None:
        parts.append(f"knee at {_told(found.knee, 1, ' workers')}")
    return (
        f"{name} ({100 * CONFIDENCE:.0f} % intervals): {', '.join(parts)}; misses the points by"
        f" {100 * (found.residual or 0):.2g} %"
    )


def _told(given: Interval, times: float, unit: str) -> str:
    low, high = times * given.low, times * given.high
    most = f"{high:.3g}" if math.isfinite(high) else "unbounded"
    return f"{times * given.value:.3g}{unit} ({low:.3g} to {most})"
