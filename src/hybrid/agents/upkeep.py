"""Looking after the mailboxes: depths, the dead letter, hosts that are gone, schedules."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from typing import Any, cast

from redis.exceptions import RedisError

from hybrid.agents.lease import envelope_text
from hybrid.agents.mailbox import Mailbox
from hybrid.agents.store import unavailable
from hybrid.agents.task import Task, TaskView
from hybrid.errors import Conflict, InvalidRequest, NotFound

_PER_OCCURRENCE = ("id", "root", "created", "deadline")


@dataclass(frozen=True)
class Backlog:
    """What waits in all mailboxes.

    Attributes:
        ready: tasks that a host could take now.
        leased: tasks in hosts' hands.
        oldest_s: seconds the longest-waiting ready task waits.
        nearest_s: seconds to the nearest deadline of an unfinished task; None without one.
    """

    ready: int
    leased: int
    oldest_s: float
    nearest_s: float | None


@dataclass(frozen=True)
class Schedule:
    """A task that is submitted again and again. `next_at` is UNIX seconds of the server's clock."""

    name: str
    next_at: float
    every_s: float
    agent: str
    input: Any


class Upkeep:
    """What operators and the swarm do with a mailbox."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    async def depth(self, agent: str) -> dict[str, int]:
        """`open` (unfinished), `ready` and `dead` tasks of an agent. Raises StoreUnavailable."""
        total = {"open": 0, "ready": 0, "dead": 0}
        client = self._mailbox.client
        try:
            for at in self._mailbox.prefixes:
                count = await cast(Awaitable[str | None], client.hget(f"{at}:open", agent))
                total["open"] += int(count or 0)
                total["ready"] += await client.zcard(f"{at}:r:{agent}")
                total["dead"] += await client.zcard(f"{at}:dead:{agent}")
        except (RedisError, OSError) as e:
            raise unavailable(e) from e
        return total

    async def backlog(self) -> Backlog:
        """What waits, over all partitions. Raises StoreUnavailable."""
        rows = await self._mailbox.call_all("backlog")
        near = [float(row[3]) / 1000 for row in rows if row[3] != ""]
        return Backlog(
            ready=sum(int(row[0]) for row in rows),
            leased=sum(int(row[1]) for row in rows),
            oldest_s=max(float(row[2]) for row in rows) / 1000,
            nearest_s=min(near) if near else None,
        )

    async def dead(self, agent: str, count: int = 100) -> list[TaskView]:
        """The dead letter, newest first. Raises StoreUnavailable."""
        views = []
        for at in self._mailbox.prefixes:
            try:
                ids = await self._mailbox.client.zrange(
                    f"{at}:dead:{agent}", 0, count - 1, desc=True
                )
            except (RedisError, OSError) as e:
                raise unavailable(e) from e
            for task_id in cast(list[str], ids):
                with contextlib.suppress(NotFound):  # its retention is over
                    views.append(await self._mailbox.view(task_id))
        return sorted(views, key=lambda v: -v.updated)[:count]

    async def requeue(self, task_id: str, *, timeout_s: float | None = None) -> TaskView:
        """Try a dead task again, from its last finished step, and parents that handed on to it.

        Args:
            timeout_s: seconds until its new deadline; None is the agent's own.

        Raises:
            NotFound. Conflict: it is not dead. StoreUnavailable.
        """
        view = await self._mailbox.view(task_id)
        limit = "" if timeout_s is None else int(timeout_s * 1000)
        reply = await self._mailbox.call(view.task.tenant, "requeue", task_id, limit)
        if reply[0] != "ok":
            raise Conflict(f"task {task_id} is {view.state}, not dead")
        return await self._mailbox.view(task_id)

    async def lost(self, owner: str, reason: str) -> int:
        """A host that is gone: what it held is tried again now, not when its leases end.

        Returns:
            How many tasks that were.
        """
        return sum(int(row[0]) for row in await self._mailbox.call_all("lost", owner, reason))

    async def recur(
        self,
        name: str,
        task: Task,
        *,
        every_s: float,
        first_at: float | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Submit a task every so often, also while no host runs; replaces a schedule of that name.

        Occurrences missed because nothing ran collapse into one. An occurrence that finds the
        agent's mailbox full is left out. Give the task a conversation to keep occurrences from
        overlapping.

        Args:
            name: of the schedule, within its tenant.
            task: what is submitted; id, root, creation and deadline are each occurrence's own.
            every_s: at least 0.1.
            first_at: UNIX seconds; None is now.
            timeout_s: seconds an occurrence has; None is the agent's own.
        """
        if every_s < 0.1:
            raise InvalidRequest(f"a schedule's every_s is at least 0.1, not {every_s:g}")
        envelope_text(task)  # refuses what a submit would refuse
        rest = {k: v for k, v in asdict(task).items() if k not in _PER_OCCURRENCE}
        text = json.dumps(rest, separators=(",", ":"), ensure_ascii=False)
        await self._mailbox.call(
            task.tenant,
            "recur",
            f"{task.tenant}\0{name}",
            int(every_s * 1000),
            int((task.created if first_at is None else first_at) * 1000),
            "" if timeout_s is None else int(timeout_s * 1000),
            text[1:],
        )

    async def unrecur(self, name: str, tenant: str = "default") -> None:
        """End a schedule; occurrences that were submitted stay. Raises NotFound."""
        reply = await self._mailbox.call(tenant, "unrecur", f"{tenant}\0{name}")
        if reply[0] != "ok":
            raise NotFound(f"no schedule {name!r}")

    async def schedules(self, tenant: str = "default") -> list[Schedule]:
        """A tenant's schedules, by when they are next due."""
        found = []
        for row in await self._mailbox.call(tenant, "recurring"):
            whose, _, name = str(row[0]).partition("\0")
            if whose == tenant:
                rest = json.loads("{" + row[3])
                found.append(
                    Schedule(
                        name, float(row[1]) / 1000, int(row[2]) / 1000, rest["agent"], rest["input"]
                    )
                )
        return found
