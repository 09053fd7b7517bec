"""The mailbox's function library: its text, its edition, and how it comes into a store.

Within a major version operations are only added, so a newer edition serves older hosts: a host
loads its own only over an older one. What would break older hosts gets a new major version, with
functions and a library name of its own, beside this one.
"""

from __future__ import annotations

from collections.abc import Awaitable
from importlib.resources import files
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from hybrid.agents.store import unavailable

NAME = "hybrid_mailbox_v1"
EDITION = 4
"""Raised with every change of the Lua files."""
_PARTS = ("state", "senders", "hosts", "care")


def text() -> str:
    """The library as the store loads it."""
    folder = files(__name__)
    parts = [folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in _PARTS]
    return "\n".join([f"#!lua name={NAME}", f"local EDITION = {EDITION}", *parts])


async def edition(client: Redis, prefix: str) -> int:
    """The edition in the store; 0 when it has none. Raises RedisError."""
    try:
        reply = await cast(Awaitable[int], client.fcall_ro("hybrid1_edition", 1, prefix))
    except ResponseError as e:
        if missing(e):
            return 0
        raise
    return int(reply)


def missing(error: ResponseError) -> bool:
    """Whether a call failed because the library is not there."""
    return "Function not found" in str(error)


async def install(client: Redis, prefixes: list[str]) -> int:
    """Load the library unless every partition's server has this edition or a newer one.

    Returns:
        The oldest edition in the store afterwards.

    Raises:
        StoreUnavailable: the store is down.
    """
    try:
        held = min([await edition(client, prefix) for prefix in prefixes])
        if held < EDITION:
            await client.function_load(text(), replace=True)
            held = EDITION
    except (RedisError, OSError) as e:
        raise unavailable(e) from e
    return held
