"""Adapters in memory: loaded when asked for, kept within a budget, never taken from a request.

Of one event loop. What holds an adapter (`hold`) keeps it; those that nothing holds leave in the
order in which they were last used, when the budget is exceeded, and are loaded again on demand.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from hybrid.errors import AdapterRefused, HybridError
from hybrid.serving.backend import AdapterRef, Backend

log = logging.getLogger("hybrid.serving")

REFUSED_S = 60.0
"""A refused digest is refused from memory for so long before its files are read again."""


@dataclass(eq=False)
class _Entry:
    """An adapter that is loaded, or on its way. size: bytes, None until it is there."""

    name: str
    loading: asyncio.Task[None]
    holds: int = 0
    size: int | None = None


class AdapterCache:
    """Adapters of one backend.

    Args:
        backend: loads and unloads them.
        budget: bytes of loaded adapters above which unused ones leave. What is in use or pinned
            stays, so that they may take more for as long.
    """

    def __init__(self, backend: Backend, budget: int) -> None:
        self._backend = backend
        self._budget = budget
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the longest unused first
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, tuple[float, str]] = {}
        self._served: frozenset[str] | None = None
        self._pinned: frozenset[str] = frozenset()
        self._bytes = 0
        self._counts: Counter[str] = Counter()

    @property
    def counters(self) -> dict[str, float]:
        """adapter_loads, adapter_evictions (for the budget), adapter_refusals (of requests), and
        adapter_bytes, which is now."""
        names = ("adapter_loads", "adapter_evictions", "adapter_refusals")
        return {**{n: self._counts[n] for n in names}, "adapter_bytes": self._bytes}

    @asynccontextmanager
    async def hold(self, adapter: AdapterRef) -> AsyncIterator[None]:
        """Keep an adapter loaded until the block ends; loads it where it is not.

        One load serves all who wait for it; it goes on when one of them, or all, leave.

        Raises:
            AdapterRefused: it does not fit, or it did not within the last REFUSED_S.
        """
        digest = adapter.digest
        self._check_refused(digest)
        entry = self._entries.get(digest)
        if entry is None:
            task = asyncio.create_task(self._load(adapter), name=f"load {adapter.name}")
            task.add_done_callback(lambda t: t.cancelled() or t.exception())  # all may have left
            entry = self._entries[digest] = _Entry(adapter.name, task)
        entry.holds += 1
        self._entries.move_to_end(digest)
        try:
            try:
                await asyncio.shield(entry.loading)
            except AdapterRefused:
                self._counts["adapter_refusals"] += 1
                raise
            yield
        finally:
            entry.holds -= 1
            self._trim()

    def serve(self, digests: Iterable[str], pinned: Iterable[str] = ()) -> None:
        """Say what the release consists of: others leave once nothing holds them.

        Args:
            pinned: digests that never leave for the budget.
        """
        self._served, self._pinned = frozenset(digests), frozenset(pinned)
        self._trim()

    async def close(self) -> None:
        """Wait for what is on its way in or out."""
        tasks = [*(e.loading for e in self._entries.values()), *self._leaving.values()]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check_refused(self, digest: str) -> None:
        until, why = self._refused.get(digest, (0.0, ""))
        if time.monotonic() < until:
            self._counts["adapter_refusals"] += 1
            raise AdapterRefused(why, param="model")

    async def _load(self, adapter: AdapterRef) -> None:
        digest = adapter.digest
        try:
            if digest in self._leaving:  # or it would be unloaded after it was loaded
                await asyncio.wait([self._leaving[digest]])
            size = await self._backend.load(adapter)
        except BaseException as e:
            del self._entries[digest]
            if isinstance(e, AdapterRefused):
                now = time.monotonic()
                self._refused = {d: r for d, r in self._refused.items() if r[0] > now}
                self._refused[digest] = (now + REFUSED_S, e.message)
            raise
        self._entries[digest].size = size
        self._bytes += size
        self._counts["adapter_loads"] += 1
        self._trim()

    def _trim(self) -> None:
        """Let go of what is not served any more, and of what is over the budget."""
        for digest, entry in list(self._entries.items()):
            if entry.holds or entry.size is None:
                continue
            retired = self._served is not None and digest not in self._served
            if retired or (self._bytes > self._budget and digest not in self._pinned):
                del self._entries[digest]
                self._bytes -= entry.size
                self._counts["adapter_evictions"] += not retired
                task = asyncio.create_task(self._unload(digest, entry.name))
                self._leaving[digest] = task
                task.add_done_callback(lambda _, d=digest: self._leaving.pop(d))  # type: ignore[misc]

    async def _unload(self, digest: str, name: str) -> None:
        try:
            await self._backend.unload(digest)
            log.info("adapter %s (%s) left", name, digest[:12])
        except HybridError as e:  # the backend has ended, and its adapters with it
            log.debug("adapter %s: %s", name, e.message)
