"""The private names of Ray that we rely on are still there, in the version we pin."""

from __future__ import annotations

import inspect
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hybrid._ray_compat import available_by_node, draining_nodes, fit_workers
from hybrid.pools import GPU


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


def test_workers_without_the_actors_of_ray_data() -> None:
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import (
        PlacementGroupCleanerCallback,
    )
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

    run = inspect.getsource(TorchTrainer.fit)
    assert "callbacks=self._create_default_callbacks()" in run
    assert "scaling_policy=create_scaling_policy(" in run
    made = inspect.getsource(TorchTrainer._create_default_callbacks)
    assert DatasetsCallback.__name__ in made
    assert PlacementGroupCleanerCallback.__name__ in made
    assert list(inspect.signature(FixedScalingPolicy).parameters) == ["scaling_config"]
    assert {"_maybe_send_resource_request", "after_controller_start"} <= set(
        dir(FixedScalingPolicy)
    )


@pytest.mark.ray
def test_a_controller_that_dies_leaves_no_slot_taken(ray_cluster: Any, tmp_path: Path) -> None:
    import ray
    from ray.exceptions import RayActorError
    from ray.train import RunConfig, ScalingConfig

    def worker(job: dict[str, Any]) -> None:
        """Writes down which actors are alive, then ends the controller."""
        from ray._private.state import state

        alive = [a for a in state.actor_table(None).values() if a["State"] == "ALIVE"]
        (written := Path(job["file"] + "~")).write_text(
            "\n".join(a["ActorClassName"] for a in alive)
        )
        written.rename(job["file"])
        os.kill(
            next(a["Pid"] for a in alive if "Controller" in a["ActorClassName"]), signal.SIGKILL
        )
        time.sleep(60)  # until it is ended with its placement group

    def free() -> tuple[float, float]:
        left = ray.available_resources()
        return left["CPU"], left[GPU.resource]

    before = free()
    with pytest.raises(RayActorError):
        fit_workers(
            worker,
            train_loop_config={"file": str(tmp_path / "actors")},
            scaling_config=ScalingConfig(
                num_workers=1, resources_per_worker={"CPU": 1}, label_selector=GPU.label_selector
            ),
            run_config=RunConfig(storage_path=str(tmp_path / "ray")),
        )
    beside = (tmp_path / "actors").read_text().split()
    for left_out in ("Cleaner", "Coordinator", "DatasetManager"):
        assert not [name for name in beside if left_out in name]
    deadline = time.monotonic() + 60
    while free() != before:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.2)
