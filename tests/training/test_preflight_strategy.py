"""Strategies are refused before any worker starts, by the key at fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybrid.config import TrainingConfig
from hybrid.training.preflight import Check
from hybrid.training.preflight_strategy import arranged, check_layout, fewest_on_a_node
from hybrid.training.probe import Probe

LLAMA = SimpleNamespace(
    model_type="llama", num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.0
)


def node(
    host: str = "host-a", deepspeed: str = "missing", compilers: tuple[str, ...] = ()
) -> Probe:
    told: dict[str, Any] = {
        "node": host, "host": host, "versions": {"deepspeed": deepspeed}, "gpus": (), "memory": 1,
        "storage": {}, "free": {}, "shards": None, "compilers": compilers,
    }  # fmt: skip
    return Probe(**told)


def look(slots: list[int], *nodes: Probe, gpu: bool = False, **training: Any) -> Check:
    settings = TrainingConfig.model_validate(training)
    return check_layout(settings, LLAMA, slots, nodes or [node()], gpu)


@pytest.mark.parametrize(
    ("training", "slots", "said"),
    [
        ({"strategy": "single", "workers": 2}, [4], "training.strategy: 'single' is for one"),
        ({"strategy": "single", "workers": [1, 2]}, [4], "training.strategy: 'single' is for one"),
        ({"strategy": "tp", "parallel": {"tensor": 4}, "workers": 4}, [4], "2 num_key_value"),
        ({"strategy": "tp", "workers": 2}, [4], "training.parallel.tensor: 'tp' shares"),
        ({"strategy": "ddp", "parallel": {"offload": True}}, [4], "training.parallel.offload"),
        ({"strategy": "fsdp", "parallel": {"shard": 2}}, [4], "training.parallel.shard"),
        ({"strategy": "hsdp"}, [4], "training.strategy: 'hsdp' keeps a copy on each node, and the"),
        ({"strategy": "hsdp", "workers": 5}, [4, 4], "5 workers cannot be spread equally"),
        ({"strategy": "hsdp", "workers": 4}, [3, 1], "4 workers cannot be spread equally"),
        ({"parallel": {"compile": True}}, [4], "training.parallel.compile: host-a has none of c++"),
        ({"strategy": "auto", "parallel": {"tensor": 4}}, [4], "there is nothing to try"),
    ],
)
def test_what_cannot_run_is_refused_by_key(
    training: dict[str, Any], slots: list[int], said: str
) -> None:
    found = look(slots, **training)
    assert (found.name, found.status) == ("layout", "fail")
    assert said in found.said


@pytest.mark.parametrize(
    ("training", "slots", "status"),
    [
        ({"strategy": "hsdp", "workers": 4}, [2, 2], "ok"),
        ({"strategy": "hsdp", "workers": 4}, [4, 4], "warn"),  # they may all be put on one node
        ({"strategy": "hsdp", "workers": 6}, [4, 3], "warn"),
        ({"strategy": "hsdp", "workers": 4, "parallel": {"shard": 2}}, [4], "ok"),
        ({"strategy": "hsdp", "workers": 4}, [], "ok"),  # nodes have yet to come
        ({"strategy": "tp", "workers": [2, 5], "parallel": {"tensor": 2}}, [4], "ok"),
        ({"strategy": "auto"}, [4], "ok"),
        ({"strategy": "fsdp"}, [], "ok"),
    ],
)
def test_what_can_run_is_not(training: dict[str, Any], slots: list[int], status: str) -> None:
    found = look(slots, **training)
    assert found.status == status, found


def test_compilers_are_asked_for_where_they_are_needed() -> None:
    compiled = {"parallel": {"compile": True}}
    with_cc = node(compilers=("cc",))
    assert look([4], node(compilers=("g++",)), **compiled).status == "ok"
    assert look([4], with_cc, **compiled).status == "fail"
    assert look([4], with_cc, gpu=True, **compiled).status == "ok"


def test_the_nodes_that_lack_a_strategys_package_are_named() -> None:
    a, b = node("a", "0.19.8"), node("b")
    found = look([2, 2], a, b, strategy="deepspeed")
    assert (found.status, "b lacks: pip install 'hybrid[deepspeed]'" in found.said) == (
        "fail",
        True,
    )
    assert look([2, 2], a, a, strategy="deepspeed").status == "ok"
    for others in ({"strategy": "fsdp"}, {"strategy": "auto"}):
        assert look([2, 2], a, b, **others).status == "ok"
    tried = {"strategy": "auto", "trials": {"vary": ["deepspeed"]}}
    assert "training.trials.vary: 'deepspeed' needs" in look([2, 2], a, b, **tried).said
    assert "deepspeed" in look([2, 2], a, a, **tried).said
    assert "deepspeed" in look([2, 2], a, a, strategy="auto", gpu=True).said
    assert "deepspeed" not in look([2, 2], a, b, strategy="auto", gpu=True).said


def test_full_nodes_come_first() -> None:
    assert arranged(3, [1, 2]) == ["node 0", "node 0", "node 1"]
    assert arranged(3, [1]) == ["node 0", "a further node", "a further node"]
    assert [fewest_on_a_node(n, [4, 2]) for n in (2, 4, 5, 6)] == [2, 4, 1, 2]
