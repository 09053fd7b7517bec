"""A rank's memory over its recorded steps, by category; its peak, and who holds it."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import DataError
from hybrid.planning.allocations import CATEGORIES, Block, blocks_of, phase_at, phases_of
from hybrid.planning.trace import load

POINTS = 240
"""Of a timeline: of each stretch the moment when most is held."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Blocks alike at the peak: of one category, from modules that differ in a number only.

    Attributes:
        owner: module or parameter, numbers of layers as `*`.
        op: what allocated most of it; "" where it was there before.
    """

    category: str
    owner: str
    op: str
    bytes: int
    blocks: int

    def __str__(self) -> str:
        by = f" ({self.op})" if self.op else ""
        return f"{self.owner or 'no module'}{by}"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One rank's memory. Bytes and seconds from the first recorded step's beginning.

    Attributes:
        timeline: (second, bytes by category in the order of `CATEGORIES`), the peak among them.
        peak: bytes by category at the peak.
        holders: who holds it, most first.
        unseen: bytes allocated of which no free was told; they count until their step ends.
    """

    path: Path
    rank: int
    timeline: tuple[tuple[float, tuple[int, ...]], ...]
    peak: dict[str, int]
    peak_at: float
    peak_step: int
    peak_phase: str
    step_peaks: dict[int, int]
    holders: tuple[Holder, ...]
    unseen: int

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.peak.values())

    @property
    def category(self) -> str:
        """Which category holds most at the peak."""
        return max(self.peak, key=lambda name: self.peak[name])

    @property
    def owner(self) -> Holder:
        """Who holds most of that category."""
        return next(h for h in self.holders if h.category == self.category)


def read_memory(path: Path) -> Memory:
    """A rank's memory from its trace.

    Raises:
        DataError: it is no trace, marks no steps, or no allocations were recorded in it.
    """
    trace = load(path)
    steps = sorted(
        (e["ts"], e["ts"] + e["dur"], int(e["name"].removeprefix("ProfilerStep#")))
        for e in trace["traceEvents"]
        if isinstance(e, dict)
        and re.fullmatch(r"ProfilerStep#\d+", str(e.get("name")))
        and e.get("cat") == "user_annotation"
    )
    if not steps:
        raise DataError(f"{path}: the trace marks no steps (ProfilerStep#)")
    blocks = blocks_of(trace, [(start, end) for start, end, _ in steps])
    if not blocks:
        raise DataError(
            f"{path}: no allocations were recorded: profile with --memory"
            " (torch.profiler: profile_memory=True)"
        )
    begin, end = steps[0][0], steps[-1][1]
    samples = _samples(blocks, begin, end)
    at, held = max(samples, key=lambda s: sum(s[1]))
    alive = [b for b in blocks if b.start <= at < b.end]
    return Memory(
        path=path,
        rank=int((trace.get("distributedInfo") or {}).get("rank", 0)),
        timeline=tuple(((t - begin) / 1e6, h) for t, h in _thinned(samples, begin, end)),
        peak=dict(zip(CATEGORIES, held, strict=True)),
        peak_at=(at - begin) / 1e6,
        peak_step=next((n for s, e, n in steps if s <= at < e), steps[-1][2]),
        peak_phase=phase_at(phases_of(trace), at),
        step_peaks={n: _most(samples, s, e) for s, e, n in steps},
        holders=_holders(alive),
        unseen=sum(b.bytes for b in blocks if b.unseen and b.start >= begin),
    )


def _samples(
    blocks: Sequence[Block], begin: float, end: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Bytes by category after each change from `begin` on, before `end`."""
    index = {name: i for i, name in enumerate(CATEGORIES)}
    changes: list[tuple[float, int, int]] = [(begin, 0, 0)]
    for block in blocks:
        if block.end > begin and block.start < end:
            at = index[block.category]
            changes.append((max(block.start, begin), at, block.bytes))
            if block.end < end:
                changes.append((block.end, at, -block.bytes))
    held = [0] * len(CATEGORIES)
    done: list[tuple[float, tuple[int, ...]]] = []
    for ts, at, size in sorted(changes, key=lambda c: c[0]):
        held[at] += size
        if done and done[-1][0] == ts:
            done.pop()
        done.append((ts, tuple(held)))
    return done


def _most(samples: Sequence[tuple[float, tuple[int, ...]]], start: float, end: float) -> int:
    """The most that is held between two moments, what was held before the first included."""
    first = max(bisect.bisect_right(samples, start, key=lambda s: s[0]) - 1, 0)
    last = bisect.bisect_left(samples, end, key=lambda s: s[0])
    return max(sum(held) for _, held in samples[first : max(last, first + 1)])


def _thinned(
    samples: Sequence[tuple[float, tuple[int, ...]]], begin: float, end: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Of each of `POINTS` stretches the sample with most; what is held before goes on."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {}
    for sample in samples:
        stretch = min(int((sample[0] - begin) / ((end - begin) or 1.0) * POINTS), POINTS - 1)
        if stretch not in best or sum(sample[1]) > sum(best[stretch][1]):
            best[stretch] = sample
    return [best[n] for n in sorted(best)]


def _holders(alive: Sequence[Block]) -> tuple[Holder, ...]:
    groups: dict[tuple[str, str], list[Block]] = {}
    for block in alive:
        owner = block.owner
        if block.category in ("parameters", "gradients", "optimiser") and not block.op:
            owner = owner.rpartition(".")[0] or owner  # the module of the parameter
        groups.setdefault((block.category, _NUMBER.sub("*", owner)), []).append(block)
    found = []
    for (category, owner), blocks in groups.items():
        by_op: dict[str, int] = {}
        for block in blocks:
            by_op[block.op] = by_op.get(block.op, 0) + block.bytes
        found.append(
            Holder(
                category=category,
                owner=owner,
                op=max(by_op, key=lambda op: by_op[op]),
                bytes=sum(b.bytes for b in blocks),
                blocks=len(blocks),
            )
        )
    return tuple(sorted(found, key=lambda h: -h.bytes))


def as_json(memory: Memory, most: int = 20) -> dict[str, Any]:
    """Plain data: bytes and seconds throughout."""
    return {
        "rank": memory.rank,
        "trace": str(memory.path),
        "peak": {
            "bytes": memory.total,
            "by_category": memory.peak,
            "second": memory.peak_at,
            "step": memory.peak_step,
            "phase": memory.peak_phase,
            "owner": {
                "category": memory.category,
                "of_category": vars(memory.owner),
                "holders": [vars(h) for h in memory.holders[:most]],
            },
        },
        "step_peaks": [{"step": n, "bytes": b} for n, b in memory.step_peaks.items()],
        "frees_unseen_bytes": memory.unseen,
        "timeline": [
            {"second": t, **dict(zip(CATEGORIES, held, strict=True))} for t, held in memory.timeline
        ],
    }


def size(count: float) -> str:
    """Bytes with a unit."""
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit:
            return f"{count / limit:.4g} {unit}"
    return f"{count:.0f} B"


def told(memory: Memory) -> list[str]:
    """What to say of it, a sentence a line."""
    parts = ", ".join(f"{c} {size(b)}" for c, b in memory.peak.items() if b)
    own = memory.owner
    lines = [
        f"rank {memory.rank}: {size(memory.total)} at the peak, in step {memory.peak_step}"
        f" ({memory.peak_phase or 'between phases'}): {parts}",
        f"most of it are {memory.category}; most of those {size(own.bytes)} of {own}, in"
        f" {own.blocks} blocks",
    ]
    if memory.unseen > 0.01 * memory.total * len(memory.step_peaks):
        lines.append(
            f"{size(memory.unseen)} were freed where the profiler does not look (gloo's threads);"
            " they count until their step ends, so the peak may be told too high"
        )
    return lines
