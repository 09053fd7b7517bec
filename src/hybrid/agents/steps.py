"""What a behaviour's steps are made of: the journal, how a behaviour ends, JSON values."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hybrid.errors import InvalidRequest, TaskFailed

if TYPE_CHECKING:
    from hybrid.agents.behaviour import Context
    from hybrid.agents.lease import Lease
    from hybrid.agents.task import Task


log = logging.getLogger(__name__)

_STOP_S = 5.0
"""A behaviour that swallows its cancellation is abandoned after this long."""


class Journal(Protocol):
    """Where finished steps are written: the mailbox, fenced by the lease."""

    def write(
        self, lease: Lease, name: str, value: Any, usage: Mapping[str, float] | None = None
    ) -> asyncio.Future[None]:
        """Begin to store a step's value and charge its usage to the root's budget.

        It is in the store before anything that the task asks the store for later. The future
        raises BudgetExceeded, StaleLease, Cancelled, InvalidRequest.
        """
        ...

    def hurry(self, lease: Lease) -> None:
        """Somebody waits for what was written: it goes out now."""
        ...

    async def emit(self, lease: Lease, kind: str, fields: Mapping[str, Any]) -> None:
        """Tell the root's listeners; nothing depends on whether it arrives."""
        ...


@dataclass(frozen=True)
class Done:
    """The behaviour returned; `output` is a JSON value."""

    output: Any


@dataclass(frozen=True)
class Suspended:
    """The behaviour can do nothing until `children` are finished, the UNIX time `until`, or one of
    the `signals`."""

    children: tuple[Task, ...]
    until: float | None
    signals: tuple[str, ...] = ()


@dataclass(frozen=True)
class Handoff:
    """What a behaviour returns to hand on: the child's outcome is its own."""

    child: Task


@dataclass(frozen=True)
class Scored:
    """The best of a closed set: its share of the probability, and every choice's logprob."""

    answer: str
    probability: float
    logprobs: dict[str, float]
    provenance: dict[str, Any] = field(default_factory=dict)


async def run(
    behaviour: Callable[[Context], Awaitable[Any]], ctx: Context
) -> Done | Handoff | Suspended:
    """Run a behaviour until it returns or can only wait.

    Raises:
        Exception: whatever the behaviour raised.
        InvalidRequest: its output is not JSON.
    """

    async def call() -> Any:
        return await behaviour(ctx)

    stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop(_: asyncio.Future[Any]) -> None:
        if not stopped.done():
            stopped.set_result(None)

    task = asyncio.create_task(call())
    task.add_done_callback(stop)
    ctx.suspended.add_done_callback(stop)
    try:
        await stopped
        if task.done():
            result = task.result()
            if isinstance(result, Handoff):
                return result
            return Done(to_json(result, f"agent {ctx.spec.name!r}"))
        return ctx.stopped()
    finally:
        if not task.done():
            task.cancel()
            _, left = await asyncio.wait({task}, timeout=_STOP_S)
            if left:
                log.error("agent %s does not end when cancelled; abandoned", ctx.spec.name)
        if task.done() and not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report it as never retrieved


def to_json(value: Any, what: str) -> Any:
    """`value` as a replay would see it.

    Raises:
        InvalidRequest: it has no JSON form.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as e:
        raise InvalidRequest(f"{what} returned what cannot be stored as JSON: {e}") from None


def place_of(key: str) -> str:
    """Where in the order of calls a journal key stands."""
    return key.partition(":")[0]


def answer_of(agent: str, outcome: Mapping[str, Any]) -> Any:
    """A child's result. Raises TaskFailed when it is not done."""
    if outcome["state"] != "done":
        raise TaskFailed(f"agent {agent!r} {outcome['state']}: {outcome['error']}")
    return outcome["result"]
