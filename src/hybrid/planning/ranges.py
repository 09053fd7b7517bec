"""Figures as ranges: from uncertain inputs to an uncertain result, and which input matters most."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SAMPLES = 2000
SEED = 0
Values = Mapping[str, float]


@dataclass(frozen=True)
class Range:
    """A figure that is known to lie between two others. Of a given figure all three are the same.

    Attributes:
        low, mid, high: in the figure's unit; low <= mid <= high.
        source: where it comes from: "given", "measured: …", "assumed: …", a table's source.
    """

    low: float
    mid: float
    high: float
    source: str = ""

    @property
    def exact(self) -> bool:
        """Whether it is one number."""
        return self.low == self.high

    def scaled(self, factor: float) -> Range:
        """The same figure in another unit, or for so many of them."""
        return Range(self.low * factor, self.mid * factor, self.high * factor, self.source)

    def into(self, whole: float) -> Range:
        """`whole` over this figure, e.g. how long a rate takes for it."""
        return Range(whole / self.high, whole / self.mid, whole / self.low, self.source)


def exactly(value: float, source: str = "given") -> Range:
    """A figure that is taken as it is."""
    return Range(value, value, value, source)


def within(value: float, factor: float, source: str) -> Range:
    """A figure that may be `factor` times less or more."""
    return Range(value / factor, value, value * factor, source)


@dataclass(frozen=True)
class Swing:
    """What one input does to a result when it goes through its range and all others stay."""

    name: str
    input: Range
    at_low: float
    at_high: float

    @property
    def width(self) -> float:
        """How far the result moves."""
        return abs(self.at_high - self.at_low)


@dataclass(frozen=True)
class Estimate:
    """A result: its range, and its inputs, the one that moves it most first.

    `value.low` and `value.high` are the 10th and 90th percentile over the inputs' ranges, each
    input triangular with its peak at `mid` and independent of the others; `value.mid` is the
    result when every input is at its `mid`.
    """

    value: Range
    swings: tuple[Swing, ...]


def estimate(result: Callable[[Values], float], inputs: Mapping[str, Range]) -> Estimate:
    """Carry inputs' ranges through to a result, by sampling with a fixed seed.

    An input of the same name and range takes the same values in every result, so that results
    that share inputs can be compared.
    """
    mids = {name: figure.mid for name, figure in inputs.items()}
    mid = result(mids)
    open_inputs = {name: figure for name, figure in inputs.items() if not figure.exact}
    if not open_inputs:
        return Estimate(exactly(mid, "computed"), ())
    draws = {name: random.Random(f"{SEED} {name}") for name in open_inputs}
    found = sorted(
        result(
            mids | {n: draws[n].triangular(f.low, f.high, f.mid) for n, f in open_inputs.items()}
        )
        for _ in range(SAMPLES)
    )
    swings = [
        Swing(name, figure, result(mids | {name: figure.low}), result(mids | {name: figure.high}))
        for name, figure in open_inputs.items()
    ]
    low, high = found[SAMPLES // 10], found[-(SAMPLES // 10)]
    spread = Range(min(low, mid), mid, max(high, mid), "computed")
    moved = [s for s in swings if s.width > 1e-9 * max(1.0, abs(mid))]
    return Estimate(spread, tuple(sorted(moved, key=lambda s: -s.width)))


def shown(value: float, significant: int = 3) -> str:
    """A number as people write it: three significant digits, thousands with commas."""
    if not math.isfinite(value):
        return "without end"
    if value == 0:
        return "0"
    if abs(value) >= 1e12:
        return f"{value:.{significant}g}"
    digits = significant - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    return f"{rounded:,.0f}" if digits <= 0 else f"{rounded:,.{max(0, digits)}f}"


def span(figure: Range, unit: str = "") -> str:
    """A range as text: `1,680` or `120 (90 – 160)`, with its unit behind."""
    text = shown(figure.mid, 4 if figure.exact else 3)
    if not figure.exact:
        text += f" ({shown(figure.low)} – {shown(figure.high)})"
    return f"{text} {unit}".rstrip()
