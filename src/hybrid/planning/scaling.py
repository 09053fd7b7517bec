"""How a rate grows with workers: Amdahl's law and the Universal Scalability Law, fitted.

N. J. Gunther, "A general theory of computational scalability based on rational functions" (2008)
and "Guerrilla Capacity Planning" (2007), ch. 4-6:

    X(N) = gamma N / (1 + sigma (N - 1) + kappa N (N - 1))

gamma is what one worker does, sigma the share that waits for others (contention; all that Amdahl
1967 knows), kappa what workers spend on agreeing with each other (coherency). With kappa > 0 the
rate has a highest point, the knee, at N* = sqrt((1 - sigma) / kappa): more workers are slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hybrid.errors import DataError, MissingExtra

CONFIDENCE = 0.9
"""Of every interval given here."""
ROUNDING = 1e-6
"""A share of the rate that a term is too small to mean anything below."""
RESAMPLES = 400
"""Fits to resampled residuals that an interval is read from."""
Model = Literal["usl", "amdahl", "none"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was measured with one number of workers.

    Attributes:
        workers: or nodes.
        rate: tokens a second, of all workers; the median of the steps.
        spread: half of the middle half of the steps, as a share of the median.
    """

    workers: int
    rate: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and the range that holds it with `CONFIDENCE`; infinite where nothing bounds it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A law put through points, and how far to believe it.

    Attributes:
        model: `none`: fewer than three points, from which no law is drawn.
        sigma, kappa: None where the model has no such term.
        knee: workers at the highest rate; None where the law has none (kappa is 0).
        residual: root mean square of what the law misses the points by, as a share of the rate;
            None where it has as many parameters as there are points, and so meets them all.
        notes: what a reader must know before believing it.
    """

    model: Model
    points: tuple[Point, ...]
    gamma: float
    sigma: Interval | None = None
    kappa: Interval | None = None
    knee: Interval | None = None
    residual: float | None = None
    notes: tuple[str, ...] = field(default=())

    def rate(self, workers: float) -> float:
        """Tokens a second that the law says for so many workers."""
        sigma = self.sigma.value if self.sigma else 0.0
        kappa = self.kappa.value if self.kappa else 0.0
        return usl(workers, self.gamma, sigma, kappa)


def usl(workers: float, gamma: float, sigma: float, kappa: float) -> float:
    """X(N) of the Universal Scalability Law; of Amdahl's where `kappa` is 0."""
    n = workers
    return gamma * n / (1 + sigma * (n - 1) + kappa * n * (n - 1))


def knee_of(sigma: float, kappa: float) -> float:
    """N*, at least 1; infinite where the rate never falls."""
    if sigma >= 1:
        return 1.0
    return math.inf if kappa == 0 else max(1.0, math.sqrt((1 - sigma) / kappa))


def serial_share(workers: int, speedup: float) -> float:
    """The share of the work that one pair of runs shows to be serial (Karp and Flatt 1990)."""
    return (1 / speedup - 1 / workers) / (1 - 1 / workers)


def fit(points: Sequence[Point], *, seed: int = 0) -> Fit:
    """The law that so many points can carry: USL from four on, Amdahl's at three, none at fewer.

    Errors are taken to be a share of the rate, equal at all points. The law is linear in
    1/gamma, sigma/gamma and kappa/gamma as a law of N / X, so the fit is non-negative least squares
    with no start values; intervals come from refits to resampled residuals.

    Args:
        points: of different numbers of workers.

    Raises:
        DataError: a point is not positive or not finite, or a number of workers is there twice.
        MissingExtra: scipy is not installed.
    """
    points = tuple(sorted(points, key=lambda p: p.workers))
    _check(points)
    if len(points) < 3:
        return _too_few(points)
    model: Model = "usl" if len(points) > 3 else "amdahl"
    terms = 3 if model == "usl" else 2
    best, missed = _solve(points, [p.workers / p.rate for p in points], terms)
    free = len(points) - terms
    share = math.sqrt(sum(m * m for m in missed) / len(points))
    sigmas, kappas, knees = _resampled(points, best, missed, terms, seed)
    sigma, kappa = best[1] / best[0], (best[2] / best[0] if terms == 3 else 0.0)
    if kappa * points[-1].workers ** 2 < ROUNDING:
        kappa = 0.0
    knee = knee_of(sigma, kappa)
    made = Fit(
        model=model,
        points=points,
        gamma=1 / best[0],
        sigma=_interval(sigma, sigmas),
        kappa=_interval(kappa, kappas) if terms == 3 else None,
        knee=_interval(knee, knees) if math.isfinite(knee) else None,
        residual=share,
    )
    return Fit(**{**made.__dict__, "notes": tuple(_notes(made, free))})


def _check(points: Sequence[Point]) -> None:
    if not points:
        raise DataError("scaling: nothing was measured")
    for p in points:
        if p.workers < 1 or not (math.isfinite(p.rate) and p.rate > 0):
            raise DataError(f"scaling: {p.workers} workers at {p.rate} tokens/s is no measurement")
    counts = [p.workers for p in points]
    twice = sorted({n for n in counts if counts.count(n) > 1})
    if twice:
        raise DataError(f"scaling: {twice[0]} workers were measured twice: give the median")


def _solve(
    points: Sequence[Point], y: Sequence[float], terms: int
) -> tuple[list[float], list[float]]:
    """Coefficients of N / X in 1, N - 1 and N (N - 1), and what they miss as shares of y."""
    try:
        import numpy as np
        from scipy.optimize import nnls
    except ImportError:
        raise MissingExtra("fits need scipy: pip install 'hybrid[plan]'") from None

    a = np.array([_terms(p.workers, terms) for p in points]) / np.array(y)[:, None]
    found, _ = nnls(a, np.ones(len(points)))
    return [float(c) for c in found], [float(m) for m in a @ found - 1]


def _terms(n: int, terms: int) -> list[float]:
    return [1.0, n - 1.0, n * (n - 1.0)][:terms]


def _resampled(
    points: Sequence[Point], best: Sequence[float], missed: Sequence[float], terms: int, seed: int
) -> tuple[list[float], list[float], list[float]]:
    """Sigma, kappa and knee of fits to the law's own curve with noise like that of the points.

    The noise has the residuals' deviation over the degrees of freedom, itself drawn anew each time
    as few points leave it uncertain (Student's t), and at least the error of the steps' medians: a
    law that happens to meet every point is no proof of its own.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    free = len(points) - terms
    deviation = math.sqrt(sum(m * m for m in missed) / free)
    least = np.array([_error_of_median(p) for p in points])
    curve = np.array([_terms(p.workers, terms) for p in points]) @ np.array(best)
    sigmas, kappas, knees = [], [], []
    for _ in range(RESAMPLES):
        noise = np.maximum(deviation * math.sqrt(free / rng.chisquare(free)), least)
        y = curve * np.exp(noise * rng.standard_normal(len(points)))
        found, _ = _solve(points, list(y), terms)
        if found[0] == 0:  # noise so large that one worker does nothing: no law at all
            continue
        sigmas.append(found[1] / found[0])
        kappas.append(found[2] / found[0] if terms == 3 else 0.0)
        knees.append(knee_of(sigmas[-1], kappas[-1]))
    return sigmas, kappas, knees


def _error_of_median(point: Point) -> float:
    """A normal's deviation is 1.48 times half its middle half; a median of ten or so steps."""
    return 1.48 * point.spread / math.sqrt(10)


def _interval(value: float, drawn: Sequence[float]) -> Interval:
    ordered = sorted(drawn)
    if not ordered:
        return Interval(value=value, low=0.0, high=math.inf)
    tail = (1 - CONFIDENCE) / 2
    low = ordered[int(tail * (len(ordered) - 1))]
    high = ordered[math.ceil((1 - tail) * (len(ordered) - 1))]
    return Interval(value=value, low=min(low, value), high=max(high, value))


def _too_few(points: tuple[Point, ...]) -> Fit:
    first, gamma = points[0], points[0].rate / points[0].workers
    if len(points) == 1:
        note = (
            f"one point ({first.workers} workers) says how fast it is there, and nothing of how it"
            " scales: measure two more for Amdahl's law, three more for the knee"
        )
        return Fit(model="none", points=points, gamma=gamma, notes=(note,))
    last = points[1]
    notes = [
        "two points tell the speed-up between them and nothing beyond: a curve through both meets"
        " them whatever the truth is, so there is no residual, no knee and no prediction"
    ]
    if first.workers == 1:
        share = serial_share(last.workers, last.rate / first.rate)
        notes.append(
            "were all that is lost serial work (Karp and Flatt 1990), its share would be"
            f" {100 * share:.1f} %"
            if share <= 1
            else f"{last.workers} workers do less than one: that is overhead, no serial work"
        )
    return Fit(model="none", points=points, gamma=gamma, notes=tuple(notes))


def _notes(made: Fit, free: int) -> list[str]:
    """What qualifies a fit."""
    most, sigma, knee = made.points[-1].workers, made.sigma, made.knee
    assert sigma is not None
    notes = []
    if free == 1:
        notes.append(
            f"{len(made.points)} points leave one degree of freedom: the residual"
            f" ({100 * (made.residual or 0):.2f} %) and the intervals are rough"
        )
    if made.model == "amdahl":
        notes.append("Amdahl's law has no knee: measure a fourth count to look for one")
    elif knee is None:
        notes.append(
            f"no knee: up to {most} workers nothing is spent on coherency (kappa is 0), so where"
            " the rate stops to grow cannot be said from these points"
        )
    elif knee.value > most:
        notes.append(
            f"the knee lies beyond the {most} workers that were measured: it is extrapolated"
        )
    if knee is not None and not math.isfinite(knee.high):
        notes.append("nothing bounds the knee from above: the noise hides whether there is one")
    if made.points[0].workers > 1:
        notes.append(
            f"one worker was not measured: its rate ({made.gamma:,.0f} tokens/s) is the law's, and"
            " so are all speed-ups"
        )
    base = made.points[0]
    each = base.rate / base.workers
    better = [p for p in made.points[1:] if p.rate / p.workers > 1.02 * each]
    if better:
        notes.append(
            f"{better[0].workers} workers do more than {better[0].workers / base.workers:g} times"
            f" what {base.workers} did: no law of contention explains that; caches, or a disturbed"
            " first measurement, do"
        )
    return notes
