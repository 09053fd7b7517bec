"""The mailbox: durable tasks over one versioned function library in the store (library/*.lua).

A sender is answered after its task is stored. A lease has an owner, an attempt number (the fencing
token) and an expiry; what a holder does with an older number is refused. The mailbox is the only
thing that retries. A tenant's tasks, counters and board share one partition, so that each call is
one atomic function; what a process asks for at the same time is one call (`batch`).

Times in an envelope are of its sender's clock; they are kept by the server's and handed out by the
host's, so no two clocks need agree.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from redis.asyncio import Redis

from hybrid.agents.batch import Batch
from hybrid.agents.lease import (
    BY_REFERENCE,
    PAYLOAD_LIMIT,
    Lease,
    Outcome,
    json_text,
    limited,
    payload_text,
    read_lease,
    refused,
    usage_text,
)
from hybrid.agents.listener import POLL_S
from hybrid.agents.payloads import Payloads
from hybrid.agents.senders import Senders
from hybrid.agents.task import State, Task
from hybrid.config import StoreConfig
from hybrid.errors import HybridError, InvalidRequest, Unavailable

__all__ = ["PAYLOAD_LIMIT", "Lease", "Mailbox", "Outcome"]

_BACKOFF_S = 0.25
_BACKOFF_MAX_S = 30.0
_UNREADABLE_S = 1.0
"""A task whose envelope this host cannot read is left to others for so long."""


class Mailbox(Senders):
    """All mailboxes of a store, for those who send and for hosts.

    Args:
        client: from `hybrid.agents.store.connect`.
        config: partitions, depth, lease, attempts and retention.
        payloads: where inputs and results over 256 KiB are kept; without it they are refused.
    """

    def __init__(
        self, client: Redis, config: StoreConfig, payloads: Payloads | None = None
    ) -> None:
        super().__init__(client, config, payloads)
        self._turn = 0

    async def lease(
        self, agents: Sequence[str] | None, owner: str, count: int, *, wait_s: float = 0
    ) -> list[Lease]:
        """Take up to `count` tasks, one of each agent in turn; None means of all agents.

        Args:
            wait_s: seconds to wait for one when there is none now.
        """
        if agents is not None and not agents:
            return []
        deadline = time.monotonic() + wait_s
        if wait_s:
            await self.listener.hear(f"host:{owner}")
        while True:
            found, idle_s = await self.take(owner, count, agents=agents, sleep=wait_s > 0)
            left = deadline - time.monotonic()
            if found or left <= 0:
                return found
            await self.rest(min(left, idle_s))

    async def take(
        self,
        owner: str,
        count: int,
        *,
        agents: Sequence[str] | None = None,
        cap: int = 1 << 20,
        room: Mapping[str, int] | None = None,
        sleep: bool = True,
        handed: bool = False,
    ) -> tuple[list[Lease], float]:
        """Lease once, without waiting. Also does what time demands: leases that expired are tried
        again, delays end, deadlines pass, schedules come due.

        Args:
            agents: whose tasks; None means any agent's.
            cap: most of one agent.
            room: most of an agent, where that is less than `cap`.
            sleep: whether the caller is going to `rest` when there is none.
            handed: whether it also takes leases that are sent to it (`listener.on_lease`). Not from
                a cluster, whose servers cannot tell whether anybody hears.

        Returns:
            Leases, and for how many seconds at most to rest before the next look; 0 when there is
            more to take.
        """
        self.listener.work.clear()
        found: list[Lease] = []
        idle_s = POLL_S
        more = False
        whose: list[str | int] = ["all"] if agents is None else ["only", *agents]
        if agents is None and room:
            whose += [part for pair in room.items() for part in pair]
        lease_ms = int(self.config.lease_s * 1000)
        asleep = 0
        if sleep:
            asleep = 2 if handed and isinstance(self.client, Redis) else 1
        for step in range(len(self.prefixes)):
            if len(found) >= count:
                break
            batch = self._batches[self.prefixes[(self._turn + step) % len(self.prefixes)]]
            wanted = (count - len(found), cap, asleep, self.listener.woken)
            now, expires, items, due, left = await batch.call(
                "lease", owner, lease_ms, *wanted, *whose
            )
            more = more or bool(left)
            if due:
                idle_s = min(idle_s, max(0.005, (float(due) - now) / 1000))
            for item in items:
                try:
                    found.append(read_lease(item, owner, now, expires))
                except InvalidRequest as e:
                    await self._unread(batch, item, f"host {owner}: {e.message}")
        self._turn += 1
        self.listener.woken = 0
        return found, 0.0 if found and more else idle_s

    @staticmethod
    async def _unread(batch: Batch, item: list[Any], note: str) -> None:
        """Leave a task of another version to others, who may know it."""
        await batch.call("release", item[0], item[2], int(_UNREADABLE_S * 1000), note)

    async def rest(self, seconds: float) -> None:
        """Wait until there may be work (`listener.work`), at most so long.

        Unlike `wait_for` it makes no task of the wait: whoever rests goes on in the very next turn
        of the loop, in time for the call that is about to go out.
        """
        timer = asyncio.get_running_loop().call_later(seconds, self.listener.work.set)
        try:
            await self.listener.work.wait()
        finally:
            timer.cancel()

    async def renew(self, leases: Sequence[Lease]) -> dict[str, str]:
        """Keep leases.

        Returns:
            By task id: `ok`, `stale` (another's by now), `cancelled` or `missing`.
        """
        states: dict[str, str] = {}
        for at in self.prefixes:
            mine = [lease for lease in leases if self.prefix_of(lease.task.tenant) == at]
            if mine:
                pairs = [x for lease in mine for x in (lease.task.id, lease.task.attempt)]
                reply = await self._batches[at].call(
                    "renew", int(self.config.lease_s * 1000), *pairs
                )
                states |= {
                    lease.task.id: str(state) for lease, state in zip(mine, reply[1:], strict=True)
                }
        return states

    async def whole(self, lease: Lease) -> Lease:
        """The lease with what is kept outside the store: its input, its children's results.

        Raises:
            RegistryError, IntegrityError, Unavailable: it cannot be had.
        """
        far = {
            name: value["ref"]
            for name, value in lease.journal.items()
            if isinstance(value, dict) and len(value) == 4 and "ref" in value and "state" in value
        }
        if lease.task.payload is None and not far:
            return lease
        journal = dict(lease.journal)
        for name, ref in far.items():
            journal[name] = {**journal[name], "result": json.loads(await self.fetch(ref))}
        return replace(lease, task=await self.whole_task(lease.task), journal=journal)

    def write(
        self, lease: Lease, name: str, value: Any, usage: Mapping[str, float] | None = None
    ) -> asyncio.Future[list[Any]]:
        """Begin to journal a finished step: it goes out within milliseconds, and before whatever
        else is asked for this task. The reply is for `refused`.

        Raises, as the reply:
            InvalidRequest: not JSON, or over 256 KiB.
        """
        task = lease.task

        def arguments() -> tuple[str | int, ...]:
            text = payload_text(value, f"step {name!r}")
            return task.id, task.attempt, name, text, usage_text(usage or {})

        return self._batch(lease).later(task.id, "record", arguments, (name, usage))

    def hurry(self, lease: Lease) -> None:
        """What `write` began for this task goes out now."""
        self._batch(lease).hurry(lease.task.id)

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
            StaleLease, Cancelled, InvalidRequest (over 256 KiB, too many steps).
        """
        written = self.write(lease, name, value, usage)
        self.hurry(lease)
        refused(lease, await written)

    async def emit(self, lease: Lease, kind: str, **fields: Any) -> None:
        """Tell the root's listeners something of a running task. Raises StaleLease, Cancelled."""
        inside = json.dumps({"event": kind, **fields}, ensure_ascii=False)[1:-1]
        await self._held("emit", lease, inside)

    async def wait_on(
        self,
        lease: Lease,
        children: Sequence[Task] = (),
        *,
        until: float | None = None,
        signals: Sequence[str] = (),
    ) -> None:
        """Give up lease and slot until all `children` (submitted here) are finished, or `until`
        (UNIX seconds), or one of the signals.

        A child that is there already is not submitted again.

        Raises:
            BudgetExceeded: no hops left; nothing was changed. StaleLease, Cancelled.
        """
        till = "" if until is None else int(until * 1000)
        names = json.dumps(list(signals)) if signals else ""
        envelopes = [await self._envelope(child) for child in children]
        await self._held("wait_on", lease, till, names, *envelopes)

    async def delegate(self, lease: Lease, child: Task) -> None:
        """Hand on to a child: however it ends, this task ends.

        Raises:
            BudgetExceeded: no hops left; nothing was changed. StaleLease, Cancelled.
        """
        await self._ended(lease, "delegate", (), (await self._envelope(child),))

    async def complete(self, lease: Lease, outcome: Outcome) -> None:
        """End a task: result, board writes, child submissions and release in one call.

        Raises:
            StaleLease, Cancelled: nothing was changed. Conflict: a board write's version.
        """
        at = self.prefix_of(lease.task.tenant)
        writes = [part for w in outcome.board for part in w.arguments(at, lease.task.tenant)]
        result = "" if outcome.result is None else json_text(outcome.result, "the result")
        if self._payloads is not None and len(result.encode()) > PAYLOAD_LIMIT:
            result = BY_REFERENCE + await self._payloads.put(result, "the result")
        limited(result, "the result")
        envelopes = [await self._envelope(child) for child in outcome.children]
        await self._ended(
            lease,
            "complete",
            (outcome.state, result, outcome.error or ""),
            (len(outcome.board), *writes, *envelopes),
            outcome.usage,
        )

    async def retry(self, lease: Lease, error: str, *, delay_s: float | None = None) -> State:
        """Give a task back after an error: tried again later, or dead after its last attempt.

        Args:
            delay_s: by default exponential from 0.25 s to 30 s, with full jitter.
        """
        if delay_s is None:
            ceiling = min(_BACKOFF_MAX_S, _BACKOFF_S * 2 ** min(lease.task.attempt, 20))
            delay_s = random.uniform(_BACKOFF_S / 2, ceiling)
        reply = await self._held("retry", lease, error, int(delay_s * 1000))
        return cast(State, reply[1])

    async def release(self, lease: Lease) -> None:
        """Give a task back untouched; the attempt does not count."""
        await self._held("release", lease, 0, "")

    def _batch(self, lease: Lease) -> Batch:
        return self._batches[self.prefix_of(lease.task.tenant)]

    async def _ended(
        self,
        lease: Lease,
        name: str,
        before: tuple[str | int, ...],
        after: tuple[str | int, ...],
        usage: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """End a task. Nobody will read its journal again: of steps that have not gone out yet only
        the cost and the news go with this call."""
        late = self._batch(lease).withdraw(lease.task.id)
        total = dict(usage)
        for step in late:
            for unit, amount in (step.note[1] or {}).items():
                total[unit] = total.get(unit, 0) + amount
        steps = "\0".join(step.note[0] for step in late)
        charged = usage_text(total)
        try:
            await self._held(name, lease, *before, charged, steps, *after)
        except BaseException as e:
            for step in late:
                if not step.reply.done():
                    lost = e if isinstance(e, HybridError) else Unavailable("not written")
                    step.reply.set_exception(lost)
            raise
        for step in late:
            if not step.reply.done():
                step.reply.set_result(["ok"])

    async def _held(self, name: str, lease: Lease, *args: str | int) -> list[Any]:
        self.hurry(lease)
        task = lease.task
        return refused(lease, await self._batch(lease).call(name, task.id, task.attempt, *args))
