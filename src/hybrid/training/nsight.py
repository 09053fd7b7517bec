"""A few steps of a run for Nsight Systems: NVTX ranges, and the profiler's start and stop.

No profiler of torch's runs meanwhile: it would take CUPTI, which serves one at a time. Ranges nest
as `step 4` > `forward and backward` > `forward`; the recorded steps lie between `cudaProfilerStart`
and `cudaProfilerStop`, both of which wait until the GPU has done what came before. On a CPU there
is nothing that records: the same steps run, and nothing is emitted.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from hybrid.training.nsight_launch import REPORT, SUFFIX, WHY_NOT
from hybrid.training.position import Position
from hybrid.training.ranges import range_name

REPORT_S = 300.0
"""How long a rank waits for its report after its last step: a few steps are some MB to convert."""
_STILL_S = 2.0


class Tool(Protocol):
    """What records: NVTX and the CUDA profiler's API."""

    def start(self) -> None:
        """Record from here on."""

    def stop(self) -> None:
        """Record no further."""

    def push(self, name: str) -> None:
        """Open a range within the last that is open."""

    def pop(self) -> None:
        """End the last range that was opened."""


class Nvtx:
    """The real one, on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """`cudaProfilerStart`, after what is under way."""
        torch.cuda.synchronize(self._device)
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """`cudaProfilerStop`, after what is under way."""
        torch.cuda.synchronize(self._device)
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]

    def push(self, name: str) -> None:
        """An NVTX range of this thread."""
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def pop(self) -> None:
        """Its end."""
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


class Nothing:
    """On a CPU: torch has no NVTX there, and nothing listens."""

    def start(self) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""

    def push(self, name: str) -> None:
        """Nothing."""

    def pop(self) -> None:
        """Nothing."""


def tool_for(device: torch.device) -> Tool:
    """What records on a device."""
    return Nvtx(device) if device.type == "cuda" else Nothing()


class NsightPosition(Position):
    """A position whose steps and phases are ranges. Only the training thread may move it.

    Args:
        first: the first step that is recorded, counted from 1 and from where the run begins.
        last: the last of them.
    """

    def __init__(self, first: int, last: int, tool: Tool) -> None:
        super().__init__()
        self._first, self._last, self._tool = first, last, tool
        self._steps = 0
        self._step_open = self._phase_open = self._recording = False

    def at(self, phase: str, step: int | None = None) -> None:
        """Also end the range of the phase before, and open this one's; a new step is one, too."""
        super().at(phase, step)
        self._end_phase()
        if step is None:
            self._tool.push(range_name(phase))
            self._phase_open = True
            return
        self._end_step()
        self._steps += 1
        if self._steps == self._first:
            self._tool.start()
            self._recording = True
        elif self._steps == self._last + 1:
            self._stop()
        self._tool.push(f"step {step}")
        self._step_open = True

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A range within that of the phase."""
        self._tool.push(name)
        try:
            yield
        finally:
            self._tool.pop()

    def close(self) -> None:
        """End what is open, where the run ended before it did."""
        self._end_phase()
        self._end_step()
        self._stop()

    def _end_phase(self) -> None:
        if self._phase_open:
            self._tool.pop()
            self._phase_open = False

    def _end_step(self) -> None:
        if self._step_open:
            self._tool.pop()
            self._step_open = False

    def _stop(self) -> None:
        if self._recording:
            self._tool.stop()
            self._recording = False


def note_path(folder: Path, rank: int) -> Path:
    """Where a rank says below a run's folder what became of its report: `rank`, `report`, `why`."""
    return folder / "traces" / f"nsight-{rank}.json"


def leave_word(
    folder: Path, rank: int, environment: Mapping[str, str] = os.environ, wait_s: float = REPORT_S
) -> None:
    """Wait for this rank's report, name it after the rank, and note where it lies.

    Ray kills a worker's whole process group when the worker ends, nsys in it, which may not have
    written all by then: so the worker stays until the file has stopped growing.
    """
    made = environment.get(REPORT)
    report, why = None, environment.get(WHY_NOT, "no nsys was asked to start this worker")
    if made is not None:
        why = f"nsys wrote no {made} within {wait_s:g} s"
        if _written(Path(made), wait_s):
            report, why = Path(made).with_name(f"rank-{rank}{SUFFIX}"), ""
            Path(made).replace(report)
    note = {"rank": rank, "report": None if report is None else str(report), "why": why}
    path = note_path(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(note), encoding="utf-8")


def _written(path: Path, wait_s: float) -> bool:
    """Whether a file is there and has not grown for a while, in time."""
    deadline = time.monotonic() + wait_s
    size, since = -1, time.monotonic()
    while time.monotonic() < deadline:
        now = path.stat().st_size if path.exists() else -1
        if now != size:
            size, since = now, time.monotonic()
        elif size > 0 and time.monotonic() - since >= _STILL_S:
            return True
        time.sleep(0.1)
    return False
