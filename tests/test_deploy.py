"""What `up` refuses before it starts anything."""

from __future__ import annotations

import asyncio
import socket

import pytest

from hybrid import config
from hybrid.deploy import _apply_agents, check_port
from hybrid.errors import PortInUse, StoreUnavailable

GOOD = {"run": {"name": "t"}, "model": {"name": "b"}}


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        made = config.parse({**GOOD, "serving": {"port": port}})
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port} cannot be used"):
            check_port(made)
    assert check_port(made) == port, "free again"
    assert check_port(config.parse({**GOOD, "serving": {"port": 0}})) > 0


def test_a_store_that_is_down_is_named() -> None:
    with pytest.raises(StoreUnavailable, match=r"store\.url"):
        asyncio.run(_apply_agents(config.parse(GOOD), {}, "redis://127.0.0.1:1/0"))
