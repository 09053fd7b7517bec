"""A real store for the whole session, emptied before every test that uses it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import redis

from hybrid.testing import throwaway_store


@pytest.fixture(scope="session")
def store_server() -> Iterator[str]:
    with throwaway_store() as url:
        yield url


@pytest.fixture
def store_url(store_server: str) -> str:
    with redis.Redis.from_url(store_server) as client:
        client.flushall()
        client.function_flush()
    return store_server


@pytest.fixture(autouse=True, scope="module")
def _set_aside() -> None:
    """What was there before (torch, Ray: half a second to look through) is not looked at again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What a test leaves open is its own failure, not a later one's."""
    yield
    gc.collect()
