"""The swarm: a detached actor that keeps the number of agent hosts right.

Hosts are detached too and found again by name: when the swarm dies they go on, and the next swarm
adopts them. It never decides about tasks; it only tells the mailbox which hosts are gone, so that
what they held is taken up at once rather than when their leases end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any

from hybrid._ray_compat import draining_nodes
from hybrid.agents.fleet import PLACE_S, Host, adopt_hosts, start_host
from hybrid.agents.mailbox import Mailbox
from hybrid.agents.payloads import payloads_of
from hybrid.agents.scaling import Scaler
from hybrid.agents.store import connect
from hybrid.agents.upkeep import Upkeep
from hybrid.config import ProjectConfig
from hybrid.errors import HybridError, PlacementError, StoreUnavailable, Unavailable
from hybrid.pools import HEAD, NAMESPACE

log = logging.getLogger(__name__)
SWARM = "hybrid-swarm"
_LOOK_S = 0.5
_SURPLUS_DRAIN_S = 10.0
_PRUNE_S = 3600.0
_NOTICE_MARGIN_S = 2.0
"""A host on a node that is being taken away is gone this long before the node."""


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
        project = ProjectConfig.model_validate(config)
        settings = project.agents.swarm
        self._blocked_s = settings.blocked_s
        self._scaler = Scaler(
            low=settings.hosts,
            high=max(settings.hosts, settings.max_hosts or 0),
            slots=settings.concurrency,
            wait_s=settings.wait_s,
            idle_s=settings.idle_s,
        )
        self._mailbox = Mailbox(connect(store_url), project.store)
        self._upkeep = Upkeep(self._mailbox)
        self._hosts: dict[str, Host] = {}
        self._wanted = settings.hosts
        self._gone: dict[str, str] = {}
        self._payloads = payloads_of(project)
        self._prune_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._loop = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self._hosts = adopt_hosts()
        while not self._stopping:
            try:
                await self._look()
            except Exception:
                log.exception("swarm: looking after the hosts failed; trying again")
            if time.monotonic() >= self._prune_at:
                self._prune_at = time.monotonic() + _PRUNE_S
                self._beside(self._prune())
            await asyncio.sleep(_LOOK_S)

    async def _prune(self) -> None:
        try:
            await asyncio.to_thread(self._payloads.prune)
        except (HybridError, OSError) as e:
            log.warning("swarm: old payloads are not removed: %s", e)

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside everything else."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def ping(self) -> bool:
        """Whether it answers."""
        return True

    async def scale(self, hosts: int) -> None:
        """Keep at least this many hosts from now on, and no more unless the backlog asks."""
        self._scaler.low = hosts
        self._scaler.high = max(hosts, self._scaler.high if self._scaler.high > hosts else 0)

    async def status(self) -> dict[str, Any]:
        """Hosts wanted and there, each with process, node and tasks in hand; what was replaced."""
        entries = await asyncio.gather(*(host.describe() for host in self._hosts.values()))
        return {"wanted": self._wanted, "hosts": list(entries), "replaced": dict(self._gone)}

    async def stop(self, deadline_s: float = 5.0) -> None:
        """Drain and end all hosts, and stop replacing them."""
        self._stopping = True
        await asyncio.gather(*(host.end(deadline_s) for host in self._hosts.values()))
        self._hosts.clear()

    async def _look(self) -> None:
        troubles = await asyncio.gather(
            *(host.trouble(self._blocked_s) for host in self._hosts.values())
        )
        for host, trouble in zip(list(self._hosts.values()), troubles, strict=True):
            if trouble is not None:
                await self._replace(host, trouble)
        self._heed_notices()
        present = [h for h in self._hosts.values() if not h.draining]
        self._wanted = await self._how_many(present)
        for _ in range(self._wanted - len(present)):
            host = start_host(self._config, self._store_url)
            self._hosts[host.name] = host
        idle_first = sorted(present, key=lambda h: h.stats.get("in_flight", 0))
        for host in idle_first[: max(0, len(present) - self._wanted)]:
            self._leave(host, _SURPLUS_DRAIN_S)

    async def _how_many(self, present: list[Host]) -> int:
        if self._scaler.low == self._scaler.high:
            return self._scaler.low
        try:
            backlog = await self._upkeep.backlog()
        except StoreUnavailable as e:
            log.warning("swarm: %s", e.message)
            return max(self._scaler.low, len(present))
        starting = sum(host.starting for host in present)
        return self._scaler.wanted(backlog, len(present), starting, time.monotonic())

    async def _replace(self, host: Host, trouble: str) -> None:
        """End a host that is gone or of no use, and let others take what it held."""
        if not host.draining:
            log.warning("host %s is replaced: %s", host.name, trouble)
            self._gone[host.name] = trouble
            for name in list(self._gone)[:-20]:
                del self._gone[name]
        host.kill()
        self._hosts.pop(host.name, None)
        with contextlib.suppress(StoreUnavailable):  # then their leases end by themselves
            await self._upkeep.lost(host.name, trouble)

    def _heed_notices(self) -> None:
        """Empty hosts whose node is about to be taken away; replacements start at once."""
        leaving = draining_nodes()
        for host in self._hosts.values():
            deadline = leaving.get(host.stats.get("node", ""))
            if deadline is not None and not host.draining:
                left = max(1.0, deadline - time.time() - _NOTICE_MARGIN_S)
                log.warning("host %s: its node is drained in %.0f s", host.name, left)
                self._leave(host, left)

    def _leave(self, host: Host, deadline_s: float) -> None:
        """Drain a host beside everything else."""
        host.draining = True

        async def leave() -> None:
            await host.end(deadline_s)
            self._hosts.pop(host.name, None)
            with contextlib.suppress(StoreUnavailable):
                await self._upkeep.lost(host.name, "the host was drained")

        self._beside(leave())


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
        try:
            status = swarm_status()
        except Unavailable:  # its process is still starting, on a busy machine
            if time.monotonic() > deadline:
                raise
            continue
        if any(h["state"] == "running" for h in status["hosts"]):
            break
        problems = [h["problem"] for h in status["hosts"] if "node" in h.get("problem", "")]
        if problems and time.monotonic() > deadline - timeout_s + PLACE_S:
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
