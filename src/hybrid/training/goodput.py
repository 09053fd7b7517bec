"""Where the wall time of a run goes: a stopwatch for the loop, and the account of all attempts.

Goodput is the share of a run's wall time in which it got further. Everything is computed from the
progress file, so that an attempt that was killed without a word is accounted for as well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["step", "data", "checkpoint", "evaluation", "compile", "trials", "export", "idle"]
"""What the loop can say it is doing; moments outside of any phase are `other`."""

CATEGORIES = {
    "productive": "productive steps",
    "recomputed": "recomputed or skipped steps",
    "data": "waiting for data",
    "checkpoint": "checkpoint stalls",
    "evaluation": "held-out evaluation",
    "startup": "start-up",
    "compile": "compilation",
    "trials": "strategy trials",
    "idle": "idle after faults and moves",
    "export": "export and publication",
    "other": "other",
}
"""Where wall time goes, and what a reader sees of each. Every second is in exactly one."""

_AFTER_NOTICE = {"move": "moved", "reclaim": "reclaimed"}


class Stopwatch:
    """Seconds of one thread by phase; within nested phases time counts for the innermost.

    It reads a clock and nothing else: no synchronisation with a device.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open = ["other"]
        self._spent: dict[str, float] = {}
        self._since = clock()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count the block within as `name`."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap; they add up to all the time since then."""
        self._charge()
        spent, self._spent = self._spent, {}
        return {name: round(seconds, 6) for name, seconds in spent.items()}

    def _charge(self) -> None:
        now = self._clock()
        name = self._open[-1]
        self._spent[name] = self._spent.get(name, 0.0) + now - self._since
        self._since = now


@dataclass
class Attempt:
    """One start of the workers, up to their end or to the last that was heard of them."""

    started: float
    from_step: int
    world_size: int
    strategy: str
    device: str
    last_step: int
    ended: float
    outcome: str = "killed"
    """`finished`, `failed`, `interrupted`; `moved` or `reclaimed` after a notice; `killed` where
    nobody could say."""


@dataclass
class Account:
    """The wall time of a run by category, and what was got for it.

    Attributes:
        seconds: by category (`CATEGORIES`); together `wall_s`.
        wall_s: from the first launch to the end, less `paused_s`.
        paused_s: between launches, after the earlier one had ended in order: nothing was held.
        worker_s: wall seconds times workers.
        steps, tokens: that count; recomputed ones are in `recomputed_steps`.
        step_flops: of all steps done, recomputed ones too; over `step_peak` it is the MFU.
        step_peak: what the hardware could have done in the seconds of those steps.
        wall_peak: what it could have done in all the wall time.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    wall_s: float = 0.0
    paused_s: float = 0.0
    worker_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    recomputed_steps: int = 0
    step_flops: float = 0.0
    useful_flops: float = 0.0
    step_peak: float = 0.0
    wall_peak: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Productive seconds over wall seconds, 0..1."""
        return self.seconds["productive"] / self.wall_s if self.wall_s else 0.0


def account(records: Sequence[dict[str, Any]]) -> Account:
    """Account for every second between the first and the last record of a progress file.

    The time between two records is what the later one says was spent (`spent`, a stopwatch's lap);
    what remains of it belongs to the event: start-up before the first `start` of a launch, idle
    after a fault before any other, and so on. A step done before is recomputed. A launch that
    follows one without an `ended` record comes after a fault: the time between is idle.
    """
    book = _Book()
    for record in records:
        book.enter(record)
    book.close_attempt()
    return book.account


class _Book:
    """The state of `account`: where the last record left off."""

    def __init__(self) -> None:
        self.account = Account()
        self.at: float | None = None  # the time up to which all is accounted for
        self.workers = 1
        self.peak = 0.0
        self.flops_per_token = 0.0
        self.compiles = False
        self.in_order = True  # nobody runs, and nobody was killed
        self.fresh = True  # the workers of this launch have not been heard of yet
        self.farthest = 0
        self.step_seconds: list[tuple[str, float]] = []  # of this attempt, by category

    def enter(self, record: dict[str, Any]) -> None:
        event, now = record["event"], float(record["time"])
        spent: dict[str, float] = record.get("spent", {})
        if event == "launch":
            self._launch(record, float(record.get("began", now)))
        elif event == "start":
            self._start(record, now, spent)
        elif event == "step":
            self._step(record, now, spent)
        elif event == "ended":
            self._ended(record, now)
        else:
            rest = "export" if event == "finished" else "other"
            self._pass(now, spent, rest, step_is="recomputed")  # a step that was left out
        if self.account.attempts:
            if event == "finished":
                self.account.attempts[-1].outcome = "finished"
            elif event == "notice":
                self.account.attempts[-1].outcome = _AFTER_NOTICE[record["kind"]]

    def _launch(self, record: dict[str, Any], began: float) -> None:
        self.close_attempt()
        if self.at is None:
            self.at = began
        elif self.in_order:
            self.account.paused_s += max(0.0, began - self.at)
            self.at = max(self.at, began)
        else:
            self._pass(began, {}, "idle")
        self.workers = int(record.get("workers", self.workers))
        self.in_order, self.fresh = False, True
        self._pass(float(record["time"]), {}, "startup")

    def _start(self, record: dict[str, Any], now: float, spent: dict[str, float]) -> None:
        self.close_attempt()
        if self.at is None:  # without a driver: the stopwatch knows when it began
            self.at = now - sum(spent.values())
        self.workers = int(record["world_size"])
        self.peak = float(record.get("peak_flops", 0.0))
        self._pass(now, spent, "startup" if self.fresh else "idle")
        self.fresh, self.in_order = False, False
        self.flops_per_token = float(record.get("flops_per_token", 0.0))
        self.compiles = bool(record.get("compile", False))
        self.account.attempts.append(
            Attempt(
                started=now,
                from_step=int(record["step"]),
                world_size=self.workers,
                strategy=str(record.get("strategy", "")),
                device=str(record.get("device", "")),
                last_step=int(record["step"]),
                ended=now,
            )
        )

    def _step(self, record: dict[str, Any], now: float, spent: dict[str, float]) -> None:
        step, tokens = int(record["step"]), int(record.get("tokens", 0))
        again = step <= self.farthest
        category = "recomputed" if again else "productive"
        before = self.account.seconds[category]
        self._pass(now, spent, "other", step_is=category)
        self.step_seconds.append((category, self.account.seconds[category] - before))
        flops = tokens * self.flops_per_token
        self.account.step_flops += flops
        self.account.step_peak += self.peak * (spent.get("step", 0.0) + spent.get("data", 0.0))
        if again:
            self.account.recomputed_steps += 1
        else:
            self.account.steps += 1
            self.account.tokens += tokens
            self.account.useful_flops += flops
            self.farthest = step
        if self.account.attempts:
            self.account.attempts[-1].last_step = step

    def _ended(self, record: dict[str, Any], now: float) -> None:
        outcome = str(record.get("outcome", "failed"))
        attempts = self.account.attempts
        finished = bool(attempts) and attempts[-1].outcome == "finished"
        if self.fresh:
            rest = "startup"
        else:
            rest = "export" if finished else "idle"
            if not finished:
                attempts[-1].outcome = outcome
        self._pass(now, {}, rest)
        self.close_attempt()
        self.in_order = True

    def _pass(
        self, now: float, spent: dict[str, float], rest: str, step_is: str = "productive"
    ) -> None:
        """Account for the time up to `now`: `spent` first, the remainder as `rest`."""
        assert self.at is not None
        delta = max(0.0, now - self.at)
        named: dict[str, float] = {}
        for name, seconds in spent.items():
            category = step_is if name == "step" else name
            if category in CATEGORIES and category != "other":
                named[category] = named.get(category, 0.0) + seconds
        total = sum(named.values())
        scale = min(1.0, delta / total) if total else 0.0  # clocks differ, a second is a second
        for category, seconds in named.items():
            self.account.seconds[category] += seconds * scale
        self.account.seconds[rest] += delta - total * scale
        self.account.wall_s += delta
        self.account.worker_s += delta * self.workers
        self.account.wall_peak += delta * self.peak
        self.at = max(self.at, now)
        if self.account.attempts and not self.fresh:
            self.account.attempts[-1].ended = self.at

    def close_attempt(self) -> None:
        """A compiled model's first step is mostly compilation: all above the usual step."""
        steps, self.step_seconds = self.step_seconds, []
        if self.compiles and len(steps) > 2:
            category, first = steps[0]
            excess = max(0.0, first - statistics.median(s for _, s in steps[1:]))
            self.account.seconds[category] -= excess
            self.account.seconds["compile"] += excess
            self.account.step_peak -= excess * self.peak
