"""How many hosts: for the backlog, for deadlines, from zero and back, never flapping."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from hybrid.agents.scaling import Scaler
from hybrid.agents.upkeep import Backlog

IDLE = Backlog(0, 0, 0.0, None)


def test_enough_for_the_backlog_between_the_limits() -> None:
    scaler = Scaler(low=0, high=4, slots=10)
    assert scaler.wanted(IDLE, 0, 0, now=0) == 0
    assert scaler.wanted(Backlog(1, 0, 0.0, None), 0, 0, now=0) == 1
    assert scaler.wanted(Backlog(15, 10, 0.0, None), 1, 0, now=0) == 3
    assert scaler.wanted(Backlog(900, 10, 0.0, None), 1, 0, now=0) == 4
    assert Scaler(low=2, high=4, slots=10).wanted(IDLE, 0, 0, now=0) == 2


def test_one_more_when_work_waits_but_not_while_one_starts() -> None:
    scaler = Scaler(low=1, high=4, slots=10, wait_s=1)
    late = Backlog(1, 5, 1.5, None)
    assert scaler.wanted(late, 1, 0, now=0) == 2
    assert scaler.wanted(late, 2, 1, now=1) == 2


def test_down_by_one_after_a_quiet_while() -> None:
    scaler = Scaler(low=0, high=4, slots=10, idle_s=30)
    assert [scaler.wanted(IDLE, 3, 0, now=t) for t in (0, 29, 31)] == [3, 3, 2]
    assert [scaler.wanted(IDLE, 2, 0, now=t) for t in (32, 60, 62)] == [2, 2, 1]
    assert scaler.wanted(Backlog(11, 0, 0.0, None), 1, 0, now=63) == 2
    assert scaler.wanted(IDLE, 2, 0, now=80) == 2, "the quiet begins anew"


@given(
    st.integers(0, 5000), st.integers(0, 5000), st.floats(0, 100), st.integers(0, 9),
    st.integers(0, 9),
)  # fmt: skip
def test_never_beyond_the_limits_and_never_more_than_one_down(
    ready: int, leased: int, oldest: float, present: int, starting: int
) -> None:
    scaler = Scaler(low=1, high=8, slots=32, idle_s=0)
    wanted = scaler.wanted(Backlog(ready, leased, oldest, 1.0), present, starting, now=5)
    assert wanted <= max(8, present)
    assert wanted >= min(1, present)
    assert wanted >= present - 1
