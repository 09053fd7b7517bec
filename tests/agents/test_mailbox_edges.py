"""The mailbox at its edges: clocks, editions, limits, hand-offs that die, schedules, lost hosts."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from test_mailbox import DONE, one, play

from hybrid.agents import library
from hybrid.agents.lease import PAYLOAD_LIMIT, Outcome
from hybrid.agents.mailbox import Mailbox
from hybrid.agents.task import Task
from hybrid.agents.upkeep import Upkeep
from hybrid.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    RateLimited,
    StaleLease,
    StoreUnavailable,
    Unavailable,
)


def test_no_two_clocks_need_agree(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time

    async def scene(m: Mailbox) -> None:
        for ahead in (-7200, 7200):
            monkeypatch.setattr(time, "time", lambda ahead=ahead: real() + ahead)
            now = time.time()
            task = Task(agent="a", input=1, deadline=now + 10, not_before=now + 0.2)
            await m.submit(task)
            monkeypatch.setattr(time, "time", lambda ahead=ahead: real() - ahead)
            lease = await one(m)
            assert lease.task.deadline is not None
            assert 8 < lease.task.deadline - time.time() < 10
            assert lease.expires - time.time() > 0
            await m.complete(lease, DONE)
            monkeypatch.undo()

    play(store_url, scene, lease_s=5)


def test_an_envelope_of_another_version_is_left_to_others(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        task = Task(agent="a", input=1)
        newer = json.loads(task.to_json()) | {"v": 99, "unheard_of": True}
        await m.call("default", "submit", json.dumps(newer), "", "")
        ours = await m.submit(Task(agent="a", input=2))
        assert [lease.task.id for lease in await m.lease(None, "old", 5)] == [ours]
        fields = await m.client.hgetall(f"hybrid:{{h0}}:t:{task.id}")
        assert (fields["state"], fields["tries"]) == ("scheduled", "0")
        [note] = await m.client.lrange(f"hybrid:{{h0}}:h:{task.id}", 0, -1)
        assert "version 99; this hybrid reads 1" in note

    play(store_url, scene)


def test_a_newer_library_stays_and_an_older_one_is_replaced(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        def edition(n: int) -> str:
            text = library.text()
            assert f"local EDITION = {library.EDITION}" in text
            return text.replace(f"local EDITION = {library.EDITION}", f"local EDITION = {n}")

        await m.client.function_load(edition(1), replace=True)
        assert await m.install() == library.EDITION
        await m.client.function_load(edition(99), replace=True)
        assert await m.install() == 99, "an older host leaves it alone"
        assert await m.submit(Task(agent="a", input=1)), "and works with it"
        await m.client.function_flush()
        assert await m.submit(Task(agent="a", input=1)), "a store without one gets it"
        assert await library.edition(m.client, m.prefixes[0]) == library.EDITION
        lease = await one(m)
        old = library.text().replace("function op.emit(", "function op.was_not_there(")
        await m.client.function_load(old, replace=True)
        with pytest.raises(Unavailable, match="no 'emit'"):
            await m.emit(lease, "tokens", text="x")

    play(store_url, scene)


def test_every_size_is_bounded(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        for i in range(4):
            await m.submit(Task(agent=f"a{i}", input=1))
        with pytest.raises(RateLimited, match="tenant 'default' has 4 unfinished"):
            await m.submit(Task(agent="other", input=1))
        assert await m.submit(Task(agent="other", input=1, tenant="else"))
        lease = await one(m, ["a0"])
        for i in range(5):
            await m.record(lease, f"{i}:s", i)
        with pytest.raises(InvalidRequest, match="max_steps"):
            await m.record(lease, "5:s", 5)
        with pytest.raises(InvalidRequest, match="at most"):
            await m.record(lease, "5:s", "x" * PAYLOAD_LIMIT)
        for _ in range(300):
            await m.emit(lease, "tokens", text="x")
        assert await m.client.xlen(f"hybrid:{{h0}}:e:{lease.task.id}") < 250
        await m.complete(lease, DONE)
        for part in "tjhbe":
            assert await m.client.pttl(f"hybrid:{{h0}}:{part}:{lease.task.id}") > 0, part
        assert await m.submit(Task(agent="other", input=1)), "an ended one makes room"

    play(store_url, scene, max_tenant_depth=4, max_steps=5, max_events=100)


def test_what_was_handed_on_is_cancelled_and_replayed_with_its_root(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        roots = []
        for agents in ("abc", "abc"):
            root = await m.submit(Task(agent="a", input=1, deadline=time.time() + 60))
            roots.append(root)
            for name in agents[1:]:
                lease = await one(m, [chr(ord(name) - 1)])
                await m.delegate(lease, lease.task.child(name, 1, key=name))
        last, other = await m.lease(["c"], "h", 2)
        await m.cancel(roots[0])
        mine = last if last.task.root == roots[1] else other
        gone = other if mine is last else last
        with pytest.raises(Exception, match="cancelled"):
            await m.complete(gone, DONE)
        assert await m.retry(mine, "broken") == "dead"
        view = await m.view(roots[1])
        assert (view.state, view.error) == ("dead", "broken"), "the end of one is the other's"
        assert {v.task.id for v in await Upkeep(m).dead("a")} == {roots[1]}

        await Upkeep(m).requeue(mine.task.id, timeout_s=30)
        assert (await m.view(roots[1])).state == "waiting"
        assert await Upkeep(m).dead("a") == []
        again = await one(m, ["c"])
        assert again.task.id == mine.task.id
        await m.complete(again, Outcome(state="done", result="mended"))
        assert (await m.view(roots[1])).result == "mended"
        for agent in "abc":
            assert (await Upkeep(m).depth(agent))["open"] == 0

    play(store_url, scene, max_attempts=1)


def test_a_deadline_ends_everything_beneath_it(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        root = await m.submit(Task(agent="a", input=1, deadline=time.time() + 0.3))
        lease = await one(m)
        child = lease.task.child("b", 1, key="k")
        await m.delegate(lease, child)
        held = await one(m, ["b"])
        grandchild = held.task.child("c", 1, key="k")
        await m.wait_on(held, [grandchild])
        await asyncio.sleep(0.35)
        await m.lease(["none"], "h", 1)  # any host's look does what time demands
        assert (await m.view(root)).state == "failed"
        states = {(await m.view(t.id)).state for t in (child, grandchild)}
        assert states <= {"failed", "cancelled"}

    play(store_url, scene)


def test_what_a_lost_host_held_is_tried_at_once(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        ids = {await m.submit(Task(agent="a", input=i)) for i in range(3)}
        held = await m.lease(None, "doomed", 3)
        assert await Upkeep(m).lost("somebody else", "x") == 0
        assert await Upkeep(m).lost("doomed", "it was killed") == 3
        again = await m.lease(None, "h", 3)
        assert {lease.task.id for lease in again} == ids
        with pytest.raises(StaleLease):
            await m.complete(held[0], DONE)
        view = await m.view(held[0].task.id)
        assert view.history[0].error == "it was killed"

    play(store_url, scene, lease_s=60)


def test_schedules_collapse_what_was_missed_and_respect_the_depth(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        care = Upkeep(m)
        task = Task(agent="a", input="tick")
        await care.recur("s", task, every_s=10, first_at=time.time() - 95)
        leases = await m.lease(None, "h", 10)
        assert [lease.task.input for lease in leases] == ["tick"], "ten were missed, one is made up"
        [schedule] = await care.schedules()
        assert 0 < schedule.next_at - time.time() <= 10
        assert await care.schedules("another tenant") == []
        await care.recur("s", task, every_s=0.1, first_at=time.time() - 1)
        await m.lease(["none"], "h", 1)
        await asyncio.sleep(0.25)
        await m.lease(["none"], "h", 1)
        assert (await care.depth("a"))["open"] == 2, "an occurrence that finds it full is left out"
        await care.unrecur("s")
        with pytest.raises(NotFound):
            await care.unrecur("s")

    play(store_url, scene, max_depth=2)


def test_a_signal_may_come_first_and_none_comes_late(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        task = await m.submit(Task(agent="a", input=1))
        await m.signal(task, "go", {"n": 1})
        await m.signal(task, "go", {"n": 2})
        lease = await one(m)
        assert lease.journal["signal:go"] == {"n": 1}, "the first value stands"
        await m.wait_on(lease, signals=["go"])
        lease = await one(m)
        await m.wait_on(lease, signals=["stop", "never"])
        assert await m.lease(None, "h", 1) == []
        await m.signal(task, "stop", None)
        await m.complete(await one(m), DONE)
        with pytest.raises(Conflict):
            await m.signal(task, "go", 1)
        with pytest.raises(NotFound):
            await m.signal("none", "go", 1)

    play(store_url, scene)


def test_a_resting_host_is_woken_and_a_busy_one_is_not(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        client = m.client
        resting = asyncio.create_task(m.lease(None, "resting", 1, wait_s=20))
        deadline = time.monotonic() + 10
        while not await client.hlen("hybrid:{h0}:resting"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        began = time.monotonic()
        task = await m.submit(Task(agent="a", input=1))
        [lease] = await resting
        assert lease.task.id == task
        assert time.monotonic() - began < 0.9, "it did not wait for its next look"

    play(store_url, scene)


def wrapped(value: object, depth: int) -> object:
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [900, 990, 5000])
def test_what_one_call_stumbles_over_harms_no_neighbour(store_url: str, depth: int) -> None:
    async def scene(m: Mailbox) -> None:
        deep = wrapped([], depth)
        await m.client.set("hybrid:{h0}:r:broken", "not ours")
        results = await asyncio.gather(
            m.submit(Task(agent="a", input=1)),
            m.submit(Task(agent="a", input=wrapped(deep, 150))),
            m.submit(Task(agent="broken", input=1)),
            m.submit(Task(agent="b", input=1)),
            return_exceptions=True,
        )
        assert m.round_trips[1] - m.round_trips[0] >= 2, "they shared a call"
        assert [type(r) for r in results] == [str, InvalidRequest, StoreUnavailable, str]
        lease = await one(m, ["a"])
        for bad in ({"a b": 1}, {"x": float("nan")}):
            with pytest.raises(InvalidRequest, match="no amount"):
                await m.record(lease, "1:s", 1, usage=bad)

    play(store_url, scene)
