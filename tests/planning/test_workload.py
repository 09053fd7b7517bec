"""Workloads as people write them, and bad ones refused with the field named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid.errors import ConfigError
from hybrid.planning.workload import load, parse

SERVE: dict[str, Any] = {"parameters": "7B", "requests_per_s": 5}
TRAIN: dict[str, Any] = {"parameters": "7B", "tokens": "1T"}
HOP: dict[str, Any] = {"name": "a", "p50_ms": 10, "p99_ms": 20}

# (workload, what the error must name)
BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("train", "serve", "missing")),
    ({"train": {"tokens": "1T"}}, ("train.parameters", "missing")),
    ({"train": {"parameters": "7B"}}, ("train.tokens", "missing")),
    ({"train": TRAIN | {"parameters": 0}}, ("train.parameters", "greater than 0")),
    ({"train": TRAIN | {"tokens": -1}}, ("train.tokens", "greater than 0")),
    ({"train": TRAIN | {"tokens": "many"}}, ("train.tokens", "'many'")),
    ({"train": TRAIN | {"tokens": float("inf")}}, ("train.tokens", "finite")),
    ({"train": TRAIN | {"tokens": float("nan")}}, ("train.tokens",)),
    ({"train": TRAIN | {"specialists": -1}}, ("train.specialists",)),
    ({"train": TRAIN | {"specialists": 2.5}}, ("train.specialists",)),
    ({"train": TRAIN | {"deadline_hours": 0}}, ("train.deadline_hours",)),
    ({"train": TRAIN | {"epochs": 1}}, ("train.epochs", "unknown key")),
    ({"train": TRAIN, "steps": 3}, ("steps", "contradicts")),
    ({"train": TRAIN | {"specialists": 12}, "skills": 3}, ("skills", "train.specialists")),
    ({"train": TRAIN, "latency": {"limit_ms": 100}}, ("latency", "serve")),
    ({"serve": {"requests_per_s": 5}}, ("serve", "parameters", "missing")),
    ({"serve": SERVE | {"requests_per_s": 0}}, ("serve.requests_per_s",)),
    ({"serve": SERVE | {"requests_per_s": True}}, ("serve.requests_per_s", "yes or no")),
    ({"serve": SERVE | {"usd_per_call": 0.01}}, ("usd_per_call", "weights")),
    ({"serve": {"weights": "api", "requests_per_s": 1, "usd_per_call": "-3 USD"}},
     ("serve.usd_per_call",)),
    ({"serve": {"weights": "api", "requests_per_s": 1, "calls_per_replica_s": 3}},
     ("calls_per_replica_s", "weights: api")),
    ({"serve": SERVE, "steps": 0}, ("steps",)),
    ({"serve": SERVE, "skills": 0}, ("skills",)),
    ({"serve": SERVE, "changes_per_month": -1}, ("changes_per_month",)),
    ({"serve": SERVE, "latency": {"limit_ms": -5}}, ("latency.limit_ms",)),
    ({"serve": SERVE, "latency": {"hops": [HOP | {"p99_ms": 5}]}}, ("latency.hops.0", "p99_ms")),
    ({"serve": SERVE, "latency": {"hops": [{"name": "a", "p50_ms": 5}]}},
     ("latency.hops.0", "p99_ms")),
    ({"serve": SERVE, "latency": {"hops": [{"name": "a", "samples_ms": [1.0] * 5}]}},
     ("latency.hops.0", "samples_ms")),
    ({"serve": SERVE, "latency": {"hops": [HOP | {"samples_ms": [1.0] * 30}]}},
     ("samples_ms", "contradicts")),
    ({"serve": SERVE, "budget": {"usd": "600 EUR"}}, ("budget.usd", "dollars")),
    ({"serve": SERVE, "budget": {"usd": "€600"}}, ("budget.usd", "dollars")),
    ({"serve": SERVE, "budget": {"usd": "lots"}}, ("budget.usd", "dollars")),
    ({"serve": SERVE, "budget": {"usd": 0}}, ("budget.usd",)),
    ({"serve": SERVE, "budget": {"usd": True}}, ("budget.usd", "yes or no")),
    ({"serve": SERVE, "budget": {"usd": 5, "per": "week"}}, ("budget.per",)),
    ({"serve": SERVE, "budget": {"market": "spot"}, "interruptible": False},
     ("budget.market", "interruptible")),
    ({"serve": SERVE, "cluster": {"gpu": "H1000"}}, ("cluster", "gpu", "H1000", "near")),
    ({"serve": SERVE, "cluster": {"gpus": 0}}, ("cluster.gpus",)),
    ({"serve": SERVE, "cluster": {"mfu": 1.2}}, ("cluster.mfu",)),
    ({"serve": SERVE, "cluster": {"mfu": 0.4, "tokens_per_s": 9}}, ("tokens_per_s", "mfu")),
    ({"serve": SERVE, "cluster": {"usd_per_hour": -600}}, ("cluster.usd_per_hour",)),
    ({"serve": SERVE, "cluster": {"correlation": 1.5}}, ("cluster.correlation",)),
    ({"serve": SERVE, "agents": {"ceiling": 1}}, ("agents.ceiling",)),
    ({"serve": SERVE, "agents": {"vcpus": 0}}, ("agents.vcpus",)),
    ({"serve": SERVE, "agents": {"market": "reserved"}}, ("agents.market",)),
    ({"serve": SERVE, "horizon_hours": 0}, ("horizon_hours",)),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "named"), BAD, ids=[", ".join(n) for _, n in BAD])
def test_bad_input_is_refused_with_the_field_named(
    raw: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(raw, "w.yaml")
    for word in ("w.yaml", *named):
        assert word in caught.value.message


def test_counts_and_money_as_people_write_them() -> None:
    w = parse(
        {
            "train": {"parameters": "1.5B", "tokens": "3e11"},
            "serve": SERVE,
            "budget": {"usd": "$1,200.50"},
            "cluster": {"usd_per_hour": "600 usd"},
        }
    )
    assert w.train is not None and w.budget is not None and w.cluster is not None
    assert (w.train.parameters, w.train.tokens) == (1.5e9, 3e11)
    assert (w.budget.usd, w.cluster.usd_per_hour) == (1200.5, 600)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.yaml")
    file = tmp_path / "w.yaml"
    file.write_text("- a list")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load(file)
    examples = sorted((Path(__file__).parents[2] / "examples/workloads").glob("*.yaml"))
    assert len(examples) >= 2
    for example in examples:
        load(example)


def test_an_unclear_gpu_is_read_as_the_first_and_says_so() -> None:
    w = parse({"cluster": {"gpu": "H100"}})
    assert w.cluster is not None
    gpu = w.cluster.product()
    assert gpu.product == "H100 80GB HBM3"
    assert "H100 PCIe" in gpu.others
    assert parse({"cluster": {"gpu": "NVIDIA A100-SXM4-80GB"}}).cluster.product().others == ()  # type: ignore[union-attr]
