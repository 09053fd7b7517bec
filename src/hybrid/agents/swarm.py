"""The swarm: a detached actor that keeps the number of agent hosts right.

Hosts are detached too and found again by name: when the swarm dies they go on, and the next swarm
adopts them. It never decides about tasks; those are the mailbox's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from typing import Any

from hybrid.config import ProjectConfig
from hybrid.errors import PlacementError, Unavailable
from hybrid.pools import AGENTS, HEAD

log = logging.getLogger(__name__)
NAMESPACE = "hybrid"
SWARM = "hybrid-swarm"
_HOST_PREFIX = "hybrid-host-"
_LOOK_S = 0.5
_PING_S = 5.0
_PLACE_S = 30.0
_HOST_MEMORY = 1 << 30
"""Bytes a host asks for, of the 4 GB of an agents node; its ceiling is 2 GiB."""


class Swarm:
    """The actor's class.

    Args:
        config: the project, as JSON data.
        store_url: given to every host.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits it; a restarted swarm then looks at once
        self, config: dict[str, Any], store_url: str
    ) -> None:
        self._config = config
        self._store_url = store_url
        self._wanted = ProjectConfig.model_validate(config).agents.swarm.hosts
        self._hosts: dict[str, _Host] = {}
        self._stopping = False
        self._loop = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self._adopt()
        while not self._stopping:
            try:
                await self._look()
            except Exception:
                log.exception("swarm: looking after the hosts failed; trying again")
            await asyncio.sleep(_LOOK_S)

    async def ping(self) -> bool:
        """Whether it answers."""
        return True

    async def scale(self, hosts: int) -> None:
        """Keep this many hosts from now on."""
        self._wanted = hosts

    async def status(self) -> dict[str, Any]:
        """Hosts wanted and there, each with process, node and tasks in hand."""
        entries = await asyncio.gather(*(host.describe() for host in self._hosts.values()))
        return {"wanted": self._wanted, "hosts": list(entries)}

    async def stop(self, deadline_s: float = 5.0) -> None:
        """Drain and end all hosts, and stop replacing them."""
        self._stopping = True
        await asyncio.gather(*(host.end(deadline_s) for host in self._hosts.values()))
        self._hosts.clear()

    def _adopt(self) -> None:
        import ray

        for entry in ray.util.list_named_actors(all_namespaces=True):
            if entry["namespace"] == NAMESPACE and entry["name"].startswith(_HOST_PREFIX):
                with contextlib.suppress(ValueError):  # it died meanwhile
                    actor = ray.get_actor(entry["name"], namespace=NAMESPACE)
                    self._hosts[entry["name"]] = _Host(entry["name"], actor, None)

    async def _look(self) -> None:
        for name, host in list(self._hosts.items()):
            if await host.gone():
                log.warning("host %s is gone; a replacement is started", name)
                del self._hosts[name]
        while len(self._hosts) < self._wanted:
            host = _start_host(self._config, self._store_url)
            self._hosts[host.name] = host
        surplus = list(self._hosts.values())[self._wanted :]
        for host in surplus:
            await host.end(10.0)
            self._hosts.pop(host.name, None)


class _Host:
    """The swarm's view of one host. `running` is the call that ends when the host does."""

    def __init__(self, name: str, actor: Any, running: Any) -> None:
        self.name = name
        self._actor = actor
        self._running = running
        self._since = time.monotonic()
        self._placed = running is None
        self._checked = time.monotonic()
        self._problem: str | None = None

    async def gone(self) -> bool:
        """Whether the host has ended or does not answer."""
        from ray.exceptions import RayError

        if self._running is not None:
            import ray

            done, _ = ray.wait([self._running], timeout=0)
            if done:
                return True
        if time.monotonic() - self._checked < _PING_S and self._placed:
            return False
        self._checked = time.monotonic()
        try:
            await asyncio.wait_for(_call(self._actor, "stats"), 2.0)
            self._placed, self._problem = True, None
        except RayError:
            return True
        except TimeoutError:
            if not self._placed and time.monotonic() - self._since > _PLACE_S:
                self._problem = _lacking()
        return False

    async def describe(self) -> dict[str, Any]:
        """For `status`."""
        from ray.exceptions import RayError

        try:
            found: dict[str, Any] = await asyncio.wait_for(_call(self._actor, "stats"), 2.0)
            return {**found, "state": "running"}
        except TimeoutError:
            problem = self._problem or "not placed yet, or busy"
            return {"name": self.name, "pid": None, "state": "pending", "problem": problem}
        except RayError:
            return {"name": self.name, "pid": None, "state": "dead"}

    async def end(self, deadline_s: float) -> None:
        """Drain, then end the process."""
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(_call(self._actor, "drain", deadline_s), deadline_s + 2)
        ray.kill(self._actor)


async def _call(actor: Any, method: str, *args: Any) -> Any:
    """A call in the control group: it is answered even when `run` keeps its event loop busy."""
    return await getattr(actor, method).options(concurrency_group="control").remote(*args)


def _lacking() -> str:
    """What the cluster lacks for a host."""
    import ray

    pool = AGENTS.label_selector
    nodes = [
        n
        for n in ray.nodes()
        if n["Alive"] and all(n["Labels"].get(k) == v for k, v in pool.items())
    ]
    if not nodes:
        return PlacementError(
            f"no node with the label {pool}: start one, or see cluster.yaml"
        ).message
    return PlacementError(
        f"{len(nodes)} agents nodes, none with 1 free CPU and {_HOST_MEMORY >> 20} MiB"
    ).message


def _start_host(config: dict[str, Any], store_url: str) -> _Host:
    import ray

    from hybrid.agents.host_actor import HostActor

    name = f"{_HOST_PREFIX}{uuid.uuid4().hex[:8]}"
    actor = (
        ray.remote(concurrency_groups={"control": 4})(HostActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=1,
            memory=_HOST_MEMORY,
            label_selector=AGENTS.label_selector,
            max_restarts=0,
            max_task_retries=0,
        )
        .remote(name, store_url, config)
    )
    return _Host(name, actor, actor.run.remote())


# --- from outside -------------------------------------------------------------------------------


def start_swarm(config: ProjectConfig, store_url: str, timeout_s: float = 60) -> Any:
    """Start the swarm, or replace one that runs so that it takes this configuration; hosts go on.

    Waits until a host is up, unless none is wanted.

    Raises:
        PlacementError: no host can be placed. Unavailable: none came up in time.
    """
    import ray

    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(SWARM, namespace=NAMESPACE))
    actor = None
    deadline = time.monotonic() + timeout_s
    while actor is None:
        try:
            actor = (
                ray.remote(Swarm)
                .options(
                    name=SWARM,
                    namespace=NAMESPACE,
                    lifetime="detached",
                    num_cpus=0,
                    label_selector=HEAD.label_selector,
                    max_restarts=-1,
                    max_concurrency=100,
                )
                .remote(config.model_dump(mode="json"), store_url)
            )
        except ValueError:  # the name of the killed one is still taken for a moment
            if time.monotonic() > deadline:
                raise Unavailable(f"actor {SWARM} cannot be replaced") from None
            time.sleep(0.1)
    while config.agents.swarm.hosts:
        status = swarm_status()
        if any(h["state"] == "running" for h in status["hosts"]):
            break
        problems = [h["problem"] for h in status["hosts"] if "node" in h.get("problem", "")]
        if problems and time.monotonic() > deadline - timeout_s + _PLACE_S:
            raise PlacementError(f"no agent host can be placed: {problems[0]}")
        if time.monotonic() > deadline:
            raise Unavailable(f"no agent host is up after {timeout_s:g} s: {status}")
        time.sleep(0.2)
    return actor


def swarm_status() -> dict[str, Any]:
    """See `Swarm.status`. Raises Unavailable when there is no swarm."""
    import ray
    from ray.exceptions import RayError

    try:
        actor = ray.get_actor(SWARM, namespace=NAMESPACE)
        status: dict[str, Any] = ray.get(actor.status.remote(), timeout=10)
    except (ValueError, RayError) as e:
        raise Unavailable(f"the swarm does not answer ({type(e).__name__}); `hybrid up`") from None
    return status


def stop_swarm(deadline_s: float = 5.0) -> None:
    """Drain and end all hosts, then the swarm. Nothing happens when there is none."""
    import ray
    from ray.exceptions import RayError

    try:
        actor = ray.get_actor(SWARM, namespace=NAMESPACE)
    except ValueError:
        return
    with contextlib.suppress(RayError):
        ray.get(actor.stop.remote(deadline_s), timeout=deadline_s + 10)
    ray.kill(actor)
