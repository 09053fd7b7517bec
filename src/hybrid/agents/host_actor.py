"""`AgentHost` in a detached Ray actor on a cheap node, without torch."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

from hybrid.agents.host import AgentHost
from hybrid.config import ProjectConfig


def calm_gc() -> None:
    """Leave what the process has loaded out of garbage collection, and collect less often: a host
    makes many short-lived objects and few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


class HostActor:
    """The actor's class. `stats` and `drain` run beside `run`, in a control group of their own."""

    def __init__(self, name: str, store_url: str, config: dict[str, Any]) -> None:
        self._arguments = (name, store_url, ProjectConfig.model_validate(config))
        self._host: AgentHost | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Run until drained."""
        from hybrid.agents.clients import ServeModelClient

        calm_gc()
        self._loop = asyncio.get_running_loop()
        self._host = AgentHost(*self._arguments, ServeModelClient())
        await self._host.run()

    async def stats(self) -> dict[str, Any]:
        """See `AgentHost.stats`."""
        if self._host is None:
            return {"name": self._arguments[0], "pid": os.getpid(), "in_flight": 0}
        return self._host.stats()

    async def drain(self, deadline_s: float) -> dict[str, int]:
        """See `AgentHost.drain`."""
        if self._host is None or self._loop is None:
            return {"finished": 0, "given_back": 0}
        # Another concurrency group is another event loop; the host lives on its own.
        future = asyncio.run_coroutine_threadsafe(self._host.drain(deadline_s), self._loop)
        return await asyncio.wrap_future(future)
