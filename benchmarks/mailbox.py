"""Five agents in a row, every message durable: our mailbox against Ray actors and frameworks.

    python benchmarks/mailbox.py [--quick] [--json -] [--langgraph PYTHON] [--autogen PYTHON]

The chain is route → search → reason → verify → respond; each hop calls a scripted model. Ours runs
in two host processes with everything on: journal, fencing, budgets, events, fsync. The peers:

- bare Ray actors in two processes, not durable: nested calls, and calls pipelined by the driver;
  the faster of both counts
- the same actors writing each hop through to the same kind of store (the fair peer)
- LangGraph with its SQLite checkpointer and durability "sync", and AutoGen core (in process, not
  durable), each by the Python interpreter that has it; skipped when not given

All are measured in turn, several rounds; medians count. `…_p50_…` are ratios of the time of one
chain (below 1, ours is faster), `…_rate_…` of chains a second when hundreds are asked for at once
(above 1, ours is faster).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from chain_agents import HOPS, run
from mailbox_peers import AUTOGEN, LANGGRAPH, PROCESSES, Chain, framework, ray_peers

from hybrid import config
from hybrid.agents.mailbox import Mailbox
from hybrid.agents.spec import SpecStore
from hybrid.agents.store import EmbeddedStore, connect
from hybrid.agents.task import Budget, Task
from hybrid.config import AgentConfig

HERE = Path(__file__).parent
SETTINGS = {"agents": {"swarm": {"concurrency": 256}}}
BUDGET = Budget(tokens=1_000_000, hops=32)


async def measure(chain: Chain, one: int, many: int) -> tuple[list[float], float]:
    """Seconds of chains one after another, and chains a second when `many` are asked at once."""
    for _ in range(5):
        await chain()
    times = []
    for _ in range(one):
        start = time.perf_counter()
        await chain()
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    await asyncio.gather(*(chain() for _ in range(many)))
    return times, many / (time.perf_counter() - start)


def started(command: list[str]) -> subprocess.Popen[bytes]:
    """A host process."""
    return subprocess.Popen(command, stdout=subprocess.PIPE)


# --- ours -----------------------------------------------------------------------------------------


class Ours:
    """Two host processes on an embedded store."""

    def __init__(self, fsync: str) -> None:
        self.fsync = fsync
        self.hops: list[list[float]] = []
        self.hosts: dict[str, float] = {}
        self.commands: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Chain]:
        """Hosts up; ended afterwards."""
        with (
            tempfile.TemporaryDirectory(prefix="hybrid-bench-") as folder,
            EmbeddedStore(Path(folder), fsync=self.fsync) as store,  # type: ignore[arg-type]
        ):
            client = connect(store.url)
            project = config.parse({"run": {"name": "b"}, "model": {"name": "m"}, **SETTINGS})
            self.mailbox = mailbox = Mailbox(client, project.store)
            await mailbox.install()
            spec = AgentConfig(behaviour="chain_agents.hop", max_concurrency=256)
            stamp = AgentConfig(behaviour="chain_agents.stamp", max_concurrency=256)
            await SpecStore(client).apply_file({**dict.fromkeys(HOPS, spec), "stamp": stamp})
            command = [sys.executable, str(HERE / "chain_agents.py"), store.url]
            command.append(json.dumps(SETTINGS))
            hosts = [started(command) for _ in range(PROCESSES)]
            try:
                await mailbox.run(self.task(), 60)
                yield self.chain
                await self.read_server(client)
            finally:
                for host in hosts:
                    host.send_signal(signal.SIGTERM)
                for host in hosts:
                    out, _ = host.communicate(timeout=30)
                    for name, value in json.loads(out).items():
                        self.hosts[name] = self.hosts.get(name, 0) + value
                await mailbox.close()
                await client.aclose()

    @staticmethod
    def task() -> Task:
        """One chain's root."""
        return Task(agent=HOPS[0], input=["hi", []], budget=BUDGET, deadline=time.time() + 60)

    async def chain(self) -> None:
        """One chain, from submit to answer."""
        start = time.perf_counter()
        view = await self.mailbox.run(self.task(), 60)
        end = time.perf_counter()
        assert view.state == "done", view
        text, times = view.result
        assert text == "hi" + "." * len(HOPS)
        self.hops.append([b - a for a, b in zip([start, *times], [*times, end], strict=True)])

    async def waiting(self, depth: int) -> list[float]:
        """Seconds from submit to the handler's start, with so many submitted at once."""

        async def one() -> float:
            start = time.perf_counter()
            task = Task(agent="stamp", input=None, deadline=time.time() + 60)
            view = await self.mailbox.run(task, 60)
            return float(view.result) - start

        return list(await asyncio.gather(*(one() for _ in range(depth))))

    async def read_server(self, client: Any) -> None:
        """What a call costs the server."""
        stats = await client.info("commandstats")
        for name in ("fcall", "publish"):
            entry = stats.get(f"cmdstat_{name}")
            if entry:
                self.commands[name] = entry["usec_per_call"]


# --- the comparison -------------------------------------------------------------------------------


class Table:
    """What was measured: seconds of single chains and rates, by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.rates: dict[str, list[float]] = {}

    def add(self, name: str, times: list[float], rate: float) -> None:
        """A round's figures."""
        self.times.setdefault(name, []).extend(times)
        self.rates.setdefault(name, []).append(rate)

    def p50(self, name: str) -> float:
        """Milliseconds."""
        return statistics.median(self.times[name]) * 1e3

    def rate(self, name: str) -> float:
        """Chains a second."""
        return statistics.median(self.rates[name])

    def say(self) -> None:
        """Print it all."""
        for name, times in self.times.items():
            p99 = sorted(times)[int(len(times) * 0.99)] * 1e3
            say(f"  {name:34} p50 {self.p50(name):6.2f} ms  p99 {p99:6.2f} ms "
                f" {self.rate(name):7.0f} chains/s")  # fmt: skip


def say(line: str) -> None:
    """To stderr: stdout is the JSON's."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


async def compare(quick: bool, langgraph: str | None, autogen: str | None) -> Table:
    """Measure everyone in turn."""
    one, many, rounds = (40, 500, 2) if quick else (100, 1000, 5)
    table = Table()
    ours = {"ours, fsync always": Ours("always"), "ours, fsync everysec": Ours("everysec")}
    programs = {
        "langgraph, sqlite, sync": (langgraph, LANGGRAPH, many // 10),
        "autogen core, not durable": (autogen, AUTOGEN, many),
    }
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hybrid-bench-"))
        peer_store = stack.enter_context(EmbeddedStore(Path(folder)))
        chains = {n: await stack.enter_async_context(o.running()) for n, o in ours.items()}
        for label, url in (("", None), (", written through", peer_store.url)):
            for how, chain in stack.enter_context(ray_peers(url)).items():
                chains[f"ray {how}{label}"] = chain
        for turn in range(rounds):
            for name, chain in chains.items():
                table.add(name, *await measure(chain, one, many))
            for name, (python, program, few) in programs.items():
                if python:
                    found = await asyncio.to_thread(framework, python, program, one, few)
                    table.add(name, *found)
            say(f"round {turn + 1} of {rounds}")
        await queues(ours["ours, fsync always"])
    table.say()
    for name, o in ours.items():
        split(name, o, one)
    return table


async def queues(ours: Ours) -> None:
    """How long a task waits for its handler, by how many were submitted at once."""
    for depth in (1, 100, 1000):
        times = 20 if depth == 1 else 2
        waits = sorted([w * 1e3 for _ in range(times) for w in await ours.waiting(depth)])
        p50, p99 = statistics.median(waits), waits[int(len(waits) * 0.99)]
        say(f"  submit → handler start, {depth:4} at once: p50 {p50:7.2f} ms, p99 {p99:7.2f} ms")


def split(name: str, ours: Ours, one: int) -> None:
    """Where a chain's time goes, and what its hosts asked of the store."""
    parts = ["submit → route", *(f"→ {h}" for h in HOPS[1:]), "→ answered"]
    ms = [statistics.median(h[i] for h in ours.hops[5 : 5 + one]) * 1e3 for i in range(len(parts))]
    shares = ", ".join(f"{part} {m:.2f}" for part, m in zip(parts, ms, strict=True))
    say(f"  {name}, one at a time: {shares} ms")
    h = ours.hosts
    say(
        f"    {h['calls'] / h['tasks']:.2f} round trips and"
        f" {h['operations'] / h['tasks']:.2f} operations a hop (1 and 2 one at a time),"
        f" {h['cpu_s'] / h['tasks'] * 1e3:.2f} ms of a host's processor time a hop,"
        f" {ours.commands.get('fcall', 0):.0f} µs of the store's a call"
    )


def claims(table: Table, langgraph: bool, autogen: bool) -> dict[str, Any]:
    """The ratios."""
    bare = ("ray nested", "ray pipelined")
    fair = ("ray nested, written through", "ray pipelined, written through")
    found: dict[str, Any] = {}

    def claim(name: str, mine: float, peer: float, digits: int) -> None:
        found[name] = {
            "ours": round(mine, digits),
            "peer": round(peer, digits),
            "ratio": round(mine / peer, 3),
        }

    def p50(name: str, ours: str, peers: tuple[str, ...]) -> None:
        claim(name, table.p50(ours), min(map(table.p50, peers)), 2)

    def rate(name: str, ours: str, peers: tuple[str, ...]) -> None:
        claim(name, table.rate(ours), max(map(table.rate, peers)), 0)

    for suffix, ours in (("", "ours, fsync always"), ("_everysec", "ours, fsync everysec")):
        p50(f"chain_p50_vs_ray{suffix}", ours, bare)
        rate(f"chain_rate_vs_ray{suffix}", ours, bare)
        p50(f"chain_p50_vs_ray_written_through{suffix}", ours, fair)
        rate(f"chain_rate_vs_ray_written_through{suffix}", ours, fair)
        if langgraph:
            rate(f"chain_rate_vs_langgraph{suffix}", ours, ("langgraph, sqlite, sync",))
        if autogen:
            rate(f"chain_rate_vs_autogen{suffix}", ours, ("autogen core, not durable",))
    return found


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under a minute")
    parser.add_argument("--json", metavar="-", help="print one JSON object last")
    parser.add_argument("--langgraph", metavar="PYTHON", help="an interpreter with LangGraph")
    parser.add_argument("--autogen", metavar="PYTHON", help="an interpreter with AutoGen core")
    arguments = parser.parse_args()
    for name in ("langgraph", "autogen"):
        if not getattr(arguments, name):
            say(f"{name} is skipped: give --{name} PYTHON, an interpreter that has it")
    with tempfile.TemporaryDirectory(prefix="hy-") as folder:
        token = Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text(os.urandom(32).hex())
        os.environ.update(
            RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token), RAY_USAGE_STATS_ENABLED="0",
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", PYTHONPATH=str(HERE),
        )  # fmt: skip
        os.environ.pop("RAY_ADDRESS", None)
        import ray

        ray.init(
            num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False,
            object_store_memory=128 << 20, _temp_dir=folder,
        )  # fmt: skip
        try:
            table = run(compare(arguments.quick, arguments.langgraph, arguments.autogen))
        finally:
            ray.shutdown()
    found = claims(table, bool(arguments.langgraph), bool(arguments.autogen))
    for name, claim in found.items():
        say(f"{name}: {claim['ratio']} (ours {claim['ours']}, peer {claim['peer']})")
    if arguments.json:
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
