"""The mailbox from outside: submit, look, wait, cancel, signal."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
import zlib
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from hybrid.agents import library
from hybrid.agents.batch import Batch
from hybrid.agents.lease import (
    PAYLOAD_LIMIT,
    envelope_text,
    fingerprint,
    json_text,
    payload_text,
    pieces,
    prefix,
    read_view,
)
from hybrid.agents.listener import POLL_S, Listener
from hybrid.agents.payloads import Payloads
from hybrid.agents.task import State, Task, TaskView
from hybrid.config import StoreConfig
from hybrid.errors import (
    BudgetExceeded,
    Conflict,
    InvalidRequest,
    NotFound,
    RateLimited,
    Unavailable,
)


class Senders:
    """All mailboxes of a store, as those see them who send.

    Args:
        client: from `hybrid.agents.store.connect`.
        config: partitions, depth, lease, attempts and retention.
        payloads: where inputs and results over 256 KiB are kept; without it they are refused.

    Attributes:
        prefixes: of its partitions.
        listener: what the store announces.
    """

    def __init__(
        self, client: Redis, config: StoreConfig, payloads: Payloads | None = None
    ) -> None:
        self.client = client
        self._payloads = payloads
        self.config = config
        self.prefixes = [prefix(i) for i in range(config.partitions)]
        self.listener = Listener(client, self.prefixes)
        self._me = uuid.uuid4().hex
        self._batches = {at: Batch(client, at, self._header, self.install) for at in self.prefixes}

    async def install(self) -> int:
        """Load the function library, if the store has none or an older edition; returns its
        edition. Raises StoreUnavailable."""
        return await library.install(self.client, self.prefixes)

    async def close(self) -> None:
        """Stop listening, give up calls under way. The client stays the caller's."""
        await self.listener.close()
        for batch in self._batches.values():
            await batch.close()

    @property
    def round_trips(self) -> tuple[int, int]:
        """Calls made so far, and operations in them."""
        batches = self._batches.values()
        return sum(b.calls for b in batches), sum(b.operations for b in batches)

    # --- senders ------------------------------------------------------------------------

    async def submit(self, task: Task) -> str:
        """Store a task; returns its id, or an earlier one's with the same idempotency key.

        Raises:
            InvalidRequest: over 256 KiB. RateLimited: the agent's or the tenant's mailbox is full.
            Conflict: the idempotency key was used with another input.
            BudgetExceeded: the root has no hops, tokens or money left.
            StoreUnavailable: not known to be stored.
        """
        return await self._submit(task, "")

    async def _submit(self, task: Task, waiter: str) -> str:
        text = await self._envelope(task)
        reply = await self.call(task.tenant, "submit", text, fingerprint(task), waiter)
        match reply[0]:
            case "full":
                whose = f"{reply[2]} {task.agent if reply[2] == 'agent' else task.tenant!r}"
                limit = "max_depth" if reply[2] == "agent" else "max_tenant_depth"
                raise RateLimited(
                    f"{whose} has {reply[1]} unfinished tasks (store.{limit} is"
                    f" {getattr(self.config, limit)}); come back later",
                    retry_after=1,
                )
            case "budget":
                raise BudgetExceeded(f"root task {task.root} has no {reply[1]} left")
            case "mismatch":
                raise Conflict(
                    f"idempotency key {task.idempotency_key!r} belongs to task {reply[1]}, whose"
                    " input is another; use a key for one request only"
                )
        return str(reply[1])

    async def run(self, task: Task, timeout_s: float) -> TaskView:
        """Submit, and the task once it is finished, or as it stands after `timeout_s`.

        Raises:
            What `submit` raises.
        """
        deadline = time.monotonic() + timeout_s
        await self.listener.hear(f"to:{self._me}")
        with self.listener.answer(task.id) as answer:
            task_id = await self._submit(task, self._me)
            if task_id == task.id:
                await asyncio.wait({answer}, timeout=min(timeout_s, POLL_S))
                if answer.done():
                    return await self._whole(answer.result())
        return await self.wait(task_id, max(0.0, deadline - time.monotonic()))

    async def view(self, task_id: str) -> TaskView:
        """Where a task stands. Raises NotFound, StoreUnavailable."""
        for batch in self._batches.values():
            reply = await batch.call("view", task_id)
            if reply[0] == "ok":
                return await self._whole(read_view(pieces(reply[1]), reply[2]))
        raise NotFound(f"no task {task_id!r}; finished ones are kept {self.config.retain_s:g} s")

    async def wait(self, task_id: str, timeout_s: float) -> TaskView:
        """The task once it is finished, or as it stands after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        view = await self.view(task_id)
        if view.finished or timeout_s <= 0:
            return view
        await self.listener.hear("ended" if view.task.parent is None else "ended:inner")
        with self.watching(task_id) as finished:
            while True:
                view = await self.view(task_id)
                left = deadline - time.monotonic()
                if view.finished or left <= 0:
                    return view
                await asyncio.wait({finished}, timeout=min(left, POLL_S))

    def watching(self, task_id: str) -> AbstractContextManager[asyncio.Future[State]]:
        """A future that resolves to the final state when the store announces it."""
        return self.listener.watching(task_id)

    async def cancel(self, task_id: str, *, reason: str = "cancelled") -> TaskView:
        """Cancel a task and everything beneath it; hosts that hold some learn it at once.

        Raises:
            NotFound, StoreUnavailable.
        """
        view = await self.view(task_id)
        await self.call(view.task.tenant, "cancel", task_id, reason)
        return await self.view(task_id)

    async def signal(self, task_id: str, name: str, value: Any) -> None:
        """Tell a task what it waits for (`ctx.receive(name)`); the first value of a name stands.

        It may come before the task waits for it.

        Raises:
            NotFound: no such task. Conflict: it has ended. InvalidRequest, StoreUnavailable.
        """
        view = await self.view(task_id)
        text = payload_text(value, f"signal {name!r}")
        reply = await self.call(view.task.tenant, "signal", task_id, name, text)
        if reply[0] == "over":
            raise Conflict(f"task {task_id} is {reply[1]} and hears no signal")
        if reply[0] == "steps":
            raise InvalidRequest(f"task {task_id} holds store.max_steps journal entries")

    # --- what is too large for the store ---

    async def _envelope(self, task: Task) -> str:
        """A task as stored; a large input goes to the blobs first."""
        text = task.to_json()
        if self._payloads is None or len(text) * 4 <= PAYLOAD_LIMIT:
            return envelope_text(task)
        if len(text.encode(errors="surrogatepass")) > PAYLOAD_LIMIT:
            ref = await self._payloads.put(json_text(task.input, "the input"), "the input")
            task = replace(task, input=None, payload=ref)
        return envelope_text(task)

    async def _whole(self, view: TaskView) -> TaskView:
        """The task with what was kept elsewhere."""
        if view.task.payload is None and view.result_ref is None:
            return view
        task, result = await self.whole_task(view.task), view.result
        if view.result_ref is not None:
            result = json.loads(await self.fetch(view.result_ref))
        return replace(view, task=task, result=result)

    async def whole_task(self, task: Task) -> Task:
        """A task with its input. Raises RegistryError, IntegrityError, Unavailable."""
        if task.payload is None:
            return task
        return replace(task, input=json.loads(await self.fetch(task.payload)))

    async def fetch(self, ref: str) -> str:
        """A text that was kept by reference. Raises RegistryError, IntegrityError, Unavailable."""
        if self._payloads is None:
            raise Unavailable(f"payload {ref} is kept where this process does not look")
        return await self._payloads.get(ref)

    # --- plumbing -----------------------------------------------------------------------

    async def call(self, tenant: str, name: str, *arguments: str | int) -> list[Any]:
        """An operation on the partition of a tenant."""
        return await self._batches[self.prefix_of(tenant)].call(name, *arguments)

    async def call_all(self, name: str, *arguments: str | int) -> list[list[Any]]:
        """An operation on every partition."""
        return [await b.call(name, *arguments) for b in self._batches.values()]

    def _header(self) -> tuple[str | int, ...]:
        s = self.config
        return (
            int(s.retain_s * 1000),
            s.max_attempts,
            s.max_depth,
            s.max_tenant_depth,
            s.max_events,
            s.max_steps,
            int(time.time() * 1000),
        )

    def prefix_of(self, tenant: str) -> str:
        """What the keys of a tenant's partition start with."""
        return self.prefixes[zlib.crc32(tenant.encode()) % len(self.prefixes)]
