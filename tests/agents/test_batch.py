"""What is asked at once is one call, and what can wait is asked for only if it is still needed."""

from __future__ import annotations

import asyncio

import pytest
from test_mailbox import DONE, one, play

from hybrid.agents.mailbox import Mailbox, Outcome
from hybrid.agents.task import Budget, Task
from hybrid.errors import BudgetExceeded, StoreUnavailable


def test_what_is_asked_at_once_is_one_call(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        await m.call("default", "backlog")
        calls, operations = m.round_trips
        await asyncio.gather(*(m.submit(Task(agent="a", input=i)) for i in range(50)))
        assert m.round_trips == (calls + 1, operations + 50)

    play(store_url, scene)


def test_a_step_goes_out_by_itself(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        task = await m.submit(Task(agent="a", input=1))
        lease = await one(m)
        assert await m.write(lease, "1:step", "value", {"tokens": 3}) == ["ok"]
        view = await m.view(task)
        assert view.usage == {"tokens": 3}

    play(store_url, scene)


def test_a_step_is_before_what_is_asked_for_its_task_next(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        await m.submit(Task(agent="a", input=1))
        lease = await one(m)
        written = m.write(lease, "1:step", "value")
        await m.emit(lease, "note")
        assert written.done()
        m.write(lease, "2:step", "value")
        await m.wait_on(lease, until=0)
        again = await one(m)
        assert again.journal == {"1:step": "value", "2:step": "value"}

    play(store_url, scene)


def test_a_step_whose_task_has_ended_is_not_sent_but_paid_for(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        task = await m.submit(Task(agent="a", input=1))
        lease = await one(m)
        _, operations = m.round_trips
        written = m.write(lease, "1:step", "value", {"tokens": 3})
        # what others ask for meanwhile does not take it along
        await m.call("default", "backlog")
        await m.complete(lease, DONE)
        assert m.round_trips[1] == operations + 2
        assert await written == ["ok"]
        assert (await m.view(task)).usage == {"tokens": 3}
        assert not await m.client.exists(f"hybrid:{{h0}}:j:{task}")

    play(store_url, scene)


def test_one_call_of_many_steps_keeps_within_the_budget(store_url: str) -> None:
    """Within a call the root's purse is read once; each operation still sees what others spent."""

    async def scene(m: Mailbox) -> None:
        root = Task(agent="a", input=1, budget=Budget(tokens=10, usd=0.5, hops=3))
        await m.submit(root)
        lease = await one(m)
        spent = await asyncio.gather(
            *(m.record(lease, f"{i}:step", i, usage={"tokens": 4, "usd": 0.1}) for i in range(4)),
            return_exceptions=True,
        )
        assert [type(s) for s in spent] == [type(None)] * 2 + [BudgetExceeded] * 2
        key = f"hybrid:{{h0}}:b:{root.id}"
        purse = await m.client.hgetall(key)
        assert (purse["tokens"], purse["hops"], float(purse["usd"])) == ("16", "1", 0.4)
        await m.complete(lease, Outcome(state="failed", error="no means"))
        assert await m.client.pttl(key) > 0

    play(store_url, scene)


def test_what_is_not_sent_at_the_end_is_refused(store_url: str) -> None:
    async def scene(m: Mailbox) -> None:
        await m.submit(Task(agent="a", input=1))
        written = m.write(await one(m), "1:step", "value")
        await m.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            await written

    play(store_url, scene)
