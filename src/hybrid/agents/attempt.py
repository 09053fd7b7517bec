"""One attempt at one task: run the behaviour, and end the lease in the way that follows from it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from hybrid.agents import tracing
from hybrid.agents.aio import end
from hybrid.agents.behaviour import Context
from hybrid.agents.board import Board
from hybrid.agents.builtin import resolve_behaviour
from hybrid.agents.clients import ModelClient
from hybrid.agents.lease import Lease, Outcome, refused
from hybrid.agents.mailbox import Mailbox
from hybrid.agents.spec import AgentSpec
from hybrid.agents.steps import Done, Handoff, Suspended, run
from hybrid.agents.tools import ToolRegistry
from hybrid.errors import (
    Cancelled,
    DeadlineExceeded,
    HybridError,
    NotFound,
    RateLimited,
    RegistryError,
    StaleLease,
    StoreUnavailable,
    Unavailable,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
_RETRYABLE = (Unavailable, RateLimited, StoreUnavailable, RegistryError)
_STORE_PAUSE_S = 0.25
_STORE_PAUSE_MAX_S = 2.0


class Attempts:
    """What all attempts of a host share.

    Args:
        mailbox: where leases come from.
        model: the served model's name.
        client: the model.
        tools: for behaviours.
        ending: called with a lease that is about to end, before the store is told: its slot is
            free, and what is leased next may share the call.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        model: str,
        client: ModelClient,
        tools: ToolRegistry,
        ending: Callable[[Lease], None],
    ) -> None:
        self._mailbox = mailbox
        self._model = model
        self._client = client
        self._tools = tools
        self._ending = ending
        self.journal = PatientJournal(mailbox)

    async def run(self, lease: Lease, specs: Mapping[str, AgentSpec]) -> str:
        """Run a lease to its end; returns a word for it."""
        with tracing.attempt(lease.task) as ended:
            word, error = await self._run(lease, specs)
            ended(word, error)
        return word

    async def _run(self, lease: Lease, specs: Mapping[str, AgentSpec]) -> tuple[str, str | None]:
        spec = specs.get(lease.task.agent)
        if spec is None:  # not seen yet, or removed: another host may know it, or it comes back
            unknown = NotFound(f"agent {lease.task.agent!r} is not there")
            return await self._again(lease, _text(unknown))
        limit: asyncio.Timeout | None = None
        try:
            lease = await self._mailbox.whole(lease)
            context = self._context(lease, spec, specs)
            function = resolve_behaviour(spec.behaviour, f"agent {spec.name!r}")
            async with asyncio.timeout(context.remaining_s) as limit:
                result = await run(function, context)
        except (StaleLease, Cancelled) as e:
            return "lost", _text(e)
        except TimeoutError as e:
            if limit is None or not limit.expired():  # one of the behaviour's own
                return await self._again(lease, f"{type(e).__name__}: {e}")
            late = DeadlineExceeded(f"task {lease.task.id}: its deadline passed while running")
            return await self._fail(lease, late)
        except _RETRYABLE as e:
            return await self._again(lease, _text(e), e.retry_after)
        except HybridError as e:
            return await self._fail(lease, e)
        except Exception as e:
            log.warning("agent %s, task %s", spec.name, lease.task.id, exc_info=True)
            return await self._again(lease, f"{type(e).__name__}: {e}")
        return await self._settle(lease, context, result)

    async def _settle(
        self, lease: Lease, context: Context, result: Done | Handoff | Suspended
    ) -> tuple[str, str | None]:
        mailbox = self._mailbox
        call: Callable[[], Awaitable[Any]]
        match result:
            case Done(output):
                word, outcome = "done", Outcome(state="done", result=output)
                call = lambda: mailbox.complete(lease, outcome)  # noqa: E731
            case Handoff(child):
                word = "handed on"
                call = lambda: mailbox.delegate(lease, child)  # noqa: E731
            case Suspended(children, until, signals):
                word = "waiting"
                call = lambda: mailbox.wait_on(  # noqa: E731
                    lease, children, until=until, signals=signals
                )
        try:
            await self._end(lease, call, context.settled)
        except (StaleLease, Cancelled) as e:
            return "lost", _text(e)
        except HybridError as e:  # no means left for a child, an output that cannot be stored
            return await self._fail(lease, e)
        return word, None

    async def _fail(self, lease: Lease, error: HybridError) -> tuple[str, str]:
        failed = Outcome(state="failed", error=_text(error))
        try:
            await self._end(lease, lambda: self._mailbox.complete(lease, failed))
        except (StaleLease, Cancelled) as e:
            return "lost", _text(e)
        return "failed", _text(error)

    async def _again(
        self, lease: Lease, error: str, delay_s: float | None = None
    ) -> tuple[str, str]:
        try:
            await self._end(lease, lambda: self._mailbox.retry(lease, error, delay_s=delay_s))
        except (StaleLease, Cancelled) as e:
            return "lost", _text(e)
        return "retried", error

    async def _end(
        self,
        lease: Lease,
        call: Callable[[], Awaitable[Any]],
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._ending(lease)
        await stubborn(call, before)

    def _context(self, lease: Lease, spec: AgentSpec, specs: Mapping[str, AgentSpec]) -> Context:
        return Context(
            lease,
            spec,
            specs=specs,
            journal=self.journal,
            client=self._client,
            model=self._model,
            board=Board(self._mailbox.client, lease.task.tenant, self._mailbox.config.partitions),
            tools=self._tools,
        )


class PatientJournal:
    """Records a step even if the store is away for a while: its effect has happened."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._patience: set[asyncio.Future[None]] = set()

    async def close(self) -> None:
        """Give up on what is not in the store yet."""
        await end(*self._patience)

    def write(
        self, lease: Lease, name: str, value: Any, usage: Mapping[str, float] | None = None
    ) -> asyncio.Future[None]:
        """See `Journal.write`."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answered(reply: asyncio.Future[list[Any]]) -> None:
            """In the common case no task is needed to wait for it."""
            if reply.cancelled() or written.done():
                return
            error = reply.exception()
            if isinstance(error, StoreUnavailable):
                again = asyncio.ensure_future(self._again(lease, name, value, usage, written))
                self._patience.add(again)
                again.add_done_callback(self._patience.discard)
            elif error is not None:
                written.set_exception(error)
            else:
                _answer(lease, written, reply.result())

        self._mailbox.write(lease, name, value, usage).add_done_callback(answered)
        return written

    def hurry(self, lease: Lease) -> None:
        """See `Journal.hurry`."""
        self._mailbox.hurry(lease)

    async def _again(
        self,
        lease: Lease,
        name: str,
        value: Any,
        usage: Mapping[str, float] | None,
        written: asyncio.Future[None],
    ) -> None:
        await asyncio.sleep(_STORE_PAUSE_S)
        reply = await stubborn(lambda: self._mailbox.write(lease, name, value, usage))
        if not written.done():
            _answer(lease, written, reply)

    async def emit(self, lease: Lease, kind: str, fields: Mapping[str, Any]) -> None:
        """See `Journal.emit`."""
        with contextlib.suppress(StoreUnavailable):
            await self._mailbox.emit(lease, kind, **fields)


async def stubborn(
    call: Callable[[], Awaitable[T]], before: Callable[[], Awaitable[None]] | None = None
) -> T:
    """Repeat a call while the store is away; what was carried out is then refused as stale.

    Args:
        before: awaited before the call is repeated.
    """
    pause = _STORE_PAUSE_S
    while True:
        try:
            return await call()
        except StoreUnavailable as e:
            log.warning("%s", e.message)
        await asyncio.sleep(pause)
        pause = min(_STORE_PAUSE_MAX_S, pause * 1.5)
        if before is not None:
            await before()


def _answer(lease: Lease, written: asyncio.Future[None], reply: list[Any]) -> None:
    try:
        refused(lease, reply)
    except HybridError as e:
        written.set_exception(e)
    else:
        written.set_result(None)


def _text(error: HybridError) -> str:
    return f"{error.code}: {error.message}"
