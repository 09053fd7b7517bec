"""What `up` puts on a cluster: the agents' specs, the gateway and the model, the hosts."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid.client import request, wait_healthy
from hybrid.cluster.local import free_port
from hybrid.config import AgentConfig, ProjectConfig
from hybrid.errors import PortInUse

if TYPE_CHECKING:
    import httpx


def deploy(
    config: ProjectConfig,
    specs: dict[str, AgentConfig],
    store_url: str,
    endpoint: Path,
    step: Callable[[str], None],
) -> str:
    """Serve and start, or update what runs; needs a connection to Ray.

    Args:
        specs: the agents of hybrid.yaml, ready to run.
        endpoint: the file that says where the endpoint is; written when it answers.
        step: called with what is being done.

    Returns:
        The base URL.

    Raises:
        StoreUnavailable, PortInUse, PlacementError, Unavailable: what could not start.
    """
    from ray import serve

    from hybrid.agents.swarm import start_swarm
    from hybrid.gateway.app import APP_NAME, build

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    asyncio.run(_apply_agents(config, specs, store_url))
    host = config.serving.host
    if endpoint.exists():
        port = int(json.loads(endpoint.read_text())["port"])
    else:
        port = check_port(config)
        serve.start(
            http_options={"host": host, "port": port, "location": "HeadOnly"},
            logging_config={"enable_access_log": False},
        )
    serve.run(
        build({"config": config.model_dump(mode="json"), "store_url": store_url}),
        name=APP_NAME,
        route_prefix="/",
    )
    step(f"starting {config.agents.swarm.hosts} agent hosts")
    start_swarm(config, store_url)
    url = f"http://{host}:{port}"
    wait_healthy(url)
    endpoint.parent.mkdir(parents=True, exist_ok=True)
    endpoint.write_text(json.dumps({"url": url, "port": port}))
    return url


def warm_up(client: httpx.Client, specs: dict[str, AgentConfig]) -> None:
    """Ask every agent one of its own examples, so that the first user does not wait for loads.

    What they answer is not looked at: a wrong answer is no reason not to be up.
    """
    asked = [(n, s.examples[0]) for n, s in specs.items() if s.examples]
    ids = [
        request(client, "POST", f"/v1/agents/{n}/tasks", json={"input": e})["id"] for n, e in asked
    ]
    for task in ids:
        request(client, "GET", f"/v1/tasks/{task}", params={"wait_s": 10})


async def _apply_agents(
    config: ProjectConfig, specs: dict[str, AgentConfig], store_url: str
) -> None:
    from hybrid.agents.mailbox import Mailbox
    from hybrid.agents.spec import SpecStore
    from hybrid.agents.store import check, connect

    client = connect(store_url)
    try:
        await check(client)
        await Mailbox(client, config.store).install()
        await SpecStore(client).apply_file(specs)
    finally:
        await client.aclose()


def check_port(config: ProjectConfig) -> int:
    """The port to listen on.

    Raises:
        PortInUse: the configured one is taken.
    """
    serving = config.serving
    if not serving.port:
        return free_port()
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((serving.host, serving.port))
        except OSError as e:
            raise PortInUse(
                f"serving.port: {serving.host}:{serving.port} cannot be used ({e.strerror});"
                " stop what listens there or set another (0 picks a free one)"
            ) from None
    return serving.port
