"""The chain's five agents, and a process that hosts them: route, search, reason, verify, respond.

    python benchmarks/chain_agents.py STORE_URL SETTINGS     (started by mailbox.py)

Each hop asks the (scripted) model and hands on to the next agent over the store.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from hybrid import config
from hybrid.agents.behaviour import Context
from hybrid.agents.host import AgentHost
from hybrid.agents.host_actor import calm_gc
from hybrid.agents.steps import Handoff
from hybrid.testing import ScriptedModelClient

T = TypeVar("T")
HOPS = ("route", "search", "reason", "verify", "respond")


def model(prompt: str) -> str:
    """The scripted model."""
    return prompt + "."


async def hop(ctx: Context) -> Handoff | Any:
    """Append a model's word and when this hop began; hand on, or answer."""
    began = time.perf_counter()  # one clock for all processes of a machine
    text, times = ctx.task.input
    chunk = await ctx.generate(prompt=text)
    said = [chunk.text, [*times, began]]
    at = HOPS.index(ctx.spec.name)
    return said if at == len(HOPS) - 1 else ctx.handoff(HOPS[at + 1], said)


async def stamp(ctx: Context) -> float:
    """When the handler began."""
    return time.perf_counter()


async def host(name: str, url: str, settings: dict[str, Any]) -> None:
    """Host the agents until SIGTERM; then print what the store was asked."""
    project = config.parse({"run": {"name": "chain"}, "model": {"name": "m"}, **settings})
    agents = AgentHost(name, url, project, ScriptedModelClient(answer=model))
    calm_gc()
    running = asyncio.create_task(agents.run())
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    calls, operations = agents.mailbox.round_trips
    busy = time.process_time()
    await agents.drain(5)
    await running
    tasks = sum(agents.finished.values())
    sys.stdout.write(
        json.dumps({"calls": calls, "operations": operations, "cpu_s": busy, "tasks": tasks})
    )


def run(main: Coroutine[Any, Any, T]) -> T:
    """On uvloop where it is installed, as Ray's workers do."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


if __name__ == "__main__":
    run(host(f"bench-{os.getpid()}", sys.argv[1], json.loads(sys.argv[2])))
