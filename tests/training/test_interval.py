"""Young's and Daly's intervals against numbers worked by hand and against what they minimise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.training.interval import FIRST, Cadence, daly, run_mtbf, young


def lost(interval: float, cost: float, mtbf: float) -> float:
    """Wall time per unit of work under exponential failures, without time to restart."""
    return mtbf * math.expm1((interval + cost) / mtbf) / interval


def test_known_values() -> None:
    assert young(50, 36_000) == pytest.approx(1897.37, abs=0.01)
    # sqrt(2*50*36000) * (1 + sqrt(1/1440)/3 + (1/1440)/9) - 50
    assert daly(50, 36_000) == pytest.approx(1864.18, abs=0.01)
    assert young(300, 86_400) == 7200
    assert daly(200, 100) == daly(1e6, 100) == 100
    assert run_mtbf(86_400, 8) == 10_800


@given(st.floats(0.01, 100), st.floats(1_000, 1e7))
def test_daly_is_near_the_true_minimum(cost: float, mtbf: float) -> None:
    """The exact optimum is found numerically; Daly's is within a thousandth of its loss."""
    low, high = 1e-3, 10 * mtbf
    for _ in range(200):  # the loss has one minimum
        third = (high - low) / 3
        if lost(low + third, cost, mtbf) < lost(high - third, cost, mtbf):
            high -= third
        else:
            low += third
    best = lost((low + high) / 2, cost, mtbf)
    assert lost(daly(cost, mtbf), cost, mtbf) - 1 <= (best - 1) * 1.001


def test_a_fixed_interval_counts_steps_of_the_run() -> None:
    cadence = Cadence(4, 1.0, start=6)
    assert [step for step in range(7, 17) if cadence.due(step)] == [8, 12, 16]


def test_auto_follows_what_saves_and_steps_cost() -> None:
    cadence = Cadence("auto", 86_400)
    assert not cadence.due(FIRST - 1) and cadence.due(FIRST)
    for _ in range(FIRST):
        cadence.step_took(0.5, saving=False)
    cadence.begun(FIRST)
    for _ in range(4):
        cadence.step_took(0.6, saving=True)
    # 0.4 s stalled, and four steps took 0.1 s more than they do alone.
    assert cadence.cost_s(0.4) == pytest.approx(0.8)
    assert cadence.best(0.4, 3.0) == round(daly(0.8, 86_400) / 0.5)
    assert cadence.best(0.4, 3_000.0) == 6_000, "not more often than it can be written"
    cadence.interval = 7
    assert not cadence.due(FIRST + 6) and cadence.due(FIRST + 7)
    cadence.begun(FIRST + 9)
    assert cadence.cost_s(0.4) == 0.4, "what an earlier save cost is forgotten"
