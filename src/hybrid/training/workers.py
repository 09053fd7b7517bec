"""The workers of a run under Ray Train: how many, where, what they are told, why they ended.

The number may follow the pool (`training.workers: [fewest, most]`). A node that is taken away with
notice costs no step: the workers commit, stand still and are ended, and the same run goes on
elsewhere. Ray must be initialised.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from typing import Any

import ray

from hybrid._ray_compat import draining_nodes
from hybrid.errors import HybridError, PlacementError, TrainingError
from hybrid.pools import GPU
from hybrid.training.loop import Job, train
from hybrid.training.notice import NOTHING, Notice
from hybrid.training.parallel import backend

_PLACE_S = 30.0
_POLL_S = "1"
"""Seconds between Ray Train's looks at which nodes are drained; of a notice's 30 its 5 are many."""


def run_workers(job: Job) -> dict[str, Any]:
    """Run the workers to the last step, through failures and lost nodes.

    Returns:
        The final metrics, see `loop.train`.

    Raises:
        HybridError: a worker's own. TrainingError: the workers failed more often than allowed.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    settings = job.config.training
    gpu = any(n["Resources"].get("GPU") for n in ray.nodes() if n["Alive"])
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", _POLL_S)
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend=backend(gpu)),
        scaling_config=ScalingConfig(
            num_workers=settings.workers,
            elastic_resize_monitor_interval_s=settings.resize_s,
            use_gpu=gpu,
            resources_per_worker={
                "CPU": settings.cpus_per_worker,
                GPU.resource: 1,
                **({"GPU": 1} if gpu else {}),
            },
            label_selector=GPU.label_selector,
        ),
        run_config=RunConfig(
            # Our checkpoints are our own, so each fit is a new run to Ray: a name used again
            # would make it resume what it remembers.
            name=f"{job.run_id}-{uuid.uuid4().hex[:6]}",
            storage_path=str(job.config.run.dir.resolve() / "ray_train"),
            failure_config=FailureConfig(max_failures=settings.faults.max_failures),
        ),
    )
    try:
        trainer.fit()
    except Exception as e:
        # Ray wraps the worker's error in classes that differ with who failed and how often.
        raise _reason(e, job) from e
    finally:
        shutil.rmtree(job.config.run.dir / "ray_train", ignore_errors=True)
    metrics: dict[str, Any] = json.loads((job.folder / "metrics.json").read_text())
    return metrics


def _worker(arguments: dict[str, Any]) -> None:
    """What Ray Train runs on each worker."""
    import ray.train

    job: Job = arguments["job"]
    final = train(
        job,
        report=ray.train.report,
        notice=_Notices(job),
        place=ray.get_runtime_context().get_node_id(),
    )
    if ray.train.get_context().get_world_rank() == 0:
        (job.folder / "metrics.json").write_text(json.dumps(final))


class _Notices:
    """What Ray Train and the pool say, the same on all ranks; called by all of them together."""

    def __init__(self, job: Job) -> None:
        import ray.train

        self._most = job.config.training.most_workers
        self._size = ray.train.get_context().get_world_size()
        self._first = ray.train.get_context().get_world_rank() == 0

    def __call__(self) -> Notice:
        import ray.train
        from ray.train.collective import broadcast_from_rank_zero

        info = ray.train.get_preemption_info()
        if info is not None:
            at = info.deadline_ms
            return Notice(kind="reclaim", deadline=None if at is None else at / 1000)
        if self._size >= self._most:
            return NOTHING
        room = free_slots() > 0 if self._first else False
        return Notice(kind="grow") if broadcast_from_rank_zero(room) else NOTHING


def free_slots() -> int:
    """Slots of the gpu pool that nobody uses; 0 while a node is drained: its own are counted in."""
    if draining_nodes():
        return 0
    return int(ray.available_resources().get(GPU.resource, 0.0))


def check_slots(slots: int, cpus: float, timeout_s: float = _PLACE_S) -> None:
    """Wait until the gpu pool has `slots` free slots of `cpus` CPUs.

    Raises:
        PlacementError: it has not after `timeout_s`; says what it has.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        free = ray.available_resources()
        has = free.get(GPU.resource, 0.0)
        # CPUs are counted on the pool's nodes only: other pools' are of no use to a worker.
        nodes = [
            n
            for n in ray.nodes()
            if n["Alive"] and all(n["Labels"].get(k) == v for k, v in GPU.label_selector.items())
        ]
        processors = sum(n["Resources"].get("CPU", 0.0) for n in nodes)
        if has >= slots and processors >= slots * cpus:
            return
        if time.monotonic() > deadline:
            raise PlacementError(
                f"training needs {slots} slots ({GPU.resource}) of {cpus:g} CPUs in the gpu pool;"
                f" it has {has:g} free on {len(nodes)} nodes with {processors:g} CPUs: lower"
                " training.workers, stop what runs there, or add nodes (see cluster.yaml)"
            )
        time.sleep(0.5)


def _reason(error: Exception, job: Job) -> HybridError:
    """The worker's own HybridError if it raised one, else a TrainingError with its last words."""
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        inner = pending.pop()
        if inner is None or inner in seen:
            continue
        if isinstance(inner, HybridError):
            return inner
        seen.append(inner)
        pending += [inner.__cause__, inner.__context__, getattr(inner, "cause", None)]
        pending += list(getattr(inner, "worker_failures", {}).values())
    text = str(error).strip().splitlines()
    return TrainingError(
        f"run {job.run_id} failed: {text[-1] if text else type(error).__name__}; run it again to go"
        f" on from its last checkpoint in {job.checkpoints}"
    )
