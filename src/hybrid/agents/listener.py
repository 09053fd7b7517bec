"""Hearing what the store announces: tasks that ended, work for this host, cancellations."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from hybrid.agents.aio import end
from hybrid.agents.lease import pieces, read_view
from hybrid.agents.task import State, TaskView

log = logging.getLogger(__name__)
POLL_S = 1.0
"""A lost announcement costs whoever waits for it this long: pub/sub promises nothing."""
_AGAIN_S = 0.2
_SUBSCRIBE_S = 2.0


class Listener:
    """One subscription a mailbox, started when it is first needed.

    Attributes:
        work: set when there may be work for this host, and after a broken connection.
        woken: the turn of the last wake heard; 0 after it was used.
        on_cancel: called with the id of a task of this host that was cancelled.
        on_lease: called with a lease that was sent to this host: the server's time, when it expires
            (both milliseconds), and what `read_lease` reads.
    """

    def __init__(self, client: Redis, prefixes: Sequence[str]) -> None:
        self._client = client
        self._prefixes = prefixes
        self._channels: dict[str, asyncio.Event] = {}
        self._waiters: dict[str, set[asyncio.Future[State]]] = {}
        self._answers: dict[str, asyncio.Future[TaskView]] = {}
        self._pubsub: PubSub | None = None
        self._task: asyncio.Task[None] | None = None
        self.work = asyncio.Event()
        self.woken = 0
        self.on_cancel: Callable[[str], None] | None = None
        self.on_lease: Callable[[int, int, list[Any]], None] | None = None

    async def hear(self, name: str) -> None:
        """Subscribe to `ended`, `ended:inner`, `host:OWNER` or `to:WAITER` of every partition.

        Returns once the store confirmed it, or after 2 s all the same: whoever waits also looks by
        itself.
        """
        if name not in self._channels:
            self._channels[name] = asyncio.Event()
            if self._pubsub is not None:
                with contextlib.suppress(RedisError, OSError, RuntimeError):
                    await self._pubsub.subscribe(*self._names([name]))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="mailbox-listener")
        if not self._channels[name].is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._channels[name].wait(), _SUBSCRIBE_S)

    async def close(self) -> None:
        """Stop listening."""
        await end(self._task)
        self._task = None

    @contextlib.contextmanager
    def watching(self, task_id: str) -> Iterator[asyncio.Future[State]]:
        """A future that resolves to the final state when it is announced."""
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

    @contextlib.contextmanager
    def answer(self, task_id: str) -> Iterator[asyncio.Future[TaskView]]:
        """A future that resolves to the finished task when it is sent to this mailbox."""
        future: asyncio.Future[TaskView] = asyncio.get_running_loop().create_future()
        self._answers[task_id] = future
        try:
            yield future
        finally:
            del self._answers[task_id]
            future.cancel()

    def _names(self, names: Sequence[str]) -> list[str]:
        return [f"{at}:{name}" for at in self._prefixes for name in names]

    async def _run(self) -> None:
        """Hear; after a broken connection, listen again."""
        while True:
            with contextlib.suppress(RedisError, OSError):
                async with self._client.pubsub() as announcements:
                    await announcements.subscribe(*self._names(list(self._channels)))
                    self._pubsub = announcements
                    try:
                        await self._read(announcements)
                    finally:
                        self._pubsub = None
            for confirmed in self._channels.values():
                confirmed.clear()
            self.work.set()
            await asyncio.sleep(_AGAIN_S)

    async def _read(self, announcements: PubSub) -> None:
        while True:
            message = await announcements.get_message(timeout=5.0)
            if message is None:
                await announcements.ping()
                continue
            name = str(message["channel"]).partition("}:")[2]
            if message["type"] == "subscribe" and name in self._channels:
                self._channels[name].set()
                if name.startswith("host:"):
                    self.work.set()  # what was announced before is looked for
            elif message["type"] == "message":
                try:
                    self._announced(name, str(message["data"]))
                except Exception:  # who else listens must go on hearing
                    log.exception("%s: %.200s", message["channel"], message["data"])

    def _announced(self, name: str, data: str) -> None:
        if name.startswith("to:"):
            task_id, fields, history = json.loads(data)
            answer = self._answers.get(task_id)
            if answer is not None and not answer.done():
                answer.set_result(read_view(pieces(fields), history or ()))
            return
        head, _, tail = data.partition(" ")
        if name.startswith("host:"):
            if head == "wake":
                self.woken = int(tail)
                self.work.set()
            elif head == "lease" and self.on_lease is not None:
                now, expires, item = json.loads(tail)
                self.on_lease(now, expires, item)
            elif head == "cancel" and self.on_cancel is not None:
                self.on_cancel(tail)
            return
        for future in self._waiters.get(head, ()):
            if not future.done():
                future.set_result(cast(State, tail))
