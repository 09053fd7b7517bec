"""Verdicts on traces made by hand: each kind, who waits for whom, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid.errors import DataError
from hybrid.planning.trace import RankTrace, StepTime
from hybrid.planning.verdict import KNOBS, judge

NOTHING = {"compute": 0.0, "matmul": 0.0, "exposed": 0.0, "overlapped": 0.0, "copies": 0.0,
           "host_wait": 0.0, "idle": 0.0, "input_wait": 0.0}  # fmt: skip


def step(number: int = 0, **seconds: float) -> StepTime:
    given = NOTHING | seconds
    whole = sum(given[k] for k in ("compute", "exposed", "copies", "host_wait", "idle"))
    return StepTime(step=number, seconds=whole, **given)


def rank(*steps: StepTime, number: int = 0, size: int = 1, **more: Any) -> RankTrace:
    fields: dict[str, Any] = {
        "path": Path("t"), "rank": number, "world_size": size, "backend": "gloo", "device": True,
        "steps": steps, "collectives": {"all_reduce": 1.0}, "phases": {}, "ops": (), "warnings": (),
    }  # fmt: skip
    return RankTrace(**fields | more)


@pytest.mark.parametrize(
    ("seconds", "bound"),
    [
        ({"compute": 0.9, "matmul": 0.7, "exposed": 0.1}, "compute"),
        ({"compute": 0.9, "matmul": 0.2, "exposed": 0.1}, "memory"),
        ({"compute": 0.5, "matmul": 0.4, "copies": 0.5}, "memory"),
        ({"compute": 0.4, "matmul": 0.3, "exposed": 0.6, "overlapped": 0.1}, "communication"),
        ({"compute": 0.3, "matmul": 0.3, "host_wait": 0.7, "input_wait": 0.6}, "input"),
        ({"compute": 0.3, "matmul": 0.2, "host_wait": 0.5, "idle": 0.2}, "host"),
    ],
)
def test_each_kind_is_told_with_its_figures_and_knobs(
    seconds: dict[str, float], bound: str
) -> None:
    found = judge([rank(step(**seconds))])
    assert found.bound == bound
    assert found.knobs == KNOBS[found.bound]
    assert found.knobs
    assert sum(found.shares.values()) == pytest.approx(1)
    assert "%" in found.evidence[1]


def test_who_waits_for_a_slow_rank_is_not_bound_by_communication() -> None:
    """Rank 1 reads data for long, rank 0 waits for it in a collective."""
    fast = rank(step(0, compute=0.2, matmul=0.2, exposed=0.8), number=0, size=2)
    slow = rank(step(0, compute=0.2, matmul=0.2, exposed=0.1, host_wait=0.7, input_wait=0.7),
                number=1, size=2)  # fmt: skip
    found = judge([fast, slow])
    assert found.bound == "input"
    assert found.imbalance == pytest.approx(0.35)
    assert any("wait for the slowest" in e for e in found.evidence)


def test_overlap_is_of_all_communication_of_all_ranks() -> None:
    one = rank(step(compute=0.8, overlapped=0.3, exposed=0.1))
    assert judge([one]).overlap == pytest.approx(0.75)
    assert judge([rank(step(compute=1.0))]).overlap is None


def test_missing_ranks_are_told_and_what_does_not_fit_together_is_refused() -> None:
    one = rank(step(compute=1.0), size=4)
    assert any("3 of 4 ranks" in w for w in judge([one]).warnings)
    with pytest.raises(DataError, match="no traces"):
        judge([])
    with pytest.raises(DataError, match="rank 0 was given twice"):
        judge([one, one])
    with pytest.raises(DataError, match="no step in common"):
        judge([one, rank(step(5, compute=1.0), number=1, size=4)])
