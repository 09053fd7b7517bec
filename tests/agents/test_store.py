"""The embedded store, and the refusal of stores that lose tasks."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import cast

import pytest
from redis.exceptions import AuthenticationError

from hybrid.agents.board import Board
from hybrid.agents.store import EmbeddedStore, check, connect
from hybrid.errors import Conflict, InvalidRequest, PortInUse, StoreUnavailable


def call(url: str, *words: str) -> object:
    async def run() -> object:
        client = connect(url)
        try:
            return await cast(Awaitable[object], client.execute_command(*words))
        finally:
            await client.aclose()

    return asyncio.run(run())


def verdict(url: str) -> None:
    async def run() -> None:
        client = connect(url)
        try:
            await check(client)
        finally:
            await client.aclose()

    asyncio.run(run())


def test_data_survives_a_kill_and_a_restart_on_the_same_port(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path / "s") as store:
        verdict(store.url)
        call(store.url, "SET", "k", "v")
        url = store.url
        store.kill()
        assert store.restart() == url
        assert call(url, "GET", "k") == "v"


def test_its_password_is_not_for_everyone(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path / "s") as store:
        assert (tmp_path / "s/server.conf").stat().st_mode & 0o077 == 0
        arguments = Path(f"/proc/{store.pid}/cmdline").read_text()
        password = store.url.split(":")[2].split("@")[0]
        assert password not in arguments
        with pytest.raises(AuthenticationError, match=r"authenticate"):
            call(f"redis://127.0.0.1:{store.port}/0", "GET", "k")


def test_one_server_a_folder_and_one_a_port(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path / "s") as store:
        with pytest.raises(Conflict, match="another store"):
            EmbeddedStore(tmp_path / "s").start()
        assert call(store.url, "PING")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        with pytest.raises(PortInUse):
            EmbeddedStore(tmp_path / "s", port=s.getsockname()[1]).start()


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from hybrid.agents.store import EmbeddedStore\n"
        "s = EmbeddedStore(Path(sys.argv[1])); s.start(); print(s.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "s")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_text():
        assert time.monotonic() < deadline, "the server outlives its owner"
        time.sleep(0.02)


def test_a_store_that_evicts_is_refused_and_one_without_a_file_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedStore(tmp_path / "s") as store:
        call(store.url, "CONFIG", "SET", "appendonly", "no")
        verdict(store.url)
        assert "append-only file is off" in caplog.text
        call(store.url, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        with pytest.raises(StoreUnavailable, match="allkeys-lru"):
            verdict(store.url)
        url = store.url
    with pytest.raises(StoreUnavailable, match="is it running"):
        verdict(url)


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path / "s") as store:
        call(store.url, "SET", "k", "v")
    [base] = (tmp_path / "s/appendonlydir").glob("*.base.*")
    base.write_bytes(b"\x00garbage" * 10)
    with pytest.raises(StoreUnavailable, match="ended at once"):
        EmbeddedStore(tmp_path / "s").start()


def test_the_board_compares_and_sets_expires_and_can_be_watched(store_url: str) -> None:
    async def run() -> None:
        client = connect(store_url)
        board, other = Board(client, "one"), Board(client, "two")
        assert await board.set("s", "k", [1], expect=0) == 1
        with pytest.raises(Conflict, match="version 1"):
            await board.set("s", "k", [2], expect=0)
        assert (await other.get("s", "k")).version == 0
        watch = board.watch("s", "k")
        assert (await anext(watch)).value == [1]
        await board.set("s", "other", 0)
        await board.set("s", "k", [2])
        assert (await anext(watch)).value == [2]
        await watch.aclose()  # type: ignore[attr-defined]
        await board.set("s", "brief", 1, ttl_s=0.05)
        async with asyncio.timeout(10):
            while (await board.get("s", "brief")).version:
                await asyncio.sleep(0.01)
        assert await board.delete("s", "k")
        assert not await board.delete("s", "k")
        with pytest.raises(InvalidRequest):
            await board.set("", "k", 1)
        await client.aclose()

    asyncio.run(run())
