"""The mailbox against a plain model: any order of calls, with a crash possible at each of them.

A crash is a caller that dies before its call, one that dies after it without having seen the
answer, a host that is declared lost, or a store that is killed and started again. Whatever
happens, the store and the model must agree about every task, and nothing may be done twice.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from mailbox_model import ATTEMPTS, Known, Model

from hybrid.agents.lease import Lease, Outcome
from hybrid.agents.mailbox import Mailbox
from hybrid.agents.store import EmbeddedStore, connect
from hybrid.agents.task import Task
from hybrid.agents.upkeep import Upkeep
from hybrid.config import StoreConfig
from hybrid.errors import Conflict, RateLimited, StaleLease

DEPTH = 6
AGENTS = ("a", "b")
Choose = st.integers(0, 1000)
Crash = st.sampled_from(["no"] * 16 + ["before", "after", "after", "store"])


class MailboxMachine(RuleBasedStateMachine):
    """Hosts h0 and h1, agents a and b, and whatever goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="hybrid-model-")
        self.store = EmbeddedStore(Path(self.folder.name))
        self.store.start()
        self.runner = asyncio.Runner()
        self.model = Model()
        self.leases: list[Lease] = []
        self.count = 0
        self.open_mailbox()

    def open_mailbox(self) -> None:
        async def make() -> tuple[Any, Mailbox]:
            client = connect(self.store.url)
            config = StoreConfig(max_attempts=ATTEMPTS, max_depth=DEPTH, lease_s=60, max_steps=50)
            return client, Mailbox(client, config)

        self.client, self.mailbox = self.runner.run(make())

    def close_mailbox(self) -> None:
        async def close() -> None:
            await self.mailbox.close()
            await self.client.aclose()

        self.runner.run(close())

    def teardown(self) -> None:
        self.close_mailbox()
        self.runner.close()
        self.store.stop()
        self.folder.cleanup()

    def do(self, crash: str, call: Callable[[], Awaitable[Any]]) -> tuple[bool, Any]:
        """Make a call as a caller does that may crash; returns whether it was made, and what its
        caller saw of it (None if it did not live to see it)."""
        if crash == "store":
            self.store.kill()
            self.store.restart()
            self.close_mailbox()
            self.open_mailbox()
        if crash == "before":
            return False, None
        seen = self.runner.run(_outcome(call))
        return True, None if crash == "after" else seen

    def since(self, task_id: str) -> int:
        async def read() -> int:
            return int(await self.client.hget(self.key(task_id), "since"))

        return self.runner.run(read())

    @staticmethod
    def key(task_id: str) -> str:
        return f"hybrid:{{h0}}:t:{task_id}"

    def child(self, lease: Lease, agent: str) -> Task:
        self.count += 1
        return lease.task.child(agent, self.count, key=str(self.count))

    @initialize()
    def start(self) -> None:
        self.runner.run(self.mailbox.install())

    @rule(
        agent=st.sampled_from(AGENTS),
        conversation=st.sampled_from([None, "x", "x", "y\0z"]),
        priority=st.sampled_from([0, 0, 0, 5, -5]),
        again=st.booleans(),
        crash=Crash,
    )
    def submit(
        self, agent: str, conversation: str | None, priority: int, again: bool, crash: str
    ) -> None:
        self.count += 1
        task = Task(
            id=f"{self.count:032d}",
            agent=agent,
            input=self.count,
            conversation=conversation,
            priority=priority,
            idempotency_key=str(self.count),
        )
        full = self.model.open(agent) >= DEPTH
        made, seen = self.do(crash, lambda: self.mailbox.submit(task))
        if again:  # a sender that did not hear, or did not believe it, asks once more
            twin = Task(
                agent=agent, input=self.count, conversation=conversation, priority=priority,
                idempotency_key=str(self.count), id=f"{self.count:031d}t",
            )  # fmt: skip
            first = seen
            _, seen = self.do("no", lambda: self.mailbox.submit(twin))
            if made and not full:
                assert seen == task.id
                assert first in (None, task.id)
            elif not full:
                assert seen == twin.id
                task, made = twin, True
        if full:
            assert not made or seen is None or isinstance(seen, RateLimited)
            return
        if made:
            self.model.add(task, self.since(task.id))

    @rule(choose=st.integers(0, 5), host=st.sampled_from(["h0", "h1"]), crash=Crash)
    def lease(self, choose: int, host: str, crash: str) -> None:
        busy = [agent for agent in AGENTS if self.model.next(agent)]
        agent = busy[choose % len(busy)] if busy and choose else AGENTS[choose % 2]
        expected = self.model.next(agent)
        made, seen = self.do(crash, lambda: self.mailbox.lease([agent], host, 1))
        if not made:
            return
        if expected is not None:
            expected.state, expected.owner = "leased", host
            expected.attempt += 1
            expected.tries += 1
        if seen is None:  # the host never saw it: the lease runs until it is declared lost
            return
        assert [lease.task.id for lease in seen] == ([expected.task.id] if expected else [])
        if expected is None:
            return
        assert seen[0].task.attempt == expected.attempt
        steps = {k for k in seen[0].journal if k.startswith("step")}
        assert steps == expected.steps, "a finished step is never forgotten"
        for child, state in expected.outcomes.items():
            assert seen[0].journal[child]["state"] == state
        self.leases.append(seen[0])

    def pick(self, choose: int) -> Lease:
        """A lease: mostly one that holds, at times a zombie's."""
        holding = [lease for lease in self.leases if self.held(lease)]
        among = holding if holding and choose % 4 else self.leases
        return among[choose % len(among)]

    def pick_task(self, choose: int) -> Known:
        tasks = list(self.model.tasks.values())
        return tasks[choose % len(tasks)]

    def held(self, lease: Lease) -> Known | None:
        """The model's task, if this lease still holds it."""
        known = self.model.tasks[lease.task.id]
        holds = known.state == "leased" and known.attempt == lease.task.attempt
        return known if holds else None

    def end(self, lease: Lease, crash: str, call: Callable[[], Awaitable[Any]]) -> Known | None:
        """Make a call that needs the lease; the task if it must have had its effect."""
        known = self.held(lease)
        made, seen = self.do(crash, call)
        if not made:
            return None
        if known is None:
            assert seen is None or isinstance(seen, StaleLease) or "cancelled" in str(seen)
            return None
        assert not isinstance(seen, Exception), seen
        return known

    # A lease is not consumed: its holder may be a zombie that tries again later.

    @precondition(lambda self: self.leases)
    @rule(choose=Choose, good=st.booleans(), crash=Crash)
    def complete(self, choose: int, good: bool, crash: str) -> None:
        lease = self.pick(choose)
        outcome = Outcome(state="done" if good else "failed", result=lease.task.attempt, error="e")
        known = self.end(lease, crash, lambda: self.mailbox.complete(lease, outcome))
        if known:
            self.model.finish(known, outcome.state, outcome.result)

    @precondition(lambda self: self.leases)
    @rule(choose=Choose, crash=Crash)
    def retry(self, choose: int, crash: str) -> None:
        lease = self.pick(choose)
        known = self.end(lease, crash, lambda: self.mailbox.retry(lease, "e", delay_s=0))
        if known:
            self.model.lose(known)

    @precondition(lambda self: self.leases)
    @rule(choose=Choose, crash=Crash)
    def release(self, choose: int, crash: str) -> None:
        lease = self.pick(choose)
        known = self.end(lease, crash, lambda: self.mailbox.release(lease))
        if known:
            known.state, known.owner = "queued", ""
            known.tries -= 1

    @precondition(lambda self: self.leases)
    @rule(choose=Choose, step=st.integers(0, 5), crash=Crash)
    def record(self, choose: int, step: int, crash: str) -> None:
        lease = self.pick(choose)
        known = self.end(lease, crash, lambda: self.mailbox.record(lease, f"step{step}", step))
        if known:
            known.steps.add(f"step{step}")

    @precondition(lambda self: self.leases)
    @rule(choose=Choose, agents=st.lists(st.sampled_from(AGENTS), max_size=2), crash=Crash)
    def wait_on(self, choose: int, agents: list[str], crash: str) -> None:
        lease = self.pick(choose)
        children = [self.child(lease, agent) for agent in agents]
        known = self.end(lease, crash, lambda: self.mailbox.wait_on(lease, children))
        if known:
            known.tries -= 1
            known.owner = ""
            for child in children:
                self.model.add(child, self.since(child.id))
                known.children.append(child.id)
                known.pending.add(child.id)
            known.state = "waiting" if known.pending else "queued"

    @precondition(lambda self: self.leases)
    @rule(choose=Choose, agent=st.sampled_from(AGENTS), crash=Crash)
    def delegate(self, choose: int, agent: str, crash: str) -> None:
        lease = self.pick(choose)
        child = self.child(lease, agent)
        known = self.end(lease, crash, lambda: self.mailbox.delegate(lease, child))
        if known:
            known.state, known.owner, known.delegate = "waiting", "", child.id
            known.tries -= 1
            self.model.add(child, self.since(child.id))

    @precondition(lambda self: self.leases)
    @rule(choose=Choose, crash=Crash)
    def wait_for_signal(self, choose: int, crash: str) -> None:
        lease = self.pick(choose)
        known = self.end(lease, crash, lambda: self.mailbox.wait_on(lease, signals=["go"]))
        if known:
            known.tries -= 1
            known.owner = ""
            known.awaits = "go"
            known.state = "queued" if "go" in known.signals else "waiting"

    @precondition(lambda self: self.model.tasks)
    @rule(choose=Choose, crash=Crash)
    def signal(self, choose: int, crash: str) -> None:
        known = self.pick_task(choose)
        made, seen = self.do(crash, lambda: self.mailbox.signal(known.task.id, "go", 1))
        if known.over:
            assert not made or seen is None or isinstance(seen, Conflict)
        elif made:
            known.signals.add("go")
            if known.state == "waiting" and known.awaits:
                known.state = "queued"

    @precondition(lambda self: self.model.tasks)
    @rule(choose=Choose, crash=Crash)
    def cancel(self, choose: int, crash: str) -> None:
        known = self.pick_task(choose)
        made, _ = self.do(crash, lambda: self.mailbox.cancel(known.task.id))
        if made:
            self.model.cancel(known)

    @rule(host=st.sampled_from(["h0", "h1"]), crash=Crash)
    def lose_host(self, host: str, crash: str) -> None:
        held = [k for k in self.model.tasks.values() if k.owner == host and k.state == "leased"]
        made, seen = self.do(crash, lambda: Upkeep(self.mailbox).lost(host, "it was killed"))
        if made:
            assert seen in (None, len(held))
            for known in held:
                self.model.lose(known)

    @precondition(lambda self: self.leases)
    @rule(choose=Choose)
    def renew(self, choose: int) -> None:
        lease = self.pick(choose)
        _, seen = self.do("no", lambda: self.mailbox.renew([lease]))
        assert (seen[lease.task.id] == "ok") == (self.held(lease) is not None)

    @invariant()
    def agree(self) -> None:
        async def look() -> None:
            tasks = self.model.tasks
            views = await asyncio.gather(*(self.mailbox.view(task_id) for task_id in tasks))
            for known, view in zip(tasks.values(), views, strict=True):
                expected = (known.state, known.attempt, known.tries)
                state = "queued" if view.state == "scheduled" else view.state  # a delay of 0
                assert (state, view.task.attempt, view.attempts) == expected, view
                if known.state in ("done", "failed"):
                    assert view.result == known.result
            depths = await asyncio.gather(*(Upkeep(self.mailbox).depth(a) for a in AGENTS))
            assert [d["open"] for d in depths] == [self.model.open(a) for a in AGENTS]

        self.runner.run(look())


async def _outcome(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except (StaleLease, RateLimited, Conflict) as e:
        return e
    except Exception as e:
        if "cancelled" in str(e):
            return e
        raise


TestMailbox = MailboxMachine.TestCase
TestMailbox.settings = settings(
    max_examples=int(os.environ.get("HYBRID_MODEL_EXAMPLES", "30")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
