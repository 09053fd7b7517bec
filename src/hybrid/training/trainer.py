"""The driver of a training run: data, workers under Ray Train, and the published base.

What a worker does is `loop.train`; here is only who runs it, where, and what becomes of it. Ray
must be initialised.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import ray

from hybrid.config import ProjectConfig
from hybrid.errors import HybridError, NotFound, PlacementError, TrainingError
from hybrid.pools import GPU
from hybrid.registry import Manifest, Registry
from hybrid.training.corpus import prepare_once
from hybrid.training.data import ShardTask, prepare_data
from hybrid.training.loop import Job, train
from hybrid.training.parallel import backend
from hybrid.training.progress import Follower
from hybrid.training.storage import Storage

log = logging.getLogger(__name__)
OnProgress = Callable[[dict[str, Any]], None]
_PLACE_S = 30.0


def train_base(
    config: ProjectConfig,
    registry: Registry,
    *,
    run_id: str | None = None,
    fresh: bool = False,
    on_progress: OnProgress | None = None,
) -> Manifest:
    """Train the base of a project and publish it.

    The same configuration on the same data is the same run: killed, it goes on from its last
    committed step; finished, its manifest is returned at once. Anything changed is another run.

    Args:
        run_id: names the run; by default made of the project's name and of all that decides it.
        fresh: start over, and publish again.
        on_progress: called with each record of the progress file (`progress.py`), and with
            `{"message": …}`.

    Raises:
        DataError, ConfigError: see `prepare_data`.
        PlacementError: the gpu pool lacks the slots; the message says how many.
        TrainingError: the run failed; the message carries the worker's own error.
        RegistryError: the base cannot be published.
    """
    say = on_progress or (lambda record: None)
    if prepare_once(config.data, config.run.dir / "data"):
        say({"message": f"made the data with {config.data.prepare}"})
    data = prepare_data(config, run_all=_in_ray_tasks)
    job = Job(config=config, data=data, run_id=run_id or default_run_id(config, data.digest))
    if fresh:
        shutil.rmtree(job.folder, ignore_errors=True)
        Storage(job.checkpoints).remove()
    elif (found := _published(registry, config.model.name, job.run_id)) is not None:
        say({"message": f"{found.name}@v{found.version} of this very run is published already"})
        return found
    results = job.folder / "result.json"
    if not results.exists():
        check_slots(config.training.fewest_workers, config.training.cpus_per_worker)
        job.folder.mkdir(parents=True, exist_ok=True)
        with Follower(job.folder, say):
            metrics = _fit(job)
        results.write_text(json.dumps(metrics))
    return registry.publish(
        "base",
        config.model.name,
        job.export,
        run_id=job.run_id,
        data_digest=data.digest,
        metrics=json.loads(results.read_text()),
    )


def default_run_id(config: ProjectConfig, data_digest: str) -> str:
    """The project's name and a digest of model, training settings, seed and data.

    Workers, strategy, checkpoints and faults are left out: they do not change what is learnt.
    """
    training = config.training.model_dump(
        mode="json",
        exclude={"workers", "cpus_per_worker", "strategy", "parallel", "checkpoint", "faults"},
    )
    decides = [config.model.model_dump(mode="json"), training, config.run.seed, data_digest]
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    return f"{config.run.name}-{digest[:12]}"


def _published(registry: Registry, name: str, run_id: str) -> Manifest | None:
    try:
        newest = registry.manifest(name)
    except NotFound:
        return None
    versions = [newest, *(m for m in registry.list("base") if m.name == name)]
    return next((m for m in versions if m.run_id == run_id), None)


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


def _fit(job: Job) -> dict[str, Any]:
    """Run the workers to the end; returns what `loop.train` does."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    settings = job.config.training
    gpu = any(n["Resources"].get("GPU") for n in ray.nodes() if n["Alive"])
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend=backend(gpu)),
        scaling_config=ScalingConfig(
            num_workers=settings.workers,
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
        notice=lambda: ray.train.get_preemption_info() is not None,
    )
    if ray.train.get_context().get_world_rank() == 0:
        (job.folder / "metrics.json").write_text(json.dumps(final))


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


def _in_ray_tasks(tasks: Sequence[ShardTask]) -> list[dict[str, Any]]:
    """Run shard tasks on the gpu pool, where the files are to be read."""
    remote = ray.remote(num_cpus=1, label_selector=GPU.label_selector)(lambda task: task())
    results: list[dict[str, Any]] = ray.get([remote.remote(task) for task in tasks])
    return results
