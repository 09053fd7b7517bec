"""The verb `profile_nsight`: steps of the real job for Nsight Systems, and what it left where.

On GPUs each worker process is started under `nsys` where its node has one. Whether there is one or
not, the command is told by which a cluster of this machine is recorded from outside.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.errors import TrainingError
from hybrid.profiles import FOLDER, Progress, ready, run_once

if TYPE_CHECKING:
    from hybrid.project import Project


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of one rank's recording.

    Attributes:
        report: the .nsys-rep file; None where there is none.
        why: why not.
    """

    rank: int
    report: Path | None
    why: str


@dataclass(frozen=True, kw_only=True)
class Nsight:
    """Steps that ran with NVTX ranges, between the CUDA profiler's start and stop.

    Attributes:
        folder: where workers' reports lie, one a rank.
        gpu: whether the workers have GPUs; without, there are no ranges and no reports.
        worker_command: what each worker process is started by, where it is.
    """

    folder: Path
    gpu: bool
    worker_command: str
    reports: tuple[Report, ...]


def profile_nsight(
    project: Project,
    *,
    workers: int | None = None,
    steps: int = 3,
    warmup: int = 3,
    on_progress: Progress | None = None,
) -> Nsight:
    """Run a few steps of the project's training for Nsight Systems, without torch's profiler.

    Args:
        workers: by default the most of `training.workers`.
        steps: between the profiler's start and stop, after `warmup` that are not.
        on_progress: called with each record of the run's progress file, and `{"message": …}`.

    Raises:
        ConfigError: a number that cannot be. PlacementError, TrainingError: see `run_workers`.
    """
    say = on_progress or (lambda record: None)
    with ready(project, workers, steps, warmup, say) as (config, data, count, folder):
        from hybrid.training.nsight import note_path
        from hybrid.training.nsight_launch import command, launcher
        from hybrid.training.profiling import Profiling
        from hybrid.training.slots import has_gpus

        gpu, folder = has_gpus(), folder.resolve()
        folder.mkdir(parents=True)
        plan = Profiling(
            warmup=warmup, active=steps, nsight=True, launcher=launcher(folder) if gpu else ""
        )
        say({"message": f"{count} workers: {warmup} + {steps} steps with ranges"})
        with run_once(config, data, count, plan, say) as made:
            paths = [note_path(made, rank) for rank in range(count)]
            if absent := [path for path in paths if not path.exists()]:
                raise TrainingError(
                    f"{len(absent)} of {count} ranks left no word in {absent[0].parent}: does every"
                    " node see run.dir?"
                )
            notes = [json.loads(path.read_text()) for path in paths]
    return Nsight(
        folder=folder,
        gpu=gpu,
        worker_command=shlex.join(command(folder / "HOST-PID", ["python", "…"])),
        reports=tuple(
            Report(rank=n["rank"], report=n["report"] and Path(n["report"]), why=n["why"])
            for n in notes
        ),
    )


def whole_command(run_dir: Path, arguments: Sequence[str]) -> list[str]:
    """The command line that records from outside all that `hybrid` starts on this machine.

    Args:
        run_dir: of the project; the report lies below it.
        arguments: of `hybrid`, `profile` and `--nsight` among them.
    """
    from hybrid.training.nsight_launch import command

    return command(run_dir.resolve() / FOLDER / "nsight", ["hybrid", *arguments])


def told(done: Nsight, whole: Sequence[str]) -> list[str]:
    """Sentences: what lies where and why not, and the commands."""
    made = [r for r in done.reports if r.report is not None]
    lines = []
    if made:
        lines.append(f"{len(made)} of {len(done.reports)} ranks left a report:")
        lines += [f"  rank {r.rank}: {r.report}" for r in made]
        lines += [
            "each of a worker process that was started by",
            f"  {done.worker_command}",
            "open them in nsys-ui, all at once for one timeline, or in words:",
            f"  nsys stats --report nvtx_sum,cuda_gpu_kern_sum {shlex.quote(str(made[0].report))}",
        ]
    if not done.gpu:
        lines.append("the workers have no GPU: there are no ranges and nothing to record here.")
    else:
        lines += [f"rank {r.rank}: no report: {r.why}" for r in done.reports if not r.report]
    if len(made) < len(done.reports):
        lines += [
            "where each GPU node has nsys on PATH, `hybrid profile --nsight` starts every worker"
            f" under it and leaves one report a rank below {done.folder.parent}.",
            "from outside, for a cluster that the command starts itself on this machine (workers"
            " of a running cluster are not its children, and not recorded):",
            f"  {shlex.join(whole)}",
            f"  then one report of all ranks is {_output(whole)}",
        ]
    return lines


def _output(whole: Sequence[str]) -> str:
    from hybrid.training.nsight_launch import SUFFIX

    [output] = [o for o in whole if o.startswith("--output=")]
    return output.removeprefix("--output=") + SUFFIX


def as_json(done: Nsight, whole: Sequence[str]) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "nsight": {
            "folder": str(done.folder),
            "gpu": done.gpu,
            "command": list(whole),
            "worker_command": done.worker_command,
            "reports": [
                {"rank": r.rank, "report": r.report and str(r.report), "why": r.why}
                for r in done.reports
            ],
        }
    }
