"""Which of cluster and agents is advised, why, and what would change the answer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_cases import CASES

from hybrid.planning.advise import advise, turning_points
from hybrid.planning.prices import load_prices
from hybrid.planning.rules import RULES, decide, findings
from hybrid.planning.workload import Workload, parse


def answer(raw: dict[str, Any]) -> str:
    return decide(findings(parse(raw)))


def test_thirty_workloads_that_differ() -> None:
    assert len(CASES) >= 30
    assert len({name for name, *_ in CASES}) == len(CASES)
    used = {rule for *_, rules in CASES for rule in rules}
    assert used == {rule.name for rule in RULES}, "every rule decides somewhere"


@pytest.mark.parametrize(("name", "raw", "expected", "rules"), CASES, ids=[c[0] for c in CASES])
def test_advice_and_its_reasons(
    name: str, raw: dict[str, Any], expected: str, rules: set[str]
) -> None:
    w = parse(raw)
    found = findings(w)
    assert {f.rule for f in found if f.applies} == rules
    assert decide(found) == expected
    for f in found:
        assert f.why and f.change


@pytest.mark.parametrize(("name", "raw", "expected", "rules"), CASES, ids=[c[0] for c in CASES])
def test_what_would_change_the_answer_does(
    name: str, raw: dict[str, Any], expected: str, rules: set[str]
) -> None:
    w = parse(raw)
    for turn in turning_points(w):
        changed: dict[str, Any] = w.model_dump()
        at = changed
        *parents, last = turn.field.split(".")
        for parent in parents:
            at = at[parent]
        at[last] = turn.value
        assert decide(findings(Workload.model_validate(changed))) == turn.answer != expected


@pytest.mark.parametrize(("name", "raw", "expected", "rules"), CASES, ids=[c[0] for c in CASES])
def test_every_workload_is_priced_by_its_own_plan(
    name: str, raw: dict[str, Any], expected: str, rules: set[str]
) -> None:
    advice = advise(parse(raw), load_prices())
    if raw.get("serve", {}).get("weights") != "api" or expected in ("agents", "hybrid"):
        assert advice.plans[0].kind == expected
    for plan in advice.plans:
        assert 0 < plan.usd.value.low <= plan.usd.value.mid <= plan.usd.value.high


# Monotonic properties: which way a change may turn the answer, over all workloads.

LIMITS = st.one_of(st.none(), st.floats(50, 20_000))
RAW = st.fixed_dictionaries(
    {
        "serve": st.fixed_dictionaries(
            {
                "parameters": st.sampled_from([1e9, 7e9, 70e9, 405e9]),
                "requests_per_s": st.floats(0.1, 100),
            }
        ),
        "train": st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {
                    "parameters": st.just(7e9),
                    "tokens": st.just(1e12),
                    "specialists": st.integers(0, 12),
                }
            ),
        ),
        "steps": st.integers(1, 6),
        "changes_per_month": st.floats(0, 60),
        "latency": st.fixed_dictionaries(
            {
                "limit_ms": LIMITS,
                "hops": st.sampled_from([[], [{"name": "a", "p50_ms": 300, "p99_ms": 2000}]]),
            }
        ),
        "budget": st.one_of(
            st.none(), st.fixed_dictionaries({"market": st.sampled_from(["spot", "on-demand"])})
        ),
    }
)
fast = settings(max_examples=150, deadline=None)


@fast
@given(RAW, st.floats(50, 20_000), st.floats(0, 20_000))
def test_a_higher_latency_limit_never_takes_agents_away(
    raw: dict[str, Any], limit: float, more: float
) -> None:
    hops = raw["latency"]["hops"]
    before = answer(raw | {"latency": {"limit_ms": limit, "hops": hops}})
    after = answer(raw | {"latency": {"limit_ms": limit + more, "hops": hops}})
    if before in ("agents", "hybrid", "single"):
        assert after == before
    else:
        assert after in ("cluster", "agents", "hybrid")


@fast
@given(RAW, st.floats(0, 60))
def test_more_new_types_never_take_agents_away(raw: dict[str, Any], more: float) -> None:
    before = answer(raw)
    after = answer(raw | {"changes_per_month": raw["changes_per_month"] + more})
    allowed = {
        "agents": {"agents"},
        "hybrid": {"hybrid"},
        "cluster": {"cluster", "hybrid"},
        "single": {"single", "agents", "cluster"},
    }
    assert after in allowed[before]


@fast
@given(RAW, st.integers(0, 5))
def test_more_steps_never_take_agents_away(raw: dict[str, Any], more: int) -> None:
    before, after = answer(raw), answer(raw | {"steps": raw["steps"] + more})
    if before in ("agents", "hybrid"):
        assert after == before
    if before == "cluster":
        assert after in ("cluster", "hybrid")


@fast
@given(RAW, st.floats(1, 100))
def test_a_larger_model_never_takes_the_cluster_away(raw: dict[str, Any], times: float) -> None:
    larger = raw["serve"] | {"parameters": raw["serve"]["parameters"] * times}
    before, after = answer(raw), answer(raw | {"serve": larger})
    if before in ("cluster", "hybrid"):
        assert after == before
    else:
        assert after in (before, "cluster", "hybrid")


@fast
@given(RAW, st.integers(0, 12))
def test_more_specialists_never_take_agents_away(raw: dict[str, Any], more: int) -> None:
    if raw["train"] is None:
        return
    train = raw["train"] | {"specialists": raw["train"]["specialists"] + more}
    before, after = answer(raw), answer(raw | {"train": train})
    assert after == before or (before, after) == ("cluster", "hybrid")
