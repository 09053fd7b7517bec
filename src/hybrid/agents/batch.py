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
from hybrid.agents.line import Line
from hybrid.agents.store import unavailable
from hybrid.errors import HybridError, InvalidRequest, StoreUnavailable

_MOST_OPERATIONS = 128
_MOST_BYTES = 1 << 20
"""A call of more is two: the store does nothing else while it carries one out."""

_LATER_S = 0.002
"""What can wait is asked for so much later: by then its task may have ended and need it no more."""

Argument = str | int


@dataclass(slots=True)
class Operation:
    """One operation of the library, and who waits for its reply."""

    name: str
    arguments: tuple[Argument, ...] | Callable[[], tuple[Argument, ...]]
    reply: asyncio.Future[list[Any]]
    note: Any = None
    due: float = 0.0


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
        self._line = Line(client)
        self._prefix = prefix
        self._header = header
        self._install = install
        self._queue: deque[Operation] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._late: dict[str, list[Operation]] = {}
        self.calls = 0
        self.operations = 0

    async def call(self, name: str, *arguments: Argument) -> list[Any]:
        """Carry out an operation; those of one task are carried out in the order of its calls.

        Raises:
            StoreUnavailable: the store does not answer; whether it was carried out is unknown.
        """
        reply: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._queue.append(Operation(name, arguments, reply))
        self._go()
        return await reply

    def later(
        self, whose: str, name: str, arguments: Callable[[], tuple[Argument, ...]], note: Any
    ) -> asyncio.Future[list[Any]]:
        """The same, without waiting: it goes out within milliseconds.

        Args:
            whose: by what `withdraw` and `hurry` find it.
            arguments: makes them when it goes out; a HybridError it raises is the reply.
            note: for who withdraws it.

        Returns:
            The reply, at which the caller must look in the end.
        """
        reply: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        due = asyncio.get_running_loop().time() + _LATER_S
        self._late.setdefault(whose, []).append(Operation(name, arguments, reply, note, due))
        if self._timer is None:
            self._wake(due)
        return reply

    def withdraw(self, whose: str) -> list[Operation]:
        """What was asked for with `later` and has not gone out: it will not. Whoever withdraws
        answers it."""
        return self._late.pop(whose, [])

    def hurry(self, whose: str) -> None:
        """What was asked for with `later` goes out before whatever is asked for next."""
        late = self._late.pop(whose, None)
        if late:
            self._queue += late
            self._go()

    def _wake(self, due: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(due, self._go)

    def _ripen(self) -> None:
        """Queue what was to be later, and is due. Insertion order is due order."""
        now = asyncio.get_running_loop().time()
        while self._late:
            whose, late = next(iter(self._late.items()))
            if late[0].due > now:
                break
            del self._late[whose]
            self._queue += late

    def _go(self) -> None:
        """Send what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run(), name="mailbox-batch")

    async def close(self) -> None:
        """Give up what is queued."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await end(self._runner)
        left = [*self._queue, *(o for late in self._late.values() for o in late)]
        self._queue.clear()
        self._late.clear()
        self._fail(left, StoreUnavailable("the mailbox is closed"))
        await self._line.close()

    async def _run(self) -> None:
        while True:
            # Whoever is about to ask, because of the last answers, gets to.
            await asyncio.sleep(0)
            taken = self._take()
            if not taken:
                break
            try:
                replies = await self._send(taken)
            except asyncio.CancelledError:
                self._fail(taken, StoreUnavailable("the mailbox was closed during a call"))
                raise
            except HybridError as e:
                self._fail(taken, e)
                continue
            for operation, reply in zip(taken, replies, strict=True):
                if operation.reply.done():
                    continue
                if reply and reply[0] == "error":
                    operation.reply.set_exception(self._refused(str(reply[1])))
                else:
                    operation.reply.set_result(reply)
        if self._late and self._timer is None:
            self._wake(next(iter(self._late.values()))[0].due)

    def _take(self) -> list[Operation]:
        taken: list[Operation] = []
        size = 0
        self._ripen()
        while self._queue and len(taken) < _MOST_OPERATIONS and size < _MOST_BYTES:
            operation = self._queue.popleft()
            if operation.reply.done():
                continue  # its caller was cancelled before it was sent
            if callable(operation.arguments):
                try:
                    operation.arguments = operation.arguments()
                except HybridError as e:
                    operation.reply.set_exception(e)
                    continue
            taken.append(operation)
            for argument in operation.arguments:
                if isinstance(argument, str):
                    size += len(argument)
        return taken

    async def _send(self, operations: list[Operation]) -> list[list[Any]]:
        arguments: list[Argument] = ["FCALL", "hybrid1_batch", 1, self._prefix, *self._header()]
        for o in operations:
            assert isinstance(o.arguments, tuple)
            arguments += (o.name, len(o.arguments), *o.arguments)
        self.calls += 1
        self.operations += len(operations)
        for last in (False, True):
            try:
                return cast(list[list[Any]], await self._line.call(tuple(arguments)))
            except ResponseError as e:
                if last or not library.missing(e):
                    raise self._refused(str(e)) from e
            except (RedisError, OSError) as e:
                raise unavailable(e) from e
            # A store that came back empty, or a new one.
            await self._install()
        raise AssertionError("unreachable")

    def _refused(self, why: str) -> HybridError:
        if "nested data structures" in why:  # the server's JSON reader has a limit of its own
            return InvalidRequest("what is sent is nested too deeply for the store")
        return StoreUnavailable(
            f"the store refuses a call of the mailbox under {self._prefix}: {why}"
        )

    @staticmethod
    def _fail(operations: list[Operation], error: HybridError) -> None:
        for operation in operations:
            if not operation.reply.done():
                operation.reply.set_exception(error)
