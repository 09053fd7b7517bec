"""Fifty agents, five hundred conversations at once: nothing lost, and what hosts and agents cost.

    python benchmarks/swarm.py [--quick] [--json -]

Agent hosts on a local Ray cluster, as `hybrid up` starts them; the store keeps every message with
fsync. Each conversation has turns that must come in order; each turn journals a step, waits without
a slot and asks another agent. Then a thousand conversations are left waiting for a person.

`lost` is 0 when every turn was answered, in order. `hosts_rss_mib` is the resident memory of all
hosts, its peer the limit of 1 GiB. `idle_agent_kib` is what another agent that does nothing costs
in a host, its peer what it costs as a Ray actor of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

import hybrid
from hybrid.agents.mailbox import Mailbox
from hybrid.agents.spec import SpecStore
from hybrid.agents.store import connect
from hybrid.agents.task import Task
from hybrid.config import AgentConfig

HERE = Path(__file__).parent
AGENTS = 50
IDLE_AGENTS = 500


def say(line: str) -> None:
    """To stderr: stdout is the JSON's."""
    sys.stderr.write(line + "\n")


def rss_kib(pid: int) -> int:
    """Resident memory that is this process's own, not shared with others."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return fields["Rss"]


async def converse(mailbox: Mailbox, number: int, turns: int) -> list[tuple[float, bool]]:
    """Seconds and rightness of each turn; all turns are sent at once and come in order."""
    agent, other = f"agent-{number % AGENTS}", f"colleague-{number % 7}"
    order: list[int] = []

    async def turn(i: int) -> tuple[float, bool]:
        start = time.perf_counter()
        task = Task(agent=agent, input=[i, other], conversation=f"c{number}", deadline=None)
        view = await mailbox.run(task, 300)
        order.append(i)
        right = view.result == [i, i * 2 + 1] and order == list(range(i + 1))
        return time.perf_counter() - start, right

    sent = []
    for i in range(turns):
        sent.append(asyncio.create_task(turn(i)))
        await asyncio.sleep(0)
    return list(await asyncio.gather(*sent))


async def measure(store_url: str, pids: list[int], quick: bool) -> dict[str, Any]:
    """All of it."""
    from hybrid.config import StoreConfig

    conversations, turns, idle = (500, 2, 200) if quick else (500, 5, 1000)
    client = connect(store_url)
    mailbox, specs = Mailbox(client, StoreConfig()), SpecStore(client)
    try:
        await mailbox.install()
        agents = {f"agent-{i}": AgentConfig(behaviour="swarm_agents.talk") for i in range(AGENTS)}
        agents |= {
            f"colleague-{i}": AgentConfig(behaviour="swarm_agents.colleague") for i in range(7)
        }
        agents["rest"] = AgentConfig(behaviour="swarm_agents.rest", timeout_s=3600)
        await specs.apply_file(agents)
        await mailbox.run(Task(agent="agent-0", input=[0, "colleague-0"]), 60)
        start = time.perf_counter()
        found = await asyncio.gather(*(converse(mailbox, i, turns) for i in range(conversations)))
        took = time.perf_counter() - start
        times = sorted(t for one in found for t, _ in one)
        lost = conversations * turns - sum(right for one in found for _, right in one)
        say(
            f"  {conversations} conversations of {turns} turns at once: {took:.1f} s,"
            f" {len(times) / took:.0f} turns/s; a turn p50 {statistics.median(times):.2f} s, p99"
            f" {times[int(len(times) * 0.99)]:.2f} s (queueing included); {lost} lost"
        )
        hosts = sum(map(rss_kib, pids)) / 1024
        say(f"  {len(pids)} hosts: {hosts:.0f} MiB resident after it")

        used = (await client.info("memory"))["used_memory"]
        ids = [await mailbox.submit(Task(agent="rest", input=i)) for i in range(idle)]
        deadline = time.monotonic() + 60
        for task_id in ids:
            while (await mailbox.view(task_id)).state != "waiting":
                assert time.monotonic() < deadline, "an idle conversation does not come to rest"
        store = ((await client.info("memory"))["used_memory"] - used) / idle / 1024
        before = sum(map(rss_kib, pids))
        say(f"  an idle conversation: {store:.1f} KiB in the store, none in a host")
        more = {f"idle-{i}": AgentConfig(description=f"Idle {i}") for i in range(IDLE_AGENTS)}
        await specs.apply_file({**agents, **more})
        await asyncio.sleep(3)
        idle_kib = (sum(map(rss_kib, pids)) - before) / IDLE_AGENTS / len(pids)
        return {"lost": lost, "hosts": hosts, "idle_kib": max(0.1, idle_kib)}
    finally:
        await mailbox.close()
        await client.aclose()


def actor_kib() -> float:
    """What an agent costs as a Ray actor of its own."""
    import ray

    class Bare:
        def pid(self) -> int:
            return os.getpid()

    actors = [ray.remote(num_cpus=0)(Bare).remote() for _ in range(2)]
    pids = ray.get([a.pid.remote() for a in actors])
    time.sleep(1)
    found = statistics.median(rss_kib(pid) for pid in pids)
    for actor in actors:
        ray.kill(actor)
    return found


def main() -> None:
    """Start, measure, report, stop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer turns, under a minute")
    parser.add_argument("--json", metavar="-", help="print one JSON object last")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(HERE)
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory(prefix="hybrid-bench-") as folder:
        file = Path(folder) / "hybrid.yaml"
        project: dict[str, Any] = {
            "run": {"name": "swarm", "dir": ".hybrid"},
            "model": {"name": "none"},
            "agents": {"swarm": {"hosts": 2, "concurrency": 128}},
        }
        file.write_text(yaml.safe_dump(project))
        opened = hybrid.open(file)
        state = opened.local.start(bound=True)
        try:
            with opened.ray():
                from hybrid.agents.swarm import start_swarm, stop_swarm, swarm_status

                assert state.store_url is not None
                start_swarm(opened.config, state.store_url)
                while sum(h["state"] == "running" for h in swarm_status()["hosts"]) < 2:
                    time.sleep(0.2)
                pids = [h["pid"] for h in swarm_status()["hosts"]]
                found = asyncio.run(measure(state.store_url, pids, arguments.quick))
                own = actor_kib()
                stop_swarm(1.0)
        finally:
            opened.local.stop()
    claims = {
        "lost": {"ours": found["lost"], "peer": 0, "ratio": float(found["lost"] > 0)},
        "hosts_rss_mib": {
            "ours": round(found["hosts"]),
            "peer": 1024,
            "ratio": round(found["hosts"] / 1024, 3),
        },
        "idle_agent_kib": {
            "ours": round(found["idle_kib"], 1),
            "peer": round(own),
            "ratio": round(found["idle_kib"] / own, 6),
        },
    }
    for name, claim in claims.items():
        say(f"{name}: ours {claim['ours']}, peer {claim['peer']}")
    if arguments.json:
        sys.stdout.write(json.dumps(claims) + "\n")


if __name__ == "__main__":
    main()
