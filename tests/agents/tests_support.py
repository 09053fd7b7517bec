"""What several tests of the agents share: scenes with agents in this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any, TypeVar

from hybrid.config import AgentConfig
from hybrid.testing import Agents, ScriptedModelClient, run_agents

Server = TypeVar("Server", bound=ThreadingHTTPServer)
FAST = {"store": {"lease_s": 0.9, "max_attempts": 3}}


def play(
    store_url: str,
    specs: dict[str, AgentConfig],
    scene: Callable[[Agents], Awaitable[None]],
    model: Any = None,
    **how: Any,
) -> None:
    """Run a scene with the agents on a real store."""

    async def run() -> None:
        async with asyncio.timeout(60):
            client = model or ScriptedModelClient()
            settings = {"settings": FAST, **how}
            async with run_agents(specs, client, store_url, **settings) as agents:
                await scene(agents)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, 20 s at most."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    """An HTTP server, in a thread."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
