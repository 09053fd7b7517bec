"""Hearing what the store announces: tasks that ended, mailboxes that have work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from hybrid.agents.aio import end
from hybrid.agents.task import State

POLL_S = 1.0
"""A lost notification costs whoever waits for it this long: pub/sub promises nothing."""
_AGAIN_S = 0.2


class Listener:
    """One subscription a mailbox, started when it is first needed.

    Attributes:
        work: set when some mailbox has work, and after a broken connection.
    """

    def __init__(self, client: Redis, prefixes: Sequence[str]) -> None:
        self._client = client
        self._prefixes = prefixes
        self._waiters: dict[str, set[asyncio.Future[State]]] = {}
        self._task: asyncio.Task[None] | None = None
        self.work = asyncio.Event()

    def start(self) -> None:
        """Listen, if it does not yet."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._hear(), name="mailbox-listener")

    async def close(self) -> None:
        """Stop listening."""
        await end(self._task)
        self._task = None

    @contextlib.contextmanager
    def watching(self, task_id: str) -> Iterator[asyncio.Future[State]]:
        """A future that resolves to the final state when it is announced."""
        self.start()
        future: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        waiting = self._waiters.setdefault(task_id, set())
        waiting.add(future)
        try:
            yield future
        finally:
            waiting.discard(future)
            if not waiting:
                self._waiters.pop(task_id, None)
            future.cancel()

    async def _hear(self) -> None:
        """Resolve waiters and wake leasers; after a broken connection, listen again."""
        while True:
            with contextlib.suppress(RedisError, OSError):
                async for channel, data in self._messages():
                    if channel == "wake":
                        self.work.set()
                        continue
                    task_id, _, state = data.partition(" ")
                    for future in self._waiters.get(task_id, ()):
                        if not future.done():
                            future.set_result(cast(State, state))
            self.work.set()
            await asyncio.sleep(_AGAIN_S)

    async def _messages(self) -> AsyncIterator[tuple[str, str]]:
        async with self._client.pubsub() as announcements:
            await announcements.subscribe(
                *(f"{at}:{name}" for at in self._prefixes for name in ("finished", "wake"))
            )
            while True:
                message = await announcements.get_message(timeout=5.0)
                if message is None:
                    await announcements.ping()
                elif message["type"] == "message":
                    yield str(message["channel"]).rsplit(":", 1)[1], str(message["data"])
