"""The verb `audit`, over Ray where there is a cluster, and the gate that it is for training."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hybrid.audit import history
from hybrid.audit.level import LEVELS

if TYPE_CHECKING:
    from hybrid.audit.conduct import NodeResult
    from hybrid.audit.verdict import NodeVerdict
    from hybrid.project import Project

Progress = Callable[[dict[str, Any]], None]
PoolName = Literal["gpu", "agents", "all"]
FOLDER = "audits"


@dataclass(frozen=True, kw_only=True)
class NodeAudit:
    """One node: what was found, what it amounts to, and what was found the last time."""

    result: NodeResult
    verdict: NodeVerdict
    previous: NodeResult | None

    @property
    def failed(self) -> bool:
        """Whether nobody should pay for it, or compute on it."""
        return self.verdict.identity == "contradicted" or self.verdict.health == "unfit"

    @property
    def reason(self) -> str:
        """The worst finding in a sentence."""
        order = ("contradicted", "unfit", "degraded", "note")
        findings = sorted(self.verdict.findings, key=lambda f: order.index(f.severity))
        return findings[0].text if findings else "nothing is against it"


def judged(
    results: Sequence[NodeResult], folder: Path, level: str, *, when: float | None = None
) -> list[NodeAudit]:
    """Hold every node against the table of GPUs and against its own past, and keep what was found.

    Args:
        folder: where audits are kept, by node.
    """
    from hybrid.audit.specs import load_specs
    from hybrid.audit.verdict import judge

    specs, done = load_specs(), []
    when = time.time() if when is None else when
    for result in results:
        before = history.previous(folder, result.name)
        verdict = judge(
            result.readings,
            specs,
            before.readings if before else None,
            findings=result.findings,
        )
        result.findings = list(verdict.findings)
        history.save(folder, result, level=level, when=when)
        done.append(NodeAudit(result=result, verdict=verdict, previous=before))
    return done


def audit(
    project: Project | None,
    *,
    level: str = "quick",
    pool: PoolName = "gpu",
    on_progress: Progress | None = None,
) -> list[NodeAudit]:
    """Audit the nodes of the cluster that is there, or this machine when there is none.

    Args:
        project: whose cluster and folder; None: the cluster at RAY_ADDRESS, and ./.hybrid.
        level: "quick" (a minute) or "full".
        pool: which nodes of a cluster.
        on_progress: called with {"node", "device", "probe", "outcome"} after each step.

    Raises:
        PlacementError: the pool has no node. MissingExtra: the driver has no torch.
    """
    folder = (project.config.run.dir if project else Path(".hybrid")) / FOLDER
    chosen = LEVELS[level]
    local = project is not None and project.local.state() is not None
    if not local and "RAY_ADDRESS" not in os.environ and not _connected():
        from hybrid.audit.run import audit_here

        results = audit_here(chosen, on_progress=on_progress)
    else:
        with _ray(project):
            from hybrid.audit.cluster import audit_cluster

            results = audit_cluster(chosen, pool=pool, on_progress=on_progress)
    return judged(results, folder, level)


def gate(project: Project, on_progress: Progress | None = None) -> dict[str, str]:
    """`training.audit`: nodes (Ray's ids) that a run must not use, and why. Ray is initialised."""
    mode = project.config.training.audit
    if mode == "off":
        return {}
    say = on_progress or (lambda record: None)
    say({"message": "auditing the gpu pool (training.audit)"})
    failed = [a for a in audit(project, pool="gpu") if a.failed and a.result.node_id]
    done = "left out" if mode == "require" else "used all the same (training.audit: warn)"
    for a in failed:
        say({"message": f"{a.result.name} fails the audit and is {done}: {a.reason}"})
    if mode == "warn":
        return {}
    return {a.result.node_id: a.reason for a in failed if a.result.node_id}


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
