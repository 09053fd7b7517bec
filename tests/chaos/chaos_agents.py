"""The behaviour of all agents under chaos: ask the model, have one effect outside, ask further."""

from __future__ import annotations

import asyncio
from typing import Any

from hybrid.agents.behaviour import Context


async def clerk(ctx: Context) -> Any:
    """`input`: the sink's url, and the agents still to be asked, the last by handing on."""
    sink, rest = ctx.task.input["sink"], ctx.task.input["rest"]
    await ctx.generate(prompt="fox", max_tokens=3)
    await ctx.tool("http", url=sink, json={"task": ctx.task.id})
    await asyncio.sleep(0.05)
    if not rest:
        return [ctx.spec.name]
    onward = {"sink": sink, "rest": rest[1:]}
    if len(rest) == 1:
        return ctx.handoff(rest[0], onward)
    return [ctx.spec.name, *await ctx.ask(rest[0], onward)]
