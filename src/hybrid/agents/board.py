"""The board: what a tenant's agents share, by key, with versions, expiry and watching."""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from hybrid.agents.store import unavailable
from hybrid.errors import Conflict, InvalidRequest

# KEYS[1] the entry; ARGV: channel, expected version or '', value, ttl in ms or ''.
_SET = """
local version = redis.call('HGET', KEYS[1], 'version') or '0'
if ARGV[2] ~= '' and ARGV[2] ~= version then return {'conflict', version} end
local new = redis.call('HINCRBY', KEYS[1], 'version', 1)
redis.call('HSET', KEYS[1], 'value', ARGV[3])
if ARGV[4] ~= '' then redis.call('PEXPIRE', KEYS[1], ARGV[4])
else redis.call('PERSIST', KEYS[1]) end
redis.call('PUBLISH', ARGV[1], KEYS[1] .. '\\0' .. new)
return {'ok', tostring(new)}
"""


@dataclass(frozen=True)
class Entry:
    """A value and its version; version 0 is a key that is not there."""

    value: Any
    version: int


@dataclass(frozen=True, kw_only=True)
class BoardWrite:
    """A write that is carried out with a task's completion. `expect=None` overwrites."""

    scope: str
    key: str
    value: Any
    expect: int | None = None
    ttl_s: float | None = None

    def arguments(self, prefix: str, tenant: str) -> tuple[str, str, str, str]:
        """Key, expected version, value and time to live, as mailbox.lua takes them."""
        return (
            entry_key(prefix, tenant, self.scope, self.key),
            "" if self.expect is None else str(self.expect),
            json.dumps(self.value, ensure_ascii=False),
            "" if self.ttl_s is None else str(int(self.ttl_s * 1000)),
        )


def entry_key(prefix: str, tenant: str, scope: str, key: str) -> str:
    """The store's key of an entry. Lengths stand before the names, so no two can collide."""
    for name, value in (("tenant", tenant), ("scope", scope), ("key", key)):
        if not value or "\0" in value:
            raise InvalidRequest(f"board: {name} {value!r} is empty or holds a NUL", param=name)
    return f"{prefix}:board:{len(tenant)}:{tenant}:{len(scope)}:{scope}:{key}"


class Board:
    """The board of one tenant.

    Args:
        client: from `hybrid.agents.store.connect`.
        tenant: whose entries these are.
        partitions: as in the store's configuration; a tenant's entries lie with its tasks.
    """

    def __init__(self, client: Redis, tenant: str = "default", partitions: int = 1) -> None:
        self._client = client
        self.tenant = tenant
        self._prefix = f"hybrid:{{h{zlib.crc32(tenant.encode()) % partitions}}}"

    async def get(self, scope: str, key: str) -> Entry:
        """The entry; `Entry(None, 0)` when it is not there. Raises StoreUnavailable."""
        at = entry_key(self._prefix, self.tenant, scope, key)
        try:
            value, version = await cast(
                Awaitable[list[str | None]], self._client.hmget(at, ["value", "version"])
            )
        except (RedisError, OSError) as e:
            raise unavailable(e) from e
        if value is None or version is None:
            return Entry(None, 0)
        return Entry(json.loads(value), int(version))

    async def set(
        self,
        scope: str,
        key: str,
        value: Any,
        *,
        expect: int | None = None,
        ttl_s: float | None = None,
    ) -> int:
        """Write an entry; returns its new version.

        Args:
            expect: the version it must be at (0: not there), or None to overwrite.
            ttl_s: seconds until it is gone.

        Raises:
            Conflict: it is at another version. StoreUnavailable.
        """
        write = BoardWrite(scope=scope, key=key, value=value, expect=expect, ttl_s=ttl_s)
        at, *rest = write.arguments(self._prefix, self.tenant)
        try:
            reply = await cast(
                Awaitable[list[str]],
                self._client.eval(_SET, 1, at, f"{self._prefix}:board", *rest),
            )
        except (RedisError, OSError) as e:
            raise unavailable(e) from e
        if reply[0] == "conflict":
            raise Conflict(
                f"board {scope}/{key} is at version {reply[1]}, expected was {expect}; read again"
            )
        return int(reply[1])

    async def delete(self, scope: str, key: str) -> bool:
        """Remove an entry; False when it was not there."""
        at = entry_key(self._prefix, self.tenant, scope, key)
        try:
            return bool(await self._client.delete(at))
        except (RedisError, OSError) as e:
            raise unavailable(e) from e

    async def watch(self, scope: str, key: str) -> AsyncIterator[Entry]:
        """The entry now, and again after every change."""
        at = entry_key(self._prefix, self.tenant, scope, key)
        async with self._client.pubsub() as announcements:
            await announcements.subscribe(f"{self._prefix}:board")
            seen = -1
            while True:
                entry = await self.get(scope, key)
                if entry.version != seen:
                    seen = entry.version
                    yield entry
                while True:  # announcements of other keys; and a look each second, in case
                    message = await announcements.get_message(
                        ignore_subscribe_messages=True, timeout=1.0
                    )
                    if message is None or str(message["data"]).partition("\0")[0] == at:
                        break
