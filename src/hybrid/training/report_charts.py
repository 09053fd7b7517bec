"""Charts as inline SVG: lines over steps, and one stacked bar. Colours come from the page's CSS."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[int, float]]

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 34
MOST_POINTS = 600


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: its name, the CSS class of its colour, (step, value) in order of step."""

    name: str
    style: str
    points: Points
    dots: bool = False


def line_chart(title: str, unit: str, lines: Sequence[Line], restarts: Sequence[int] = ()) -> str:
    """An SVG of curves over optimiser steps, or a sentence where there is nothing to draw.

    Args:
        title: shown above and read aloud.
        unit: what the vertical axis counts.
        restarts: steps at which the workers began anew: dashed lines.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return f'<figure><figcaption>{escape(title)}</figcaption><p class="none">none</p></figure>'
    xs = [step for line in lines for step, _ in line.points]
    ys = [value for line in lines for _, value in line.points]
    y_ticks = ticks(min(ys), max(ys))
    x_ticks = [t for t in ticks(min(xs), max(xs)) if min(xs) <= t <= max(xs) and t == int(t)]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def x(step: float) -> float:
        return LEFT + (step - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in y_ticks:
        at = f"{y(tick):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{at}" dy="4">{number(tick)}</text>')
    for tick in x_ticks:
        at, below = f"{x(tick):.1f}", HEIGHT - BOTTOM + 16
        parts.append(f'<text class="tick x" x="{at}" y="{below}">{tick:,.0f}</text>')
    parts.append(f'<text class="tick x" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}">step</text>')
    for step in restarts:
        if x_low <= step <= x_high:
            at = f"{x(step):.1f}"
            parts.append(
                f'<line class="restart" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
                f"<title>restart after step {step}</title></line>"
            )
    readings = []
    for line in lines:
        points = thinned(line.points)
        readings.append({"name": line.name, "points": [[s, number(v)] for s, v in points]})
        path = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in points)
        if len(points) > 1:
            parts.append(f'<polyline class="curve {line.style}" points="{path}"/>')
        if line.dots or len(points) == 1:
            parts += [
                f'<circle class="dot {line.style}" cx="{x(s):.1f}" cy="{y(v):.1f}" r="4"/>'
                for s, v in points
            ]
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/>')
    key = "".join(f'<span><i class="{line.style}"></i>{escape(line.name)}</span>' for line in lines)
    last = "; ".join(f"{line.name} ends at {number(line.points[-1][1])}" for line in lines)
    label = escape(f"{title}, {unit}, steps {min(xs)} to {max(xs)}: {last}")
    data = escape(json.dumps({"low": x_low, "high": x_high, "lines": readings}), quote=True)
    return (
        f"<figure><figcaption>{escape(title)} <small>{escape(unit)}</small></figcaption>"
        + (f'<p class="key">{key}</p>' if len(lines) > 1 else "")
        + f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}"'
        f' data-chart="{data}">{"".join(parts)}</svg><p class="reading" aria-hidden="true"></p>'
        "</figure>"
    )


def stacked_bar(label: str, shares: Sequence[tuple[str, str, float]]) -> str:
    """An SVG bar of shares that add up to one.

    Args:
        shares: (name, CSS class, share of one) from left to right.
    """
    at, parts = 0.0, []
    for name, style, share in shares:
        width = share * WIDTH
        if width > 0.05:
            gap = 1.5 if width > 4 else 0.0
            parts.append(
                f'<rect class="{style}" x="{at:.2f}" y="0" width="{max(width - gap, 0.05):.2f}"'
                f' height="36"><title>{escape(name)}: {100 * share:.1f} %</title></rect>'
            )
        at += width
    return (
        f'<svg class="bar" viewBox="0 0 {WIDTH} 36" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


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


def number(value: float) -> str:
    """A value in as few characters as tell it apart."""
    if value == 0:
        return "0"
    if abs(value) >= 1e3:
        return f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.3g}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2e}"


def flops(value: float) -> str:
    """FLOP/s with a unit."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}FLOP/s"
    return f"{value / 1e6:.3g} MFLOP/s"


def thinned(points: Points, most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """At most about `most` points: of each stretch the lowest and the highest, so spikes stay."""
    if len(points) <= most:
        return list(points)
    kept: list[tuple[int, float]] = []
    stretch = -(-len(points) * 2 // most)
    for first in range(0, len(points), stretch):
        part = points[first : first + stretch]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    if kept[-1][0] != points[-1][0]:
        kept.append(points[-1])
    return kept
