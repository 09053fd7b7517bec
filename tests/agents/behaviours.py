"""Behaviours that the host tests name by dotted path."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from hybrid.agents.behaviour import Context
from hybrid.errors import InvalidRequest, Unavailable

ran: list[str] = []
failures = {"left": 0}
order = {"second": False}


async def twice(ctx: Context) -> Any:
    """Two steps; fails between them as often as `failures` says."""

    def one() -> str:
        ran.append("one")
        return "1"

    def two() -> str:
        ran.append("two")
        return "2"

    first = await ctx.step("one", one)
    if failures["left"]:
        failures["left"] -= 1
        raise Unavailable("not now", retry_after=0.05)
    return first + await ctx.step("two", two)


async def fickle(ctx: Context) -> Any:
    """Does something else on its second attempt."""
    name = "b" if order["second"] else "a"
    order["second"] = True
    await ctx.step(name, lambda: name)
    if ctx.task.attempt == 1:
        raise Unavailable("not now", retry_after=0.05)
    return name


async def ping(ctx: Context) -> Any:
    """A → B → A: asks pong, who asks ping again, down to zero."""
    n = ctx.task.input
    return 0 if n == 0 else 1 + await ctx.ask("pong", n - 1)


async def pong(ctx: Context) -> Any:
    """See ping."""
    n = ctx.task.input
    return 0 if n == 0 else 1 + await ctx.ask("ping", n - 1)


async def forever(ctx: Context) -> Any:
    """Runs until it is cancelled, and says so."""
    ran.append("started")
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        ran.append("cancelled")
        raise


async def parent(ctx: Context) -> Any:
    """Asks `forever`."""
    return await ctx.ask("forever", "x")


async def crash(ctx: Context) -> Any:
    """A bug."""
    raise ZeroDivisionError("a bug")


async def unstorable(ctx: Context) -> Any:
    """Returns what is no JSON."""
    return {1, 2}


async def post(ctx: Context) -> Any:
    """Calls a tool, then fails as often as `failures` says."""
    answer = await ctx.tool("http", url=ctx.task.input, json={"n": 1})
    if failures["left"]:
        failures["left"] -= 1
        raise Unavailable("not now", retry_after=0.05)
    return answer


async def slow(ctx: Context) -> Any:
    """A second of waiting."""
    await asyncio.sleep(1)
    return "slow"


async def block_once(ctx: Context) -> Any:
    """Block the whole event loop, as a behaviour must not; on the first attempt only."""
    if ctx.task.attempt == 1:
        time.sleep(60)  # noqa: ASYNC251 - that is the point
    return "unblocked"


async def eat(ctx: Context) -> Any:
    """Take more memory than a host gives."""
    return len(bytearray(3 << 30))


async def linger(ctx: Context) -> Any:
    """Take a while."""
    await asyncio.sleep(float(ctx.task.input))
    return ctx.task.attempt


async def approval(ctx: Context) -> Any:
    """Wait for a person's word."""
    said = await ctx.receive("approval", timeout_s=20)
    return {"said": said}


async def pipeline(ctx: Context) -> Any:
    """Generate, then hand on to `echo`."""
    draft = await ctx.generate(prompt="one two three")
    return ctx.handoff("echo", draft.text + " four")


async def classify(ctx: Context) -> Any:
    """Answers held to three kinds of constraint; two at once are refused."""
    await ctx.generate(choices=["civil", "criminal"])
    await ctx.generate(json_schema={"type": "null"})
    last = await ctx.generate(regex="a+")
    try:
        await ctx.generate(json_schema={"type": "null"}, regex="a")
    except InvalidRequest as e:
        return [last.text, e.param]


async def outer(ctx: Context) -> Any:
    """Ask `upper`; the length of the input, and its answer."""
    return [len(ctx.task.input), await ctx.ask("upper", ctx.task.input)]


async def upper(ctx: Context) -> Any:
    """The input in capitals."""
    return ctx.task.input.upper()


async def asker(ctx: Context) -> Any:
    """Ask `echo`."""
    return await ctx.ask("echo", "x")
