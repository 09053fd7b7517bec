"""The mailbox on other stores: a real cluster of three nodes with five partitions, and Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import redis

from hybrid.agents.events import Events
from hybrid.agents.lease import Outcome
from hybrid.agents.mailbox import Mailbox
from hybrid.agents.store import check, connect, server_binary
from hybrid.agents.task import Task
from hybrid.agents.upkeep import Upkeep
from hybrid.config import AgentConfig, StoreConfig
from hybrid.errors import StoreUnavailable
from hybrid.testing import Agents, ScriptedModelClient, run_agents

SLOTS = 16384


def free_ports(count: int) -> list[int]:
    """Ports whose neighbour on the cluster's bus is left to the server's own choice."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            s = stack.enter_context(socket.socket())
            s.bind(("127.0.0.1", 0))
            found.append(s.getsockname()[1])
        return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextlib.contextmanager
def servers(binary: str, folder: Path, *options: tuple[str, ...]) -> Iterator[list[redis.Redis]]:
    """Plain servers, one for each list of options."""
    ports = free_ports(2 * len(options))
    processes, clients = [], []
    try:
        for i, more in enumerate(options):
            place = folder / str(i)
            place.mkdir()
            port, bus = ports[2 * i : 2 * i + 2]
            words = [w.format(bus=bus) for w in more]
            command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(place)]
            command += ["--save", "", "--appendonly", "yes", *words]
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            clients.append(redis.Redis(port=port, decode_responses=True))
        for client in clients:
            until(lambda c=client: bool(c.ping()), "a server does not start")  # type: ignore[misc]
        yield clients
    finally:
        for client in clients:
            client.close()
        for process in processes:
            process.kill()
            process.wait()


def port_of(client: redis.Redis) -> int:
    return int(client.connection_pool.connection_kwargs["port"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--cluster-enabled", "yes", "--cluster-port", "{bus}")
    folder = tmp_path_factory.mktemp("cluster")
    with servers(server_binary(), folder, options, options, options) as nodes:
        bounds = [SLOTS * i // 3 for i in range(4)]
        for node, start, end in zip(nodes, bounds, bounds[1:], strict=False):
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", start, end - 1)
        for node in nodes[1:]:
            bus = int(node.config_get("cluster-port")["cluster-port"])
            nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port_of(node), bus)
        for node in nodes:
            until(
                lambda n=node: (
                    "cluster_state:ok" in str(n.execute_command("CLUSTER", "INFO"))  # type: ignore[misc]
                    and len(n.cluster("SLOTS")) == 3
                ),
                "the cluster does not form",
            )
        yield f"redis+cluster://127.0.0.1:{port_of(nodes[0])}"


async def walk(url: str, partitions: int) -> None:
    """Every way of a task, for tenants of every partition."""
    client = connect(url)
    mailbox = Mailbox(client, StoreConfig(partitions=partitions))
    try:
        await check(client)
        assert await mailbox.install() >= 2
        tenants = [f"tenant-{i}" for i in range(20)]
        ids = [await mailbox.submit(Task(agent="a", input=t, tenant=t)) for t in tenants]
        assert len({mailbox.prefix_of(t) for t in tenants}) == min(partitions, 5)
        leases = await mailbox.lease(None, "h", 20, wait_s=1)
        assert {lease.task.id for lease in leases} == set(ids)
        waiting = asyncio.create_task(mailbox.wait(ids[0], 20))
        await mailbox.record(leases[0], "1:s", {"x": 1}, usage={"tokens": 3})
        assert set((await mailbox.renew(leases)).values()) == {"ok"}
        for lease in leases:
            if lease.task.id == ids[1]:
                child = lease.task.child("b", 1, key="k")
                await mailbox.delegate(lease, child)
            elif lease.task.id == ids[2]:
                assert (await mailbox.cancel(ids[2])).state == "cancelled"
            else:
                await mailbox.complete(lease, Outcome(state="done", result=lease.task.input))
        assert (await waiting).state == "done"
        [inner] = await mailbox.lease(["b"], "h", 1)
        await mailbox.complete(inner, Outcome(state="done", result="inner"))
        assert (await mailbox.view(ids[1])).result == "inner"
        backlog = await Upkeep(mailbox).backlog()
        assert (backlog.ready, backlog.leased) == (0, 0)
        told = [e async for e in Events(client, mailbox).follow(await mailbox.view(ids[1])) if e]
        assert told[-1].data["state"] == "done"
    finally:
        await mailbox.close()
        await client.aclose()


def test_a_cluster_holds_the_partitions_on_several_nodes(cluster: str) -> None:
    asyncio.run(walk(cluster, 5))

    async def scene() -> None:
        settings = {"store": {"partitions": 5}}
        specs = {"echo": AgentConfig()}
        async with run_agents(
            specs, ScriptedModelClient(), cluster, hosts=2, settings=settings
        ) as a:
            answers = await asyncio.gather(*(ask(a, f"t{i}") for i in range(20)))
            assert answers == [f"t{i}" for i in range(20)]

    async def ask(agents: Agents, tenant: str) -> str:
        view = await agents.mailbox.run(Task(agent="echo", input=tenant, tenant=tenant), 20)
        return str(view.result["answer"])

    asyncio.run(scene())

    async def spread() -> None:
        client = connect(cluster)
        keys = [k async for k in client.scan_iter("hybrid:{h*}:t:*")]
        nodes = {client.get_node_from_key(k).port for k in keys}  # type: ignore[attr-defined]
        await client.aclose()
        assert len(nodes) > 1

    asyncio.run(spread())


@pytest.mark.parametrize("binary", ["valkey", "redis"])
def test_one_server_of_either_kind(binary: str, tmp_path: Path) -> None:
    found = (
        server_binary()
        if binary == "valkey"
        else os.environ.get("HYBRID_REDIS_SERVER") or shutil.which("redis-server")
    )
    if found is None:
        pytest.skip("no redis-server >= 7 on PATH or in HYBRID_REDIS_SERVER")
    with servers(found, tmp_path, ()) as [client]:
        url = f"redis://127.0.0.1:{port_of(client)}"
        asyncio.run(walk(url, 1))
        asyncio.run(walk(url, 5))


def test_a_store_that_evicts_is_refused(tmp_path: Path) -> None:
    async def look(url: str) -> None:
        client = connect(url)
        try:
            await check(client)
        finally:
            await client.aclose()

    with servers(server_binary(), tmp_path, ("--maxmemory-policy", "allkeys-lru")) as [client]:
        url = f"redis://127.0.0.1:{port_of(client)}"
        with pytest.raises(StoreUnavailable, match="allkeys-lru"):
            asyncio.run(look(url))
    with pytest.raises(StoreUnavailable, match="does not answer"):
        asyncio.run(look(url))


def test_keys_of_another_program_are_named(tmp_path: Path) -> None:
    async def scene(run: Callable[[Mailbox], Awaitable[None]], url: str) -> None:
        client = connect(url)
        mailbox = Mailbox(client, StoreConfig())
        try:
            await run(mailbox)
        finally:
            await mailbox.close()
            await client.aclose()

    async def submit(mailbox: Mailbox) -> None:
        with pytest.raises(StoreUnavailable, match=r"hybrid:\{h0\}.*WRONGTYPE"):
            await mailbox.submit(Task(agent="a", input=1))
        assert await mailbox.submit(Task(agent="b", input=1)), "what it does not touch goes on"

    with servers(server_binary(), tmp_path, ()) as [client]:
        client.set("hybrid:{h0}:r:a", "not ours")
        asyncio.run(scene(submit, f"redis://127.0.0.1:{port_of(client)}"))
