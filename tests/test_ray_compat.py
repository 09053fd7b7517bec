"""The private names of Ray that we rely on are still there, in the version we pin."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from hybrid._ray_compat import available_by_node, draining_nodes


def test_cluster_schema() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    assert list(inspect.signature(prepare_config).parameters) == ["config"]
    assert list(inspect.signature(validate_config).parameters) == ["config"]


def test_local_cluster() -> None:
    from ray.cluster_utils import Cluster

    assert "shutdown_at_exit" in inspect.signature(Cluster).parameters
    assert inspect.signature(Cluster.add_node).parameters["node_args"].kind.name == "VAR_KEYWORD"


@pytest.mark.ray
def test_nodes_that_are_drained_can_be_asked_for(ray_cluster: Any) -> None:
    from ray._private.state import state

    assert set(draining_nodes()) == set(state.get_draining_nodes())


@pytest.mark.ray
def test_what_is_free_on_each_node_can_be_asked_for(ray_cluster: Any) -> None:
    import ray

    free = available_by_node()
    assert set(free) == {n["NodeID"] for n in ray.nodes() if n["Alive"]}
    assert sum(r.get("CPU", 0.0) for r in free.values()) <= ray.cluster_resources()["CPU"]
