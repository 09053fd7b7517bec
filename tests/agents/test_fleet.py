"""What the swarm thinks of a host, asked of real actors."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from hybrid.agents import fleet
from hybrid.agents.fleet import Host

pytestmark = pytest.mark.ray


def slow() -> Any:
    """The class of a host that answers, but is not ready before so many looks."""

    class Slow:  # made here, so that it is sent to the actor by value
        def __init__(self, looks: int) -> None:
            self.left = looks

        def stats(self) -> dict[str, Any]:
            self.left -= 1
            return {"starting": True} if self.left >= 0 else {"in_flight": 0}

    return Slow


@pytest.mark.parametrize("looks", [1, 10**9])
def test_a_host_that_never_gets_ready_is_replaced(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    import ray

    monkeypatch.setattr(fleet, "START_S", 0.3)
    monkeypatch.setattr(fleet, "_LOOK_S", 0.05)
    actor = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(slow()).remote(looks)
    host = Host("slow", actor, None)

    async def look() -> str | None:
        deadline = time.monotonic() + 30
        while True:
            trouble = await host.trouble(60)
            if trouble is not None or not host.starting:
                return trouble
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    try:
        trouble = asyncio.run(look())
        if looks == 1:
            assert trouble is None
        else:
            assert trouble == "the host was up, but not ready in 0.3 s"
    finally:
        ray.kill(actor)
