"""Bad numbers: what is stopped, left out or noted, and that all of it survives a resume."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.config import FaultConfig
from hybrid.training.policy import FEWEST, Policy, Verdict

NAN, INF = float("nan"), float("inf")


def policy(**faults: Any) -> Policy:
    return Policy(FaultConfig.model_validate(faults))


def settled(made: Policy, norm: float = 1.0) -> Policy:
    for _ in range(FEWEST):
        assert made.accept(2.0, norm)
    return made


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (INF, 1.0), (2.0, NAN), (2.0, INF)])
def test_what_is_not_finite_stops_the_run_or_is_left_out(loss: float, norm: float) -> None:
    made = policy()
    assert not made.accept(loss, norm)
    assert made.verdict is not None
    assert made.verdict.action == "stop"
    assert "not finite" in made.verdict.reason
    made = policy(not_finite="skip")
    assert not made.accept(loss, norm)
    assert made.verdict is not None
    assert made.verdict.action == "skip"
    assert made.accept(2.0, 1.0)
    assert made.verdict is None


@pytest.mark.parametrize(
    ("action", "applied"), [("stop", False), ("skip", False), ("record", True)]
)
def test_a_spike_is_many_times_the_recent_median(action: str, applied: bool) -> None:
    made = settled(policy(spike=4, on_spike=action), 0.5)
    assert made.accept(2.0, 1.99)
    assert made.verdict is None
    assert made.accept(2.0, 2.5) is applied
    assert made.verdict == Verdict(
        action=action,  # type: ignore[arg-type]
        reason="gradient norm 2.5 is 5.0 times the recent median 0.5 (training.faults.spike: 4)",
    )


def test_nothing_is_a_spike_before_there_is_a_median_or_without_a_limit() -> None:
    made = policy(spike=2)
    for norm in range(FEWEST):
        assert made.accept(2.0, 10.0**norm)
    assert settled(policy()).accept(2.0, 1e9)


def test_norms_that_stay_high_are_the_new_normal() -> None:
    made = settled(policy(spike=3, on_spike="record"))
    spikes = 0
    for _ in range(3 * FEWEST):
        made.accept(2.0, 10.0)
        spikes += made.verdict is not None
    assert spikes == FEWEST


def test_too_many_left_out_stop_the_run_after_all() -> None:
    made = settled(policy(not_finite="skip", spike=4, max_skipped=2))
    made.accept(NAN, NAN)
    made.accept(2.0, 50.0)
    assert made.skipped == 2
    assert not made.accept(2.0, 50.0)
    assert made.verdict is not None
    assert made.verdict.action == "stop"
    assert "2 steps were left out before (training.faults.max_skipped: 2)" in made.verdict.reason
    assert made.skipped == 2


@given(
    norms=st.lists(st.floats(0.1, 1e3) | st.sampled_from([NAN, INF]), min_size=1, max_size=60),
    at=st.integers(0, 60),
)
def test_a_resumed_policy_judges_as_if_it_had_never_stopped(norms: list[float], at: int) -> None:
    faults = {"spike": 3.0, "not_finite": "skip", "max_skipped": 5}
    whole = policy(**faults)
    expected = [(whole.accept(1.0, n), whole.verdict) for n in norms]
    first = policy(**faults)
    got = [(first.accept(1.0, n), first.verdict) for n in norms[:at]]
    second = policy(**faults)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [(second.accept(1.0, n), second.verdict) for n in norms[at:]]
    assert got == expected
    assert second.state_dict() == whole.state_dict()
