"""The audit of a Ray cluster: one actor on every node of a pool, which holds no resources.

An actor that asks for nothing is placed at once, on a node that is full too; what it measures there
is then what the node has left, and the challenge shows that.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from concurrent.futures import Future
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybrid._ray_compat import draining_nodes
from hybrid.audit.conduct import Conductor, NodeResult, OnProgress
from hybrid.audit.level import Level
from hybrid.audit.proof import NO_TRUST, Trust
from hybrid.audit.run import Machine, Plan
from hybrid.errors import PlacementError
from hybrid.pools import LABEL

PoolName = Literal["gpu", "agents", "all"]
_CALLS = 64  # at once on one node: its devices, and room to say how it goes


class RayMember:
    """A node of the cluster, and the actor that audits it."""

    def __init__(self, node: dict[str, Any], name: str, plan: Plan) -> None:
        self.name = name
        self.node_id: str | None = node["NodeID"]
        self.address: str = node["NodeManagerAddress"]
        self.pool: str | None = node["Labels"].get(LABEL)
        self._actor = (
            ray.remote(Machine)
            .options(
                num_cpus=0,
                max_restarts=0,
                max_concurrency=_CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            .remote(plan)
        )

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Start a method of the node's machine."""
        future: Future[Any] = getattr(self._actor, method).remote(*arguments).future()
        return future

    def close(self) -> None:
        """End the node's probe processes, then the actor."""
        # A node that is gone raises one of many classes, and is then closed already.
        with contextlib.suppress(Exception):
            ray.get(self._actor.close.remote(), timeout=3)
        ray.kill(self._actor)


def nodes_of(pool: PoolName) -> list[dict[str, Any]]:
    """The living nodes of a pool (`all`: every pool's) that are not being taken away.

    Raises:
        PlacementError: there is none.
    """
    going = draining_nodes()
    found = [
        n
        for n in ray.nodes()
        if n["Alive"]
        and n["NodeID"] not in going
        and (pool == "all" or n["Labels"].get(LABEL) == pool)
    ]
    if not found:
        raise PlacementError(f"no node of the pool {pool!r} is there to audit")
    return found


def audit_cluster(
    level: Level,
    *,
    pool: PoolName = "gpu",
    devices: tuple[str, ...] | None = None,
    cores: float | None = None,
    memory_bytes: int | None = None,
    trust: Trust = NO_TRUST,
    on_progress: OnProgress | None = None,
) -> list[NodeResult]:
    """Audit every node of a pool at once. Ray must be initialised.

    What a node claims, where it is not said here, is what it joined the cluster with: CPUs and
    memory. Of nodes that share a machine CPUs are slots: Ray is told of more than there are.

    Args:
        level: the budgets.
        pool: which nodes.
        devices: specs on every node; None: each node's GPUs, else its CPU.
        cores, memory_bytes: what each node is paid for.
        trust: with what the seller's own proof is checked.
        on_progress: see `audit_here`.

    Raises:
        PlacementError: no such node.
    """
    nodes = nodes_of(pool)
    shared = Counter(n["NodeManagerHostname"] for n in ray.nodes() if n["Alive"])
    members = []
    for node in nodes:
        name = node["NodeManagerHostname"]
        if shared[name] > 1:
            name = f"{name}-{node['NodeID'][:8]}"
        resources = node["Resources"]
        cpus, memory = resources.get("CPU"), int(resources.get("memory", 0)) or None
        plan = Plan(
            level=level,
            devices=devices,
            cores=cpus if cores is None and shared[node["NodeManagerHostname"]] == 1 else cores,
            memory_bytes=memory if memory_bytes is None else memory_bytes,
            slots=cpus,
        )
        members.append(RayMember(node, name, plan))
    return Conductor(members, level, trust=trust, on_progress=on_progress).run()
