"""The mailbox on a real server: what is acknowledged is kept, and only a lease's holder may act."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hybrid.agents.board import Board, BoardWrite
from hybrid.agents.mailbox import PAYLOAD_LIMIT, Lease, Mailbox, Outcome
from hybrid.agents.store import EmbeddedStore, connect
from hybrid.agents.task import Budget, Task
from hybrid.agents.upkeep import Upkeep
from hybrid.config import StoreConfig
from hybrid.errors import (
    BudgetExceeded,
    Cancelled,
    Conflict,
    InvalidRequest,
    NotFound,
    RateLimited,
    StaleLease,
    StoreUnavailable,
)

DONE = Outcome(state="done", result="ok")


@asynccontextmanager
async def mailbox(url: str, **config: Any) -> AsyncIterator[Mailbox]:
    client = connect(url)
    made = Mailbox(client, StoreConfig(**{"lease_s": 30, "max_attempts": 3, **config}))
    await made.install()
    try:
        yield made
    finally:
        await made.close()
        await client.aclose()


def play(url: str, scene: Callable[[Mailbox], Awaitable[None]], **config: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(50), mailbox(url, **config) as m:
            await scene(m)

    asyncio.run(run())


async def one(m: Mailbox, agents: Any = None, wait_s: float = 5) -> Lease:
    [lease] = await m.lease(agents, "host", 1, wait_s=wait_s)
    return lease


def test_priority_then_age(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        ids = [
            await m.submit(Task(agent="a", input=i, priority=p)) for i, p in enumerate((0, 5, 0, 5))
        ]
        leases = await m.lease(["a"], "h", 10)
        assert [lease.task.id for lease in leases] == [ids[1], ids[3], ids[0], ids[2]]

    play(store_url, scene)


def test_a_deep_mailbox_starves_no_other(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        for i in range(50):
            await m.submit(Task(agent="deep", input=i))
        await m.submit(Task(agent="other", input=0))
        agents = [lease.task.agent for lease in await m.lease(None, "h", 4)]
        assert agents.count("other") == 1

    play(store_url, scene)


def test_an_expired_lease_is_anothers_and_the_old_holder_is_refused(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        task = await m.submit(Task(agent="a", input="x"))
        old = await one(m)
        await m.record(old, "1:step", {"kept": True})
        new = await one(m)
        assert new.task.id == task
        assert new.task.attempt == 2
        assert new.journal == {"1:step": {"kept": True}}
        for late in (
            m.complete(old, DONE),
            m.record(old, "2:x", 1),
            m.retry(old, "late"),
            m.release(old),
            m.wait_on(old, [old.task.child("b", 1, key="k")]),
        ):
            with pytest.raises(StaleLease):
                await late
        await m.complete(new, DONE)
        view = await m.view(task)
        assert (view.state, view.attempts) == ("done", 2)
        assert [h.outcome for h in view.history] == ["lost", "done"]
        with pytest.raises(StaleLease):
            await m.complete(new, DONE)
        with pytest.raises(NotFound):
            await m.view("child-of-a-stale-lease")

    play(store_url, scene, lease_s=0.2)


def test_renewing_keeps_a_lease(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        await m.submit(Task(agent="a", input="x"))
        lease = await one(m)
        for _ in range(6):
            await asyncio.sleep(0.1)
            assert await m.renew([lease]) == {lease.task.id: "ok"}
            assert await m.lease(None, "thief", 1) == []
        await m.complete(lease, DONE)

    play(store_url, scene, lease_s=0.3)


def test_retries_back_off_and_end_in_the_dead_letter(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        task = await m.submit(Task(agent="a", input="x"))
        for attempt in (1, 2):
            assert await m.retry(await one(m), f"error {attempt}") == "scheduled"
            assert await m.lease(None, "h", 1) == [], "it is backing off"
        assert await m.retry(await one(m), "error 3") == "dead"
        [dead] = await Upkeep(m).dead("a")
        assert dead.error == "error 3"
        assert [h.error for h in dead.history] == ["error 1", "error 2", "error 3"]
        await Upkeep(m).requeue(task)
        assert await Upkeep(m).dead("a") == []
        await m.complete(await one(m), DONE)
        with pytest.raises(Conflict):
            await Upkeep(m).requeue(task)
        assert await Upkeep(m).depth("a") == {"open": 0, "ready": 0, "dead": 0}

    play(store_url, scene)


def test_a_conversation_is_done_in_order_and_others_are_not_held_up(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        ids = [await m.submit(Task(agent="a", input=i, conversation="c")) for i in range(3)]
        other = await m.submit(Task(agent="a", input="o", conversation="d"))
        first = await m.lease(None, "h", 10)
        assert {lease.task.id for lease in first} == {ids[0], other}
        await m.cancel(ids[1])
        mine = next(lease for lease in first if lease.task.id == ids[0])
        await m.retry(mine, "again", delay_s=0.05)
        again = await one(m)
        assert again.task.id == ids[0], "a retry keeps its place"
        await m.complete(again, DONE)
        assert (await one(m)).task.id == ids[2]

    play(store_url, scene)


def test_waiting_for_children_survives_and_brings_their_outcomes(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        root = await m.submit(Task(agent="a", input="x", conversation="c"))
        lease = await one(m)
        children = [lease.task.child("b", i, key=str(i)) for i in range(2)]
        await m.wait_on(lease, children)
        assert (await m.view(root)).state == "waiting"
        for _ in range(2):
            child = await one(m, ["b"])
            end = Outcome(state="failed", error="no") if child.task.input else DONE
            await m.complete(child, end)
        back = await one(m)
        assert back.task.id == root
        outcomes = {c.id: back.journal[c.id] for c in children}
        assert outcomes[children[0].id] == {"state": "done", "result": "ok", "error": None}
        assert outcomes[children[1].id] == {"state": "failed", "result": None, "error": "no"}
        await m.wait_on(back, children)  # a replay that asks the same again is ready at once
        await m.complete(await one(m), DONE)
        assert (await m.view(root)).attempts == 1

    play(store_url, scene)


def test_cancelling_reaches_everything_beneath(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        root = await m.submit(Task(agent="a", input="x"))
        lease = await one(m)
        child = lease.task.child("b", 1, key="k")
        await m.wait_on(lease, [child])
        inner = await one(m, ["b"])
        grandchild = inner.task.child("c", 1, key="k")
        await m.wait_on(inner, [grandchild])
        held = await one(m, ["c"])
        waiting = asyncio.create_task(m.wait(grandchild.id, 10))
        await asyncio.sleep(0)
        assert (await m.cancel(root, reason="enough")).state == "cancelled"
        assert (await waiting).state == "cancelled"
        assert await m.renew([held]) == {held.task.id: "cancelled"}
        for call in (m.complete(held, DONE), m.record(held, "1:x", 1)):
            with pytest.raises(Cancelled):
                await call
        assert (await m.view(child.id)).error == "enough"
        assert (await m.cancel(root)).state == "cancelled"
        assert await m.lease(None, "h", 5) == []

    play(store_url, scene)


def test_a_submit_with_a_key_is_answered_once(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        tasks = [Task(agent="a", input="x", idempotency_key="k") for _ in range(5)]
        ids = await asyncio.gather(*(m.submit(t) for t in tasks))
        assert len(set(ids)) == 1
        other = Task(agent="a", input="x", idempotency_key="k", tenant="other")
        assert await m.submit(other) == other.id
        assert (await Upkeep(m).depth("a"))["open"] == 2

    play(store_url, scene)


def test_budgets_are_one_counter_a_root(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        await m.submit(Task(agent="a", input="x", budget=Budget(tokens=10, hops=3)))
        lease = await one(m)
        await m.record(lease, "1:g", 1, usage={"tokens": 6})
        with pytest.raises(BudgetExceeded, match="hops"):
            await m.wait_on(lease, [lease.task.child("b", i, key=str(i)) for i in range(3)])
        assert await m.lease(None, "h", 5) == [], "nothing was submitted"
        await m.wait_on(lease, [lease.task.child("b", i, key=str(i)) for i in range(2)])
        child = await one(m, ["b"])
        with pytest.raises(BudgetExceeded, match="tokens"):
            await m.record(child, "1:g", 1, usage={"tokens": 5})

    play(store_url, scene)


def test_delays_deadlines_and_depth(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        now = time.time()
        later = await m.submit(Task(agent="a", input="x", not_before=now + 0.3))
        late = await m.submit(Task(agent="b", input="x", deadline=now + 0.2))
        assert (await m.view(later)).state == "scheduled"
        assert (await one(m, ["a"])).task.id == later
        assert time.time() - now >= 0.3
        await asyncio.sleep(max(0.0, now + 0.25 - time.time()))
        assert await m.lease(["b"], "h", 1) == []
        view = await m.view(late)
        assert view.state == "failed"
        assert "deadline" in str(view.error)
        await m.submit(Task(agent="c", input=1))
        await m.submit(Task(agent="c", input=2))
        with pytest.raises(RateLimited) as e:
            await m.submit(Task(agent="c", input=3))
        assert e.value.retry_after

    play(store_url, scene, max_depth=2)


def test_what_cannot_be_stored_is_refused_by_name(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        with pytest.raises(InvalidRequest, match="at most"):
            await m.submit(Task(agent="a", input="x" * PAYLOAD_LIMIT))
        with pytest.raises(InvalidRequest, match="Unicode"):
            await m.submit(Task(agent="a", input="\ud800"))
        text = "naïve 日本 \u0000 🦜"
        task = await m.submit(Task(agent="ä/ö", input=text, conversation="c\u0000d"))
        lease = await one(m)
        with pytest.raises(InvalidRequest, match="not JSON"):
            await m.complete(lease, Outcome(state="done", result=float("nan")))
        await m.complete(lease, Outcome(state="done", result=text))
        assert (await m.view(task)).result == text

    play(store_url, scene)


def test_board_writes_happen_with_the_completion_or_not_at_all(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        board = Board(m.client)
        await m.submit(Task(agent="a", input="x"))
        lease = await one(m)
        write = BoardWrite(scope="s", key="k", value={"n": 1}, expect=0)
        await board.set("s", "k", "taken")
        with pytest.raises(Conflict):
            await m.complete(lease, Outcome(state="done", board=(write,)))
        assert (await m.view(lease.task.id)).state == "leased"
        good = BoardWrite(scope="s", key="k", value={"n": 1}, expect=1)
        child = Task(agent="next", input="go")
        await m.complete(lease, Outcome(state="done", board=(good,), children=(child,)))
        entry = await board.get("s", "k")
        assert (entry.value, entry.version) == ({"n": 1}, 2)
        assert (await one(m, ["next"])).task.id == child.id

    play(store_url, scene)


def test_concurrent_hosts_never_share_a_task(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        ids = {await m.submit(Task(agent=f"a{i % 3}", input=i)) for i in range(60)}
        seen: list[str] = []

        async def host(name: str) -> None:
            async with mailbox(store_url) as own:
                while leases := await own.lease(None, name, 4):
                    for lease in leases:
                        seen.append(lease.task.id)
                        await own.complete(lease, DONE)

        await asyncio.gather(*(host(f"h{i}") for i in range(5)))
        assert len(seen) == 60
        assert set(seen) == ids

    play(store_url, scene)


def test_partitions_keep_tenants_apart_and_find_every_task(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        ids = [await m.submit(Task(agent="a", input=t, tenant=f"t{t}")) for t in range(12)]
        keys = await m.client.keys("hybrid:*:t:*")
        assert len({k.split(":")[1] for k in keys}) == 3
        leases = await m.lease(["a"], "h", 12)
        assert {lease.task.id for lease in leases} == set(ids)
        for lease in leases:
            await m.complete(lease, DONE)
        assert [(await m.view(i)).state for i in ids] == ["done"] * 12

    play(store_url, scene, partitions=3)


def test_a_killed_store_has_kept_what_it_acknowledged(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path / "store") as store:
        acknowledged: list[str] = []

        async def flood() -> None:
            async with mailbox(store.url) as m:

                async def send(i: int) -> None:
                    try:
                        acknowledged.append(await m.submit(Task(agent="a", input=i)))
                    except StoreUnavailable:
                        return

                sends = [asyncio.create_task(send(i)) for i in range(400)]
                while len(acknowledged) < 100:
                    await asyncio.sleep(0)
                store.kill()
                await asyncio.gather(*sends)
                with pytest.raises(StoreUnavailable):
                    await m.submit(Task(agent="a", input="x"))

        asyncio.run(flood())
        store.restart()

        async def look(m: Mailbox) -> None:
            for task in acknowledged:
                assert (await m.view(task)).state == "queued"

        play(store.url, look)
        assert len(acknowledged) >= 100
