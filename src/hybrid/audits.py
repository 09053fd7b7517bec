"""The verb `audit`, over Ray where there is a cluster, and the gate that it is for training."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hybrid.audit import history
from hybrid.audit.level import LEVELS
from hybrid.audit.proof import NO_TRUST, Trust

if TYPE_CHECKING:
    from hybrid.audit.conduct import NodeResult
    from hybrid.audit.report import NodeReport
    from hybrid.project import Project

Progress = Callable[[dict[str, Any]], None]
PoolName = Literal["gpu", "agents", "all"]
FOLDER = "audits"


def failed(node: NodeReport) -> bool:
    """Whether nobody should pay for a node, or compute on it."""
    return node.verdict.identity == "contradicted" or node.verdict.health == "unfit"


def reason(node: NodeReport) -> str:
    """The worst finding in a sentence."""
    from hybrid.audit.report import worst_first

    findings = worst_first(node.verdict.findings)
    return findings[0].text if findings else "nothing is against it"


def judged(
    results: Sequence[NodeResult],
    folder: Path,
    level: str,
    earlier: Sequence[NodeReport] = (),
    sold_as: str | None = None,
) -> list[NodeReport]:
    """Hold every node against the table of GPUs and against its own past, and keep what was found.

    Args:
        folder: where audits are kept, by node.
        earlier: an audit to compare with in place of the last that was kept.
        sold_as: see `verdict.judge`.
    """
    done, when = [], time.time()
    for result in results:
        node = _judge(result, earlier, sold_as, history.previous(folder, result.name))
        result.findings = list(node.verdict.findings)
        history.save(folder, result, level=level, when=when)
        done.append(node)
    return done


def _judge(
    result: NodeResult,
    earlier: Sequence[NodeReport],
    sold_as: str | None = None,
    kept: NodeResult | None = None,
) -> NodeReport:
    """One node's verdict, with what an earlier audit said of it or of its GPUs."""
    from hybrid.audit.report import NodeReport, earlier_of, handed_back
    from hybrid.audit.specs import load_specs
    from hybrid.audit.verdict import judge

    before = earlier_of(result, earlier) or kept
    verdict = judge(
        result.readings,
        load_specs(),
        before.readings if before else None,
        findings=[*result.findings, *handed_back(result, earlier)],
        sold_as=sold_as,
    )
    return NodeReport(result=result, verdict=verdict, previous=before)


def read_saved(
    paths: Sequence[Path], earlier: Sequence[NodeReport] = (), sold_as: str | None = None
) -> list[NodeReport]:
    """Judge saved outputs: each path is one node, a file or a folder of them. Nothing is measured.

    Raises:
        DataError: a path is not there, or is none of the outputs that are read.
    """
    from hybrid.audit.captures import capture_files, read_capture_file
    from hybrid.audit.conduct import NodeResult
    from hybrid.audit.judgement import of_node

    results = [
        NodeResult(
            name=path.name,
            readings=[r for file in capture_files([path]) for r in read_capture_file(file)],
        )
        for path in paths
    ]
    for result in results:
        result.findings = of_node(result)
    return [_judge(result, earlier, sold_as) for result in results]


def audit(
    project: Project | None,
    *,
    level: str = "quick",
    pool: PoolName = "gpu",
    earlier: Sequence[NodeReport] = (),
    sold_as: str | None = None,
    cores: float | None = None,
    memory_bytes: int | None = None,
    trust: Trust = NO_TRUST,
    on_progress: Progress | None = None,
) -> list[NodeReport]:
    """Audit the nodes of the cluster that is there, or this machine when there is none.

    Args:
        project: whose cluster and folder; None: the cluster at RAY_ADDRESS, and ./.hybrid.
        level: "quick" (a minute) or "full".
        pool: which nodes of a cluster.
        earlier: an audit to compare with in place of the last that was kept.
        sold_as: what the GPUs are sold as; None: what they claim to be.
        cores, memory_bytes: what each node is sold with; None: what it claims to have.
        trust: with what the seller's own proof is checked.
        on_progress: called with {"node", "device", "probe", "outcome"} after each step.

    Raises:
        PlacementError: the pool has no node.
    """
    folder = (project.config.run.dir if project else Path(".hybrid")) / FOLDER
    chosen = LEVELS[level]
    options: dict[str, Any] = {
        "cores": cores, "memory_bytes": memory_bytes, "trust": trust, "on_progress": on_progress
    }  # fmt: skip
    local = project is not None and project.local.state() is not None
    if not local and "RAY_ADDRESS" not in os.environ and not _connected():
        from hybrid.audit.run import audit_here

        results = audit_here(chosen, **options)
    else:
        with _ray(project):
            from hybrid.audit.cluster import audit_cluster

            results = audit_cluster(chosen, pool=pool, **options)
    return judged(results, folder, level, earlier, sold_as)


def gate(project: Project, on_progress: Progress | None = None) -> dict[str, str]:
    """`training.audit`: nodes (Ray's ids) that a run must not use, and why. Ray is initialised."""
    mode = project.config.training.audit
    if mode == "off":
        return {}
    say = on_progress or (lambda record: None)
    say({"message": "auditing the gpu pool (training.audit)"})
    bad = [n for n in audit(project, pool="gpu") if failed(n)]
    done = "left out" if mode == "require" else "used all the same (training.audit: warn)"
    for node in bad:
        say({"message": f"{node.result.name} fails the audit and is {done}: {reason(node)}"})
    if mode == "warn":
        return {}
    return {node.result.node_id: reason(node) for node in bad if node.result.node_id}


def _connected() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _ray(project: Project | None) -> Any:
    if project is not None:
        return project.ray()
    import ray

    @contextlib.contextmanager
    def connection() -> Any:
        ray.init(log_to_driver=False, logging_level="warning", namespace="hybrid")
        try:
            yield
        finally:
            ray.shutdown()

    return contextlib.nullcontext() if _connected() else connection()
