"""What the agents of the swarm benchmark do: remember, wait, ask a colleague, answer."""

from __future__ import annotations

from typing import Any

from hybrid.agents.behaviour import Context


async def talk(ctx: Context) -> Any:
    """One turn of a conversation: `input` is [turn, colleague]."""
    turn, colleague = ctx.task.input
    noted = await ctx.step("note", lambda: turn * 2)
    await ctx.sleep(0.1)
    said = await ctx.ask(colleague, noted)
    return [turn, said]


async def colleague(ctx: Context) -> Any:
    """Answer at once."""
    return ctx.task.input + 1


async def rest(ctx: Context) -> Any:
    """An idle conversation: it waits for a person."""
    return await ctx.receive("go")
