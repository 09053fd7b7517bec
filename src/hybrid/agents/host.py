"""An agent host: leases tasks of any agent and runs their behaviours, many at once.

`AgentHost` is plain asyncio, for tests and for embedding; `HostActor` is the same as a detached Ray
actor on a cheap node, without torch. A host keeps nothing that matters: what it held when it died
is leased again by another and goes on after its last finished step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from hybrid.agents.aio import end, whole
from hybrid.agents.behaviour import Context
from hybrid.agents.board import Board
from hybrid.agents.builtin import resolve_behaviour
from hybrid.agents.clients import ModelClient
from hybrid.agents.mailbox import Lease, Mailbox, Outcome
from hybrid.agents.spec import AgentSpec, SpecStore
from hybrid.agents.steps import Done, run
from hybrid.agents.store import connect
from hybrid.agents.tools import ToolRegistry
from hybrid.config import ProjectConfig
from hybrid.errors import (
    Cancelled,
    DeadlineExceeded,
    HybridError,
    RateLimited,
    RegistryError,
    StaleLease,
    StoreUnavailable,
    Unavailable,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
_RETRYABLE = (Unavailable, RateLimited, StoreUnavailable, RegistryError)
_LEASE_WAIT_S = 1.0
_STORE_PAUSE_S = 0.25
_GIVE_BACK_S = 0.5
"""Kept of a drain's deadline to give back what is still running."""


class AgentHost:
    """Runs agents until it is drained.

    Args:
        name: the owner of its leases.
        store_url: where mailboxes and specs are.
        config: `store`, `agents.swarm.concurrency` and `model.name` are read.
        client: the model.
        tools: further tools for behaviours.
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
        self._config = config
        self._client = client
        self._tools = tools or ToolRegistry()
        self._redis = connect(store_url)
        self._mailbox = Mailbox(self._redis, config.store)
        self._spec_store = SpecStore(self._redis)
        self._specs: dict[str, AgentSpec] = {}
        self._running: dict[asyncio.Task[None], Lease] = {}
        self._draining = asyncio.Event()
        self._known = asyncio.Event()
        self.finished: Counter[str] = Counter()

    def stats(self) -> dict[str, Any]:
        """Process, tasks in hand, and how tasks ended here."""
        return {
            "name": self.name,
            "pid": os.getpid(),
            "in_flight": len(self._running),
            "tasks": sorted(lease.task.id for lease in list(self._running.values())),
            "agents": sorted(self._specs),
            "draining": self._draining.is_set(),
            "finished": dict(self.finished),
        }

    async def run(self) -> None:
        """Lease and run until drained; a store that goes away is waited for."""
        watcher = asyncio.create_task(self._watch_specs(), name="specs")
        try:
            await self._known.wait()
            while not self._draining.is_set():
                agents, count = self._room()
                if not count:
                    await self._one_ends()
                    continue
                try:
                    await self._take(agents, count)
                except StoreUnavailable as e:
                    log.warning("%s: %s", self.name, e.message)
                    await asyncio.sleep(_STORE_PAUSE_S)
            while self._running:
                await asyncio.wait(list(self._running))
        finally:
            await whole(self._close(watcher))

    async def _close(self, watcher: asyncio.Task[None]) -> None:
        await end(watcher, *self._running)
        await self._mailbox.close()
        await self._redis.aclose()

    def _room(self) -> tuple[list[str], int]:
        """The agents that may get another task here, and how many may be leased at once.

        At most the smallest room of any of them, so that nothing leased has to wait.
        """
        held = Counter(lease.task.agent for lease in self._running.values())
        room = {n: s.max_concurrency - held[n] for n, s in self._specs.items()}
        agents = sorted(n for n, left in room.items() if left > 0)
        free = self._config.agents.swarm.concurrency - len(self._running)
        if not self._specs:
            return [], free  # nothing to do yet; the look at time's doings goes on
        return agents, min([free, *(room[n] for n in agents)]) if agents else 0

    async def _take(self, agents: list[str], count: int) -> None:
        leases = await self._mailbox.lease(agents, self.name, count, wait_s=_LEASE_WAIT_S)
        for lease in leases:
            task = asyncio.create_task(self._handle(lease), name=lease.task.id)
            self._running[task] = lease
            task.add_done_callback(lambda t: self._running.pop(t, None))

    async def _one_ends(self) -> None:
        drained = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait({drained, *self._running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()

    async def drain(self, deadline_s: float) -> dict[str, int]:
        """Stop leasing, finish what ends in time, give back the rest; the attempt does not count.

        Returns:
            How many tasks were finished and given back.
        """
        self._draining.set()
        ends = time.monotonic() + deadline_s
        held = len(self._running)
        if self._running:
            left = max(0.0, ends - time.monotonic() - _GIVE_BACK_S)
            await asyncio.wait(list(self._running), timeout=left)
        await end(*self._running)
        back = self.finished["given back"]
        return {"finished": held - back, "given_back": back}

    # --- one task -----------------------------------------------------------------------------

    async def _handle(self, lease: Lease) -> None:
        """Run a lease to its end, whatever that is; never raises but for cancellation."""
        keeper = asyncio.create_task(self._keep(lease))
        try:
            with self._mailbox.watching(lease.task.id) as ended:
                work = asyncio.create_task(self._work(lease))
                try:
                    either: set[asyncio.Future[Any]] = {work, keeper, ended}
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    if ended.done() and ended.result() != "cancelled":
                        await asyncio.wait({work}, timeout=_LEASE_WAIT_S)  # it ended it itself
                finally:
                    if not work.done():
                        await whole(end(work))
                if work.cancelled():
                    self.finished["lost"] += 1  # cancelled by its owner, or another's by now
                else:
                    self.finished[work.result()] += 1
        except asyncio.CancelledError:
            # Drained: cancelled here, not in the store.
            await whole(self._give_back(lease))
            raise
        finally:
            await whole(end(keeper))

    async def _give_back(self, lease: Lease) -> None:
        with contextlib.suppress(StaleLease, Cancelled, StoreUnavailable):
            await self._mailbox.release(lease)
            self.finished["given back"] += 1

    async def _work(self, lease: Lease) -> str:
        spec = self._specs.get(lease.task.agent)
        if spec is None:  # removed between two looks: another host may know it, or it comes back
            return await self._again(lease, f"agent {lease.task.agent!r} is not there")
        limit: asyncio.Timeout | None = None
        try:
            context = self._context(lease, spec)
            function = resolve_behaviour(spec.behaviour, f"agent {spec.name!r}")
            async with asyncio.timeout(context.remaining_s) as limit:
                outcome = await run(function, context)
        except (StaleLease, Cancelled):
            return "lost"
        except TimeoutError as e:
            if limit is None or not limit.expired():  # one of the behaviour's own
                return await self._again(lease, f"{type(e).__name__}: {e}")
            late = DeadlineExceeded(f"task {lease.task.id}: its deadline passed while running")
            return await self._end(lease, Outcome(state="failed", error=_text(late)))
        except _RETRYABLE as e:
            return await self._again(lease, _text(e), e.retry_after)
        except HybridError as e:
            return await self._end(lease, Outcome(state="failed", error=_text(e)))
        except Exception as e:
            log.warning("agent %s, task %s", spec.name, lease.task.id, exc_info=True)
            return await self._again(lease, f"{type(e).__name__}: {e}")
        if isinstance(outcome, Done):
            return await self._end(lease, Outcome(state="done", result=outcome.output))
        try:
            await self._stubborn(
                lambda: self._mailbox.wait_on(lease, outcome.children, until=outcome.until)
            )
        except HybridError as e:
            if isinstance(e, StaleLease | Cancelled):
                return "lost"
            return await self._end(lease, Outcome(state="failed", error=_text(e)))
        return "waiting"

    def _context(self, lease: Lease, spec: AgentSpec) -> Context:
        return Context(
            lease,
            spec,
            specs=dict(self._specs),
            journal=_PatientJournal(self),
            client=self._client,
            model=self._config.model.name,
            board=Board(self._redis, lease.task.tenant, self._config.store.partitions),
            tools=self._tools,
        )

    async def _end(self, lease: Lease, outcome: Outcome) -> str:
        try:
            await self._stubborn(lambda: self._mailbox.complete(lease, outcome))
        except (StaleLease, Cancelled):
            return "lost"
        except HybridError as e:  # an output that cannot be stored
            failed = Outcome(state="failed", error=_text(e))
            await self._stubborn(lambda: self._mailbox.complete(lease, failed))
            return "failed"
        return outcome.state

    async def _again(self, lease: Lease, error: str, delay_s: float | None = None) -> str:
        try:
            await self._stubborn(lambda: self._mailbox.retry(lease, error, delay_s=delay_s))
        except (StaleLease, Cancelled):
            return "lost"
        return "retried"

    async def _stubborn(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call while the store is away; what was carried out is then refused as stale."""
        pause = _STORE_PAUSE_S
        while True:
            try:
                return await call()
            except StoreUnavailable as e:
                log.warning("%s: %s", self.name, e.message)
            await asyncio.sleep(pause)
            pause = min(2.0, pause * 1.5)

    async def _keep(self, lease: Lease) -> None:
        """Renew the lease; returns when it is lost."""
        while True:
            await asyncio.sleep(self._config.store.lease_s / 3)
            try:
                await self._mailbox.renew(lease)
            except (StaleLease, Cancelled):
                return
            except StoreUnavailable as e:
                log.warning("%s: lease of %s: %s", self.name, lease.task.id, e.message)

    # --- specs ----------------------------------------------------------------------------------

    async def _watch_specs(self) -> None:
        while True:
            try:
                async for specs in self._spec_store.changes():
                    self._specs = specs
                    self._known.set()
            except Exception as e:  # noqa: BLE001 - redis-py raises many kinds; all mean "away"
                log.warning("%s: specs cannot be watched: %s", self.name, e)
            await asyncio.sleep(_STORE_PAUSE_S)


class _PatientJournal:
    """Records a step even if the store is away for a while: its effect has happened."""

    def __init__(self, host: AgentHost) -> None:
        self._host = host

    async def record(self, lease: Lease, name: str, value: Any, *, usage: Any = None) -> None:
        """See `Mailbox.record`."""
        mailbox = self._host._mailbox
        await self._host._stubborn(lambda: mailbox.record(lease, name, value, usage=usage))


def _text(error: HybridError) -> str:
    return f"{error.code}: {error.message}"


class HostActor:
    """`AgentHost` in a Ray actor. `stats`, `drain` and `ping` run beside `run`, not behind it."""

    def __init__(self, name: str, store_url: str, config: dict[str, Any]) -> None:
        self._arguments = (name, store_url, ProjectConfig.model_validate(config))
        self._host: AgentHost | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Run until drained."""
        from hybrid.agents.clients import ServeModelClient

        self._loop = asyncio.get_running_loop()
        self._host = AgentHost(*self._arguments, ServeModelClient())
        await self._host.run()

    async def stats(self) -> dict[str, Any]:
        """See `AgentHost.stats`."""
        if self._host is None:
            return {"name": self._arguments[0], "pid": os.getpid(), "in_flight": 0}
        return self._host.stats()

    async def drain(self, deadline_s: float) -> dict[str, int]:
        """See `AgentHost.drain`."""
        if self._host is None or self._loop is None:
            return {"finished": 0, "given_back": 0}
        # Another concurrency group is another event loop; the host lives on its own.
        future = asyncio.run_coroutine_threadsafe(self._host.drain(deadline_s), self._loop)
        return await asyncio.wrap_future(future)
