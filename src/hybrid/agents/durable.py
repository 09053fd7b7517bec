"""Durable steps: what an attempt does is journalled under its place in the order of calls.

When the task is run again, after a crash, a retry or a wait, finished steps return what they
returned and only the rest is done. `behaviour.Context` adds models and tools.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hybrid.agents import tracing
from hybrid.agents.steps import Handoff, Journal, Suspended, answer_of, place_of, to_json
from hybrid.errors import Conflict, NotFound

if TYPE_CHECKING:
    from hybrid.agents.lease import Lease
    from hybrid.agents.spec import AgentSpec
    from hybrid.agents.task import Task

_lane: ContextVar[str] = ContextVar("lane", default="")


class Durable:
    """One attempt at one task, as far as the journal knows it.

    Attributes:
        task: the envelope, with its effective deadline.
        spec: the agent whose behaviour this is.
        specs: all agents, as this host sees them.
        suspended: resolves when nothing can go on before what is waited for has come.
    """

    def __init__(
        self,
        lease: Lease,
        task: Task,
        spec: AgentSpec,
        specs: Mapping[str, AgentSpec],
        journal: Journal,
    ) -> None:
        self.task = task
        self.spec = spec
        self.specs = specs
        self._lease = lease
        self._store = journal
        self._journal = dict(lease.journal)
        self._places = {place_of(key): key for key in self._journal}
        self._calls: dict[str, int] = {}
        self._busy = 0
        self._children: dict[str, Task] = {}
        self._until: float | None = None
        self._signals: list[str] = []
        self._unwritten: list[asyncio.Future[None]] = []
        self.suspended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def step(self, name: str, fn: Callable[[], Any]) -> Any:
        """Run `fn` once and for all; its JSON value is what every later attempt gets.

        `fn` is called in a thread unless it is a coroutine function. It runs again only when the
        host died after it began and before its value was stored.
        """

        async def run(key: str) -> tuple[Any, None]:
            if inspect.iscoroutinefunction(fn):
                return await fn(), None
            value = await asyncio.to_thread(fn)
            return (await value if inspect.isawaitable(value) else value), None

        return await self._once(name, run, pure=False)

    async def ask(self, agent: str, input: Any) -> Any:
        """Another agent's output. While it works this task waits, without lease or slot.

        Raises:
            NotFound: no such agent.
            TaskFailed: it failed, died or was cancelled; the message carries its error.
        """
        key = self._next(f"ask {agent}")
        child = self._child(agent, input, key)
        if child.id in self._journal:
            return answer_of(agent, self._journal[child.id])
        self._present(agent, "asks")
        self._remember(key, child.id)
        self._children[child.id] = child
        return await self._wait()

    def handoff(self, agent: str, input: Any) -> Handoff:
        """What to return to hand this task on: however the other agent's task ends, this one ends.

        Neither lease nor slot is held meanwhile, and this behaviour is not run again.

        Raises:
            NotFound: no such agent.
        """
        key = self._next(f"handoff {agent}")
        self._present(agent, "hands on to")
        return Handoff(self._child(agent, input, key))

    async def receive(self, name: str, timeout_s: float | None = None) -> Any:
        """Wait, without lease or slot, for a signal from outside: an approval, a person's answer.

        It is sent with POST /v1/tasks/{id}/signals/{name} or `Mailbox.signal`, and may come before
        it is waited for.

        Raises:
            TimeoutError: none came within `timeout_s`, counted from the first attempt here.
        """
        key = self._next(f"receive {name}")
        if timeout_s is not None and key not in self._journal:
            self._remember(key, time.time() + timeout_s)
        if (heard := f"signal:{name}") in self._journal:
            return self._journal[heard]
        wake = self._journal.get(key)
        if wake is not None:
            if time.time() >= wake:
                raise TimeoutError(f"no signal {name!r} came within {timeout_s:g} s")
            self._until = wake if self._until is None else min(wake, self._until)
        self._signals.append(name)
        return await self._wait()

    async def sleep(self, seconds: float) -> None:
        """Wait without lease or slot; counted from the first attempt that came here."""
        key = self._next("sleep")
        if key not in self._journal:
            self._remember(key, time.time() + seconds)
        wake = self._journal[key]
        if time.time() < wake:
            self._until = wake if self._until is None else min(wake, self._until)
            await self._wait()

    async def gather(self, *branches: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run branches side by side; each numbers its own steps. Waits for all of them.

        Raises:
            Exception: the first failing branch's (by position), once all have ended.
        """
        place = self._count()

        async def run(index: int, branch: Coroutine[Any, Any, Any]) -> Any:
            _lane.set(f"{place}.{index}/")
            return await branch

        results = await asyncio.gather(
            *(run(i, branch) for i, branch in enumerate(branches)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def _count(self) -> str:
        lane = _lane.get()
        self._calls[lane] = self._calls.get(lane, 0) + 1
        return f"{lane}{self._calls[lane]}"

    def _next(self, name: str) -> str:
        """The journal key of the next call in this branch.

        Raises:
            Conflict: an earlier attempt did something else at this place.
        """
        place = self._count()
        key = f"{place}:{name}"
        before = self._places.get(place, key)
        if before != key:
            raise Conflict(
                f"step {place} of agent {self.spec.name!r} was {before.partition(':')[2]!r} when"
                f" task {self.task.id} first ran and is {name!r} now: its behaviour changed or"
                " depends on something outside its steps; submit the task anew"
            )
        return key

    def _child(self, agent: str, input: Any, key: str) -> Task:
        child = self.task.child(agent, input, key=key)
        return replace(child, trace=tracing.child_carrier(self.task)) if tracing.on() else child

    def _present(self, agent: str, doing: str) -> None:
        if agent not in self.specs:
            raise NotFound(f"agent {self.spec.name!r} {doing} {agent!r}, which is not there")

    def _remember(
        self, key: str, value: Any, usage: Mapping[str, float] | None = None
    ) -> asyncio.Future[None]:
        """Journal a value; going on needs not wait for it, `settled` does."""
        written = self._store.write(self._lease, key, value, usage)
        self._journal[key] = value
        self._unwritten.append(written)
        # Whoever ends the task need not ask how this went; asyncio is told so.
        written.add_done_callback(lambda w: w.cancelled() or w.exception())
        return written

    async def settled(self) -> None:
        """Wait until all that was journalled is in the store.

        Raises:
            BudgetExceeded, StaleLease, Cancelled: what a write met with.
        """
        if self._unwritten:
            self._store.hurry(self._lease)
        while self._unwritten:
            await self._unwritten[0]
            self._unwritten.pop(0)

    async def _once(
        self,
        name: str,
        run: Callable[[str], Awaitable[tuple[Any, Mapping[str, float] | None]]],
        *,
        pure: bool = True,
        plain: bool = False,
    ) -> Any:
        """A step's value: the journal's, or what `run` returns, journalled.

        What has an effect begins after everything before it is in the store, and is in the store
        before anything goes on. What costs only time (`pure`) is written behind: it shares a call
        with what comes next, and is repeated if the host dies just then. `plain`: the value is what
        a replay would see as it is.
        """
        key = self._next(name)
        if key in self._journal:
            return self._journal[key]
        with self._working():
            if not pure or any(w.done() for w in self._unwritten):
                await self.settled()
            value, usage = await run(key)
            if not plain:
                value = to_json(value, f"step {name!r} of agent {self.spec.name!r}")
            written = self._remember(key, value, usage)
            if not pure:
                self._store.hurry(self._lease)
                await written
        return value

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self._suspend_when_idle()

    async def _wait(self) -> Any:
        """Never returns in this attempt: `run` cancels the behaviour once nothing else runs."""
        self._suspend_when_idle()
        return await asyncio.get_running_loop().create_future()

    def _suspend_when_idle(self) -> None:
        # Later, so that branches that are about to call something get to do so. Suspending
        # early would be only slower: the next attempt goes on from the same journal.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._suspend)

    def _suspend(self) -> None:
        waiting = self._children or self._until is not None or self._signals
        if waiting and not self._busy and not self.suspended.done():
            self.suspended.set_result(None)

    def stopped(self) -> Suspended:
        """What is waited on."""
        return Suspended(tuple(self._children.values()), self._until, tuple(self._signals))
