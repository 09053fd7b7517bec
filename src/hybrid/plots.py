"""Plots as inline SVG that fill the width there is, with text of the same size on every screen.

Across, everything is placed in percent of the plot's area; down, in pixels. Curves are drawn in an
area of 1000 by 1000 that is stretched to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hybrid.pages import Colour, Html, tag

Points = Iterable[tuple[float, float]]
HEIGHT = 200
_MOST = 1e300
"""Beyond it values are drawn as this one: a float's range has no room for a margin."""


def number(value: float) -> str:
    """A value in as few characters as tell it apart."""
    if value == 0:
        return "0"
    if abs(value) >= 1e3:
        return f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.3g}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2e}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values from at or below `low` to at or above `high`, about that many.

    A span that floats can hardly tell from none is drawn as none: padded around its middle.
    """
    if high - low <= 1e-12 * max(abs(low), abs(high)) or high - low < 1e-300:
        pad = max(abs(low), abs(high)) * 0.1
        pad = pad if pad > 1e-300 else 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What goes across or up.

    Attributes:
        low, high: its ends; low < high, and 0 < low where it is logarithmic.
        ticks: values that are marked.
        told: of a tick, how it is written.
    """

    low: float
    high: float
    ticks: Sequence[float] = ()
    log: bool = False
    told: Callable[[float], str] = number

    @classmethod
    def upwards(cls, values: Iterable[float], *, told: Callable[[float], str] = number) -> Axis:
        """From a round value below all to one above."""
        held = [_held(v) for v in values]
        marked = ticks(min(held), max(held))
        return cls(low=min(marked[0], *held), high=max(marked[-1], *held), ticks=marked, told=told)

    def at(self, value: float) -> float:
        """Where a value is, from 0 to 1."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


class Plot:
    """A plot in the making: marks are drawn in the order in which they are added.

    Args:
        x, y: the axes; values beyond an end are drawn at it.
        across: what goes across, with its unit.
    """

    def __init__(self, x: Axis, y: Axis, *, across: str = "", height: int = HEIGHT) -> None:
        self._x, self._y, self._height = x, y, height
        self._parts: list[Html] = []
        for value in y.ticks:
            at = self._down(value)
            self._parts += [
                tag("line", x1="0", x2="100%", y1=at, y2=at, class_="grid"),
                tag("text", y.told(value), x="-8", y=at, dy="4", text_anchor="end"),
            ]
        self._parts += [
            tag("text", x.told(v), x=self._across(v), y=height + 16, text_anchor="middle")
            for v in x.ticks
        ]
        if across:
            below = str(height + 32)
            self._parts.append(tag("text", across, x="100%", y=below, text_anchor="end"))

    def curve(self, points: Points, colour: Colour, *, dashed: bool = False) -> None:
        """A line from point to point."""
        self._stretched(
            tag(
                "polyline", points=self._path(points), class_="curve", stroke=f"var(--{colour})",
                stroke_dasharray="5 4" if dashed else None,
            )
        )  # fmt: skip

    def area(self, lower: Points, upper: Points, colour: Colour, told: str) -> None:
        """What is between two curves."""
        around = self._path([*upper, *reversed([*lower])])
        self._stretched(tag("polygon", tag("title", told), points=around, fill=f"var(--{colour})"))

    def dot(self, x: float, y: float, colour: Colour, told: str = "") -> None:
        """A point, and what is said of it when it is pointed at."""
        self._parts.append(
            tag(
                "circle", *([tag("title", told)] if told else []), cx=self._across(x),
                cy=self._down(y), r="4", class_="dot", fill=f"var(--{colour})",
            )
        )  # fmt: skip

    def whisker(self, x: float, low: float, high: float, colour: Colour) -> None:
        """How far a point may be off."""
        at = self._across(x)
        line = {"x1": at, "x2": at, "y1": self._down(low), "y2": self._down(high)}
        self._parts.append(tag("line", **line, stroke=f"var(--{colour})"))

    def mark(self, x: float, colour: Colour, told: str, *, written: bool = False) -> None:
        """A dashed line at one value across.

        Args:
            told: what it is, when it is pointed at.
            written: whether that is also written beside it.
        """
        at = self._across(x)
        self._parts.append(
            tag(
                "line", tag("title", told), x1=at, x2=at, y1="0", y2=self._height,
                stroke=f"var(--{colour})", stroke_dasharray="4 4",
            )
        )  # fmt: skip
        if written:
            left = self._x.at(x) > 0.6
            self._parts.append(
                tag("text", told, x=at, y="14", dx="-5" if left else "5",
                    text_anchor="end" if left else "start")
            )  # fmt: skip

    def svg(self, label: str, **attributes: str) -> Html:
        """The plot.

        Args:
            label: read aloud in its place.
        """
        return tag(
            "svg", *self._parts, class_="plot", height=self._height, role="img",
            aria_label=label, **attributes,
        )  # fmt: skip

    def cursor(self) -> None:
        """A line that a script of the page moves."""
        self._parts.append(
            tag("line", y1="0", y2=self._height, class_="cursor", visibility="hidden")
        )

    def _across(self, value: float) -> str:
        return f"{100 * self._x.at(_held(value)):.2f}%"

    def _down(self, value: float) -> str:
        return f"{self._height * (1 - self._y.at(_held(value))):.1f}"

    def _path(self, points: Points) -> str:
        x, y = self._x, self._y
        return " ".join(
            f"{1000 * x.at(_held(a)):.1f},{1000 * (1 - y.at(_held(b))):.1f}" for a, b in points
        )

    def _stretched(self, shape: Html) -> None:
        self._parts.append(
            tag(
                "svg", shape, viewBox="0 0 1000 1000", preserveAspectRatio="none", width="100%",
                height="100%",
            )
        )  # fmt: skip


def bar(parts: Iterable[tuple[str, Colour, float]], label: str) -> Html:
    """One bar of shares that add up to one, from left to right: (name, colour, share)."""
    at, drawn = 0.0, []
    for name, colour, share in parts:
        if share > 0.0001:
            drawn.append(
                tag(
                    "rect", tag("title", f"{name} {100 * share:.1f} %"), x=f"{100 * at:.2f}%",
                    y="0", width=f"{100 * share:.2f}%", height="100%", fill=f"var(--{colour})",
                    stroke="var(--page)",
                )
            )  # fmt: skip
        at += share
    return tag("svg", *drawn, class_="bar", role="img", aria_label=label)


def _held(value: float) -> float:
    return min(max(value, -_MOST), _MOST)
