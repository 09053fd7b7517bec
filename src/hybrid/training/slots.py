"""Slots of the gpu pool: how many workers fit now, and waiting until they do.

Counted by node, and not on nodes that are being drained: Ray counts those, and what others hold,
and would wait for ever for workers that cannot be placed. Ray must be initialised.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ray

from hybrid._ray_compat import available_by_node, draining_nodes
from hybrid.config import TrainingConfig
from hybrid.errors import PlacementError
from hybrid.pools import GPU

PLACE_S = 30.0
Avoid = Mapping[str, str]
"""Nodes (Ray's ids) that no worker may run on, and why."""
NOBODY: Avoid = MappingProxyType({})


def worker_resources(cpus: float, gpu: bool) -> dict[str, float]:
    """What one worker takes."""
    return {"CPU": cpus, GPU.resource: 1, **({"GPU": 1} if gpu else {})}


def has_gpus() -> bool:
    """Whether any node has a GPU."""
    return any(n["Resources"].get("GPU") for n in ray.nodes() if n["Alive"])


def pool_nodes(avoid: Avoid = NOBODY) -> list[dict[str, Any]]:
    """Nodes of the gpu pool that are there to stay, but those to avoid."""
    leaving = draining_nodes().keys() | avoid.keys()
    return [
        n
        for n in ray.nodes()
        if n["Alive"]
        and n["NodeID"] not in leaving
        and all(n["Labels"].get(k) == v for k, v in GPU.label_selector.items())
    ]


def free_slots(needs: dict[str, float], avoid: Avoid = NOBODY) -> int:
    """How many workers with such needs could be started now."""
    free = available_by_node()
    return sum(
        min(int(free.get(n["NodeID"], {}).get(name, 0.0) / need) for name, need in needs.items())
        for n in pool_nodes(avoid)
    )


def wait_for_slots(
    fewest: int,
    most: int,
    cpus: float,
    timeout_s: float = PLACE_S,
    avoid: Avoid = NOBODY,
    unit: int = 1,
) -> int:
    """Wait until `fewest` workers fit the gpu pool.

    While it waits the pool's autoscaler is asked for them.

    Args:
        unit: of which `fewest` and `most` are multiples, and what is returned, too.

    Returns:
        How many fit, at most `most`.

    Raises:
        PlacementError: fewer do after `timeout_s`; says what there is.
    """
    needs = worker_resources(cpus, has_gpus())
    deadline = time.monotonic() + timeout_s
    demand: Any = None
    try:
        while (fit := free_slots(needs, avoid)) < fewest:
            if time.monotonic() > deadline:
                nodes = pool_nodes(avoid)
                slots = sum(n["Resources"].get(GPU.resource, 0.0) for n in nodes)
                processors = sum(n["Resources"].get("CPU", 0.0) for n in nodes)
                raise PlacementError(
                    f"training needs {fewest} slots ({GPU.resource}) of {cpus:g} CPUs in the gpu"
                    f" pool; {fit} are free of the {slots:g} on {len(nodes)} nodes with"
                    f" {processors:g} CPUs: lower training.workers, stop what runs there, or add"
                    " nodes (see cluster.yaml)"
                    + "".join(f"; left out is {node[:12]}: {why}" for node, why in avoid.items())
                )
            if demand is None:
                demand = _demand(fewest, needs, avoid)
            elif demand.wait(0):
                fit = fewest + free_slots(needs, avoid)  # what it holds is ours
                break
            time.sleep(0.5)
        return min(most, fit // unit * unit)
    finally:
        if demand is not None:
            ray.util.remove_placement_group(demand)


def wait_for_workers(
    settings: TrainingConfig, timeout_s: float = PLACE_S, avoid: Avoid = NOBODY
) -> int:
    """Wait until as many workers fit as a run needs; how many it can have. See `wait_for_slots`."""
    return wait_for_slots(
        settings.fewest_workers,
        settings.most_workers,
        settings.cpus_per_worker,
        timeout_s,
        avoid,
        settings.worker_unit,
    )


def _demand(count: int, needs: dict[str, float], avoid: Avoid) -> Any:
    """What an autoscaler sees; it also takes the slots as soon as they are there."""
    return ray.util.placement_group(
        [dict(needs)] * count, bundle_label_selector=[GPU.selector_without(tuple(avoid))] * count
    )
