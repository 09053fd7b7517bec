"""What happens to a root task and all beneath it, in order, the same to everyone who listens.

Events lie in a stream in the store, one entry a call that changed something; an event's id is the
entry's id and its place in it, so a listener that comes back goes on where it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from hybrid.agents.mailbox import Mailbox
from hybrid.agents.store import unavailable
from hybrid.agents.task import TERMINAL, TaskView
from hybrid.errors import InvalidRequest, RateLimited

_BLOCK_MS = 4000
_LISTENERS = 200
_ID = re.compile(r"(\d+-\d+)\.(\d+)")


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        id: where it stands in its root's stream.
        kind: `state`, `step`, `tokens`, `signal`; `gap` where events were dropped because more
            than store.max_events came after them; `end` last.
        data: task, agent, attempt and what the kind has to say.
    """

    id: str
    kind: str
    data: dict[str, Any]


class Events:
    """Listens on behalf of many.

    Args:
        client: from `hybrid.agents.store.connect`, not the mailbox's: listening holds connections.
        mailbox: to look tasks up.
    """

    def __init__(self, client: Redis, mailbox: Mailbox) -> None:
        self._client = client
        self._mailbox = mailbox
        self._listening = 0

    async def follow(
        self, task: TaskView, after: str | None = None
    ) -> AsyncGenerator[Event | None, None]:
        """A task's events from the first, or after the one of id `after`, until it has ended.

        Of a root, those of everything beneath it too. None now and then, when nothing happens.

        Raises:
            InvalidRequest: `after` is no event's id.
            RateLimited: too many listen here. StoreUnavailable.
        """
        entry, index = _position(after)
        if self._listening >= _LISTENERS:
            raise RateLimited(f"{_LISTENERS} listen here already", retry_after=5)
        self._listening += 1
        try:
            async for event in self._follow(task, entry, index):
                yield event
        except (RedisError, OSError) as e:
            raise unavailable(e) from e
        finally:
            self._listening -= 1

    async def _follow(
        self, task: TaskView, entry: str, index: int
    ) -> AsyncGenerator[Event | None, None]:
        key = f"{self._mailbox.prefix_of(task.task.tenant)}:e:{task.task.root}"
        whole = task.task.id == task.task.root
        if entry != "0-0":
            seen = await cast(Awaitable[list[Any]], self._client.xrange(key, entry, count=1))
            if seen and seen[0][0] == entry:
                for event in _events(seen[0], index + 1):
                    if whole or event.data["task"] == task.task.id:
                        yield event
                    if _is_last(event, task):
                        return
            elif seen:
                yield Event(entry + ".0", "gap", {"task": task.task.id})
        while True:
            found = await cast(
                Awaitable[list[Any]], self._client.xread({key: entry}, 100, block=_BLOCK_MS)
            )
            for item in found[0][1] if found else ():
                entry = item[0]
                for event in _events(item, 0):
                    if whole or event.data["task"] == task.task.id:
                        yield event
                    if _is_last(event, task):
                        return
            if not found:
                view = await self._mailbox.view(task.task.id)
                if view.finished:  # and its last event was seen before, or is not kept
                    yield Event(entry + ".0", "end", {"task": view.task.id, "state": view.state})
                    return
                yield None


def _position(after: str | None) -> tuple[str, int]:
    if after is None:
        return "0-0", 0
    match = _ID.fullmatch(after)
    if match is None:
        raise InvalidRequest(
            f"{after!r} is no event's id (they read 1785668687123-0.0)", param="Last-Event-ID"
        )
    return match.group(1), int(match.group(2))


def _events(item: tuple[str, dict[str, str]], start: int) -> list[Event]:
    entry, fields = item
    return [
        Event(f"{entry}.{i}", str(data.pop("event")), data)
        for i, data in enumerate(json.loads(fields["d"]))
        if i >= start
    ]


def _is_last(event: Event, task: TaskView) -> bool:
    ended = event.kind == "state" and event.data["state"] in TERMINAL
    return ended and event.data["task"] == task.task.id
