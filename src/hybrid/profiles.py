"""The verb `profile`: a few steps of the real job under the profiler, and what bounds them."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hybrid.config import ProjectConfig
from hybrid.errors import ConfigError, HybridError, TrainingError
from hybrid.planning.memory_timeline import Memory, read_memory
from hybrid.planning.trace import RankTrace, read_trace
from hybrid.planning.verdict import Knob, Verdict, judge
from hybrid.scaling_runs import measure, one_strategy, timed_config, with_training

if TYPE_CHECKING:
    from hybrid.project import Project
    from hybrid.training.data import PreparedData
    from hybrid.training.profiling import Profiling

Progress = Callable[[dict[str, Any]], None]
FOLDER = "profiles"
TRY_STEPS, TRY_WARMUP = 10, 4


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What a knob did.

    Attributes:
        outcome: `measured`, `already so`, `by hand` (no key does it), or `failed`.
        ratio: tokens a second against the job as it is; None where it was not measured.
        text: the keys that were set, or why not.
    """

    knob: str
    outcome: str
    ratio: float | None
    text: str


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A profile: its traces (they open in Perfetto), accounted for and judged.

    Attributes:
        memory: of each rank, where it was asked for.
    """

    folder: Path
    ranks: tuple[RankTrace, ...]
    verdict: Verdict
    tried: tuple[Tried, ...]
    memory: tuple[Memory, ...] = ()


def profile(
    project: Project,
    *,
    workers: int | None = None,
    steps: int = 3,
    warmup: int = 3,
    try_knobs: bool = False,
    memory: bool = False,
    on_progress: Progress | None = None,
) -> Profiled:
    """Profile a few steps of the project's training on all ranks.

    Traces are kept below `run.dir`/profiles.

    Args:
        workers: by default the most of `training.workers`.
        steps: recorded, after `warmup` that are not.
        try_knobs: measure the job with each knob that the verdict names, too.
        memory: record allocations, too, in as many steps after those.
        on_progress: called with each record of the run's progress file, and `{"message": …}`.

    Raises:
        ConfigError: a number that cannot be. PlacementError, TrainingError: see `run_workers`.
    """
    say = on_progress or (lambda record: None)
    with ready(project, workers, steps, warmup, say) as (config, data, count, folder):
        from hybrid.training.profiling import Profiling

        say({"message": f"{count} workers: {warmup} + {steps} steps under the profiler"})
        plan = Profiling(warmup=warmup, active=steps, memory=memory)
        _record(config, data, count, plan, folder, say)
        ranks = tuple(read_trace(path) for path in sorted(folder.glob("rank-*.json.gz")))
        verdict = judge(ranks)
        tried = tuple(_try_all(config, data, count, verdict, say)) if try_knobs else ()
    found = tuple(read_memory(path) for path in sorted(folder.glob("memory-*.json.gz")))
    return Profiled(folder=folder, ranks=ranks, verdict=verdict, tried=tried, memory=found)


@contextmanager
def ready(
    project: Project, workers: int | None, steps: int, warmup: int, say: Progress
) -> Iterator[tuple[ProjectConfig, PreparedData, int, Path]]:
    """Ray, and what a profile needs: the project's settings, its data, the count of workers, and
    the folder (not yet made) for what is found.

    Raises:
        ConfigError: a number that cannot be.
    """
    config = project.config
    one_strategy(config.training)
    count = config.training.most_workers if workers is None else workers
    for name, value in (("--workers", count), ("--steps", steps), ("--warmup", warmup)):
        if value < 1:
            raise ConfigError(f"{name} {value}: expected 1 or more")
    with type(project)(with_training(config, workers=count)).ray(training_only=True):
        from hybrid.training.trainer import made_data

        data = dataclasses.replace(made_data(config, say), holdout=None)
        yield config, data, count, config.run.dir / FOLDER / time.strftime("%Y%m%dT%H%M%S")


def _record(
    config: ProjectConfig,
    data: PreparedData,
    count: int,
    plan: Profiling,
    folder: Path,
    say: Progress,
) -> None:
    """Run the job and leave its traces in `folder`."""
    from hybrid.training.profiling import FOLDER as TRACES

    with run_once(config, data, count, plan, say) as made:
        found = sorted((made / TRACES).glob("*.json.gz"))
        expected = count * (1 + plan.memory)
        if len(found) != expected:
            raise TrainingError(
                f"{len(found)} of the {expected} traces of {count} ranks are in {made}: does"
                " every node see run.dir?"
            )
        folder.mkdir(parents=True)
        for path in found:
            shutil.move(path, folder / path.name)


@contextmanager
def run_once(
    config: ProjectConfig, data: PreparedData, count: int, plan: Profiling, say: Progress
) -> Iterator[Path]:
    """Run the job for the steps of a plan. Its folder, which is removed with all else it left."""
    from hybrid.training.loop import Job
    from hybrid.training.progress import Follower
    from hybrid.training.storage import Storage
    from hybrid.training.workers import run_workers

    timed = timed_config(config, steps=plan.steps, workers=count)
    job = Job(config=timed, data=data, run_id=f"profile-{count}", profiling=plan)
    shutil.rmtree(job.folder, ignore_errors=True)
    Storage(job.checkpoints).remove()
    job.folder.mkdir(parents=True)
    try:
        with Follower(job.folder, say):
            run_workers(job, lambda text: say({"message": text}))
        yield job.folder
    finally:
        shutil.rmtree(job.folder, ignore_errors=True)
        Storage(job.checkpoints).remove()


def _try_all(
    config: ProjectConfig, data: PreparedData, count: int, verdict: Verdict, say: Progress
) -> list[Tried]:
    """Time the job as it is, then with each knob alone."""

    def rate(of: ProjectConfig) -> float:
        return measure(of, data, "strong", count, TRY_STEPS, TRY_WARMUP, say).point.rate

    say({"message": "as it is"})
    before, done = rate(config), []
    for knob in verdict.knobs:
        say({"message": f"trying {knob.name}"})
        made = turned(config, knob)
        if isinstance(made, Tried):
            done.append(made)
            continue
        text = ", ".join(f"{key}: {_at(made, key)}" for key in knob.settings)
        try:
            ratio = rate(made) / before
        except HybridError as e:
            why = f"{text}: {e.message}"
            done.append(Tried(knob=knob.name, outcome="failed", ratio=None, text=why))
            continue
        grown = made.training.tokens_per_step / config.training.tokens_per_step
        if grown != 1:
            text += f" (a step is then {grown:g} times as many tokens: another training run)"
        done.append(Tried(knob=knob.name, outcome="measured", ratio=ratio, text=text))
    return done


def turned(config: ProjectConfig, knob: Knob) -> ProjectConfig | Tried:
    """The project with a knob turned, or why it is not."""
    known = {key: _at(config, key) for key in knob.settings}
    if not known or any(value is None for value in known.values()):
        return Tried(knob=knob.name, outcome="by hand", ratio=None, text=knob.text)
    wanted = {
        key: 2 * known[key] if value == "x2" else value for key, value in knob.settings.items()
    }
    if wanted == known:
        text = ", ".join(f"{key}: {value}" for key, value in known.items())
        return Tried(knob=knob.name, outcome="already so", ratio=None, text=text)
    try:
        return with_training(config, **_nested(config, wanted))
    except ValidationError as e:
        return Tried(knob=knob.name, outcome="failed", ratio=None, text=e.errors()[0]["msg"])


def _nested(config: ProjectConfig, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys below `training` as values of its own keys."""
    changes: dict[str, Any] = {}
    for key, value in wanted.items():
        _, first, *rest = key.split(".")
        if rest:
            inner = changes.setdefault(first, getattr(config.training, first).model_dump())
            inner[rest[0]] = value
        else:
            changes[first] = value
    return changes


def _at(config: ProjectConfig, key: str) -> Any:
    """The value of a dotted key; None where there is no such key."""
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part, None)
    return found
