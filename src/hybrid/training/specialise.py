"""Specialising: many adapters on the gpu pool, several at once, each process training many in turn.

A process loads the base once; starting one an adapter would cost more than the training. Ray must
be initialised.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ray

from hybrid.config import AdapterConfig, ProjectConfig
from hybrid.errors import HybridError, TrainingError, Unavailable
from hybrid.pools import GPU
from hybrid.registry import Manifest, Registry
from hybrid.training import rows
from hybrid.training.corpus import prepare_once
from hybrid.training.progress import Follower, Progress
from hybrid.training.slots import wait_for_slots

OnProgress = Callable[[dict[str, Any]], None]


def specialise(
    config: ProjectConfig,
    registry: Registry,
    *,
    base: str,
    only: Sequence[str] | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> dict[str, Manifest]:
    """Train, judge and publish adapters. What is published for this base, data and settings stays.

    Args:
        base: reference of the base, e.g. `legal-base@<digest>`.
        only: names in `config.adapters`; None is all.
        force: publish even what does not beat the majority class by its margin.
        on_progress: called with `{"adapter", "step", "steps", "loss"}` and `{"message"}`.

    Raises:
        DataError, ConfigError: before anything is trained. PlacementError: no free slots.
        TrainingError: one was not good enough (the others are published), or failed.
    """
    say = on_progress or (lambda record: None)
    if prepare_once(config.data, config.run.dir / "data"):
        say({"message": f"made the data with {config.data.prepare}"})
    base_manifest = registry.manifest(base)
    names = list(config.adapters if only is None else only)
    runs = {
        name: run_id(name, config.adapters[name], rows.read(name, config.adapters[name]).digest,
                     base_manifest.digest)
        for name in names
    }  # fmt: skip
    published = {m.run_id: m for m in registry.list("adapter")}
    done = {name: published[run] for name, run in runs.items() if run in published}
    for name, manifest in done.items():
        say({"message": f"{name}@v{manifest.version} is published already"})
    todo = [name for name in names if name not in done]
    if not todo:
        return done
    most = min(len(todo), config.training.most_workers)
    count = wait_for_slots(1, most, config.training.cpus_per_worker)
    folders = {name: config.run.dir / "adapters" / runs[name] for name in todo}
    with contextlib.ExitStack() as followers:
        for name, folder in folders.items():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            followers.enter_context(Follower(folder, _named(name, say)))
        # The longest first, so that none is left to run alone at the end.
        todo.sort(key=lambda n: -config.adapters[n].lora.steps * config.adapters[n].lora.batch)
        results = _run(config, base_manifest.digest, todo, runs, force, count)
        failed = []
        for name, result in results:
            if isinstance(result, HybridError):
                failed.append(f"{name}: {result.message}")
                say({"message": f"{name}: {result.message}"})
            else:
                done[name] = result
    if failed:
        raise TrainingError("\n".join(failed))
    return {name: done[name] for name in names}


def _named(name: str, say: OnProgress) -> OnProgress:
    return lambda record: say({**record, "adapter": name})


def run_id(name: str, spec: AdapterConfig, data_digest: str, base_digest: str) -> str:
    """The adapter's name and a digest of all that decides it; where its files lie does not."""
    decides = spec.model_dump(
        mode="json", exclude={"train", "holdout", "choices", "augment", "candidates"}
    )
    raw = json.dumps([decides, data_digest, base_digest], sort_keys=True)
    return f"{name}-{hashlib.sha256(raw.encode()).hexdigest()[:12]}"


def _run(
    config: ProjectConfig,
    base_digest: str,
    names: Sequence[str],
    runs: dict[str, str],
    force: bool,
    count: int,
) -> Iterable[tuple[str, Manifest | HybridError]]:
    """Hand out the names to `count` processes as they become free."""
    gpu = any(n["Resources"].get("GPU") for n in ray.nodes() if n["Alive"])
    options: dict[str, Any] = {
        "num_cpus": config.training.cpus_per_worker,
        "resources": {GPU.resource: 1},
        "label_selector": GPU.label_selector,
        "max_restarts": 0,
        **({"num_gpus": 1} if gpu else {}),
    }
    workers = [
        ray.remote(LoraWorker).options(**options).remote(config, base_digest) for _ in range(count)
    ]
    queue = list(names)
    running: dict[Any, tuple[str, Any]] = {}
    try:
        while queue or running:
            busy = {id(worker) for _, worker in running.values()}
            for worker in workers:
                if queue and id(worker) not in busy:
                    name = queue.pop(0)
                    running[worker.train.remote(name, runs[name], force)] = (name, worker)
            ready, _ = ray.wait(list(running), num_returns=1)
            for ref in ready:
                name, worker = running.pop(ref)
                yield name, _result(ref, name, workers, worker)
                if not workers:
                    for left in [*(n for n, _ in running.values()), *queue]:
                        yield left, Unavailable("no training process is left")
                    return
    finally:
        for worker in workers:
            ray.kill(worker)


def _result(ref: Any, name: str, workers: list[Any], worker: Any) -> Manifest | HybridError:
    from ray.exceptions import RayActorError, RayTaskError

    try:
        manifest: Manifest = ray.get(ref)
        return manifest
    except RayTaskError as e:
        cause = e.cause
        if isinstance(cause, HybridError):
            return cause
        return TrainingError(f"training {name} failed: {cause!r}")
    except RayActorError:
        workers.remove(worker)
        return Unavailable(
            f"the process that trained {name} is gone (out of memory?); run it again"
        )


class LoraWorker:
    """A Ray actor that trains one adapter after another on a base it loads once."""

    def __init__(self, config: ProjectConfig, base_digest: str) -> None:
        import torch

        from hybrid.training.lora import Base

        if not torch.cuda.is_available():
            torch.set_num_threads(max(1, int(config.training.cpus_per_worker)))
        self._config = config
        self._registry = Registry(config.registry.root, cache=config.registry.cache)
        resolved = self._registry.by_digest(base_digest)
        self._base_path, self._base_digest = resolved.path, base_digest
        self._base = Base(resolved.path, f"{resolved.manifest.name}@{base_digest}")

    def train(self, name: str, run: str, force: bool) -> Manifest:
        """Train, judge, publish.

        Raises:
            TrainingError: it does not beat the majority class by the margin, or diverged.
        """
        from hybrid.training.evaluate import evaluate
        from hybrid.training.lora import train_adapter

        spec = self._config.adapters[name]
        data = rows.read(name, spec)
        folder: Path = self._config.run.dir / "adapters" / run
        progress = Progress(folder)
        started = time.monotonic()
        trained = train_adapter(
            self._base,
            spec,
            data,
            folder / "adapter",
            seed=self._config.run.seed,
            report=lambda record: progress.write("step", **record),
        )
        seconds = time.monotonic() - started
        progress.write("judging")
        metrics = {**trained, **evaluate(self._base_path, folder / "adapter", spec, data)}
        metrics |= {"train_seconds": round(seconds, 1)}
        needed = metrics["majority"] + spec.margin
        if metrics["exact"] < needed and not force:
            raise TrainingError(
                f"held-out exact match {metrics['exact']:.1%} does not beat the majority class"
                f" ({metrics['majority']:.1%}) by {spec.margin:.1%}: not published; train longer,"
                " look at the data, or publish it with --force"
            )
        return self._registry.publish(
            "adapter",
            name,
            folder / "adapter",
            base_digest=self._base_digest,
            run_id=run,
            data_digest=data.digest,
            metrics=metrics,
        )
