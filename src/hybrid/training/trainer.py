"""The driver of a training run: data, workers under Ray Train, and the published base.

What a worker does is `loop.train`; here is only who runs it, where, and what becomes of it. Ray
must be initialised.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from hybrid.config import ProjectConfig
from hybrid.errors import NotFound
from hybrid.pools import GPU
from hybrid.registry import Manifest, Registry
from hybrid.training.auto import settled
from hybrid.training.corpus import prepare_once
from hybrid.training.data import PreparedData, ShardTask, prepare_data, prepared
from hybrid.training.loop import Job
from hybrid.training.preflight_nodes import guard
from hybrid.training.progress import Follower
from hybrid.training.report import launched
from hybrid.training.slots import PLACE_S
from hybrid.training.storage import Storage
from hybrid.training.workers import run_workers

log = logging.getLogger(__name__)
OnProgress = Callable[[dict[str, Any]], None]
_NOT_LEARNT = {
    "workers", "resize_s", "cpus_per_worker", "strategy", "trials", "parallel", "checkpoint",
    "faults", "audit", "preflight", "usd_per_hour",
}  # fmt: skip


def train_base(
    config: ProjectConfig,
    registry: Registry,
    *,
    run_id: str | None = None,
    fresh: bool = False,
    gate: Callable[[], Mapping[str, str]] = dict,
    on_progress: OnProgress | None = None,
) -> Manifest:
    """Train the base of a project and publish it.

    The same configuration on the same data is the same run: killed, it goes on from its last
    committed step; finished, its manifest is returned at once. Anything changed is another run.

    Args:
        run_id: names the run; by default made of the project's name and of all that decides it.
        fresh: start over, and publish again.
        gate: called before workers start: nodes (Ray's ids) they must not run on, and why.
        on_progress: called with each record of the progress file (`progress.py`), and with
            `{"message": …}`.

    Raises:
        DataError, ConfigError: see `prepare_data`.
        PlacementError: the gpu pool lacks the slots; the message says how many.
        TrainingError: the run failed; the message carries the worker's own error.
        RegistryError: the base cannot be published.
    """
    say, began = on_progress or (lambda record: None), time.time()
    if prepared(config) is None:  # making it may take long: what fails then had better fail now
        guard(config, say, wait_s=PLACE_S)
    data = made_data(config, say)
    job = Job(config=config, data=data, run_id=run_id or default_run_id(config, data.digest))
    if fresh:
        shutil.rmtree(job.folder, ignore_errors=True)
        Storage(job.checkpoints).remove()
    elif (found := _published(registry, config.model.name, job.run_id)) is not None:
        say({"message": f"{found.name}@v{found.version} of this very run is published already"})
        return found
    settings = config.training
    with launched(
        job.folder,
        began=began,
        workers=settings.fewest_workers,
        usd_per_hour=settings.usd_per_hour,
        say=say,
    ):
        results = job.folder / "result.json"
        if not results.exists():
            avoid = gate()
            guard(config, say, wait_s=PLACE_S, checkpoints=job.checkpoints, avoid=avoid)
            job = settled(job, say, avoid)
            with Follower(job.folder, say):
                metrics = run_workers(job, lambda text: say({"message": text}), avoid)
            results.write_text(json.dumps(metrics))
        return registry.publish(
            "base",
            config.model.name,
            job.export,
            run_id=job.run_id,
            data_digest=data.digest,
            metrics=json.loads(results.read_text()),
        )


def made_data(config: ProjectConfig, say: OnProgress) -> PreparedData:
    """The project's data, made where it is not there yet. Raises what `prepare_data` does."""
    if prepare_once(config.data, config.run.dir / "data"):
        say({"message": f"made the data with {config.data.prepare}"})
    return prepare_data(config, run_all=_in_ray_tasks)


def default_run_id(config: ProjectConfig, data_digest: str) -> str:
    """The project's name and a digest of model, training settings, seed and data.

    What does not change what is learnt is left out: workers, strategy, checkpoints, faults, price.
    """
    training = config.training.model_dump(mode="json", exclude=_NOT_LEARNT)
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


def _in_ray_tasks(tasks: Sequence[ShardTask]) -> list[dict[str, Any]]:
    """Run shard tasks on the gpu pool, where the files are to be read."""
    remote = ray.remote(num_cpus=1, label_selector=GPU.label_selector)(lambda task: task())
    results: list[dict[str, Any]] = ray.get([remote.remote(task) for task in tasks])
    return results
