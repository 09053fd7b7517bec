"""Every private Ray name we touch, in one place; tests/test_ray_compat.py checks each is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def validate_cluster(config: dict[str, Any]) -> str | None:
    """What Ray's own schema has against a cluster file; None when nothing. Needs no cloud."""
    from jsonschema.exceptions import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(config))
    except ValidationError as e:
        return str(e.message)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        return f"{type(e).__name__}: {e}"
    return None


def draining_nodes() -> dict[str, float]:
    """Nodes that are being taken away: node id → UNIX time at which each is gone."""
    from ray._private.state import state

    return {node: at / 1000 for node, at in state.get_draining_nodes().items()}


def available_by_node() -> dict[str, dict[str, float]]:
    """What is free on each node, by node id; a second or so old."""
    from ray._private.state import state

    found: dict[str, dict[str, float]] = state.available_resources_per_node()
    return found


def fit_workers(worker: Callable[[dict[str, Any]], None], **settings: Any) -> None:
    """`TorchTrainer(worker, **settings).fit()`, for a fixed number of workers, with fewer actors.

    Each actor wakes a hundred times a second, and where the ranks fill the machine it takes that
    from them: of the five that Ray Train has beside two ranks on two cores, three are left out.

    - The manager of Ray Data's datasets: there are none.
    - The coordinator, which keeps Ray Data from counting on the workers' slots, and asks the
      autoscaler for them: they are there when the workers are started, and held by a placement
      group.
    - The cleaner, which removes that placement group when the controller alone has died. This
      function does; when the driver dies as well, Ray itself does.
    """
    from ray.exceptions import RayActorError
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import (
        PlacementGroupCleanerCallback,
    )
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    class Fixed(FixedScalingPolicy):  # type: ignore[misc]
        """Without the coordinator: what it never asked for it need not give back either."""

        def after_controller_start(self, *_: Any) -> None:
            pass

        def _maybe_send_resource_request(self) -> None:
            pass

    class Trainer(TorchTrainer):  # type: ignore[misc]
        def _initialize_and_run_controller(self, **given: Any) -> Any:
            left_out = (DatasetsCallback, PlacementGroupCleanerCallback)
            given["callbacks"] = [c for c in given["callbacks"] if not isinstance(c, left_out)]
            given["scaling_policy"] = Fixed(self.scaling_config)
            return super()._initialize_and_run_controller(**given)

    trainer, before = Trainer(worker, **settings), _placement_groups()
    try:
        trainer.fit()
    except RayActorError:  # the controller's own end; a worker's comes in an error of Ray Train's
        for group in _placement_groups() - before:
            remove_placement_group(PlacementGroup(group))
        raise


def _placement_groups() -> set[Any]:
    """Ids of those that this driver, or an actor of its, has made and that are there still."""
    import ray

    job = ray.get_runtime_context().get_job_id()
    table = ray.util.placement_group_table()
    return {
        ray._raylet.PlacementGroupID.from_hex(group)
        for group, entry in table.items()
        if group.endswith(job) and entry["state"] != "REMOVED"
    }
