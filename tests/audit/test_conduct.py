"""The whole audit, on nodes within this process: each lie is found by the reading it shows in."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lying_devices import TINY
from members import member

from hybrid.audit import conduct, rally
from hybrid.audit.conduct import Conductor, NodeResult
from hybrid.audit.judgement import of_node, of_peers
from hybrid.audit.reading import Reading
from hybrid.audit.specs import load_specs
from hybrid.audit.verdict import judge


def audit(*members: Any, level: Any = TINY) -> list[NodeResult]:
    return Conductor(members, level).run()


def challenged(*members: Any, level: Any = TINY) -> list[NodeResult]:
    """Challenges and the judgement on them, without the probes."""
    conductor = Conductor(members, level)
    conductor.everywhere(conductor.describe)
    rally.challenge_all(conductor)
    for result in conductor.results:
        result.findings += of_node(result)
    return conductor.results


def caught(result: NodeResult, kind: str) -> list[tuple[int | None, str]]:
    """(GPU, reading that gave it away) of the findings of a kind."""
    return [(f.gpu, f.readings[0].name) for f in result.findings if f.kind == kind]


def values(result: NodeResult, name: str) -> list[Any]:
    return [r.value for r in result.readings if r.name == name]


def test_each_lie_is_found_by_the_reading_it_shows_in() -> None:
    (node,) = audit(member("n", "Honest", "HostBacked", "Forgetful", "WrongProduct"))
    verdict = judge(node.readings, load_specs(), findings=node.findings)
    node.findings = list(verdict.findings)
    assert (1, "measured.chunk_min_gib_s") in caught(node, "host-backed-memory")
    assert caught(node, "memory-errors") == [(2, "measured.memory_errors")]
    assert [g.health for g in verdict.gpus][2:] == ["unfit", "unfit"]
    assert verdict.gpus[1].identity == verdict.identity == "contradicted"
    assert caught(node, "challenge-wrong") == [(3, "challenge.correct")]
    assert caught(node, "challenge-not-repeatable") == [(3, "challenge.repeat_identical")]
    assert values(node, "challenge.correct") == [True, True, True, False]
    assert caught(node, "challenge-repeated-answer") == []
    assert caught(node, "cores-missing") == caught(node, "memory-missing") == []


def test_silent_corruption_shows_when_work_is_repeated() -> None:
    level = replace(TINY, repeats=8)
    (node,) = challenged(member("n", "Honest", "Flaky"), level=level)
    assert caught(node, "challenge-not-repeatable") == [(1, "challenge.repeat_identical")]


def test_one_answer_for_eight_gpus() -> None:
    (node,) = challenged(member("n", *["Precomputed"] * 8))
    found = caught(node, "challenge-repeated-answer")
    assert found == [(gpu, "challenge.answer_of_another") for gpu in range(8)]
    assert len(caught(node, "challenge-wrong")) == 8


def test_one_card_for_eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE_CARD", str(tmp_path / "card"))
    (node,) = challenged(member("n", *["OneForAll"] * 8), level=replace(TINY, repeats=1))
    found = caught(node, "challenge-shared-card")
    # Who is served first by the one card is as fast as alone; those in the queue are not.
    assert len(found) >= 4
    assert {name for _, name in found} == {"challenge.at_once_over_alone"}
    assert all(values(node, "challenge.correct"))


def test_cores_and_memory_that_are_not_there() -> None:
    def reading(name: str, value: float) -> Reading:
        return Reading(name=name, value=value, source="x", fakeable=False)

    node = NodeResult(
        name="n",
        readings=[
            reading("cpu.cores_claimed", 176),
            reading("cpu.cores_measured", 20),
            reading("cpu.cores_obtained", 12),
            reading("cpu.memory_bytes_claimed", 4 << 30),
            reading("cpu.memory_bytes_measured", 2 << 30),
            reading("cpu.steal_fraction", 0.4),
        ],
    )
    assert {f.kind: f.severity for f in of_node(node)} == {
        "cores-missing": "contradicted",
        "memory-missing": "contradicted",
        "stolen-time": "degraded",
        "busy": "note",
    }


def test_a_vm_of_4_gib_that_shows_a_little_less_is_no_finding() -> None:
    claimed = Reading(name="cpu.memory_bytes_claimed", value=4 << 30, source="x", fakeable=True)
    shown = replace(claimed, name="cpu.memory_bytes_measured", value=int(3.8 * 2**30))
    assert of_node(NodeResult(name="n", readings=[claimed, shown])) == []


def test_a_node_slower_than_its_peers_is_named_and_a_spread_is_not() -> None:
    def node(name: str, tflops: float, pair: float) -> NodeResult:
        speed = Reading(
            name="measured.matmul_tflops.bf16", value=tflops, source="x", fakeable=False, gpu=0
        )
        link = Reading(
            name="collective.pair_gib_s", value=pair, source="x", fakeable=False,
            detail={"slowest_pair": ["a", "d"]},
        )  # fmt: skip
        return NodeResult(name=name, readings=[speed, link])

    nodes = [node("a", 255, 20.0), node("b", 250, 20.0), node("c", 243, 19.0), node("d", 177, 4.0)]
    of_peers(nodes)
    assert [[f.kind for f in n.findings] for n in nodes] == [
        [], [], [], ["slow-links", "slower-than-peers"],
    ]  # fmt: skip
    assert "d exchanges 4 GiB/s" in nodes[3].findings[0].text
    assert "71 %" in nodes[3].findings[1].text


class Silent:
    """A node that answers nothing."""

    name, node_id, address, pool = "silent", "id", "127.0.0.1", None

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return Future()

    def close(self) -> None:
        pass


class Dying(Silent):
    """A node that is lost once it has said what it has."""

    name = "dying"

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if method == "describe":
            future.set_result({"boot_id": "other", "fabric_gib_s": None, "devices": ["cpu"]})
        else:
            future.set_exception(RuntimeError("The actor died because its node has died."))
        return future


def test_a_silent_and_a_dying_node_do_not_hold_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct, "START_S", 1.0)
    monkeypatch.setattr(conduct, "GRACE_S", 1.0)
    said: list[dict[str, Any]] = []
    nodes = [Silent(), member("n", "Honest"), Dying()]
    start = time.monotonic()
    silent, good, dying = Conductor(nodes, TINY, on_progress=said.append).run()
    assert time.monotonic() - start < 30
    assert silent.lost == "no answer to describe within 2 s"
    assert dying.lost is not None and "its node has died" in dying.lost
    for result in (silent, dying):
        assert [f.severity for f in result.findings] == ["unfit"]
    assert good.lost is None
    assert values(good, "challenge.correct") == [True]
    assert {"silent", "dying", "n"} == {record["node"] for record in said}
