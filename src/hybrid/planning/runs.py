"""What a training run measured, from its folder: reads progress.jsonl, and report.json's cost.

The files are the contract (docs/training.md), not the training's code: planning imports none of it.
"""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import DataError

DRIVER_EVENTS = {"launch", "ended"}
"""Written by the driver, before the workers start and after they end."""
WARM_UP = 3
"""Steps after a start that are left out of the speed: caches, compilation, first allocations."""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What a run did.

    Attributes:
        name: the folder's name.
        parameters, workers, device: of the model; of the last start.
        peak_flops: measured matmul FLOP/s of one worker, as the run itself reports it.
        steps_done, steps_planned: optimiser steps.
        tokens_per_step: median.
        step_s: median seconds of a step without evaluation, saving and warm-up.
        eval_s: mean seconds of an evaluation; 0 without one.
        evals: how many there were.
        seconds: from each start to the last record before the next, summed.
        starts: how often it (re)started.
        finished: whether it reached its last step.
        usd: its cost, of report.json; None: there is none, or no price.
    """

    name: str
    parameters: float
    workers: int
    device: str
    peak_flops: float
    steps_done: int
    steps_planned: int
    tokens_per_step: float
    step_s: float
    eval_s: float
    evals: int
    seconds: float
    starts: int
    finished: bool
    usd: float | None

    @property
    def work(self) -> tuple[float, float, int]:
        """What must be the same for one run to say how long another takes."""
        return self.parameters, self.tokens_per_step, self.workers

    @property
    def tokens_per_s(self) -> float:
        """Of the steps' own time, after warm-up."""
        return self.tokens_per_step / self.step_s

    @property
    def other_s(self) -> float:
        """Seconds that were neither steps nor evaluations: warm-up, checkpoints, the export."""
        work = self.step_s * self.steps_done + self.eval_s * self.evals
        return max(0.0, self.seconds - work)

    @property
    def mfu(self) -> float:
        """Share of the measured matmul speed of all workers: 6 FLOPs a parameter and token."""
        return 6 * self.parameters * self.tokens_per_s / (self.peak_flops * self.workers)


def read_run(folder: Path) -> RunFigures:
    """Read a run's folder, runs/<run>.

    Raises:
        DataError: it has no progress.jsonl, or too few steps to say anything.
    """
    path = folder / "progress.jsonl"
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise DataError(
            f"{folder}: no run's folder: {e}; expected .hybrid/runs/<run> with progress.jsonl"
        ) from None
    try:
        records = [json.loads(line) for line in raw[: raw.rfind(b"\n") + 1].splitlines()]
        return _figures(folder, records)
    except (ValueError, KeyError, TypeError) as e:
        raise DataError(f"{path}: not a run's progress: {type(e).__name__}: {e}") from None


def _figures(folder: Path, records: list[dict[str, Any]]) -> RunFigures:
    starts = [r for r in records if r["event"] == "start"]
    steps = [r for r in records if r["event"] == "step"]
    durations = _step_seconds(records)
    if not starts or len(durations) < WARM_UP:
        raise DataError(
            f"{folder}: {len(steps)} steps recorded, too few; at least {2 * WARM_UP + 1} are needed"
        )
    last = starts[-1]
    evals = [b["time"] - a["time"] for a, b in itertools.pairwise(records) if b["event"] == "eval"]
    return RunFigures(
        name=folder.name,
        parameters=float(last["parameters"]),
        workers=int(last["world_size"]),
        device=str(last["device"]),
        peak_flops=float(last["peak_flops"]),
        steps_done=max(int(r["step"]) for r in steps),
        steps_planned=int(last["steps"]),
        tokens_per_step=float(statistics.median(r["tokens"] for r in steps)),
        step_s=statistics.median(durations),
        eval_s=statistics.fmean(evals) if evals else 0.0,
        evals=len(evals),
        seconds=_working_seconds(records),
        starts=len(starts),
        finished=any(r["event"] == "finished" for r in records),
        usd=_cost(folder),
    )


def _step_seconds(records: list[dict[str, Any]]) -> list[float]:
    """Seconds of the steps that directly follow a step, WARM_UP of each start left out."""
    found: list[float] = []
    since_start = 0
    for before, record in itertools.pairwise(records):
        if before["event"] == "start":
            since_start = 0
        if record["event"] == "step":
            since_start += 1
            if before["event"] == "step" and since_start > WARM_UP:
                found.append(record["time"] - before["time"])
    return found


def _working_seconds(records: list[dict[str, Any]]) -> float:
    """Between the starts a run may lie still for days: only what follows each start counts."""
    total, began, last = 0.0, None, 0.0
    for record in records:
        if record["event"] in DRIVER_EVENTS:
            continue
        if record["event"] == "start":
            total += last - began if began is not None else 0.0
            began = record["time"]
        last = record["time"]
    return total + (last - began if began is not None else 0.0)


def _cost(folder: Path) -> float | None:
    path = folder / "report.json"
    if not path.exists():
        return None
    usd = json.loads(path.read_text(encoding="utf-8")).get("cost_usd")
    return None if usd is None else float(usd)
