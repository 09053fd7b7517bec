"""The swarm on a real cluster: hosts killed, blocked, drained, started for work and ended after."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis

from hybrid import config
from hybrid.agents.mailbox import Mailbox
from hybrid.agents.spec import SpecStore
from hybrid.agents.store import connect
from hybrid.agents.swarm import SWARM, start_swarm, stop_swarm, swarm_status
from hybrid.agents.task import Task
from hybrid.config import AgentConfig, ProjectConfig
from hybrid.errors import Unavailable
from hybrid.pools import AGENTS

pytestmark = pytest.mark.ray

SPECS = {
    "echo": AgentConfig(),
    "blocker": AgentConfig(behaviour="behaviours.block_once"),
    "eater": AgentConfig(behaviour="behaviours.eat"),
    "linger": AgentConfig(behaviour="behaviours.linger"),
}


def project(**swarm: Any) -> ProjectConfig:
    return config.parse(
        {
            "run": {"name": "swarm"},
            "model": {"name": "base"},
            "store": {"lease_s": 30},
            "agents": {"swarm": {"blocked_s": 4, "host_memory_mib": 512, **swarm}},
        }
    )


PROJECT = project(hosts=2)


def until(condition: Callable[[], Any], seconds: float = 40) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return found


def running() -> dict[str, int]:
    return {h["name"]: h["pid"] for h in swarm_status()["hosts"] if h["state"] == "running"}


@contextlib.contextmanager
def a_swarm(of: ProjectConfig, store_url: str) -> Iterator[None]:
    async def apply() -> None:
        client = connect(store_url)
        await Mailbox(client, of.store).install()
        # Without a model deployed every call is Unavailable: the task is retried, never lost.
        await SpecStore(client).apply_file(SPECS)
        await client.aclose()

    asyncio.run(apply())
    start_swarm(of, store_url)
    try:
        until(lambda: len(running()) == of.agents.swarm.hosts)
        yield
    finally:
        stop_swarm(1.0)
    with pytest.raises(Unavailable):
        swarm_status()


def give_notice(ray_cluster: Any, node_id: str, seconds: int) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
    command += ["--address", ray_cluster.address, "--node-id", node_id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "notice"]
    command += ["--deadline-remaining-seconds", str(seconds)]
    subprocess.run(command, check=True, env=ray_cluster.env, capture_output=True)


def play(store_url: str, scene: Callable[[Mailbox], Awaitable[None]]) -> None:
    async def run() -> None:
        client = connect(store_url)
        mailbox = Mailbox(client, PROJECT.store)
        try:
            async with asyncio.timeout(90):
                await scene(mailbox)
        finally:
            await mailbox.close()
            await client.aclose()

    asyncio.run(run())


@pytest.fixture(scope="class")
def swarm(ray_cluster: Any, store_server: str) -> Iterator[str]:
    """Two hosts for all tests of a class: after each of them there are two again."""
    with redis.Redis.from_url(store_server) as client:
        client.flushall()
    with a_swarm(PROJECT, store_server):
        yield store_server


class TestTwoHosts:
    def test_hosts_are_without_torch_and_on_the_agents_pool(
        self, swarm: str, ray_cluster: Any
    ) -> None:
        for pid in running().values():
            maps = subprocess.run(["cat", f"/proc/{pid}/maps"], capture_output=True, check=True)
            assert b"libtorch" not in maps.stdout

    def test_tasks_survive_what_the_model_does_not(self, swarm: str) -> None:
        async def scene(mailbox: Mailbox) -> None:
            view = await mailbox.run(Task(agent="echo", input="x", max_attempts=2), 40)
            assert view.state == "dead"
            assert "unavailable" in str(view.error)
            assert [h.outcome for h in view.history] == ["retry", "retry"]

        play(swarm, scene)

    def test_a_killed_host_is_replaced_and_a_killed_swarm_leaves_hosts_running(
        self, swarm: str
    ) -> None:
        import ray

        before = running()
        name, pid = next(iter(before.items()))
        os.kill(pid, signal.SIGKILL)
        after = until(lambda: (r := running()) and len(r) == 2 and name not in r and r)
        assert set(before) - {name} <= set(after), "the other host was left alone"

        ray.kill(ray.get_actor(SWARM, namespace="hybrid"))
        for host in after.values():
            os.kill(host, 0)
        start_swarm(PROJECT, swarm)
        assert until(lambda: (r := running()) and len(r) == 2 and r) == after, "hosts are adopted"

    def test_a_behaviour_that_blocks_or_eats_memory_harms_nothing_else(self, swarm: str) -> None:
        before = running()

        async def scene(mailbox: Mailbox) -> None:
            eaten = await mailbox.run(Task(agent="eater", input=0, max_attempts=1), 40)
            assert eaten.state == "dead"
            assert "MemoryError" in str(eaten.error)
            assert running() == before, "the host went on"

            others = [await mailbox.submit(Task(agent="linger", input=4)) for _ in range(8)]
            view = await mailbox.run(Task(agent="blocker", input=0), 60)
            assert view.result == "unblocked"
            assert view.history[0].outcome == "lost"
            assert "event loop was blocked" in str(view.history[0].error)
            assert "behaviours.py" in str(view.history[0].error), "and where"
            for other in others:
                assert (await mailbox.wait(other, 30)).state == "done"

        play(swarm, scene)
        after = until(lambda: (r := running()) and len(r) == 2 and r)
        assert len(set(before) & set(after)) == 1, "only the blocked one was replaced"


def test_hosts_come_from_zero_for_work_and_go_after(ray_cluster: Any, store_url: str) -> None:
    with a_swarm(project(hosts=0, max_hosts=2, idle_s=1.0, concurrency=4), store_url):

        async def scene(mailbox: Mailbox) -> None:
            ids = [await mailbox.submit(Task(agent="linger", input=3)) for _ in range(8)]
            for task_id in ids:
                assert (await mailbox.wait(task_id, 60)).state == "done"

        assert not running()
        play(store_url, scene)
        assert len(swarm_status()["hosts"]) == 2, "as many as the work needed"
        until(lambda: not swarm_status()["hosts"])


def test_a_host_on_a_node_that_is_taken_away_gives_its_tasks_back_in_time(
    ray_cluster: Any, store_url: str
) -> None:
    node = ray_cluster.cluster.add_node(
        num_cpus=4, resources=AGENTS.resources(4), labels=AGENTS.labels(),
        object_store_memory=128 << 20,
    )  # fmt: skip
    try:
        with a_swarm(project(hosts=5), store_url):
            hosts = [h for h in swarm_status()["hosts"] if h["node"] == node.node_id]
            assert hosts, "five hosts do not fit the first node"

            async def scene(mailbox: Mailbox) -> None:
                ids = [await mailbox.submit(Task(agent="linger", input=8)) for _ in range(40)]
                until(lambda: sum(h.get("in_flight", 0) for h in swarm_status()["hosts"]) == 40)
                give_notice(ray_cluster, node.node_id, 4)
                views = [await mailbox.wait(task_id, 60) for task_id in ids]
                assert {v.state for v in views} == {"done"}
                # Given back, not lost: the attempt did not count, nobody waited for a lease to end.
                assert {v.attempts for v in views} == {1}
                assert max(v.task.attempt for v in views) == 2

            play(store_url, scene)
            gone = {h["name"] for h in hosts}
            until(lambda: not gone & {h["name"] for h in swarm_status()["hosts"]})
    finally:
        ray_cluster.cluster.remove_node(node)
