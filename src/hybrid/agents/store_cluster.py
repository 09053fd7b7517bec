"""A store in cluster mode: `redis+cluster://[:password@]host:port`, any node of it.

A partition's keys share a hash tag, so every call of the mailbox is one call of one node; with
`store.partitions` > 1 the partitions spread over the nodes. Announcements are heard from any node:
a cluster passes them on to all.
"""

from __future__ import annotations

import random
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

_FOR_ONE_NODE = {
    "username",
    "password",
    "ssl",
    "decode_responses",
    "socket_timeout",
    "socket_connect_timeout",
}
SCHEMES = {"redis+cluster://": "redis://", "rediss+cluster://": "rediss://"}


def is_cluster(url: str) -> bool:
    """Whether a URL names a cluster."""
    return url.startswith(tuple(SCHEMES))


class ClusterClient(RedisCluster):
    """redis-py's client of a cluster, with what the mailbox asks of it."""

    def pubsub(self, **how: Any) -> PubSub:  # type: ignore[override]
        """Announcements, from any node: redis-py would ask for the channel's own."""
        nodes = self.get_nodes() or list(self.nodes_manager.startup_nodes.values())
        node = random.choice(nodes)
        settings = {k: v for k, v in self.connection_kwargs.items() if k in _FOR_ONE_NODE}
        client = Redis(host=node.host, port=int(node.port), **settings)
        self._announcers = [*getattr(self, "_announcers", []), client]
        return client.pubsub(**how)

    async def aclose(self) -> None:
        """Close every connection."""
        for client in getattr(self, "_announcers", []):
            await client.aclose()
        await super().aclose()

    async def function_load(self, code: str, replace: bool | None = False) -> Any:
        """Load a library into every primary."""
        command = ["FUNCTION LOAD", *(["REPLACE"] if replace else []), code]
        return await self.execute_command(*command, target_nodes=RedisCluster.PRIMARIES)

    async def infos(self, section: str) -> list[dict[str, Any]]:
        """INFO of every primary."""
        found: dict[str, dict[str, Any]] = await self.execute_command(
            "INFO", section, target_nodes=RedisCluster.PRIMARIES
        )
        return list(found.values())


def connect_cluster(url: str, *, connections: int, timeout_s: float) -> ClusterClient:
    """A client; connected when it is first used. See `store.connect`."""
    scheme = next(s for s in SCHEMES if url.startswith(s))
    client = ClusterClient.from_url(
        url.replace(scheme, SCHEMES[scheme], 1),
        max_connections=connections,
        decode_responses=True,
        socket_timeout=timeout_s,
        socket_connect_timeout=2.0,
        # Being sent on to another node is no retry; a broken connection may have been one.
        retry=Retry(NoBackoff(), 0),
    )
    return cast(ClusterClient, client)
