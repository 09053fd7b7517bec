"""Storages: the same promises on a local path and on an object store; one that is not shared."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import checkpoint_worlds
import worlds

from hybrid.training.storage import BLOCK, Storage


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Storage(tmp_path / "s" if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def test_files_come_back_whole_and_in_parts(storage: Storage) -> None:
    data = bytes(range(256)) * 100
    size, digest = storage.write("a/one", [memoryview(data[:1000]), memoryview(data[1000:])])
    assert size == storage.size("a/one") == len(data)
    assert digest == storage.sha256("a/one")
    assert storage.read("a/one") == data
    assert storage.read("a/one", 300, 700) == data[300:700]
    assert storage.read("a/one", len(data) - 3, len(data) + 9) == data[-3:]
    storage.put("a/two", b"2")
    storage.put("a/two", b"22")
    assert storage.read("a/two") == b"22"
    assert storage.names("a") == ["one", "two"] and storage.names() == ["a"]
    storage.remove("a/one")
    storage.remove("a/none")
    assert storage.names("a") == ["two"]
    storage.remove("a")
    storage.remove("a")
    assert storage.names("a") == storage.names() == []
    for read in (storage.read, storage.size, storage.sha256):
        with pytest.raises(FileNotFoundError):
            read("a/one")  # type: ignore[operator]


def test_a_block_may_be_larger_than_what_is_written_at_once(tmp_path: Path) -> None:
    data = bytearray(BLOCK + 12_345)
    data[BLOCK - 1 : BLOCK + 1] = b"xy"
    storage = Storage(tmp_path)
    assert storage.write("f", [memoryview(data)]) == (len(data), storage.sha256("f"))
    assert storage.read("f") == data


def test_what_fails_half_way_leaves_nothing_under_its_name(storage: Storage) -> None:
    def blocks():  # type: ignore[no-untyped-def]
        yield memoryview(b"half")
        raise OSError("the other half is gone")

    with pytest.raises(OSError, match="other half"):
        storage.write("f", blocks())
    assert storage.names() == []


def test_a_storage_that_is_not_shared_or_not_writable_is_refused(tmp_path: Path) -> None:
    said = worlds.run(2, tmp_path / "world", checkpoint_worlds.try_storages, tmp_path)
    assert said["shared"] == ""
    assert "training.checkpoint.storage" in said["apart"]
    assert "is not shared by all nodes of the run: rank" in said["apart"]
    assert "does not see what rank" in said["apart"]
    assert "cannot be written: rank 1" in said["unwritable"]
    for folder in ("shared", "apart-0", "apart-1"):
        assert list((tmp_path / folder).iterdir()) == [], "the trial's files are removed"
