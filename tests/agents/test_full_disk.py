"""A disk that is full under the store: nothing that was acknowledged is lost."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from test_mailbox import DONE, one, play

from hybrid.agents.mailbox import Mailbox
from hybrid.agents.store import EmbeddedStore
from hybrid.agents.task import Task
from hybrid.errors import StoreUnavailable


def mount(*words: str) -> bool:
    return subprocess.run(words, capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    at = tmp_path / "disk"
    at.mkdir()
    if not mount("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(at)):
        pytest.skip("a disk of 4 MiB cannot be mounted here (needs root)")
    yield at
    assert mount("umount", str(at))


@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_what_is_acknowledged_is_there_when_there_is_room_again(
    disk: Path, fsync: Literal["always", "everysec"]
) -> None:
    with EmbeddedStore(disk / "s", fsync=fsync) as store:
        kept: list[str] = []

        async def fill(m: Mailbox) -> None:
            with contextlib.suppress(StoreUnavailable):
                while True:
                    kept.append(await m.submit(Task(agent="a", input="x" * 50_000)))

        play(store.url, fill)
        assert 10 < len(kept) < 200
        assert mount("mount", "-o", "remount,size=32m", str(disk))
        store.restart()

        async def work(m: Mailbox) -> None:
            for _ in kept:
                lease = await one(m)
                assert lease.task.input == "x" * 50_000
                await m.complete(lease, DONE)
            assert {(await m.view(k)).state for k in kept} == {"done"}

        play(store.url, work)
