"""A few steps of a run under torch's profiler, on every rank, with ranges named after our phases.

The loop says where it is through `Position.at`; here that also opens a range of the profiler, and
of NVTX on a GPU, and the first word of each step advances the profiler's schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from hybrid.training.parallel import World
from hybrid.training.position import Position

FOLDER = "traces"


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """What of a run is profiled.

    Attributes:
        warmup: steps before, the last of them with the profiler running but not recording.
        active: steps recorded.
    """

    warmup: int = 3
    active: int = 3

    @property
    def steps(self) -> int:
        """Of the run: one more, whose beginning ends the recording."""
        return self.warmup + self.active + 1


def trace_path(folder: Path, rank: int) -> Path:
    """Where a rank's trace is below a run's folder."""
    return folder / FOLDER / f"rank-{rank}.json.gz"


@contextmanager
def watched_position(plan: Profiling | None, folder: Path, world: World) -> Iterator[Position]:
    """The position of a run: a plain one, or one that profiles by `plan` and writes the trace."""
    if plan is None:
        yield Position()
        return
    position = _Profiled(plan, folder, world)
    try:
        yield position
    finally:
        position.close()


class _Profiled(Position):
    """A position whose phases are ranges. Only the training thread may move it."""

    def __init__(self, plan: Profiling, folder: Path, world: World) -> None:
        super().__init__()
        self._nvtx = world.device.type == "cuda"
        self._range: Any = None
        self._started = False
        path = trace_path(folder, world.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        cuda = [ProfilerActivity.CUDA] if self._nvtx else []
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=schedule(wait=plan.warmup - 1, warmup=1, active=plan.active, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
        )

    def at(self, phase: str, step: int | None = None) -> None:
        """Also end the range of the phase before, and open this one's."""
        super().at(phase, step)
        self._leave()
        if step is not None:
            if self._started:
                self._profiler.step()
            else:
                self._profiler.start()
                self._started = True
        name = phase.partition(" of micro-batch")[0]
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        self._range = record_function(name)
        self._range.__enter__()

    def _leave(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
            if self._nvtx:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the range, and the profiler where the run ended before it did."""
        self._leave()
        if self._started:
            self._profiler.stop()
            self._started = False
