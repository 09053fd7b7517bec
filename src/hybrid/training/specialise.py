"""Specialising: many adapters on the gpu pool, several at once, each process training many in turn.

A process loads the base once; starting one an adapter would cost more than the training. An
adapter with `lora.workers` is trained by that many processes together. Ray must be initialised.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hybrid.config import AdapterConfig, ProjectConfig
from hybrid.errors import HybridError, TrainingError
from hybrid.registry import Manifest, Registry
from hybrid.training import rows
from hybrid.training.adapter_team import run_team_jobs
from hybrid.training.corpus import prepare_once
from hybrid.training.progress import Follower
from hybrid.training.servable import check_servable
from hybrid.training.slots import free_slots, has_gpus, wait_for_slots, worker_resources

OnProgress = Callable[[dict[str, Any]], None]


def specialise(
    config: ProjectConfig,
    registry: Registry,
    *,
    base: str,
    only: Sequence[str] | None = None,
    force: bool = False,
    fresh: bool = False,
    on_progress: OnProgress | None = None,
) -> dict[str, Manifest]:
    """Train, judge and publish adapters. What is published for this base, data and settings stays,
    and one that was killed midway goes on from its last small checkpoint.

    Args:
        base: reference of the base, e.g. `legal-base@<digest>`.
        only: names in `config.adapters`; None is all.
        force: publish even what does not beat the majority class by its margin.
        fresh: forget what is partly trained.
        on_progress: called with `{"adapter", "step", "steps", "loss"}` and `{"message"}`.

    Raises:
        DataError, ConfigError, AdapterRefused: before anything is trained; refused is what the
        engine would not serve. PlacementError: no free slots.
        TrainingError: one was not good enough (the others are published), or failed.
    """
    say = on_progress or (lambda record: None)
    if prepare_once(config.data, config.run.dir / "data"):
        say({"message": f"made the data with {config.data.prepare}"})
    base_manifest = registry.manifest(base)
    names = list(config.adapters if only is None else only)
    for name in names:
        check_servable(name, config.adapters[name], None, config.serving.backend)
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
    largest = max(config.adapters[name].lora.workers for name in todo)
    wait_for_slots(largest, largest, config.training.cpus_per_worker)
    folders = {name: config.run.dir / "adapters" / runs[name] for name in todo}
    with contextlib.ExitStack() as followers:
        for name, folder in folders.items():
            if fresh:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            followers.enter_context(Follower(folder, _named(name, say)))
        failed = []
        for name, result in _run(config, base_manifest.digest, todo, runs, force):
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
        mode="json",
        exclude={
            **dict.fromkeys(("train", "holdout", "choices", "augment", "candidates"), True),
            "lora": {"workers", "checkpoint_every"},
        },
    )
    raw = json.dumps([decides, data_digest, base_digest], sort_keys=True)
    return f"{name}-{hashlib.sha256(raw.encode()).hexdigest()[:12]}"


def _run(
    config: ProjectConfig, base_digest: str, names: Sequence[str], runs: dict[str, str], force: bool
) -> Iterator[tuple[str, Manifest | HybridError]]:
    """All adapters, those of one team's size after those of another."""

    def cost(name: str) -> int:
        return config.adapters[name].lora.steps * config.adapters[name].lora.batch

    sizes = sorted({config.adapters[name].lora.workers for name in names})
    for size in sizes:
        # The longest first, so that none is left to run alone at the end.
        jobs = [n for n in sorted(names, key=lambda n: -cost(n))
                if config.adapters[n].lora.workers == size]  # fmt: skip
        free = free_slots(worker_resources(config.training.cpus_per_worker, has_gpus()))
        most = max(1, min(len(jobs), max(config.training.most_workers, size) // size, free // size))
        yield from run_team_jobs(config, base_digest, jobs, runs, force, size=size, teams=most)
