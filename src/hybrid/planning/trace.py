"""Reads a PyTorch profiler's Chrome trace: what each moment of each step of a rank went to.

Each moment of a step is one of, in this order: compute, exposed communication (nothing is computed
meanwhile), a memory copy, the host (the device, or on a CPU the ops, wait for what the program
does), idle. Communication while something is computed is overlapped; it is told beside, not added.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import DataError
from hybrid.planning import kernel_names as names
from hybrid.planning.intervals import clip, intersect, length, subtract, union

DISPATCH_US = 20.0
"""An op on the CPU shorter than this is mostly PyTorch's own dispatch: the host's time."""
_STEP = "ProfilerStep#"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One step of one rank, in seconds.

    compute + exposed + copies + host_wait + idle = seconds.

    Attributes:
        matmul: of compute, in products of matrices, convolutions and attention.
        overlapped: communication while something was computed.
        input_wait: of host_wait and idle, waiting for a batch.
    """

    step: int
    seconds: float
    compute: float
    matmul: float
    exposed: float
    overlapped: float
    copies: float
    host_wait: float
    idle: float
    input_wait: float

    @property
    def communication(self) -> float:
        """Exposed and overlapped."""
        return self.exposed + self.overlapped

    @property
    def overlap(self) -> float | None:
        """Share of the communication that compute hides; None where there was none."""
        return self.overlapped / self.communication if self.communication else None


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One rank's trace.

    Attributes:
        device: whether it holds kernels of a GPU; else ops on the CPU are what computes.
        collectives: seconds by kind, over all steps, whether or not hidden.
        phases: seconds on the main thread by range (the phases of our steps), over all steps.
        ops: the ops or kernels that took longest, over all steps: (name, seconds, calls).
        warnings: what a reader must know before believing the figures.
    """

    path: Path
    rank: int
    world_size: int
    backend: str
    device: bool
    steps: tuple[StepTime, ...]
    collectives: dict[str, float]
    phases: dict[str, float]
    ops: tuple[tuple[str, float, int], ...]
    warnings: tuple[str, ...]


def read_trace(path: Path) -> RankTrace:
    """Read a trace, plain or gzipped.

    Raises:
        DataError: it is not there, or no trace of PyTorch's profiler, or holds no event.
    """
    return analyse(load(path), path)


def load(path: Path) -> dict[str, Any]:
    """The trace as JSON.

    Raises:
        DataError: see `read_trace`.
    """
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        found = json.loads(raw)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such trace") from None
    except (ValueError, EOFError, OSError, zlib.error) as e:
        raise DataError(f"{path}: no trace of PyTorch's profiler: {e}") from None
    if isinstance(found, list):  # the bare form of the format
        found = {"traceEvents": found}
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise DataError(f"{path}: no trace of PyTorch's profiler: it has no traceEvents")
    return found


def analyse(trace: dict[str, Any], path: Path) -> RankTrace:
    """What `load` gave, accounted for. Raises DataError where no complete event is in it."""
    about = trace.get("distributedInfo") or {}
    rank, size = int(about.get("rank", 0)), int(about.get("world_size", 1))
    sorted_out = _Sorted([e for e in trace["traceEvents"] if _complete(e)])
    if not sorted_out.steps:
        raise DataError(f"{path}: the trace holds no event that took time")
    steps = tuple(sorted_out.step(number, window) for number, window in sorted_out.steps)
    warnings = []
    if size > 1 and not sorted_out.collectives:
        warnings.append(
            f"NO COMMUNICATION WAS FOUND, although {size} ranks trained together"
            f" (backend {about.get('backend', '?')}): its kernels may have names that are not known"
            " here, or the ranks did not talk; believe no figure about communication"
        )
    if sorted_out.unnumbered:
        warnings.append("the trace marks no steps (ProfilerStep#): it is taken as one")
    return RankTrace(
        path=path,
        rank=rank,
        world_size=size,
        backend=str(about.get("backend", "none")),
        device=sorted_out.device,
        steps=steps,
        collectives=sorted_out.collectives,
        phases=sorted_out.phases(),
        ops=sorted_out.longest(),
        warnings=tuple(warnings),
    )


def _complete(event: Any) -> bool:
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and isinstance(event.get("ts"), int | float)
        and isinstance(event.get("dur"), int | float)
        and event.get("cat") != "Trace"
    )


def _span(event: dict[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


class _Sorted:
    """The events of one rank by what they stand for, as sets of microseconds."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for event in events:
            by_kind.setdefault(str(event.get("cat", "")).lower(), []).append(event)
        kernels = by_kind.get("kernel", [])
        ranges = by_kind.get("user_annotation", []) + by_kind.get("python_function", [])
        ops = by_kind.get("cpu_op", []) + by_kind.get("operator", [])
        calls = by_kind.get("cuda_runtime", []) + by_kind.get("cuda_driver", [])
        self.device = bool(kernels)
        self.collectives: dict[str, float] = {}
        self._ops: dict[str, list[float]] = {}
        self._ranges = ranges
        self.steps, self.unnumbered = _steps(ranges, events)
        communication = [_span(e) for e in ranges if self._collective(e, None)]
        busy: list[tuple[float, float]] = []
        matmul: list[tuple[float, float]] = []
        copies: list[tuple[float, float]] = []
        if self.device:
            for event in kernels:
                if self._collective(event, names.device_collective(event["name"])):
                    communication.append(_span(event))
                    continue
                busy.append(_span(event))
                if names.is_matmul(event["name"], True):
                    matmul.append(_span(event))
                self._count(event)
            copies = [_span(e) for k in ("gpu_memcpy", "gpu_memset") for e in by_kind.get(k, [])]
            hosts = [_span(e) for e in (*ops, *ranges, *calls) if not _marks_step(e)]
            waits = union(_span(e) for e in (*calls, *ops) if names.is_wait(e["name"]))
        else:
            for event, innermost in computing_ops(ops, ranges):
                (copies if names.is_copy(event["name"]) else busy).append(_span(event))
                if names.is_matmul(event["name"], False):
                    matmul.append(_span(event))
                if innermost:
                    self._count(event)
            hosts, waits = [window for _, window in self.steps], []
        self._communication = union(communication)
        self._copies = union(copies)
        # A copy inside a larger op of the CPU is the copy's; on a GPU both are done at once.
        self._compute = union(busy) if self.device else subtract(union(busy), self._copies)
        self._matmul = intersect(union(matmul), self._compute)
        self._host = subtract(union(hosts), waits)
        self._input = union(_span(e) for e in ranges if names.is_input(e["name"]))

    def _collective(self, event: dict[str, Any], kind: str | None) -> bool:
        kind = kind or names.host_collective(event["name"])
        if kind is None and event.get("cat") == "kernel":
            kind = names.told_collective(event.get("args") or {})
        if kind is None:
            return False
        self.collectives[kind] = self.collectives.get(kind, 0.0) + event["dur"] / 1e6
        return True

    def _count(self, event: dict[str, Any]) -> None:
        counted = self._ops.setdefault(event["name"], [0.0, 0])
        counted[0] += event["dur"] / 1e6
        counted[1] += 1

    def step(self, number: int, window: tuple[float, float]) -> StepTime:
        """Account for one step."""
        compute, communication = clip(self._compute, window), clip(self._communication, window)
        exposed = subtract(communication, compute)
        taken = union([*compute, *exposed])
        copies = subtract(clip(self._copies, window), taken)
        free = subtract([window], union([*taken, *copies]))
        host = intersect(free, clip(self._host, window))
        seconds = {
            "seconds": length([window]),
            "compute": length(compute),
            "matmul": length(clip(self._matmul, window)),
            "exposed": length(exposed),
            "overlapped": length(communication) - length(exposed),
            "copies": length(copies),
            "host_wait": length(host),
            "idle": length(free) - length(host),
            "input_wait": length(intersect(free, clip(self._input, window))),
        }
        return StepTime(step=number, **{k: max(v, 0.0) / 1e6 for k, v in seconds.items()})

    def phases(self) -> dict[str, float]:
        """Seconds by named range on the thread that marks the steps; ours are those of a step."""
        main = next((e.get("tid") for e in self._ranges if _marks_step(e)), None)
        found: dict[str, float] = {}
        for event in self._ranges:
            name = event["name"]
            if event.get("tid") == main and not _marks_step(event) and "::" not in name:
                found[name] = found.get(name, 0.0) + event["dur"] / 1e6
        return found

    def longest(self, most: int = 12) -> tuple[tuple[str, float, int], ...]:
        """What computing took longest."""
        ordered = sorted(self._ops.items(), key=lambda item: -item[1][0])[:most]
        return tuple((name, seconds, int(calls)) for name, (seconds, calls) in ordered)


def _marks_step(event: dict[str, Any]) -> bool:
    return str(event["name"]).startswith(_STEP)


def _steps(
    ranges: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]
) -> tuple[list[tuple[int, tuple[float, float]]], bool]:
    """The steps' windows; where none are marked, one from the first event to the last."""
    marked = [
        (int(e["name"].removeprefix(_STEP)), _span(e))
        for e in ranges
        if _marks_step(e) and e["name"].removeprefix(_STEP).isdigit()
    ]
    if marked or not events:
        return sorted(marked), False
    spans = [_span(e) for e in events]
    return [(0, (min(s for s, _ in spans), max(e for _, e in spans)))], True


@dataclass
class _Open:
    """An op on the stack of its thread: whether it only wraps, and whether others work within."""

    event: dict[str, Any]
    end: float
    collective: bool
    wraps: bool = False
    parent: bool = False


def computing_ops(
    ops: Sequence[dict[str, Any]], ranges: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], bool]]:
    """Of a CPU's ops those that compute: long enough, outside collectives, wrapping no dispatch.

    Ops nest. One that holds the launch of a collective or a tensor subclass' dispatch is not itself
    at work all the while; those within it are.

    Returns:
        Each with whether it is innermost.
    """
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in (*ops, *(e for e in ranges if names.host_collective(e["name"]))):
        threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    done: list[_Open] = []
    for events in threads.values():
        stack: list[_Open] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while stack and stack[-1].end <= event["ts"]:
                stack.pop()
            collective = names.host_collective(event["name"]) is not None
            op = _Open(event, _span(event)[1], collective)
            if collective or names.is_glue(event["name"]):
                for above in stack:
                    above.wraps = True
            elif event["dur"] >= DISPATCH_US and not any(above.collective for above in stack):
                done.append(op)
                for above in stack:
                    above.parent = True
            stack.append(op)
    return [(op.event, not op.parent) for op in done if not op.wraps]
