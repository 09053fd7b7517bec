"""The mailbox: durable tasks over one versioned function library in the store (mailbox.lua).

A sender is answered after its task is stored. A lease has an owner, an attempt number (the fencing
token) and an expiry; what a holder does with an older number is refused. The mailbox is the only
thing that retries. A tenant's tasks, counters and board share one partition, so that each call is
one atomic function.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import zlib
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.resources import files
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from hybrid.agents.lease import (
    PAYLOAD_LIMIT,
    Lease,
    Outcome,
    envelope_text,
    payload_text,
    prefix,
    read_view,
)
from hybrid.agents.listener import POLL_S, Listener
from hybrid.agents.store import unavailable
from hybrid.agents.task import State, Task, TaskView
from hybrid.config import StoreConfig
from hybrid.errors import (
    BudgetExceeded,
    Cancelled,
    Conflict,
    NotFound,
    RateLimited,
    StaleLease,
)

__all__ = ["PAYLOAD_LIMIT", "Lease", "Mailbox", "Outcome"]

LIBRARY = "hybrid_mailbox_v1"
_BACKOFF_S = 0.25
_BACKOFF_MAX_S = 30.0


class Mailbox:
    """All mailboxes of a store.

    Args:
        client: from `hybrid.agents.store.connect`.
        config: partitions, depth, lease, attempts and retention.
    """

    def __init__(self, client: Redis, config: StoreConfig) -> None:
        self._client = client
        self._config = config
        self._retain_ms = int(config.retain_s * 1000)
        self._prefixes = [prefix(i) for i in range(config.partitions)]
        self._turn = 0
        self._listener = Listener(client, self._prefixes)

    async def install(self) -> None:
        """Load the function library, if the store has none or another edition of it.

        Raises:
            StoreUnavailable: the store is down.
        """
        code = files("hybrid.agents").joinpath("mailbox.lua").read_text(encoding="utf-8")
        try:
            held = await self._client.function_list(library=LIBRARY, withcode=True)
            if not any(code in map(str, _flat(entry)) for entry in held):
                await self._client.function_load(code, replace=True)
        except (RedisError, OSError) as e:
            raise unavailable(e) from e

    async def close(self) -> None:
        """Stop listening. The client stays the caller's."""
        await self._listener.close()

    # --- senders ------------------------------------------------------------------------

    async def submit(self, task: Task) -> str:
        """Store a task; returns its id, or an earlier one's with the same idempotency key.

        Raises:
            InvalidRequest: over 256 KiB. RateLimited: the mailbox is full.
            BudgetExceeded: the root has no hops left. StoreUnavailable: not stored.
        """
        reply = await self._call(
            "submit",
            self._prefix(task.tenant),
            envelope_text(task),
            self._config.max_attempts,
            self._config.max_depth,
            self._retain_ms,
        )
        if reply[0] == "full":
            raise RateLimited(
                f"agent {task.agent!r} has {reply[1]} unfinished tasks (store.max_depth is"
                f" {self._config.max_depth}); come back later",
                retry_after=1,
            )
        if reply[0] == "budget":
            raise BudgetExceeded(f"root task {task.root} has no {reply[1]} left")
        return str(reply[1])

    async def view(self, task_id: str) -> TaskView:
        """Where a task stands. Raises NotFound, StoreUnavailable."""
        for at in self._prefixes:
            try:
                fields = await cast(
                    Awaitable[dict[str, str]], self._client.hgetall(f"{at}:t:{task_id}")
                )
                if fields:
                    history = await cast(
                        Awaitable[list[str]], self._client.lrange(f"{at}:h:{task_id}", 0, -1)
                    )
                    return read_view(fields, history)
            except (RedisError, OSError) as e:
                raise unavailable(e) from e
        raise NotFound(f"no task {task_id!r}; finished ones are kept {self._config.retain_s:g} s")

    async def wait(self, task_id: str, timeout_s: float) -> TaskView:
        """The task once it is finished, or as it stands after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self.watching(task_id) as finished:
            while True:
                view = await self.view(task_id)
                left = deadline - time.monotonic()
                if view.finished or left <= 0:
                    return view
                await asyncio.wait({finished}, timeout=min(left, POLL_S))

    def watching(self, task_id: str) -> AbstractContextManager[asyncio.Future[State]]:
        """A future that resolves to the final state when the store announces it."""
        return self._listener.watching(task_id)

    async def cancel(self, task_id: str, *, reason: str = "cancelled") -> TaskView:
        """Cancel a task and everything beneath it; hosts that hold some learn it at once.

        Raises:
            NotFound, StoreUnavailable.
        """
        view = await self.view(task_id)
        await self._call("cancel", self._prefix(view.task.tenant), task_id, reason, self._retain_ms)
        return await self.view(task_id)

    # --- hosts --------------------------------------------------------------------------

    async def lease(
        self, agents: Sequence[str] | None, owner: str, count: int, *, wait_s: float = 0
    ) -> list[Lease]:
        """Take up to `count` tasks, one of each agent in turn; None means of all agents.

        Also does what time demands: leases that expired are tried again, delays end.

        Args:
            wait_s: seconds to wait for one when there is none now.
        """
        self._listener.start()
        deadline = time.monotonic() + wait_s
        while True:
            self._listener.work.clear()
            found: list[Lease] = []
            due: list[float] = []
            for step in range(len(self._prefixes)):
                at = self._prefixes[(self._turn + step) % len(self._prefixes)]
                if len(found) < count:
                    found += await self._lease(at, agents, owner, count - len(found), due)
            self._turn += 1
            left = deadline - time.monotonic()
            if found or left <= 0:
                return found
            sleep = min(left, POLL_S)
            if due:
                sleep = max(0.005, min(sleep, min(due) - time.time()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._listener.work.wait(), sleep)

    async def _lease(
        self,
        at: str,
        agents: Sequence[str] | None,
        owner: str,
        count: int,
        due: list[float],
    ) -> list[Lease]:
        """Lease in one partition; appends when its next delay ends (UNIX seconds) to `due`."""
        lease_ms = int(self._config.lease_s * 1000)
        names = agents if agents is not None else ()
        if agents is not None and not agents:
            return []
        reply = await self._call("lease", at, owner, lease_ms, count, self._retain_ms, *names)
        _, expires, items, next_due = reply
        if next_due:
            due.append(float(next_due) / 1000)
        return [
            Lease(
                task=Task.from_json(envelope).with_attempt(int(attempt)),
                owner=owner,
                expires=expires / 1000,
                journal={
                    k: json.loads(v) for k, v in zip(journal[::2], journal[1::2], strict=True)
                },
            )
            for envelope, attempt, journal in items
        ]

    async def renew(self, lease: Lease) -> float:
        """Keep a lease; returns its new expiry (UNIX seconds).

        Raises:
            StaleLease: it is another's by now. Cancelled: the task was cancelled.
        """
        reply = await self._held("renew", lease, int(self._config.lease_s * 1000))
        return float(reply[1]) / 1000

    async def record(
        self,
        lease: Lease,
        name: str,
        value: Any,
        *,
        usage: Mapping[str, float] | None = None,
    ) -> None:
        """Journal a finished step, and charge what it used to the root.

        Raises:
            BudgetExceeded: the step is recorded, and the root's limit is passed.
            StaleLease, Cancelled, InvalidRequest (over 256 KiB).
        """
        text = payload_text(value, f"step {name!r}")
        await self._held("record", lease, name, text, json.dumps(dict(usage)) if usage else "")

    async def wait_on(
        self, lease: Lease, children: Sequence[Task] = (), *, until: float | None = None
    ) -> None:
        """Give up lease and slot until all `children` (submitted here) are finished, or `until`.

        A child that is there already is not submitted again.

        Raises:
            BudgetExceeded: no hops left; nothing was changed. StaleLease, Cancelled.
        """
        await self._held(
            "wait_on",
            lease,
            "" if until is None else repr(until),
            self._config.max_attempts,
            *map(envelope_text, children),
        )

    async def complete(self, lease: Lease, outcome: Outcome) -> None:
        """End a task: result, board writes, child submissions and release in one call.

        Raises:
            StaleLease, Cancelled: nothing was changed. Conflict: a board write's version.
        """
        at = self._prefix(lease.task.tenant)
        writes = [part for w in outcome.board for part in w.arguments(at, lease.task.tenant)]
        await self._held(
            "complete",
            lease,
            outcome.state,
            "" if outcome.result is None else payload_text(outcome.result, "the result"),
            outcome.error or "",
            json.dumps(dict(outcome.usage)) if outcome.usage else "",
            self._retain_ms,
            self._config.max_attempts,
            len(outcome.board),
            *writes,
            *map(envelope_text, outcome.children),
        )

    async def retry(self, lease: Lease, error: str, *, delay_s: float | None = None) -> State:
        """Give a task back after an error: tried again later, or dead after its last attempt.

        Args:
            delay_s: by default exponential from 0.25 s to 30 s, with full jitter.
        """
        if delay_s is None:
            ceiling = min(_BACKOFF_MAX_S, _BACKOFF_S * 2 ** min(lease.task.attempt, 20))
            delay_s = random.uniform(_BACKOFF_S / 2, ceiling)
        reply = await self._held("retry", lease, error, int(delay_s * 1000), self._retain_ms)
        return cast(State, reply[1])

    async def release(self, lease: Lease) -> None:
        """Give a task back untouched; the attempt does not count."""
        await self._held("release", lease)

    # --- looking after it ---------------------------------------------------------------

    async def depth(self, agent: str) -> dict[str, int]:
        """`open` (unfinished), `ready` and `dead` tasks of an agent."""
        total = {"open": 0, "ready": 0, "dead": 0}
        try:
            for at in self._prefixes:
                count = await cast(Awaitable[str | None], self._client.hget(f"{at}:open", agent))
                total["open"] += int(count or 0)
                total["ready"] += await self._client.zcard(f"{at}:r:{agent}")
                total["dead"] += await self._client.zcard(f"{at}:dead:{agent}")
        except (RedisError, OSError) as e:
            raise unavailable(e) from e
        return total

    async def dead(self, agent: str, count: int = 100) -> list[TaskView]:
        """The dead letter, newest first."""
        views = []
        for at in self._prefixes:
            ids = await self._client.zrange(f"{at}:dead:{agent}", 0, count - 1, desc=True)
            for task_id in cast(list[str], ids):
                with contextlib.suppress(NotFound):  # its retention is over
                    views.append(await self.view(task_id))
        return views[:count]

    async def requeue_dead(self, task_id: str) -> None:
        """Try a dead task again, from its last finished step. Raises NotFound, Conflict."""
        view = await self.view(task_id)
        reply = await self._call("requeue", self._prefix(view.task.tenant), task_id)
        if reply[0] != "ok":
            raise Conflict(f"task {task_id} is {view.state}, not dead")

    # --- plumbing -----------------------------------------------------------------------

    def _prefix(self, tenant: str) -> str:
        return self._prefixes[zlib.crc32(tenant.encode()) % len(self._prefixes)]

    async def _held(self, function: str, lease: Lease, *args: str | int) -> list[Any]:
        task = lease.task
        reply = await self._call(function, self._prefix(task.tenant), task.id, task.attempt, *args)
        match reply[0]:
            case "ok":
                return reply
            case "cancelled":
                raise Cancelled(f"task {task.id} was cancelled")
            case "budget":
                raise BudgetExceeded(f"root task {task.root} has no {reply[1]} left")
            case "conflict":
                raise Conflict(f"board key {reply[1]} is at version {reply[2]}; read it again")
            case _:
                raise StaleLease(
                    f"task {task.id}: attempt {task.attempt} of {lease.owner} no longer holds it"
                )

    async def _call(self, function: str, at: str, *args: str | int) -> list[Any]:
        try:
            return await self._fcall(function, at, *args)
        except ResponseError as e:
            if "Function not found" not in str(e) and not isinstance(e, NoScriptError):
                raise
        # A store that came back empty, or a new one: the library is loaded once and asked again.
        await self.install()
        return await self._fcall(function, at, *args)

    async def _fcall(self, function: str, at: str, *args: str | int) -> list[Any]:
        try:
            reply = await cast(
                Awaitable[list[Any]], self._client.fcall(f"hybrid1_{function}", 1, at, *args)
            )
        except ResponseError:
            raise
        except (RedisError, OSError) as e:
            raise unavailable(e) from e
        return reply


def _flat(entry: Any) -> list[Any]:
    if isinstance(entry, Mapping):
        return [x for pair in entry.items() for x in pair]
    return list(entry)
