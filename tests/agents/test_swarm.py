"""The swarm on a real cluster: killed hosts are replaced, a killed swarm leaves them running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybrid import config
from hybrid.agents.mailbox import Mailbox
from hybrid.agents.spec import SpecStore
from hybrid.agents.store import connect
from hybrid.agents.swarm import SWARM, start_swarm, stop_swarm, swarm_status
from hybrid.agents.task import Task, TaskView
from hybrid.config import AgentConfig, ProjectConfig
from hybrid.errors import Unavailable

pytestmark = pytest.mark.ray

PROJECT: ProjectConfig = config.parse(
    {
        "run": {"name": "swarm"},
        "model": {"name": "base"},
        "store": {"lease_s": 1.5},
        "agents": {"swarm": {"hosts": 2}},
    }
)


def until(condition: Callable[[], Any], seconds: float = 40) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return found


def running() -> dict[str, int]:
    return {h["name"]: h["pid"] for h in swarm_status()["hosts"] if h["state"] == "running"}


@pytest.fixture
def swarm(ray_cluster: Any, store_url: str) -> Iterator[str]:
    async def apply() -> None:
        client = connect(store_url)
        await Mailbox(client, PROJECT.store).install()
        # Without a model deployed every call is Unavailable: the task is retried, never lost.
        await SpecStore(client).apply_file({"echo": AgentConfig()})
        await client.aclose()

    asyncio.run(apply())
    start_swarm(PROJECT, store_url)
    until(lambda: len(running()) == 2)
    yield store_url
    stop_swarm(1.0)
    with pytest.raises(Unavailable):
        swarm_status()


def test_hosts_are_without_torch_and_on_the_agents_pool(swarm: str, ray_cluster: Any) -> None:
    for pid in running().values():
        maps = subprocess.run(["cat", f"/proc/{pid}/maps"], capture_output=True, check=True)
        assert b"libtorch" not in maps.stdout


def test_a_killed_host_is_replaced_and_a_killed_swarm_leaves_hosts_running(swarm: str) -> None:
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


def test_tasks_survive_what_the_model_does_not(swarm: str) -> None:
    async def ask() -> TaskView:
        client = connect(swarm)
        mailbox = Mailbox(client, PROJECT.store)
        try:
            task = Task(agent="echo", input="x", max_attempts=2)
            return await mailbox.wait(await mailbox.submit(task), 40)
        finally:
            await mailbox.close()
            await client.aclose()

    view = asyncio.run(ask())
    assert view.state == "dead"
    assert "unavailable" in str(view.error)
    assert [h.outcome for h in view.history] == ["retry", "retry"]
