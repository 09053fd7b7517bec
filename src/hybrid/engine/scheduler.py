"""Who runs next: fair queues of waiting requests, rows for running ones, a token budget a step.

Fair between (tenant, adapter) pairs by the virtual token counter of Sheng et al., "Fairness in
Serving Large Language Models" (OSDI 2024): the queue that was served least goes first, and one
that comes back after a pause is lifted to the least active counter, so that idling saves nothing.
A higher priority goes before fairness, but nobody waits for ever: a request gains one priority for
every `_AGE_STEPS` steps that it waits. When the cache is full the least urgent, latest request
gives its row back and is computed again when there is room (preemption by recompute, as in vLLM,
Kwon et al. 2023).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hybrid.engine.kv_cache import KVCache, Row
from hybrid.engine.lora import Adapter
from hybrid.engine.text import Stream
from hybrid.errors import RateLimited
from hybrid.wire import Sampling

_OUTPUT_WEIGHT = 2.0
"""A generated token costs more than a prompt token, as in the paper."""
_AGE_STEPS = 256
_AHEAD = 64
"""A row is first taken for the prompt and so many tokens of the answer."""

Client = tuple[str, str]
Queue = tuple[Client, int]
"""A client's requests of one priority wait in a queue of their own."""


@dataclass(eq=False)
class Sequence:
    """One request in the engine.

    `computed` tokens of prompt and output are in its row. `tag` is the caller's.
    """

    id: str
    prompt: list[int]
    sampling: Sampling
    adapter: Adapter | None
    tenant: str
    deadline: float | None
    stream: Stream
    draws: torch.Generator | None
    priority: int = 0
    tag: Any = None
    output: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    row: Row | None = None
    arrived: float = field(default_factory=time.monotonic)
    arrived_step: int = 0
    started: float | None = None
    first_token: float | None = None
    preempted: int = 0
    ended: bool = False

    @property
    def client(self) -> Client:
        """Whose counter it is charged to."""
        return self.tenant, self.adapter.digest if self.adapter else ""

    @property
    def queue(self) -> Queue:
        """Where it waits."""
        return self.client, self.priority

    @property
    def known(self) -> int:
        """Tokens of prompt and output; the last one of an output is not computed yet."""
        return len(self.prompt) + len(self.output)

    def tokens(self, first: int, last: int) -> list[int]:
        """Tokens [first, last) of prompt and output."""
        n = len(self.prompt)
        if first >= n:
            return self.output[first - n : last - n]
        return self.prompt[first:last] + self.output[: max(0, last - n)]


@dataclass(frozen=True)
class Item:
    """A request's share of a step: its next `count` tokens; `last` when a token is chosen after."""

    sequence: Sequence
    count: int
    last: bool


class Scheduler:
    """Queues and rows.

    Args:
        cache: the rows.
        max_rows: requests that run together.
        max_queue: requests that may wait.
        step_tokens: tokens of one step, at most; long prompts are run in pieces beside decoding.
        begin: called with a request that has just got a row; it may fill the beginning of it.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_rows: int,
        max_queue: int,
        step_tokens: int = 512,
        begin: Callable[[Sequence], None] = lambda _: None,
    ) -> None:
        self._begin = begin
        self._cache = cache
        self.max_rows = max_rows
        self._max_queue = max_queue
        self._step_tokens = step_tokens
        self._waiting: dict[Queue, deque[Sequence]] = {}
        self._counters: dict[Client, float] = {}
        self._ending: deque[float] = deque(maxlen=32)
        self.running: list[Sequence] = []
        self.waiting = 0
        self.steps = 0
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises:
            RateLimited: `max_queue` wait already; `retry_after` says when one of them has begun, at
                the rate of the last ones.
        """
        if self.waiting >= self._max_queue:
            raise RateLimited(
                f"{self._max_queue} requests wait already (serving.max_queue)",
                retry_after=self._retry_after(),
            )
        client = sequence.client
        active = {*(c for c, _ in self._waiting), *(s.client for s in self.running)}
        if client not in active:
            floor = min((self._counters.get(c, 0.0) for c in active), default=0.0)
            self._counters[client] = max(self._counters.get(client, 0.0), floor)
            if len(self._counters) > 4096:  # clients that have gone; the others keep theirs
                self._counters = {c: v for c, v in self._counters.items() if c in {*active, client}}
        sequence.arrived_step = self.steps
        self._waiting.setdefault(sequence.queue, deque()).append(sequence)
        self.waiting += 1

    def plan(self) -> list[Item]:
        """The next step: a token for everyone who decodes, and pieces of prompts beside it."""
        self.steps += 1
        self._make_room()
        self._admit()
        room = self._step_tokens - sum(s.known - s.computed == 1 for s in self.running)
        reading = [s for s in self.running if s.known - s.computed > 1]
        # Prompts share what decoding leaves, so that a long one cannot hold up a short one.
        shares: dict[Sequence, int] = {}
        for i, s in enumerate(sorted(reading, key=lambda s: s.known - s.computed)):
            shares[s] = min(s.known - s.computed, max(1, room // (len(reading) - i)))
            room -= shares[s]
        return [
            Item(s, n, last=s.computed + n == s.known)
            for s in self.running
            for n in [shares.get(s, 1)]
        ]

    def charge(self, sequence: Sequence) -> None:
        """Count one generated token."""
        self._counters[sequence.client] += _OUTPUT_WEIGHT

    def remove(self, sequence: Sequence) -> None:
        """Take a request out, running or waiting; its row is free at once."""
        if sequence.row is not None:
            self._leave(sequence)
            self._ending.append(time.monotonic())
            return
        queue = self._waiting[sequence.queue]
        queue.remove(sequence)
        self.waiting -= 1
        if not queue:
            del self._waiting[sequence.queue]

    def expired(self, now: float) -> list[Sequence]:
        """Requests whose deadline (UNIX seconds) has passed."""
        everyone = [*self.running, *(s for q in self._waiting.values() for s in q)]
        return [s for s in everyone if s.deadline is not None and s.deadline < now]

    # --- rows -----------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Every running request has room for its next tokens, or somebody is preempted."""
        for s in list(self.running):
            while s.row is not None and not self._cache.grow(s.row, s.known, s.computed):
                victim = max(
                    self.running, key=lambda r: (-self._urgency(r), r.started or 0.0, r.arrived)
                )
                self._preempt(victim)

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.computed = 0
        sequence.preempted += 1
        self.preemptions += 1
        self._waiting.setdefault(sequence.queue, deque()).appendleft(sequence)
        self.waiting += 1

    def _admit(self) -> None:
        while self._waiting and len(self.running) < self.max_rows:
            first = min(
                self._waiting,
                key=lambda q: (-self._urgency(self._waiting[q][0]), self._counters.get(q[0], 0.0)),
            )
            sequence, client = self._waiting[first][0], first[0]
            ahead = max(1, min(_AHEAD, sequence.sampling.max_tokens - len(sequence.output)))
            row = self._cache.take(sequence.known + ahead)
            if row is None:
                return  # whoever is first waits for room; nobody overtakes by being small
            queue = self._waiting[first]
            queue.popleft()
            self.waiting -= 1
            if not queue:
                del self._waiting[first]
            sequence.row = row
            if sequence.started is None:
                sequence.started = time.monotonic()
                self._counters[client] = self._counters.get(client, 0.0) + len(sequence.prompt)
            self.running.append(sequence)
            self._begin(sequence)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._cache.give(sequence.row)
        sequence.row = None
        self.running.remove(sequence)

    def _urgency(self, sequence: Sequence) -> int:
        return sequence.priority + (self.steps - sequence.arrived_step) // _AGE_STEPS

    def _retry_after(self) -> float:
        """Seconds until one more has ended, at the rate of the last ones."""
        if len(self._ending) < 2:
            return 1.0
        each = (self._ending[-1] - self._ending[0]) / (len(self._ending) - 1)
        return min(60.0, max(0.1, each))
