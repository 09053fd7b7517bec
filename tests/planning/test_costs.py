"""What a plan costs: known sums, simulations of failures and of latency, and missed limits."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.errors import ConfigError
from hybrid.planning import agents_cost, training_cost
from hybrid.planning.advise import Advice, advise
from hybrid.planning.latency import chain
from hybrid.planning.prices import load_prices
from hybrid.planning.ranges import Range, estimate, exactly, shown, span
from hybrid.planning.spot import event_rate, pool_risk
from hybrid.planning.workload import AgentsPart, ClusterPart, Hop, TrainPart, parse


def advice(raw: dict[str, Any]) -> Advice:
    return advise(parse(raw), load_prices())


def test_64_h100_for_two_weeks() -> None:
    found = advice({"cluster": {"gpus": 64, "usd_per_hour": 600, "hours": 336}})
    assert found.plans[0].usd.value.mid == pytest.approx(201_600)
    assert found.plans[0].usd.value.exact
    assert any("$9.38 per H100 80GB HBM3-hour" in note for note in found.notes)
    assert any("cluster.usd_per_hour looks off" in note for note in found.notes)


def test_50_agents_for_two_weeks() -> None:
    raw = {"agents": {"nodes": 50, "usd_per_hour": 5, "hours": 336, "market": "on-demand"}}
    found = advice(raw)
    assert found.plans[0].usd.value.mid == pytest.approx(1680)
    assert not any("looks off" in note for note in found.notes), "$0.10 is no odd price on demand"
    spot = advice({"agents": raw["agents"] | {"market": "spot"}})
    assert any("agents.usd_per_hour looks off" in note for note in spot.notes)


def test_a_usual_price_does_not_look_off() -> None:
    found = advice({"cluster": {"gpus": 64, "usd_per_hour": 256, "hours": 1}})
    assert not any("looks off" in note for note in found.notes)


def test_training_time_is_6nd_over_the_flops() -> None:
    """405B on 15.6T tokens took 30.84 million H100-hours, as published with it (Llama 3, 2024)."""
    train = TrainPart(parameters=405e9, tokens=15.6e12)
    cluster = ClusterPart(gpus=16_384)
    given_ = training_cost.inputs(train, cluster, spot=False)
    hours = estimate(lambda v: training_cost.training_time(v, cluster.nodes, 1).wall, given_)
    low, high = hours.value.low * 16_384, hours.value.high * 16_384
    assert low < 30.84e6 < high
    exact = ClusterPart(gpus=8, matmul_tflops=800, mfu=0.5, node_mtbf_hours=1e12, checkpoint_s=1e-6)
    values = {k: r.mid for k, r in training_cost.inputs(train, exact, spot=False).items()}
    expected = 6 * 405e9 * 15.6e12 / (8 * 400e12) / 3600
    assert training_cost.training_time(values, 1, 1).wall == pytest.approx(expected, rel=1e-6)


def test_daly_agrees_with_a_simulation_of_failures() -> None:
    work, cost, mtbf, restart = 40_000.0, 30.0, 4000.0, 100.0
    interval = training_cost.daly_interval(cost, mtbf)
    rng = random.Random(1)
    walls = []
    for _ in range(400):
        wall, left = 0.0, work
        while left > 0:
            segment = min(interval, left) + cost
            while (fails := rng.expovariate(1 / mtbf)) < segment:
                wall += fails
                while (again := rng.expovariate(1 / mtbf)) < restart:
                    wall += again  # a failure while it restarts
                wall += restart
            wall += segment
            left -= interval
        walls.append(wall)
    found = training_cost.wall_seconds(work, interval, cost, mtbf, restart)
    assert found == pytest.approx(sum(walls) / len(walls), rel=0.02)
    for other in (interval / 3, interval * 3):
        assert training_cost.wall_seconds(work, other, cost, mtbf, restart) > found


def test_a_pool_that_fails_faster_than_it_restarts_never_ends() -> None:
    assert math.isinf(training_cost.wall_seconds(1e6, 100, 10, 0.1, 300))
    assert shown(math.inf) == "without end"


def test_an_unknown_speed_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.matmul_tflops"):
        advice({"train": {"parameters": "1B", "tokens": "1B"},
                "cluster": {"gpu": "A30", "usd_per_hour": 3}})  # fmt: skip
    with pytest.raises(ConfigError, match=r"cluster\.usd_per_hour"):
        advice({"cluster": {"gpu": "A30"}})


def test_agents_without_a_price_are_refused_by_name(tmp_path: Path) -> None:
    table = tmp_path / "p.csv"
    table.write_text(
        "item,market,usd_per_hour,provider,date,source\nL4,spot,1,Somebody,2026-11-02,https://x\n"
    )
    raw: dict[str, Any] = {"agents": {"nodes": 3}}
    with pytest.raises(ConfigError, match=r"agents\.usd_per_hour"):
        advise(parse(raw), load_prices(table))
    raw["agents"]["usd_per_hour"] = 1
    assert advise(parse(raw), load_prices(table)).plans[0].usd.value.mid == pytest.approx(730)


def test_littles_law() -> None:
    agents = AgentsPart(calls_in_flight=10, ceiling=0.5, vcpus=1, cpu_ms_per_call=1)
    v = {"requests a second": 20.0, "model call, s": 3.0, "CPU of a call, ms": 1.0}
    need = agents_cost.capacity(v, steps=2, agents=agents)
    assert (need.calls_per_s, need.in_flight) == (40, 120)
    assert need.nodes == need.for_calls == 24
    assert need.utilisation == pytest.approx(0.5)
    slow = agents_cost.capacity(v | {"CPU of a call, ms": 1000.0}, 2, agents)
    assert slow.nodes == slow.for_cpu == 80
    spread = agents_cost.capacity(v, 2, agents.model_copy(update={"zones": 3}))
    assert spread.nodes == 36, "two zones carry what three share"


def test_too_few_nodes_are_said_to_be() -> None:
    found = advice({"serve": {"weights": "api", "requests_per_s": 100, "call_s": 5}, "steps": 3,
                    "agents": {"nodes": 2}})  # fmt: skip
    assert any("agents.nodes: 2 are" in note and "needed" in note for note in found.notes)


def test_co_interruptions_are_not_independent() -> None:
    together = pool_risk(0.02, 0.5, nodes=50, zones=1, hours=336, replace_s=180)
    assert together.taken_at_once == 50
    assert together.half_gone > 0.9
    assert together.half_gone_independent < 1e-30
    spread = pool_risk(0.02, 0.5, nodes=50, zones=5, hours=336, replace_s=180)
    assert spread.half_gone < together.half_gone
    alone = pool_risk(0.02, 0.0, nodes=4, zones=2, hours=336, replace_s=180)
    assert alone.half_gone == pytest.approx(alone.half_gone_independent, rel=1e-6)
    assert event_rate(0.02, 0.0, 50, 1) == pytest.approx(1.0)
    assert event_rate(0.02, 1.0, 50, 1) == pytest.approx(0.02)


def test_latency_of_a_chain_against_its_simulation() -> None:
    hops = [
        Hop(name="queue", p50_ms=3, p99_ms=12),
        Hop(name="model", p50_ms=700, p99_ms=2500),
        Hop(name="tool", p50_ms=100, p99_ms=1500),
    ]
    found = chain(hops)
    rng = random.Random(2)
    z = 2.3263478740408408
    laws = [(math.log(p50), math.log(p99 / p50) / z) for _, p50, p99 in found.by_hop]
    sums = sorted(sum(math.exp(rng.gauss(*law)) for law in laws) for _ in range(20_000))
    assert found.p99_ms.low == pytest.approx(sums[19_800], rel=0.1)
    assert found.p99_ms.high == 12 + 2500 + 1500
    assert found.p50_ms.low <= sums[10_000] * 1.05
    assert found.slowest == "model"


def test_measured_samples_of_a_hop() -> None:
    samples = tuple(float(i) for i in range(1, 102))
    found = chain([Hop(name="a", samples_ms=samples)])
    assert found.by_hop == (("a", 51.0, 100.0),)
    assert found.p99_ms.mid == pytest.approx(100)
    constant = chain([Hop(name="a", p50_ms=5, p99_ms=5)])
    assert constant.p99_ms.mid == pytest.approx(5)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.1, 10), st.floats(1, 10), st.floats(1, 10))
def test_an_estimate_holds_its_middle_and_names_what_matters(a: float, b: float, c: float) -> None:
    inputs = {
        "small": Range(a, a * 1.01, a * 1.02),
        "large": Range(b, b * 1.5, b * 3),
        "fixed": exactly(c),
    }
    found = estimate(lambda v: v["small"] * v["large"] * v["fixed"], inputs)
    assert found.value.low <= found.value.mid <= found.value.high
    assert a * b * c <= found.value.low
    assert found.value.high <= a * 1.02 * b * 3 * c * (1 + 1e-9)
    assert [s.name for s in found.swings] == ["large", "small"]


def test_numbers_as_people_write_them() -> None:
    assert [shown(v) for v in (0, 0.01234, 9.375, 123.4, 201_600, 2.14e16)] == [
        "0", "0.0123", "9.38", "123", "202,000", "2.14e+16",
    ]  # fmt: skip
    assert span(exactly(201_600)) == "201,600"
    assert span(Range(1, 2, 3), "h") == "2.00 (1.00 – 3.00) h"


def test_budget_deadline_and_latency_that_are_missed_are_named() -> None:
    raw = {
        "train": {"parameters": "70B", "tokens": "15T", "deadline_hours": 10},
        "serve": {"parameters": "7B", "requests_per_s": 1, "call_s": 3},
        "latency": {"limit_ms": 1000},
        "budget": {"usd": 100, "per": "total"},
        "cluster": {"gpus": 8},
    }
    misses = " ".join(advice(raw).plans[0].misses)
    for key in ("train.deadline_hours", "latency.limit_ms", "budget.usd", "cluster.gpus"):
        assert key in misses


def test_training_on_spot_and_serving_on_demand_are_paid_at_their_own_prices(
    tmp_path: Path,
) -> None:
    table = tmp_path / "p.csv"
    row = "L40S,{},{},Somebody,2026-11-02,https://x\n"
    head = "item,market,usd_per_hour,provider,date,source\n"
    table.write_text(head + row.format("spot", 1) + row.format("on-demand", 10))
    raw = {
        "train": {"parameters": "1B", "tokens": "1B"},
        "serve": {"parameters": "1B", "requests_per_s": 1, "calls_per_replica_s": 100},
        "cluster": {"gpu": "L40S", "gpus": 4, "market": "spot", "tokens_per_s": 1e6},
    }
    found = advise(parse(raw), load_prices(table))
    (plan,) = found.plans
    assert plan.kind == found.answer == "cluster"
    assert any("no plan for hybrid: agents.usd_per_hour" in note for note in found.notes)
    training, serving = (part[1].value for part in plan.parts)
    assert plan.training_hours is not None
    assert training.mid == pytest.approx(4 * 1 * plan.training_hours.value.mid)
    assert serving.mid == pytest.approx(730 * 10)
    assert plan.usd.value.mid == pytest.approx(training.mid + serving.mid)


def test_what_may_not_stop_is_not_put_on_spot() -> None:
    found = advice({"serve": {"weights": "api", "requests_per_s": 1}, "steps": 2,
                    "interruptible": False})  # fmt: skip
    assert "on-demand" in found.plans[0].parts[-1][0]
    assert any("interruptible: no" in note for note in found.notes)
