"""Blocks of an allocator's memory, from the `[memory]` events of a PyTorch profiler's trace.

The trace tells each allocation and free by address. What a block is for comes from marks that the
training loop leaves in the trace (`hybrid_memory`, see there): addresses of what is held at known
moments; else from the phase of the step it was allocated in. Whose it is comes from the ranges of
the modules' forward passes, and for the backward pass from the numbers by which autograd's nodes
are tied to the operators they undo.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

CATEGORIES = ("parameters", "gradients", "optimiser", "activations", "input", "other")
KEY, MARK, FORWARD = "hybrid_memory", "hybrid::mark ", "hybrid::forward "
LASTING = frozenset(("parameters", "gradients", "optimiser"))
_STEP = "ProfilerStep#"
_BACKWARD = "autograd::engine::evaluate_function: "
_GATHER = re.compile(r"all_?gather|FSDP::(?:pre_forward|pre_backward|root_pre_forward)", re.I)
_REDUCE = re.compile(r"reduce_?scatter|chunk_cat|FSDP::post_backward", re.I)
_OWN = re.compile(r"^(?:hybrid::|ProfilerStep#)")


@dataclass(kw_only=True)
class Block:
    """Memory at one address from its allocation to its free, in microseconds of the trace.

    Attributes:
        start: -inf of one that was there before the recording.
        end: inf of one that is there after it.
        owner: the module, or of parameters, gradients and state the parameter; "" if not known.
        op: what allocated it.
        unseen: its free was not told: a thread made it that the profiler does not watch.
    """

    address: int
    bytes: int
    start: float
    end: float = math.inf
    category: str = ""
    owner: str = ""
    op: str = ""
    unseen: bool = False


@dataclass
class _Place:
    """Where in the program an allocation happened."""

    module: str = ""
    op: str = ""
    sequence: int | None = None
    ranges: tuple[str, ...] = ()


@dataclass
class _Thread:
    """Events of one thread by time: those that last, and moments (index of a memory event)."""

    spans: list[dict[str, Any]] = field(default_factory=list)
    points: list[tuple[float, int]] = field(default_factory=list)


def blocks_of(trace: dict[str, Any], steps: Sequence[tuple[float, float]]) -> list[Block]:
    """All blocks of the trace's device, sorted by start.

    Args:
        trace: as `trace.load` gives it.
        steps: windows of the recorded steps, in order. A block of which no free was told and that
            is not known to be held ends with its step.
    """
    events = _memory_events(trace)
    if not events:
        return []
    places = _places(trace["traceEvents"], events)
    found = _paired(events, places)
    _name(found, trace, events)
    if events[0]["args"].get("Device Type"):
        _add_untold(found, events[0]["args"])
    phases = _phases(trace["traceEvents"])
    ends = [end for _, end in steps]
    for block in found:
        if not block.category:
            block.category = _by_place(block, phases)
        if (
            block.category not in LASTING
            and block.start > -math.inf
            and (block.unseen or block.end == math.inf)
        ):
            at = bisect.bisect_right(ends, block.start)
            if at < len(ends):
                block.unseen, block.end = True, min(block.end, ends[at])
    return sorted(found, key=lambda b: b.start)


def _memory_events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the accelerator where there are any, else of the host; by time."""
    told = [
        e
        for e in trace["traceEvents"]
        if isinstance(e, dict)
        and e.get("name") == "[memory]"
        and isinstance(e.get("args"), dict)
        and isinstance(e.get("ts"), int | float)
        and all(isinstance(e["args"].get(key), int) for key in ("Addr", "Bytes"))
    ]
    kinds = {e["args"].get("Device Type", 0) for e in told}
    kind = max(kinds, default=0)
    return sorted(
        (e for e in told if e["args"].get("Device Type", 0) == kind), key=lambda e: e["ts"]
    )


def _spans(events: Iterable[Any]) -> Iterable[dict[str, Any]]:
    kinds = ("cpu_op", "user_annotation")
    return (e for e in events if isinstance(e, dict) and e.get("cat") in kinds and "dur" in e)


def _places(events: Sequence[Any], memory: Sequence[dict[str, Any]]) -> list[_Place]:
    """The place of each memory event, from the ranges and ops that enclose it on its thread."""
    threads: dict[Any, _Thread] = {}
    for event in _spans(events):
        threads.setdefault(event.get("tid"), _Thread()).spans.append(event)
    for index, event in enumerate(memory):
        threads.setdefault(event.get("tid"), _Thread()).points.append((event["ts"], index))
    found = [_Place() for _ in memory]
    modules: dict[int, str] = {}
    for thread in threads.values():
        _walk(thread, found, modules)
    for place in found:
        if not place.module and place.sequence is not None:
            place.module = modules.get(place.sequence, "")
    return found


def _walk(thread: _Thread, found: list[_Place], modules: dict[int, str]) -> None:
    """Go through a thread with the stack of what is open; note modules by sequence number."""
    spans = sorted(thread.spans, key=lambda e: (e["ts"], -e["dur"]))
    stack: list[dict[str, Any]] = []
    at = 0
    for ts, index in [*thread.points, (math.inf, -1)]:
        while at < len(spans) and spans[at]["ts"] <= ts:
            span = spans[at]
            at += 1
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= span["ts"]:
                stack.pop()
            stack.append(span)
            number = (span.get("args") or {}).get("Sequence number")
            if isinstance(number, int) and span["cat"] == "cpu_op":
                place = _place(stack)
                if place.module:
                    modules[number] = place.module
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= ts:
            stack.pop()
        if index >= 0:
            found[index] = _place(stack)


def _place(stack: Sequence[dict[str, Any]]) -> _Place:
    """The innermost module or node of autograd, and the outermost op within it."""
    place = _Place(ranges=tuple(str(e["name"]) for e in stack))
    for event in stack:
        name = str(event["name"])
        if name.startswith(FORWARD):
            place.module, place.op, place.sequence = name.removeprefix(FORWARD), "", None
            place.module = place.module or "(the model)"
        elif name.startswith(_BACKWARD):
            place.module, place.op = "", name.removeprefix(_BACKWARD)
            place.sequence = (event.get("args") or {}).get("Sequence number")
        elif not place.op and event["cat"] == "cpu_op" and not _OWN.match(name):
            place.op = name
    return place


def _paired(events: Sequence[dict[str, Any]], places: Sequence[_Place]) -> list[Block]:
    """Allocations with their frees. One whose address is given out again had ended unseen."""
    done: list[Block] = []
    alive: dict[int, Block] = {}
    starts: list[int] = []  # addresses of `alive`, sorted
    for event, place in zip(events, places, strict=True):
        ts, address, size = event["ts"], event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            at = bisect.bisect_left(starts, address)
            first = at
            if at and starts[at - 1] + alive[starts[at - 1]].bytes > address:
                first = at - 1
            last = at
            while last < len(starts) and starts[last] < address + size:
                last += 1
            for gone in starts[first:last]:
                ended = alive.pop(gone)
                ended.end, ended.unseen = ts, True
            block = Block(address=address, bytes=size, start=ts, owner=place.module, op=place.op)
            if any(_GATHER.search(r) for r in place.ranges):
                block.category = "parameters"
            elif any(_REDUCE.search(r) for r in place.ranges):
                block.category = "gradients"
            starts[first:last] = [address]
            alive[address] = block
            done.append(block)
        elif size < 0 and address in alive:
            alive.pop(address).end = ts
            starts.pop(bisect.bisect_left(starts, address))
        elif size < 0:
            done.append(Block(address=address, bytes=-size, start=-math.inf, end=ts))
    return done


def _name(found: list[Block], trace: dict[str, Any], events: Sequence[dict[str, Any]]) -> None:
    """Give blocks what the marks say of their addresses; add those that were there before."""
    notes = trace.get(KEY)
    if not isinstance(notes, dict):
        return
    names, marks = notes["names"], notes["marks"]
    by_address: dict[int, list[Block]] = {}
    for known in sorted(found, key=lambda b: b.start):
        by_address.setdefault(known.address, []).append(known)
    moments = sorted(
        (e["ts"], int(e["name"].removeprefix(MARK)))
        for e in _spans(trace["traceEvents"])
        if str(e["name"]).startswith(MARK)
    )
    addresses = sorted((e["args"]["Addr"], e["ts"]) for e in events if e["args"]["Bytes"] > 0)
    marked: set[int] = set()
    for ts, number in moments:
        for category, name, address, size in marks[number]:
            here = by_address.setdefault(address, [])
            block: Block | None = next((b for b in reversed(here) if b.start <= ts < b.end), None)
            if block is None:
                # Of numpy's memory, say, which is not the allocator's; or it was there before.
                if category == "input":
                    continue
                before = max((b.end for b in here if b.end <= ts), default=-math.inf)
                again = bisect.bisect_right(addresses, (address, ts))
                block = Block(address=address, bytes=size, start=before if here else -math.inf)
                while again < len(addresses) and addresses[again][0] < address + size:
                    if addresses[again][1] > ts:
                        block.end = min(block.end, addresses[again][1])
                    again += 1
                here.append(block)
                found.append(block)
            if id(block) not in marked:
                marked.add(id(block))
                block.category = category
                if category != "input":
                    block.owner, block.op = names[name] or "(several)", ""


def _add_untold(found: list[Block], first: dict[str, Any]) -> None:
    """What an accelerator's allocator held when the recording began, beyond the blocks known."""
    total = first.get("Total Allocated")
    if isinstance(total, int):
        known = sum(b.bytes for b in found if b.start == -math.inf)
        if (rest := total - max(first["Bytes"], 0) - known) > 0:
            found.append(Block(address=0, bytes=rest, start=-math.inf, category="other"))


def _phases(events: Iterable[Any]) -> list[tuple[float, float, str]]:
    """Ranges of the thread that marks the steps, outermost only, by start."""
    spans = [e for e in _spans(events) if e["cat"] == "user_annotation"]
    main = next((e.get("tid") for e in spans if str(e["name"]).startswith(_STEP)), None)
    done: list[tuple[float, float, str]] = []
    for event in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        name = str(event["name"])
        if event.get("tid") != main or _OWN.match(name):
            continue
        if not done or event["ts"] >= done[-1][1]:
            done.append((event["ts"], event["ts"] + event["dur"], name))
    return done


def phase_at(phases: Sequence[tuple[float, float, str]], ts: float) -> str:
    """The phase of a moment; "" between two."""
    at = bisect.bisect_right(phases, (ts, math.inf, "")) - 1
    return phases[at][2] if at >= 0 and ts < phases[at][1] else ""


def phases_of(trace: dict[str, Any]) -> list[tuple[float, float, str]]:
    """The phases of the steps, (start, end, name) in microseconds, in order."""
    return _phases(trace["traceEvents"])


def _by_place(block: Block, phases: Sequence[tuple[float, float, str]]) -> str:
    phase = phase_at(phases, block.start)
    if "forward" in phase or "backward" in phase:
        return "activations"
    return "input" if phase == "data" else "other"
