"""A real cluster with one node slowed: the audit names it, and training is kept off it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lying_devices import OTHERS, TINY

from hybrid.audit.cluster import audit_cluster
from hybrid.audit.level import LEVELS, MIB
from hybrid.audit.report import NodeReport
from hybrid.audits import audit, failed, gate
from hybrid.config import ProjectConfig
from hybrid.errors import PlacementError
from hybrid.pools import GPU
from hybrid.project import Project

OBJECT_STORE = 128 * MIB
NETWORKED = replace(
    TINY, reduce_bytes=(MIB, 2 * MIB, 4 * MIB), cpu_reduce_bytes=4 * MIB, reduce_s=0.05
)

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be halved"),
]


def halve(pid: int, core: int) -> None:
    """Bind every thread of a process, and of all beneath it, to one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        # Threads and children may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})
            for child in (task / "children").read_text().split():
                halve(int(child), core)


@pytest.fixture(scope="module")
def slowed(ray_cluster: Any) -> Iterator[str]:
    """Ray's id of another gpu node, all processes of which share one core."""
    node = ray_cluster.cluster.add_node(
        num_cpus=4,
        resources=GPU.resources(4),
        labels=GPU.labels(),
        object_store_memory=OBJECT_STORE,
    )
    (raylet,) = node.all_processes["raylet"]
    halve(raylet.process.pid, min(os.sched_getaffinity(0)))
    yield node.node_id
    ray_cluster.cluster.remove_node(node)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("project")
    return Project(
        ProjectConfig.model_validate(
            {
                "run": {"name": "t", "dir": folder / "run"},
                "model": {"name": "b"},
                "training": {"audit": "require"},
            }
        )
    )


@pytest.fixture(scope="module")
def audited(slowed: str, project: Project) -> Iterator[list[NodeReport]]:
    before = dict(LEVELS)
    LEVELS["quick"] = NETWORKED
    try:
        reports = audit(project, pool="gpu")
        for _ in range(2):
            if {a.result.node_id for a in reports if failed(a)} == {slowed}:
                break
            # A hypervisor that takes cores away meanwhile makes a true finding of the other node.
            reports = audit(project, pool="gpu")
        yield reports
    finally:
        LEVELS.update(before)


def test_the_slowed_node_is_named(audited: list[NodeReport], slowed: str) -> None:
    assert len(audited) == 2
    assert {a.result.node_id for a in audited if failed(a)} == {slowed}
    slow = next(a for a in audited if failed(a))
    finding = next(f for f in slow.verdict.findings if f.kind == "cores-missing")
    assert slow.verdict.identity == "contradicted"
    assert finding.readings[0].name == "cpu.cores_measured"
    assert finding.readings[0].detail["affinity"] == 1
    for a in audited:
        assert a.result.lost is None
        values = {r.name: r.value for r in a.result.readings}
        assert values["challenge.correct"] is True
        assert values["collective.errors"] == 0
        assert isinstance(values["collective.pair_gib_s"], float)
        curve = next(r.curve for r in a.result.readings if r.name == "collective.algbw_gib_s")
        assert [size for size, _ in curve] == [MIB, 2 * MIB, 4 * MIB]


def test_training_is_kept_off_it(
    audited: list[NodeReport], slowed: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from hybrid import audits
    from hybrid.training.slots import pool_nodes, wait_for_slots

    monkeypatch.setattr(audits, "audit", lambda *args, **more: audited)
    said: list[str] = []
    avoid = gate(project, lambda record: said.append(record["message"]))
    assert set(avoid) == {slowed}
    assert "left out" in said[-1] and "cores" in said[-1]

    @ray.remote(num_cpus=0.1, label_selector=GPU.selector_without(tuple(avoid)))
    def where() -> str:
        return str(ray.get_runtime_context().get_node_id())

    good = {n["NodeID"] for n in pool_nodes(avoid)}
    assert len(good) == 1
    assert wait_for_slots(4, 99, 1, avoid=avoid) == 4, "the slots of the good node"
    with pytest.raises(PlacementError, match=f"left out is {slowed[:12]}: .*cores are claimed"):
        wait_for_slots(5, 5, 1, timeout_s=0.1, avoid=avoid)
    assert set(ray.get([where.remote() for _ in range(12)])) == good


def test_a_warning_leaves_no_node_out(
    audited: list[NodeReport], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid import audits

    monkeypatch.setattr(audits, "audit", lambda *args, **more: audited)
    config = project.config.model_copy(
        update={"training": project.config.training.model_copy(update={"audit": "warn"})}
    )
    said: list[str] = []
    assert gate(Project(config), lambda record: said.append(record["message"])) == {}
    assert "used all the same" in said[-1]


@pytest.mark.parametrize(("cores", "gib", "missing"), [(1, 1, []), (96, 1 << 20, ["cores-missing",
                                                       "memory-missing"])])  # fmt: skip
def test_agents_nodes_are_held_against_what_is_paid_for(
    ray_cluster: Any, cores: int, gib: int, missing: list[str]
) -> None:
    """By the probes that need no torch, which agents' nodes do not have."""
    [node] = audit_cluster(TINY, pool="agents", devices=(), cores=cores, memory_bytes=gib << 30)
    assert (node.pool, node.lost, node.devices) == ("agents", None, [])
    assert [f.kind for f in node.findings if f.kind not in OTHERS] == missing
    assert {f.readings[0].name for f in node.findings if f.kind in missing} == {
        f"cpu.{k.replace('memory-missing', 'memory_bytes').replace('cores-missing', 'cores')}"
        "_measured"
        for k in missing
    }


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*use_push_based_shuffle.*")  # Ray's own, of itself
def test_a_run_with_the_gate_ends_on_the_good_node(
    audited: list[NodeReport], slowed: str, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(f"line {n} of a small corpus" for n in range(400)))
    config = ProjectConfig.model_validate(
        {
            "run": {"name": "gated", "dir": tmp_path / "run"},
            "registry": {"root": str(tmp_path / "registry"), "cache": tmp_path / "cache"},
            "model": {"name": "b", "hidden_size": 32, "intermediate_size": 64, "layers": 1,
                      "heads": 2, "kv_heads": 1, "context": 64},
            "data": {"train": [str(corpus)], "holdout": [str(corpus)],
                     "tokenizer": {"vocab_size": 300}, "text_documents": "line"},
            "training": {"audit": "require", "steps": 4, "sequence_length": 32, "workers": [1, 8],
                         "micro_batch": 2, "micro_batches": 8, "eval_every": 4},
        }
    )  # fmt: skip
    said: list[dict[str, Any]] = []
    manifest = Project(config).train(on_progress=said.append)
    assert manifest.name == "b"
    good = {a.result.node_id for a in audited if a.result.node_id != slowed}
    assert any("left out" in record.get("message", "") for record in said)
    starts = [record for record in said if record.get("event") == "start"]
    assert starts and {w["node"] for record in starts for w in record["workers"]} == good
