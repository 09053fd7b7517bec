"""The peers of mailbox.py: Ray actors, and the frameworks' scripts, each run by its own Python."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from chain_agents import HOPS

from hybrid.agents.store import connect

PROCESSES = 2
"""Hosts of ours, actors of theirs."""
Chain = Callable[[], Awaitable[Any]]


def ray_actor() -> Any:
    """The class of a peer's actor: all agents of the chain, one process."""
    import ray

    class Peer:
        def __init__(self, url: str | None) -> None:
            self.store: Any = connect(url) if url else None
            self.others: list[Any] = []

        def meet(self, others: list[Any]) -> None:
            self.others = others

        async def nested(self, chain: str, text: str, at: int) -> str:
            text = await self.hop(chain, text, at)
            if at == len(HOPS) - 1:
                return text
            return str(
                await self.others[(at + 1) % len(self.others)].nested.remote(chain, text, at + 1)
            )

        async def hop(self, chain: str, text: str, at: int) -> str:
            text += "."
            if self.store is not None:
                await self.store.hset(f"chain:{chain}", HOPS[at], text)
            return text

    return ray.remote(num_cpus=0, max_concurrency=20_000)(Peer)


@contextlib.contextmanager
def ray_peers(url: str | None) -> Iterator[dict[str, Chain]]:
    """Chains over two actor processes, by how they are called."""
    import ray

    actor = ray_actor()
    peers = [actor.remote(url) for _ in range(PROCESSES)]
    ray.get([p.meet.remote(peers) for p in peers])
    counter = iter(range(1 << 60))

    async def nested() -> None:
        text = await peers[0].nested.remote(str(next(counter)), "hi", 0)
        assert text == "hi" + "." * len(HOPS)

    async def pipelined() -> None:
        name, said = str(next(counter)), "hi"
        for at in range(len(HOPS)):
            said = peers[at % PROCESSES].hop.remote(name, said, at)
        assert await said == "hi" + "." * len(HOPS)  # type: ignore[misc]

    yield {"nested": nested, "pipelined": pipelined}
    for peer in peers:
        ray.kill(peer)


LANGGRAPH = """
import asyncio, json, os, sys, tempfile, time
from typing import TypedDict
from langgraph.graph import StateGraph, START, END
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
class S(TypedDict): x: str
async def node(s): return {"x": s["x"] + "."}
async def main(one, many):
    with tempfile.TemporaryDirectory() as d:
        async with AsyncSqliteSaver.from_conn_string(os.path.join(d, "c.db")) as saver:
            g = StateGraph(S); names = ["route", "search", "reason", "verify", "respond"]
            for n in names: g.add_node(n, node)
            for a, b in zip([START, *names], [*names, END]): g.add_edge(a, b)
            app = g.compile(checkpointer=saver)
            n = iter(range(1 << 60))
            async def chain():
                thread = {"configurable": {"thread_id": str(next(n))}}
                r = await app.ainvoke({"x": "hi"}, thread, durability="sync")
                assert r["x"] == "hi.....", r
"""
AUTOGEN = """
import asyncio, json, sys, time
from dataclasses import dataclass
from autogen_core import RoutedAgent, message_handler, MessageContext, AgentId
from autogen_core import SingleThreadedAgentRuntime
@dataclass
class M:
    x: str
    hop: int
class Hop(RoutedAgent):
    def __init__(self): super().__init__("hop")
    @message_handler
    async def h(self, message: M, ctx: MessageContext) -> M:
        said = M(message.x + ".", message.hop + 1)
        if said.hop == 5: return said
        return await self.send_message(said, AgentId(f"hop{said.hop}", "default"))
async def main(one, many):
    if True:
        if True:
            rt = SingleThreadedAgentRuntime()
            for i in range(5): await Hop.register(rt, f"hop{i}", lambda: Hop())
            rt.start()
            async def chain():
                r = await rt.send_message(M("hi", 0), AgentId("hop0", "default"))
                assert r.x == "hi....."
"""
MEASURE = """
            for _ in range(5): await chain()
            times = []
            for _ in range(one):
                t = time.perf_counter(); await chain(); times.append(time.perf_counter() - t)
            t = time.perf_counter(); await asyncio.gather(*[chain() for _ in range(many)])
            print(json.dumps([times, many / (time.perf_counter() - t)]))
asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
"""


def framework(python: str, program: str, one: int, many: int) -> tuple[list[float], float]:
    """A framework's chain in a process of its own interpreter."""
    done = subprocess.run(
        [python, "-c", program + MEASURE, str(one), str(many)],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    times, rate = json.loads(done.stdout.splitlines()[-1])
    return times, rate
