"""A few steps of a run under torch's profiler, on every rank, with ranges named after our phases.

The loop says where it is through `Position.at`; here that also opens a range (`named_range`), and
the first word of each step advances the profiler's schedule. Memory is profiled in steps of its
own, after those that are timed: what it takes to record allocations is in no figure of time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from hybrid.training.memory_marks import KEY, MemoryMarks
from hybrid.training.nsight import NsightPosition, leave_word, tool_for
from hybrid.training.parallel import World
from hybrid.training.position import Position
from hybrid.training.ranges import named_range, range_name

FOLDER = "traces"


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """What of a run is profiled.

    Attributes:
        warmup: steps before, the last of them with the profiler running but not recording.
        active: steps recorded.
        memory: record allocations as well, in as many steps after those.
        nsight: ranges for Nsight Systems instead of torch's profiler; see `nsight`.
        launcher: what worker processes are started by, if not Python; see `nsight_launch`.
    """

    warmup: int = 3
    active: int = 3
    memory: bool = False
    nsight: bool = False
    launcher: str = ""

    @property
    def steps(self) -> int:
        """Of the run: one more after each recording, whose beginning ends it."""
        return self.warmup + self.active + 1 + (1 + self.active if self.memory else 0)


def trace_path(folder: Path, rank: int) -> Path:
    """Where a rank's trace is below a run's folder."""
    return folder / FOLDER / f"rank-{rank}.json.gz"


def memory_path(folder: Path, rank: int) -> Path:
    """Where the trace of a rank's allocations is."""
    return folder / FOLDER / f"memory-{rank}.json.gz"


@contextmanager
def watched_position(plan: Profiling | None, folder: Path, world: World) -> Iterator[Position]:
    """The position of a run: a plain one, or one that profiles by `plan` and writes the trace."""
    if plan is None:
        yield Position()
        return
    if plan.nsight:
        first, last = plan.warmup + 1, plan.warmup + plan.active
        marked = NsightPosition(first, last, tool_for(world.device))
        try:
            yield marked
        finally:
            marked.close()
        leave_word(folder, world.rank)
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
        self._plan, self._device = plan, world.device
        self._range = ExitStack()
        self._steps = 0
        self._profiler: Any = None
        self._memory: MemoryMarks | None = None
        self._watched: tuple[Any, Any] | None = None
        self._trace, self._memory_trace = (f(folder, world.rank) for f in (trace_path, memory_path))
        self._trace.parent.mkdir(parents=True, exist_ok=True)

    def watch(self, model: Any, optimizer: Any) -> None:
        """Also remember whose parameters, gradients and state the memory's profile tells apart."""
        self._watched = (model, optimizer)

    def within(self, name: str) -> AbstractContextManager[None]:
        """A range within that of the phase."""
        return named_range(name, self._device)

    def at(self, phase: str, step: int | None = None) -> None:
        """Also end the range of the phase before, and open this one's."""
        super().at(phase, step)
        self._range.close()
        if self._memory is not None:
            self._memory.all()
        if step is not None:
            self._steps += 1
            self._advance()
        self._range.enter_context(named_range(range_name(phase), self._device))

    def _advance(self) -> None:
        """Begin the step that is the `_steps`-th, counted from 1."""
        plan = self._plan
        if self._steps == plan.steps:
            self._note()
        if self._profiler is not None:
            self._profiler.step()
        if self._steps == 1:
            self._start(self._trace, wait=plan.warmup - 1, memory=False)
        elif self._steps == plan.warmup + plan.active + 1:
            self._stop()
            if plan.memory:
                self._start(self._memory_trace, wait=0, memory=True)
        elif self._steps == plan.steps:
            self._stop()
        if self._memory is not None and self._profiler.step_num == 1:
            self._memory.all()  # what is there when the recording begins

    def _start(self, path: Path, *, wait: int, memory: bool) -> None:
        cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=schedule(wait=wait, warmup=1, active=self._plan.active, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
            profile_memory=memory,
        )
        self._profiler.start()
        if memory:
            if self._watched is None:
                raise ValueError("memory is profiled, and nothing was given to watch")
            self._memory = MemoryMarks(*self._watched, self._device)

    def _note(self) -> None:
        """Before the recording ends; after that nothing can be added."""
        if self._memory is not None and 1 <= self._profiler.step_num <= self._plan.active:
            self._profiler.add_metadata_json(KEY, self._memory.notes())

    def _stop(self) -> None:
        if self._memory is not None:
            self._note()
            self._memory.remove()
            self._memory = None
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def close(self) -> None:
        """End the range, and the profiler where the run ended before it did."""
        self._range.close()
        self._stop()
