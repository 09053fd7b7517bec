"""An agent host: leases tasks of any agent and runs their behaviours, many at once.

Plain asyncio, for tests and for embedding; `host_actor` is the same as a Ray actor. A host keeps
nothing that matters: what it held when it died is leased again by another and goes on after its
last finished step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Coroutine
from typing import Any

from hybrid.agents.aio import end, whole
from hybrid.agents.attempt import Attempts
from hybrid.agents.clients import ModelClient
from hybrid.agents.lease import Lease, read_lease
from hybrid.agents.mailbox import Mailbox
from hybrid.agents.payloads import payloads_of
from hybrid.agents.spec import AgentSpec, SpecStore
from hybrid.agents.store import connect
from hybrid.agents.tools import ToolRegistry
from hybrid.config import ProjectConfig
from hybrid.errors import Cancelled, InvalidRequest, StaleLease, StoreUnavailable

log = logging.getLogger(__name__)
_STORE_PAUSE_S = 0.25
_IDLE_S = 1.0
_GIVE_BACK_S = 0.5
"""Kept of a drain's deadline to give back what is still running."""
_BEAT_S = 0.1


class AgentHost:
    """Runs agents until it is drained.

    Args:
        name: the owner of its leases.
        store_url: where mailboxes and specs are.
        config: `store`, `agents.swarm.concurrency` and `model.name` are read.
        client: the model.
        tools: further tools for behaviours.

    Attributes:
        mailbox: what it leases from.
        finished: how many attempts ended in which way.
        beat: `time.monotonic()` of the event loop's last sign of life.
    """

    def __init__(
        self,
        name: str,
        store_url: str,
        config: ProjectConfig,
        client: ModelClient,
        tools: ToolRegistry | None = None,
    ) -> None:
        self.name = name
        self._redis = connect(store_url)
        self.mailbox = Mailbox(self._redis, config.store, payloads_of(config))
        self._concurrency = config.agents.swarm.concurrency
        self._renew_s = config.store.lease_s / 3
        self._spec_store = SpecStore(self._redis)
        self._specs: dict[str, AgentSpec] = {}
        self._cap = 1
        self._narrow: dict[str, int] = {}
        self._attempts = Attempts(
            self.mailbox, config.model.name, client, tools or ToolRegistry(), self._ending
        )
        self._held: dict[str, Lease] = {}
        self._busy: Counter[str] = Counter()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, deque[Lease]] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._dropped: set[str] = set()
        self._draining = False
        self._known = asyncio.Event()
        self.finished: Counter[str] = Counter()
        self.beat = time.monotonic()

    def stats(self) -> dict[str, Any]:
        """Process, tasks in hand, and how tasks ended here. May be called from any thread."""
        held = list(self._held.values())
        return {
            "name": self.name,
            "pid": os.getpid(),
            "in_flight": len(held),
            "tasks": sorted(lease.task.id for lease in held),
            "agents": sorted(self._specs),
            "draining": self._draining,
            "finished": dict(self.finished),
            "blocked_s": max(0.0, time.monotonic() - self.beat - _BEAT_S),
        }

    async def run(self) -> None:
        """Lease and run until drained; a store that goes away is waited for."""
        helpers = [
            asyncio.create_task(self._watch_specs(), name="specs"),
            asyncio.create_task(self._keep(), name="renewals"),
            asyncio.create_task(self._beats(), name="beat"),
        ]
        self.mailbox.listener.on_cancel = self._drop
        self.mailbox.listener.on_lease = self._handed
        try:
            await self._known.wait()
            while not self._draining:
                try:
                    await self._take()
                except StoreUnavailable as e:
                    log.warning("%s: %s", self.name, e.message)
                    await asyncio.sleep(_STORE_PAUSE_S)
            while self._running:
                await asyncio.wait(list(self._running.values()))
        finally:
            await whole(self._close(helpers))

    async def _close(self, helpers: list[asyncio.Task[None]]) -> None:
        await end(*helpers, *self._running.values(), *self._errands)
        await self._attempts.journal.close()
        await self.mailbox.close()
        await self._redis.aclose()

    async def _take(self) -> None:
        await self.mailbox.listener.hear(f"host:{self.name}")
        free = self._concurrency - len(self._held)
        if free <= 0:
            self.mailbox.listener.work.clear()
            await self.mailbox.rest(_IDLE_S)
            return
        leases, idle_s = await self.mailbox.take(
            # Who has work in hand fetches more with the next call anyhow, many at a time.
            self.name,
            free,
            cap=self._cap,
            room=self._room(),
            handed=not self._held,
        )
        for lease in leases:
            self._start(lease)
        if idle_s and not self._draining:
            await self.mailbox.rest(idle_s)

    def _handed(self, now: int, expires: int, item: list[Any]) -> None:
        """A lease that the store sent while this host was resting."""
        try:
            lease = read_lease(item, self.name, now, expires)
        except InvalidRequest:
            return  # of another version; when it runs out, the task is another's
        if self._draining:
            self._beside(self._give_back(lease))
        else:
            self._start(lease)

    def _start(self, lease: Lease) -> None:
        """Run a lease; one for which its agent has no room here is held until it has."""
        task_id, agent = lease.task.id, lease.task.agent
        self._held[task_id] = lease
        spec = self._specs.get(agent)
        if spec is not None and self._busy[agent] >= spec.max_concurrency:
            self._waiting.setdefault(agent, deque()).append(lease)
            return
        self._busy[agent] += 1
        self._running[task_id] = asyncio.create_task(self._handle(lease), name=task_id)

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _room(self) -> dict[str, int]:
        """How many more of an agent may run here, where that is less than of an idle one."""
        room = dict(self._narrow)
        for agent, busy in self._busy.items():
            spec = self._specs.get(agent)
            if spec is not None and spec.max_concurrency - busy < self._cap:
                room[agent] = max(0, spec.max_concurrency - busy)
        return room

    def _ending(self, lease: Lease) -> None:
        """A slot is free, and the next lease may share the call that ends this one."""
        if self._held.pop(lease.task.id, None) is not None:
            self._busy[lease.task.agent] -= 1
            if not self._busy[lease.task.agent]:
                del self._busy[lease.task.agent]
            self.mailbox.listener.work.set()
            waiting = self._waiting.get(lease.task.agent)
            if waiting and not self._draining:
                following = waiting.popleft()
                if following.task.id in self._held:
                    self._start(following)

    async def drain(self, deadline_s: float) -> dict[str, int]:
        """Stop leasing, finish what ends in time, give back the rest; the attempt does not count.

        Returns:
            How many tasks were finished and given back.
        """
        self._draining = True
        self.mailbox.listener.work.set()
        ends = time.monotonic() + deadline_s
        waiting = [lease for line in self._waiting.values() for lease in line]
        held = len(self._running) + len(waiting)
        for lease in waiting:
            await self._give_back(lease)
        if self._running:
            left = max(0.0, ends - time.monotonic() - _GIVE_BACK_S)
            await asyncio.wait(list(self._running.values()), timeout=left)
        await end(*self._running.values())
        back = self.finished["given back"]
        return {"finished": held - back, "given_back": back}

    # --- one task -----------------------------------------------------------------------------

    async def _handle(self, lease: Lease) -> None:
        """Run a lease to its end, whatever that is; never raises but for cancellation."""
        task_id = lease.task.id
        try:
            word = await self._attempts.run(lease, self._specs)
        except asyncio.CancelledError:
            if task_id not in self._dropped:  # drained: cancelled here, not in the store
                await whole(self._give_back(lease))
                raise
            word = "lost"  # cancelled by its owner, or another's by now
        finally:
            self._ending(lease)
            self._dropped.discard(task_id)
            if self._running.get(task_id) is asyncio.current_task():
                del self._running[task_id]
        self.finished[word] += 1

    async def _give_back(self, lease: Lease) -> None:
        with contextlib.suppress(StaleLease, Cancelled, StoreUnavailable):
            await self.mailbox.release(lease)
            self.finished["given back"] += 1

    def _drop(self, task_id: str) -> None:
        """Stop work on a task that is no longer ours."""
        running = self._running.get(task_id)
        if running is None:
            self._held.pop(task_id, None)  # it was waiting for room
        if running is not None and not running.done():
            self._dropped.add(task_id)
            running.cancel()

    async def _keep(self) -> None:
        """Renew all leases; stop work on those that are lost."""
        while True:
            await asyncio.sleep(self._renew_s)
            held = list(self._held.values())
            try:
                states = await self.mailbox.renew(held)
            except StoreUnavailable as e:
                log.warning("%s: leases are not renewed: %s", self.name, e.message)
                continue
            for lease in held:
                task_id = lease.task.id
                # It may have ended meanwhile, and even be back under a newer attempt.
                if states[task_id] != "ok" and self._held.get(task_id) is lease:
                    self._drop(task_id)

    async def _beats(self) -> None:
        while True:
            self.beat = time.monotonic()
            await asyncio.sleep(_BEAT_S)

    # --- specs ----------------------------------------------------------------------------------

    async def _watch_specs(self) -> None:
        while True:
            try:
                async for specs in self._spec_store.changes():
                    self._specs = specs
                    limits = Counter(s.max_concurrency for s in specs.values())
                    self._cap = limits.most_common(1)[0][0] if limits else 1
                    self._narrow = {
                        s.name: s.max_concurrency
                        for s in specs.values()
                        if s.max_concurrency < self._cap
                    }
                    self._known.set()
            except Exception as e:  # noqa: BLE001 - redis-py raises many kinds; all mean "away"
                log.warning("%s: specs cannot be watched: %s", self.name, e)
            await asyncio.sleep(_STORE_PAUSE_S)
