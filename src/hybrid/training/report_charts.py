"""Curves over optimiser steps: what is drawn of them, and what a reader finds under the pointer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.pages import Colour, Html, figure, group, key, tag
from hybrid.plots import Axis, Plot, number, ticks

Points = Sequence[tuple[int, float]]
MOST_POINTS = 600
SCRIPT = """
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const data = JSON.parse(svg.dataset.chart), cursor = svg.querySelector(".cursor");
  const reading = svg.parentNode.querySelector(".reading"), span = data.high - data.low;
  const show = (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = data.low + (event.clientX - box.left) / box.width * span;
    const nearest = data.lines.map((line) => line.points.reduce(
      (best, p) => Math.abs(p[0] - wanted) < Math.abs(best[0] - wanted) ? p : best));
    const across = `${100 * (nearest[0][0] - data.low) / span}%`;
    cursor.setAttribute("x1", across); cursor.setAttribute("x2", across);
    cursor.setAttribute("visibility", "visible");
    reading.textContent = data.lines.map(
      (line, i) => `step ${nearest[i][0]}: ${line.name} ${nearest[i][1]}`).join("   ");
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden"); reading.textContent = "";
  });
}
"""
"""What a page with `line_chart` needs: the values under the pointer."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: its name, its colour, (step, value) in order of step."""

    name: str
    colour: Colour
    points: Points
    dots: bool = False


def line_chart(title: str, unit: str, lines: Sequence[Line], restarts: Sequence[int] = ()) -> Html:
    """A figure of curves over optimiser steps, or a sentence where there is nothing to draw.

    Args:
        title: shown above and read aloud.
        unit: what the vertical axis counts.
        restarts: steps at which the workers began anew: dashed lines.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return figure("nothing was recorded", title, unit=unit)
    steps = [step for line in lines for step, _ in line.points]
    low, high = min(steps), max(max(steps), min(steps) + 1)
    whole = [t for t in ticks(low, high, 4) if low <= t <= high and t == int(t)]
    plot = Plot(
        Axis(low=low, high=high, ticks=whole, told=lambda step: f"{step:,.0f}"),
        Axis.upwards(value for line in lines for _, value in line.points),
        across="step",
    )
    for step in restarts:
        if low <= step <= high:
            plot.mark(step, "red", f"restart after step {step}")
    read = []
    for line in lines:
        points = thinned(line.points)
        read.append({"name": line.name, "points": [[s, number(v)] for s, v in points]})
        if len(points) > 1:
            plot.curve(points, line.colour)
        if line.dots or len(points) == 1:
            for step, value in points:
                plot.dot(step, value, line.colour, f"step {step}: {line.name} {number(value)}")
    plot.cursor()
    last = "; ".join(f"{line.name} ends at {number(line.points[-1][1])}" for line in lines)
    drawn = plot.svg(
        f"{title}, {unit}, steps {min(steps)} to {max(steps)}: {last}",
        data_chart=json.dumps({"low": low, "high": high, "lines": read}),
    )
    return figure(
        group(drawn, tag("p", class_="reading", aria_hidden="true")),
        title,
        unit=unit,
        legend=key((line.name, line.colour) for line in lines) if len(lines) > 1 else "",
    )


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
