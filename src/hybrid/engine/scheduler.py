"""Who runs next: fair queues of waiting requests, slots for running ones, a token budget a step.

Fair between (tenant, adapter) pairs by the virtual token counter of Sheng et al., "Fairness in
Serving Large Language Models" (OSDI 2024): the queue that was served least goes first, and one
that comes back after a pause is lifted to the least active counter, so that idling saves nothing.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from hybrid.engine.kv_cache import KVCache
from hybrid.engine.lora import Adapter
from hybrid.engine.text import Stream
from hybrid.errors import RateLimited
from hybrid.wire import Sampling

_OUTPUT_WEIGHT = 2.0
"""A generated token costs more than a prompt token, as in the paper."""


@dataclass(eq=False)
class Sequence:
    """One request in the engine.

    `computed` tokens of prompt and output are in its slot. `tag` is the caller's.
    """

    id: str
    prompt: list[int]
    sampling: Sampling
    adapter: Adapter | None
    tenant: str
    deadline: float | None
    stream: Stream
    draws: torch.Generator | None
    tag: Any = None
    output: list[int] = field(default_factory=list)
    computed: int = 0
    slot: int | None = None
    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    ended: bool = False

    @property
    def client(self) -> tuple[str, str]:
        """Whose counter it is charged to."""
        return self.tenant, self.adapter.digest if self.adapter else ""

    @property
    def pending(self) -> list[int]:
        """Tokens to run before the next one can be chosen."""
        tokens = self.prompt + self.output if self.output else self.prompt
        return tokens[self.computed :]


@dataclass(frozen=True)
class Item:
    """A request's share of a step: its next `tokens`; `last` when a token is chosen after them."""

    sequence: Sequence
    tokens: list[int]
    last: bool


class Scheduler:
    """Queues and slots.

    Args:
        cache: the slots.
        max_queue: requests that may wait.
        step_tokens: tokens of one step, at most; long prompts are run in pieces beside decoding.
    """

    def __init__(self, cache: KVCache, *, max_queue: int, step_tokens: int = 512) -> None:
        self._cache = cache
        self._max_queue = max_queue
        self._step_tokens = step_tokens
        self._waiting: dict[tuple[str, str], deque[Sequence]] = {}
        self._counters: dict[tuple[str, str], float] = {}
        self.running: list[Sequence] = []

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return sum(map(len, self._waiting.values()))

    def add(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises:
            RateLimited: `max_queue` wait already.
        """
        if self.waiting >= self._max_queue:
            raise RateLimited(
                f"{self._max_queue} requests wait already (serving.max_queue)", retry_after=1
            )
        client = sequence.client
        active = {*self._waiting, *(s.client for s in self.running)}
        if client not in active:
            floor = min((self._counters.get(c, 0.0) for c in active), default=0.0)
            self._counters[client] = max(self._counters.get(client, 0.0), floor)
        self._waiting.setdefault(client, deque()).append(sequence)

    def plan(self) -> list[Item]:
        """The next step: a token for everyone who decodes, and pieces of prompts beside it.

        Items are sorted by adapter, the base last, so that each adapter's rows are one segment.
        """
        while self._cache.free and self._waiting:
            client = min(self._waiting, key=lambda c: self._counters.get(c, 0.0))
            queue = self._waiting[client]
            sequence = queue.popleft()
            if not queue:
                del self._waiting[client]
            sequence.slot = self._cache.take()
            self._counters[client] = self._counters.get(client, 0.0) + len(sequence.prompt)
            self.running.append(sequence)
        work = [(s, s.pending) for s in self.running]
        decoding = sum(len(pending) == 1 for _, pending in work)
        # Prompts share what decoding leaves, so that a long one cannot hold up a short one.
        share = max(1, (self._step_tokens - decoding) // max(1, len(work) - decoding))
        items = [
            Item(s, pending[:share], last=len(pending) <= share)
            if len(pending) > 1
            else Item(s, pending, last=True)
            for s, pending in work
        ]
        items.sort(key=lambda i: (i.sequence.adapter is None, i.sequence.client[1]))
        return items

    def charge(self, sequence: Sequence) -> None:
        """Count one generated token."""
        self._counters[sequence.client] += _OUTPUT_WEIGHT

    def remove(self, sequence: Sequence) -> None:
        """Take a request out, running or waiting; its slot is free at once."""
        if sequence.slot is not None:
            self._cache.give(sequence.slot)
            sequence.slot = None
            self.running.remove(sequence)
            return
        queue = self._waiting[sequence.client]
        queue.remove(sequence)
        if not queue:
            del self._waiting[sequence.client]

    def expired(self, now: float) -> list[Sequence]:
        """Requests whose deadline (UNIX seconds) has passed."""
        everyone = [*self.running, *(s for q in self._waiting.values() for s in q)]
        return [s for s in everyone if s.deadline is not None and s.deadline < now]
