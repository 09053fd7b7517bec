"""Collectives over nodes of which one fails: who hangs is named, who waited is not blamed."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from lying_devices import TINY

from hybrid.audit import network
from hybrid.audit.conduct import Conductor, NodeResult
from hybrid.audit.judgement import of_node
from hybrid.audit.level import MIB
from hybrid.audit.process import ProbeFailed
from hybrid.audit.reading import Reading

LEVEL = replace(TINY, reduce_bytes=(MIB,))


class Scripted:
    """A member whose part in the collectives ends as written."""

    node_id, address, pool = None, "127.0.0.1", None

    def __init__(self, name: str, ending: Any) -> None:
        self.name = name
        self.ending = ending

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if method == "meeting_point":
            future.set_result("tcp://127.0.0.1:1")
        elif isinstance(self.ending, Exception):
            future.set_exception(self.ending)
        else:
            future.set_result(self.ending)
        return future

    def close(self) -> None:
        pass


def collected(*members: Scripted, device: str = "cpu", **fields: Any) -> list[NodeResult]:
    conductor = Conductor(members, LEVEL)
    for result in conductor.results:
        result.devices = [device]
        for name, value in fields.items():
            setattr(result, name, value)
    network.collect_all(conductor)
    return conductor.results


def done(pairs: list[list[float]], curve: Any = None, **more: Any) -> dict[str, Any]:
    slow = [[2.0**n * MIB, 2.0**n / 10] for n in range(4)]
    return {
        "curve": curve or slow, "wrong": [], "pairs": pairs, "backend": "gloo", "transport": None,
        **more,
    }  # fmt: skip


def value(result: NodeResult, name: str) -> Any:
    return next(r.value for r in result.readings if r.name == name)


def test_who_hangs_is_unfit_and_who_waited_is_not() -> None:
    waited = ProbeFailed("failed", "DistStoreError: wait timeout after 20000ms")
    hung = ProbeFailed("timed-out", "sweep did not end within 30 s and was killed")
    a, b, c = collected(Scripted("a", waited), Scripted("b", hung), Scripted("c", waited))
    assert [f.severity for f in of_node(b)] == ["unfit"]
    assert [f.severity for r in (a, c) for f in of_node(r)] == ["degraded", "degraded"]


def test_the_slowest_pair_is_named() -> None:
    nodes = collected(
        Scripted("a", done([[0.0, 1.0, 9.0], [0.0, 2.0, 2.0]])),
        Scripted("b", done([[1.0, 2.0, 2.5]])),
        Scripted("c", done([])),
    )
    pair = next(r for r in nodes[2].readings if r.name == "collective.pair_gib_s")
    assert pair.value == pytest.approx(2.25)
    assert pair.detail["slowest_pair"] == ["a", "c"]
    assert value(nodes[0], "collective.class") == "healthy"
    assert value(nodes[0], "collective.busbw_gib_s") == pytest.approx(10 / 1024 * 4 / 3)


def test_a_wrong_sum_is_found_where_it_was() -> None:
    good, bad = collected(Scripted("a", done([])), Scripted("b", done([], wrong=[MIB])))
    assert of_node(good) == []
    assert [f.kind for f in of_node(bad)] == ["collective-wrong"]


def test_sockets_in_place_of_the_fabric_show_in_the_log_of_nccl() -> None:
    fast = [[2.0**n * MIB, 2.0**n / 100000] for n in range(4)]
    told = done([], curve=fast, backend="nccl", transport="Socket")
    nodes = collected(Scripted("a", told), Scripted("b", told), device="cuda:0", fabric_gib_s=100.0)
    assert value(nodes[0], "collective.class") == "socket"
    assert [f.kind for f in of_node(nodes[0])] == ["collective-socket"]
    without = collected(Scripted("a", told), Scripted("b", told), device="cuda:0")
    assert value(without[0], "collective.class") == "healthy"  # nobody promised a fabric


def test_within_a_node_the_links_of_its_product_are_what_counts() -> None:
    name = Reading(
        name="claimed.name", value="NVIDIA H100 80GB HBM3", source="nvml", fakeable=True, gpu=0
    )
    conductor = Conductor([Scripted("a", done([]))], LEVEL)
    conductor.results[0].readings.append(name)
    assert network._nominal(conductor, [0]) == pytest.approx(450e9 / 2**30)
    conductor.results[0].readings.clear()
    assert network._nominal(conductor, [0]) is None
