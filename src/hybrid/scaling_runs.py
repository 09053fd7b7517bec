"""The verb `scale`: the real training job, for a few steps, at each number of workers."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.config import ProjectConfig, TrainingConfig
from hybrid.errors import ConfigError
from hybrid.planning.sweep import Measured, Mode, Sweep, assess

if TYPE_CHECKING:
    from hybrid.project import Project
    from hybrid.training.data import PreparedData

Progress = Callable[[dict[str, Any]], None]
FOLDER = "scale"
FEWEST_STEPS = 3


def default_counts(most: int) -> list[int]:
    """1, 2, 4, … up to `most`, and `most` itself."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == most else [*counts, most]


def scale(
    project: Project,
    *,
    workers: Sequence[int] | None = None,
    modes: Sequence[Mode] = ("strong", "weak"),
    steps: int = 20,
    warmup: int = 5,
    usd_per_hour: float | None = None,
    fresh: bool = False,
    on_progress: Progress | None = None,
) -> list[Sweep]:
    """Measure how the project's training scales, and say how many workers to use.

    Each run is the project's own job under Ray Train, without evaluation and checkpoints within
    the steps that are timed. What was measured is kept below `run.dir`/scale: run again, it goes
    on where it stopped.

    Args:
        workers: the counts; by default 1, 2, 4, … up to `training.workers`.
        modes: `strong` keeps the step as it is, `weak` gives each worker as much as one has.
        steps: timed for each count, after `warmup` steps that are not.
        usd_per_hour: the price of one worker's share of a node; by default
            `training.usd_per_hour`.
        fresh: measure all again.
        on_progress: called with each record of the runs' progress files, and `{"message": …}`.

    Raises:
        ConfigError: a count or number of steps that cannot be. PlacementError: the pool has fewer
        slots than the most workers. TrainingError and others: see `run_workers`.
    """
    config = project.config
    counts = _counts(config, workers, modes, steps, warmup)
    say = on_progress or (lambda record: None)
    wide = with_training(config, workers=counts[-1])
    # A cluster of its own must have slots for the most.
    with type(project)(wide).ray(training_only=True):
        from hybrid.training.trainer import made_data

        data = dataclasses.replace(made_data(config, say), holdout=None)
        kept = _Kept(config, data, steps, warmup)
        if fresh:
            kept.path.unlink(missing_ok=True)
        done = kept.read()
        for mode in modes:
            for count in counts:
                if (mode, count) in done:
                    say({"message": f"{mode}, {count} workers: measured before"})
                    continue
                say({"message": f"{mode}, {count} workers: {warmup} + {steps} steps"})
                done[mode, count] = measure(config, data, mode, count, steps, warmup, say)
                kept.write(list(done.values()))
        facts = _facts(config)
    return [
        assess(
            [done[mode, count] for count in counts],
            {**facts, **_where([done[mode, count] for count in counts])},
            config.training.usd_per_hour if usd_per_hour is None else usd_per_hour,
        )
        for mode in modes
    ]


def _counts(
    config: ProjectConfig,
    workers: Sequence[int] | None,
    modes: Sequence[Mode],
    steps: int,
    warmup: int,
) -> list[int]:
    training = config.training
    one_strategy(training)
    unit = training.worker_unit
    default = [n for n in default_counts(training.most_workers) if n % unit == 0]
    counts = sorted(set(workers or default))
    if odd := [n for n in counts if n % unit]:
        raise ConfigError(
            f"--workers {odd[0]}: training.strategy {training.strategy!r} takes multiples of {unit}"
        )
    if counts[0] < 1:
        raise ConfigError(f"--workers {counts[0]}: expected 1 or more")
    if steps < FEWEST_STEPS:
        raise ConfigError(f"--steps {steps}: a median needs {FEWEST_STEPS} or more")
    if warmup < 1:
        raise ConfigError(f"--warmup {warmup}: the first step is never like the others; 1 or more")
    if not modes:
        raise ConfigError("scale: expected a mode, strong or weak")
    if "strong" in modes and counts[-1] > training.micro_batches:
        raise ConfigError(
            f"{counts[-1]} workers cannot share the {training.micro_batches} micro-batches of a"
            " step: raise training.micro_batches, name fewer with --workers, or use --mode weak",
            param="training.micro_batches",
        )
    if training.strategy == "single" and counts[-1] > 1:
        raise ConfigError(
            "training.strategy 'single' is for one worker: scale needs ddp or fsdp",
            param="training.strategy",
        )
    return counts


def one_strategy(training: TrainingConfig) -> None:
    """Refuse `auto`: what is measured must be one strategy."""
    if training.strategy == "auto":
        raise ConfigError(
            "training.strategy: 'auto' cannot be measured as such: set the strategy that"
            " `hybrid train --try-strategies` picks",
            param="training.strategy",
        )


def with_training(config: ProjectConfig, **changes: Any) -> ProjectConfig:
    """The project with other keys of `training`, checked as if it were written so."""
    training = TrainingConfig.model_validate({**config.training.model_dump(), **changes})
    return config.model_copy(update={"training": training})


def timed_config(config: ProjectConfig, *, steps: int, **changes: Any) -> ProjectConfig:
    """The project's job for `steps` steps with nothing between them: no evaluation, no saves."""
    never = 10**9
    return with_training(
        config,
        steps=steps,
        audit="off",
        eval_every=never,
        checkpoint={"every": never, "keep": 1},
        faults={**config.training.faults.model_dump(), "max_failures": 0},
        **changes,
    )


def measure(
    config: ProjectConfig,
    data: PreparedData,
    mode: Mode,
    count: int,
    steps: int,
    warmup: int,
    say: Progress,
) -> Measured:
    """Time one run, from nothing to nothing: its folder is removed before and after."""
    import ray

    from hybrid.training.loop import Job
    from hybrid.training.progress import Follower, read_progress
    from hybrid.training.storage import Storage
    from hybrid.training.workers import run_workers

    grid = config.training.micro_batches * (count if mode == "weak" else 1)
    timed = timed_config(config, steps=warmup + steps, workers=count, micro_batches=grid)
    job = Job(config=timed, data=data, run_id=f"scale-{mode}-{count}")

    def clear() -> None:
        shutil.rmtree(job.folder, ignore_errors=True)
        Storage(job.checkpoints).remove()

    clear()
    job.folder.mkdir(parents=True)
    try:
        with Follower(job.folder, say):
            run_workers(job, lambda text: say({"message": text}))
        records = read_progress(job.folder)
    finally:
        clear()
    times = [r["time"] for r in records if r["event"] == "step"]
    start = next(r for r in records if r["event"] == "start")
    nodes = {w["node"] for w in start["workers"]}
    machines = {n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] in nodes}
    here = machines == {ray.util.get_node_ip_address()}
    return Measured(
        mode=mode,
        workers=count,
        step_s=tuple(b - a for a, b in itertools.pairwise(times[warmup - 1 :])),
        tokens_per_step=timed.training.tokens_per_step,
        nodes=len(nodes),
        machines=len(machines),
        cores=os.cpu_count() if here else None,
        when=time.time(),
    )


class _Kept:
    """Measurements on disk, one file for one state of job, data and sweep."""

    def __init__(self, config: ProjectConfig, data: PreparedData, steps: int, warmup: int) -> None:
        apart = {"workers", "resize_s", "audit", "checkpoint", "faults", "eval_every", "steps",
                 "usd_per_hour"}  # fmt: skip
        decides = [
            config.model.model_dump(mode="json"),
            config.training.model_dump(mode="json", exclude=apart),
            config.run.seed,
            data.digest,
            steps,
            warmup,
        ]
        digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
        self.path: Path = config.run.dir / FOLDER / f"{digest}.json"

    def read(self) -> dict[tuple[Mode, int], Measured]:
        """What was measured before; nothing where there is no such file, or half of one."""
        try:
            records = json.loads(self.path.read_text())
            found = [Measured(**{**r, "step_s": tuple(r["step_s"])}) for r in records]
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError) as e:
            raise ConfigError(
                f"{self.path}: no measurements of `hybrid scale` ({e}); remove it, or use --fresh"
            ) from None
        return {(m.mode, m.workers): m for m in found}

    def write(self, measured: Sequence[Measured]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps([dataclasses.asdict(m) for m in measured]))
        new.replace(self.path)


def _facts(config: ProjectConfig) -> dict[str, Any]:
    """What is known of the runs beside their times, an audit's network among it."""
    training = config.training
    facts: dict[str, Any] = {
        "strategy": training.strategy,
        "cpus_per_worker": training.cpus_per_worker,
        "tokens_per_worker_step": training.tokens_per_step // 2,
    }
    rates = list(_audited(config.run.dir))
    return facts | ({"network_gib_s": min(rates)} if rates else {})


def _audited(folder: Path) -> Iterator[float]:
    """What `hybrid audit` last measured of each node's all-reduce."""
    from hybrid.audit.history import previous
    from hybrid.audits import FOLDER as AUDITS

    for node in sorted((folder / AUDITS).glob("*/")):
        found = previous(folder / AUDITS, node.name)
        for reading in found.readings if found else ():
            if reading.name == "collective.busbw_gib_s" and isinstance(reading.value, float):
                yield reading.value


def _where(measured: Sequence[Measured]) -> dict[str, Any]:
    """Whether two workers were two machines, which is what the rule of two is about."""
    two = next((m for m in measured if m.workers == 2), None)
    if two is None:
        return {}
    if two.machines > 1:
        return {"unit": "nodes", "one_machine": False}
    return {"one_machine": True, "cores": two.cores}
