"""One atomic call for many operations: what is asked for while a call is under way goes together.

With fsync on every write a round trip costs a disk's flush. A process has one call under way for a
partition; whatever its tasks ask for meanwhile (submits, steps, completions, the next lease) is the
next call. An idle process waits for nothing: its operation goes out at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from hybrid.agents import library
from hybrid.agents.aio import end
from hybrid.agents.store import unavailable
from hybrid.errors import HybridError, StoreUnavailable

_MOST_OPERATIONS = 128
_MOST_BYTES = 1 << 20
"""A call of more is two: the store does nothing else while it carries one out."""

Argument = str | int


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    arguments: tuple[Argument, ...]
    reply: asyncio.Future[list[Any]]


class Batch:
    """Operations on one partition.

    Args:
        client: from `hybrid.agents.store.connect`.
        prefix: the partition's.
        header: what stands before the operations, made anew for every call.
        install: loads the function library into a store that has none.

    Attributes:
        calls, operations: how many round trips, for how many operations.
    """

    def __init__(
        self,
        client: Redis,
        prefix: str,
        header: Callable[[], tuple[Argument, ...]],
        install: Callable[[], Awaitable[Any]],
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._header = header
        self._install = install
        self._queue: deque[_Operation] = deque()
        self._runner: asyncio.Task[None] | None = None
        self.calls = 0
        self.operations = 0

    async def call(self, name: str, *arguments: Argument) -> list[Any]:
        """Carry out an operation; those of one task are carried out in the order of its calls.

        Raises:
            StoreUnavailable: the store does not answer; whether it was carried out is unknown.
        """
        return await self.start(name, *arguments)

    def start(self, name: str, *arguments: Argument) -> asyncio.Future[list[Any]]:
        """The same without waiting. The caller must look at the future in the end."""
        reply: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._queue.append(_Operation(name, arguments, reply))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run(), name="mailbox-batch")
        return reply

    async def close(self) -> None:
        """Give up what is queued."""
        await end(self._runner)
        self._fail(list(self._queue), StoreUnavailable("the mailbox is closed"))
        self._queue.clear()

    async def _run(self) -> None:
        while self._queue:
            # Whoever is about to ask, because of the last answers, gets to.
            await asyncio.sleep(0)
            taken = self._take()
            if not taken:
                continue
            try:
                replies = await self._send(taken)
            except asyncio.CancelledError:
                self._fail(taken, StoreUnavailable("the mailbox was closed during a call"))
                raise
            except HybridError as e:
                self._fail(taken, e)
                continue
            for operation, reply in zip(taken, replies, strict=True):
                if not operation.reply.done():
                    operation.reply.set_result(reply)

    def _take(self) -> list[_Operation]:
        taken: list[_Operation] = []
        size = 0
        while self._queue and len(taken) < _MOST_OPERATIONS and size < _MOST_BYTES:
            operation = self._queue.popleft()
            if operation.reply.done():
                continue  # its caller was cancelled before it was sent
            taken.append(operation)
            size += sum(len(a) for a in operation.arguments if isinstance(a, str))
        return taken

    async def _send(self, operations: list[_Operation]) -> list[list[Any]]:
        arguments = [part for o in operations for part in (o.name, len(o.arguments), *o.arguments)]
        self.calls += 1
        self.operations += len(operations)
        for last in (False, True):
            try:
                return await cast(
                    Awaitable[list[list[Any]]],
                    self._client.fcall(
                        "hybrid1_batch", 1, self._prefix, *self._header(), *arguments
                    ),
                )
            except ResponseError as e:
                if last or not library.missing(e):
                    raise StoreUnavailable(
                        f"the store refuses a call of the mailbox under {self._prefix}: {e}"
                    ) from e
            except (RedisError, OSError) as e:
                raise unavailable(e) from e
            # A store that came back empty, or a new one.
            await self._install()
        raise AssertionError("unreachable")

    @staticmethod
    def _fail(operations: list[_Operation], error: HybridError) -> None:
        for operation in operations:
            if not operation.reply.done():
                operation.reply.set_exception(error)
