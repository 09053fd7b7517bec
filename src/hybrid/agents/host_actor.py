"""`AgentHost` in a detached Ray actor on a cheap node, without torch."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from hybrid.agents import tracing
from hybrid.agents.host import AgentHost
from hybrid.config import ProjectConfig


def calm_gc() -> None:
    """Leave what the process has loaded out of garbage collection, and collect less often: a host
    makes many short-lived objects and few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def limit_memory(mib: int) -> None:
    """Let this process take so much more memory than it has; beyond that Python raises
    MemoryError, which ends one attempt of one task, not the host and all it holds."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((held << 10) + (mib << 20), hard))


class HostActor:
    """The actor's class. `stats` and `drain` run beside `run`, in a control group of their own."""

    def __init__(self, name: str, store_url: str, config: dict[str, Any]) -> None:
        self._arguments = (name, store_url, ProjectConfig.model_validate(config))
        self._host: AgentHost | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    async def run(self) -> None:
        """Run until drained."""
        import ray
        import ray.serve  # takes seconds, and would block the event loop at the first model call

        from hybrid.agents.clients import ServeModelClient

        self._node = ray.get_runtime_context().get_node_id()
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        host = AgentHost(*self._arguments, ServeModelClient())
        calm_gc()
        limit_memory(self._arguments[2].agents.swarm.host_memory_mib)
        self._host = host
        end_traces = tracing.configure()
        try:
            await host.run()
        finally:
            await asyncio.to_thread(end_traces)

    async def stats(self) -> dict[str, Any]:
        """See `AgentHost.stats`; and the node, and where its event loop stands if it is blocked."""
        if self._host is None:
            return {"name": self._arguments[0], "pid": os.getpid(), "starting": True}
        stats = {**self._host.stats(), "node": self._node}
        if stats["blocked_s"] > 1:
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                at = traceback.extract_stack(frame)[-1]
                stats["blocked_at"] = f"{at.filename}:{at.lineno} in {at.name}"
        return stats

    async def drain(self, deadline_s: float) -> dict[str, int]:
        """See `AgentHost.drain`."""
        if self._host is None or self._loop is None:
            return {"finished": 0, "given_back": 0}
        # Another concurrency group is another event loop; the host lives on its own.
        future = asyncio.run_coroutine_threadsafe(self._host.drain(deadline_s), self._loop)
        return await asyncio.wrap_future(future)
