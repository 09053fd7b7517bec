"""The workers of a run under Ray Train: how many, where, what they are told, when they move.

Each time that the workers begin, as many are started as fit, within `training.workers`. When a node
is to be taken away they commit the step they are at and end, and are started anew on the nodes that
stay, long before the deadline; the same when there is room for more of them. That is ours, not Ray
Train's: its elastic policy counts slots that others hold and nodes that are drained, loses the
steps since the last checkpoint when it grows, and stands still until a notice ends.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from hybrid._ray_compat import draining_nodes, fit_workers
from hybrid.errors import CheckpointError, HybridError, TrainingError, Unavailable
from hybrid.pools import GPU
from hybrid.training.hang_report import last_hang
from hybrid.training.loop import Job, train
from hybrid.training.notice import NOTHING, Notice
from hybrid.training.parallel import backend
from hybrid.training.slots import (
    NOBODY,
    PLACE_S,
    Avoid,
    free_slots,
    has_gpus,
    pool_nodes,
    wait_for_workers,
    worker_resources,
)

log = logging.getLogger(__name__)

WAIT_S = 600.0
"""How long a run that has lost its nodes waits for others; new spot nodes take minutes."""
_RESULT = "outcome.json"
OnMessage = Callable[[str], None]


def run_workers(job: Job, say: OnMessage = log.info, avoid: Avoid = NOBODY) -> dict[str, Any]:
    """Run workers to the last step, through moves, lost nodes and failures.

    Args:
        say: told of every new start.
        avoid: nodes (Ray's ids) that no worker may run on, and why.

    Returns:
        The final metrics, see `loop.train`.

    Raises:
        PlacementError: too few slots. TrainingError: the workers failed more often than
        `training.faults.max_failures`. Another HybridError: a worker's own.
    """
    settings = job.config.training
    failures, patience = 0, PLACE_S
    while True:
        count = wait_for_workers(settings, patience, avoid)
        patience = WAIT_S
        (job.folder / _RESULT).unlink(missing_ok=True)
        nodes = {n["NodeID"] for n in pool_nodes()}
        begun = time.time()
        try:
            fit(job, count, avoid, worker=_worker)
        except Exception as e:
            # Ray wraps the worker's error in classes that differ with who failed and how often.
            own = own_error(e)
            reason = own or _failed(e, job, begun)
            if own is not None and not isinstance(own, (CheckpointError, Unavailable)):
                raise own from e  # it would be the same again
            if nodes & draining_nodes().keys():
                say(f"a node was taken away amid a step: {reason.message}")
                continue
            failures += 1
            if 0 <= settings.faults.max_failures < failures:
                raise reason from e
            say(f"failure {failures}, the workers are started again: {reason.message}")
            continue
        outcome: dict[str, Any] = json.loads((job.folder / _RESULT).read_text())
        if "moved" not in outcome:
            return outcome
        say(f"the workers are started anew after step {outcome['step']}: {outcome['moved']}")


def fit(job: Job, count: int, avoid: Avoid, worker: Callable[[dict[str, Any]], None]) -> None:
    """Start workers and wait until all have ended.

    Args:
        worker: what each of them runs, given `job` and `avoid`.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig

    settings, gpu = job.config.training, has_gpus()
    launcher = job.profiling.launcher if job.profiling else ""
    # A notice is often of 30 s: 5 until it is seen would be many.
    os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "1")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    try:
        fit_workers(
            worker,
            train_loop_config={"job": job, "avoid": dict(avoid)},
            torch_config=TorchConfig(
                backend=backend(gpu),
                # A collective's own timeout says little: the watchdog is to be first.
                timeout_s=math.ceil(3 * settings.faults.hang_s) + 60,
            ),
            scaling_config=ScalingConfig(
                num_workers=count,
                use_gpu=gpu,
                resources_per_worker=worker_resources(settings.cpus_per_worker, gpu),
                label_selector=GPU.selector_without(tuple(avoid)),
            ),
            run_config=RunConfig(
                # Our checkpoints are our own, so each fit is a new run to Ray: a name used again
                # would make it resume what it remembers.
                name=f"{job.run_id}-{uuid.uuid4().hex[:6]}",
                storage_path=str(job.config.run.dir.resolve() / "ray_train"),
                # One place that starts again is enough: it is `run_workers`.
                failure_config=FailureConfig(max_failures=0, max_preemption_failures=0),
                worker_runtime_env={"py_executable": launcher} if launcher else None,
            ),
        )
    finally:
        shutil.rmtree(job.config.run.dir / "ray_train", ignore_errors=True)


def _worker(arguments: dict[str, Any]) -> None:
    """What Ray Train runs on each worker; rank 0 leaves the outcome in a file."""
    import ray.train

    job: Job = arguments["job"]
    outcome = train(
        job,
        report=ray.train.report,
        notice=_Notices(job, arguments["avoid"]),
        place=ray.get_runtime_context().get_node_id(),
    )
    if ray.train.get_context().get_world_rank() == 0:
        (job.folder / _RESULT).write_text(json.dumps(outcome))


class _Notices:
    """What Ray Train and the pool say, the same on all ranks; called by all of them together."""

    def __init__(self, job: Job, avoid: Avoid) -> None:
        import ray.train

        self._avoid = avoid
        settings = job.config.training
        self._fewest, self._most = settings.fewest_workers, settings.most_workers
        self._resize_s, self._unit = settings.resize_s, settings.worker_unit
        self._needs = worker_resources(settings.cpus_per_worker, has_gpus())
        self._size = ray.train.get_context().get_world_size()
        self._first = ray.train.get_context().get_world_rank() == 0
        self._alone_since = time.monotonic()

    def __call__(self) -> Notice:
        import ray.train
        from ray.train.collective import broadcast_from_rank_zero

        info = ray.train.get_preemption_info()
        if info is None and self._size >= self._most:
            return NOTHING
        said = self._look(info) if self._first else None
        notice: Notice = broadcast_from_rank_zero(said)
        return notice

    def _look(self, info: Any) -> Notice:
        room = free_slots(self._needs, self._avoid)
        if info is None:
            room = room // self._unit * self._unit
            if not room:
                self._alone_since = time.monotonic()
            if time.monotonic() - self._alone_since < self._resize_s:
                return NOTHING
            return Notice(kind="move", why=f"room for {self._size + room} workers")
        staying = self._size - len(info.preempted_ranks)
        why = f"{len(info.preempted_node_ids)} of the nodes will be taken away"
        if staying + room >= self._fewest:
            return Notice(kind="move", why=why)
        at = info.deadline_ms
        return Notice(kind="reclaim", why=why, deadline=None if at is None else at / 1000)


def own_error(error: Exception) -> HybridError | None:
    """The HybridError that a worker raised, wherever in Ray's errors it is."""
    return next((e for e in causes(error) if isinstance(e, HybridError)), None)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and all those that Ray has wrapped in it, each once."""
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        inner = pending.pop()
        if inner is None or inner in seen:
            continue
        yield inner
        seen.append(inner)
        pending += [inner.__cause__, inner.__context__, getattr(inner, "cause", None)]
        pending += list(getattr(inner, "worker_failures", {}).values())


def _failed(error: Exception, job: Job, begun: float) -> TrainingError:
    """Why an attempt that hung was ended, or what else Ray says, in its last words."""
    if (hang := last_hang(job.folder, begun)) is not None:
        return TrainingError(f"run {job.run_id} hangs: {hang}")
    text = str(error).strip().splitlines()
    return TrainingError(
        f"run {job.run_id} failed: {text[-1] if text else type(error).__name__}; run it again to go"
        f" on from its last checkpoint in {job.checkpoints}"
    )
