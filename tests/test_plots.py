"""Plots of any figures are whole: nothing falls out of them, no figure is too large to draw."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid.plots import Axis, Plot, bar, number, ticks

FINITE = st.floats(allow_nan=False, allow_infinity=False)
POINTS = st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=20)


@given(POINTS)
@example([(0.0, -1.7e308), (5e-324, 1.7e308)])
@example([(1e16, 1.0), (1e16 + 2, math.nextafter(1.0, 2))])
def test_every_mark_is_within_the_plot(points: list[tuple[float, float]]) -> None:
    xs, ys = zip(*points, strict=True)
    plot = Plot(Axis.upwards(xs), Axis.upwards(ys), across="x <y>", height=100)
    plot.curve(points, "blue", dashed=True)
    plot.area([(x, min(ys)) for x in xs], points, "red", "<all>")
    for x, y in points:
        plot.dot(x, y, "green", "&")
        plot.whisker(x, min(ys), y, "blue")
    plot.mark(xs[0], "ink", "here", written=True)
    svg = ElementTree.fromstring(plot.svg('said "so"', data_chart="{}"))
    assert svg.get("aria-label") == 'said "so"'
    for shape in svg.iter():
        for name in ("x1", "x2", "cx"):
            assert 0 <= float(shape.get(name, "0").rstrip("%")) <= 100
        for name in ("y1", "y2", "cy"):
            assert 0 <= float(shape.get(name, "0").rstrip("%")) <= 100
        for place in re.split("[ ,]", shape.get("points", "0")):
            assert 0 <= float(place) <= 1000
    assert len(svg.findall("circle")) == len(points)
    assert len(svg.findall("svg")) == 2


@given(FINITE.filter(lambda v: v > 1e-300), st.floats(1.001, 1e6))
def test_a_logarithmic_axis_goes_by_ratios(low: float, factor: float) -> None:
    low = min(low, 1e300)
    axis = Axis(low=low, high=low * factor, log=True)
    assert axis.at(low) == 0
    assert axis.at(low * factor) == pytest.approx(1)
    assert axis.at(low * math.sqrt(factor)) == pytest.approx(0.5, abs=1e-6)
    assert axis.at(0.0 if low > 0 else -1) == 0, "beyond an end is at it"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_a_bar_holds_all_shares_that_can_be_seen(parts: list[float]) -> None:
    whole = sum(parts) or 1.0
    shares = [part / whole for part in parts]
    svg = ElementTree.fromstring(bar((("<a>", "red", s) for s in shares), "a bar"))
    seen = [s for s in shares if s > 0.0001]
    widths = [float(str(rect.get("width")).rstrip("%")) for rect in svg]
    assert widths == pytest.approx([100 * s for s in seen], abs=0.01)


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
@example(0.0, 5e-324)
@example(1e9, math.nextafter(1e9, 0))
def test_ticks_are_few_ascending_and_enclose(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    found = ticks(low, high)
    assert 2 <= len(found) <= 13
    assert found == sorted(set(found))
    slack = 1e-6 * max(abs(low), abs(high), 1e-9)
    assert found[0] <= low + slack and found[-1] >= high - slack


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1234.5, "1,234"), (0.00012, "1.20e-04"), (1.2e9, "1.2e+09"), (3.14159, "3.142")],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert number(value) == shown
