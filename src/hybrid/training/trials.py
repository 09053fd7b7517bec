"""The search of `strategy: auto`: which combination is tried next, and which one is picked and why.

Everything follows from the rows so far, so that a search whose workers have died goes on where it
was: the combination that killed them is a rejected row.

First each way to spread the model is tried as it needs least computing, and with more recomputation
or fewer rows at once where that does not fit. Then what differs in one respect from the fastest so
far, until nothing near is faster; likewise around the best of other ways that are nearly as fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybrid.errors import TrainingError
from hybrid.training.candidates import CHECKPOINTING, Candidate, Space

NEAR = 0.9
"""Ways whose best reaches this share of the fastest are looked at closer, too."""
EQUAL = 0.02
"""Rates that differ by less are the same: of these the one that needs least memory is picked."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one combination.

    Attributes:
        outcome: `measured`; `rejected`, tried and no good; `left out`, not tried; `begun`.
        why: it is not measured.
        memory: whether it is for want of memory: what needs more is not tried either.
        step_s: median seconds of a timed step.
        peak_bytes: most memory that a rank held.
        retries: times that a GPU's allocator had to give up its cache, of all ranks.
    """

    candidate: Candidate
    outcome: str
    why: str = ""
    memory: bool = False
    step_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    retries: int = 0

    def as_record(self) -> dict[str, Any]:
        """As JSON, see `of_record`."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Row:
        """The row that `as_record` was made of."""
        return cls(**{**record, "candidate": Candidate(**record["candidate"])})


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last that was said of each combination, in the order in which they were begun."""
    by_candidate: dict[Candidate, Row] = {}
    for row in rows:
        by_candidate[row.candidate] = row
    return list(by_candidate.values())


class Search:
    """What is tried next.

    Args:
        most: trials, at most; those that were rejected count.
    """

    def __init__(self, space: Space, most: int) -> None:
        self._space = space
        self._most = most

    def next(self, rows: Sequence[Row]) -> Candidate | None:
        """The next combination after these rows (`latest`); None: that was all."""
        if sum(row.outcome != "left out" for row in rows) >= self._most:
            return None
        known = {row.candidate for row in rows}
        return next((c for c in self._wanted(rows) if c not in known), None)

    def _wanted(self, rows: Sequence[Row]) -> Iterator[Candidate]:
        for way in self._space.ways:
            for candidate in self._space.ladder(way):
                yield candidate
                if not any(r.candidate == candidate and r.memory for r in rows):
                    break  # less memory is not what it lacks
        for row in _best_of_ways(rows):
            for near in self._space.neighbours(row.candidate):
                yield near
                if near.micro_batch > row.candidate.micro_batch and _lacks_memory(near, rows):
                    yield from self._space.lighter(near)

    def hopeless(self, candidate: Candidate, rows: Sequence[Row]) -> str | None:
        """Why a combination needs no trial: one that needs no more memory has run out of it."""
        for row in rows:
            if row.memory and row.outcome == "rejected" and _needs_more(candidate, row.candidate):
                return f"needs more memory than {row.candidate}, {_shape(row.candidate)}"
        return None


def _best_of_ways(rows: Sequence[Row]) -> list[Row]:
    """The fastest row of each way that is nearly as fast as the fastest of all."""
    measured = sorted(_measured(rows), key=_rate, reverse=True)
    best: dict[Any, Row] = {}
    for row in measured:
        if _rate(row) >= NEAR * _rate(measured[0]):
            best.setdefault(row.candidate.way, row)
    return list(best.values())


def _lacks_memory(candidate: Candidate, rows: Sequence[Row]) -> bool:
    return any(row.memory for row in rows if row.candidate == candidate)


def _needs_more(c: Candidate, other: Candidate) -> bool:
    """Whether `c` cannot need less memory than `other`, another of the same way."""
    order = CHECKPOINTING.index
    return (
        c.way == other.way
        and c.compile == other.compile
        and (other.reshard or not c.reshard)
        and c.micro_batch >= other.micro_batch
        and order(c.activation_checkpointing) <= order(other.activation_checkpointing)
    )


def _measured(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.outcome == "measured" and row.tokens_per_s]


def _rate(row: Row) -> float:
    return row.tokens_per_s or 0.0


def _shape(candidate: Candidate) -> str:
    return f"{candidate.micro_batch} rows x {candidate.micro_batches}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was picked, why, and the table it was picked from.

    Attributes:
        left_out: what was not tried at all, and why.
        workers: of the trials.
        usd_per_hour: of one worker.
        seconds: that the trials took.
    """

    candidate: Candidate
    why: str
    rows: list[Row]
    left_out: dict[str, str]
    workers: int
    usd_per_hour: float | None
    seconds: float = 0.0

    def as_record(self) -> dict[str, Any]:
        """As JSON, see `of_record`."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Choice:
        """The choice that `as_record` was made of; other keys are passed over."""
        fields = {name: record[name] for name in cls.__dataclass_fields__}
        rows = [Row.of_record(row) for row in record["rows"]]
        candidate = Candidate(**record["candidate"])
        return cls(**{**fields, "candidate": candidate, "rows": rows})


def choose(
    rows: Sequence[Row], left_out: dict[str, str], *, workers: int, usd_per_hour: float | None
) -> Choice:
    """The fastest combination; of those that are as fast, the one that needs least memory.

    Raises:
        TrainingError: none could be measured; says what became of each.
    """
    measured = sorted(_measured(rows), key=_rate, reverse=True)
    if not measured:
        told = [f"{row.candidate}, {_shape(row.candidate)}: {row.why}" for row in rows]
        told += [f"{name}: {why}" for name, why in left_out.items()]
        raise TrainingError(
            "training.strategy: auto: no combination works on these workers:\n  "
            + "\n  ".join(told)
        )
    fastest = measured[0]
    equal = [row for row in measured if _rate(row) >= (1 - EQUAL) * _rate(fastest)]
    picked = min(equal, key=lambda row: row.peak_bytes or 0)
    why = f"fastest of {len(measured)} measured"
    if picked is not fastest:
        why = f"as fast as {fastest.candidate}, {_shape(fastest.candidate)}, in less memory"
    others = [row for row in measured if row.candidate.way != picked.candidate.way]
    if others:
        ratio = _rate(picked) / _rate(others[0])
        why += f"; {ratio:.2f} times the best of another strategy, {others[0].candidate}"
    if failed := sum(row.outcome == "rejected" for row in rows):
        why += f"; {failed} tried and rejected"
    return Choice(
        candidate=picked.candidate,
        why=why,
        rows=list(rows),
        left_out=left_out,
        workers=workers,
        usd_per_hour=usd_per_hour,
    )


HEADS = ("", "combination", "rows x micro-batches", "tokens/s", "memory", "tokens/USD", "result")


def cells(choice: Choice) -> list[list[str]]:
    """The table of a choice by `HEADS`: the fastest first, then what was not measured, and why."""
    table = []
    order = sorted(choice.rows, key=lambda row: (row.outcome != "measured", -_rate(row)))
    for row in order:
        dollars = (choice.usd_per_hour or 0.0) * choice.workers
        table.append(
            [
                "*" if row.candidate == choice.candidate else "",
                str(row.candidate),
                f"{row.candidate.micro_batch} x {row.candidate.micro_batches}",
                f"{_rate(row):,.0f}" if row.tokens_per_s else "-",
                f"{row.peak_bytes / 2**30:.2f} GiB" if row.peak_bytes else "-",
                f"{_rate(row) * 3600 / dollars:,.0f}" if row.tokens_per_s and dollars else "-",
                f"{row.outcome}: {row.why}" if row.why else row.outcome,
            ]
        )
    for name, why in choice.left_out.items():
        table.append(["", name, "-", "-", "-", "-", f"left out: {why}"])
    return table


def lines(choice: Choice) -> list[str]:
    """The table as plain text, and what was picked."""
    table = [list(HEADS), *cells(choice)]
    if choice.usd_per_hour is None:
        table = [[cell for n, cell in enumerate(row) if n != 5] for row in table]
    widths = [max(len(row[n]) for row in table) for n in range(len(table[0]) - 1)]
    rows = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in table
    ]
    return [*rows, picked(choice)]


def picked(choice: Choice) -> str:
    """One line: what was picked, and why."""
    c = choice.candidate
    return f"picked {c}, {_shape(c)} on {choice.workers} workers: {choice.why}"


def shown(choice: Choice) -> dict[str, Any]:
    """What was picked, in words, and the table it was picked from: `heads` and `rows`."""
    return {"picked": picked(choice), "heads": list(HEADS), "rows": cells(choice)}
