"""The swarm's hosts: started, looked at, drained and ended, each in an actor of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import Any

from hybrid.errors import PlacementError
from hybrid.pools import AGENTS, NAMESPACE

HOST_PREFIX = "hybrid-host-"
PLACE_S = 30.0
"""A host that is not up after this long says what the cluster lacks."""
START_S = 120.0
"""A host whose process answers, but that does not lease after this long, is replaced."""
_HOST_MEMORY = 1 << 30
"""Bytes a host asks of an agents node's 4 GB."""
_LOOK_S = 1.0
_ANSWER_S = 2.0


class Host:
    """The swarm's view of one host.

    Attributes:
        name: the actor's, and the owner of its leases.
        stats: what it last said of itself; empty before it first did.
        draining: it leases no more and is about to end.
    """

    def __init__(self, name: str, actor: Any, running: Any) -> None:
        self.name = name
        self.stats: dict[str, Any] = {}
        self.draining = False
        self._actor = actor
        self._running = running
        self._since = time.monotonic()
        self._looked = 0.0
        self._answered = time.monotonic()
        self._first: float | None = None
        self._problem: str | None = None

    @property
    def starting(self) -> bool:
        """Whether it does not lease yet."""
        return not self.stats or "starting" in self.stats

    async def trouble(self, blocked_s: float) -> str | None:
        """Why it must be replaced, or None.

        Args:
            blocked_s: how long its event loop may be blocked by a behaviour.
        """
        from ray.exceptions import RayError

        if self._running is not None:
            import ray

            done, _ = ray.wait([self._running], timeout=0)
            if done:
                return "the host ended"
        if time.monotonic() - self._looked < _LOOK_S:
            return None
        self._looked = time.monotonic()
        try:
            self.stats = await asyncio.wait_for(_call(self._actor, "stats"), _ANSWER_S)
        except RayError as e:
            return f"the host died ({type(e).__name__})"
        except TimeoutError:
            silent = time.monotonic() - self._answered
            if self.stats and silent > blocked_s:
                return f"the host's process gave no sign of life for {silent:.0f} s"
            if not self.stats and time.monotonic() - self._since > PLACE_S:
                self._problem = lacking()
            return None
        self._answered = time.monotonic()
        self._first = self._first or self._answered
        if self.starting and self._answered - self._first > START_S:
            return f"the host was up, but not ready in {START_S:g} s"
        blocked = self.stats.get("blocked_s", 0.0)
        if blocked > blocked_s:
            return (
                f"the host's event loop was blocked for {blocked:.0f} s at"
                f" {self.stats.get('blocked_at')}: a behaviour must not block; use ctx.step with a"
                " plain function, which runs in a thread"
            )
        return None

    async def describe(self) -> dict[str, Any]:
        """For `status`."""
        from ray.exceptions import RayError

        try:
            found: dict[str, Any] = await asyncio.wait_for(_call(self._actor, "stats"), _ANSWER_S)
            if "starting" in found:
                return {**found, "state": "pending", "problem": "it is starting"}
            return {**found, "state": "draining" if self.draining else "running"}
        except TimeoutError:
            problem = self._problem or "not placed yet, or busy"
            return {"name": self.name, "pid": None, "state": "pending", "problem": problem}
        except RayError:
            return {"name": self.name, "pid": None, "state": "dead"}

    async def end(self, deadline_s: float) -> None:
        """Drain, then end the process."""
        from ray.exceptions import RayError

        self.draining = True
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(_call(self._actor, "drain", deadline_s), deadline_s + 2)
        self.kill()

    def kill(self) -> None:
        """End the process now."""
        import ray

        ray.kill(self._actor)


def start_host(config: dict[str, Any], store_url: str) -> Host:
    """Start a host on the agents pool."""
    import ray

    from hybrid.agents.host_actor import HostActor

    name = f"{HOST_PREFIX}{uuid.uuid4().hex[:8]}"
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
    return Host(name, actor, actor.run.remote())


def adopt_hosts() -> dict[str, Host]:
    """The hosts that an earlier swarm left, by name."""
    import ray

    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(HOST_PREFIX):
            with contextlib.suppress(ValueError):  # it died meanwhile
                actor = ray.get_actor(entry["name"], namespace=NAMESPACE)
                found[entry["name"]] = Host(entry["name"], actor, None)
    return found


def lacking() -> str:
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


async def _call(actor: Any, method: str, *args: Any) -> Any:
    """A call in the control group: it is answered even when `run` keeps its event loop busy."""
    return await getattr(actor, method).options(concurrency_group="control").remote(*args)
