"""Where checkpoints lie: a local path, a shared file system, or an object store through fsspec.

Few operations, so that every kind of storage can hold to them: files are written once under names
of their own, a small file can be put whole or not at all, and parts of files are read. Nothing is
renamed, because object stores cannot.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec

from hybrid.errors import CheckpointError, ConfigError

if TYPE_CHECKING:  # a node is asked what it sees of a storage without waiting for torch
    from hybrid.training.parallel import World

BLOCK = 16 << 20
"""Bytes hashed, written or read at once: long enough that Python's lock is rarely asked for."""
_SEEN_S = 5.0
"""A shared file system may show a new file to other nodes this late."""
KEY = "training.checkpoint.storage"


class Storage:
    """Files below one folder.

    Failures are OSErrors, whatever the backend raises; a missing file is a FileNotFoundError.

    Args:
        url: a local path, or any fsspec URL such as s3://bucket/prefix.
    """

    def __init__(self, url: str | Path) -> None:
        self.url = str(url).rstrip("/")
        # A listing that was remembered would hide what other ranks have written since.
        self.fs, self.base = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        protocols = (self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol
        self.local = Path(self.base) if "file" in protocols else None

    def at(self, path: str) -> str:
        """The whole address of a file, for messages."""
        return f"{self.url}/{path}" if path else self.url

    # --- writing ------------------------------------------------------------------------

    def write(self, path: str, blocks: Iterable[memoryview]) -> tuple[int, str]:
        """Write a file that is not there yet; durable on return.

        Where it fails, what was written is removed again as far as possible.

        Args:
            blocks: of bytes; each is hashed just before it is written.

        Returns:
            Its size in bytes and its sha256 in hex.
        """
        size, digest = 0, hashlib.sha256()
        with self._opened(path) as write:
            for block in blocks:
                for start in range(0, len(block), BLOCK):
                    part = block[start : start + BLOCK]
                    digest.update(part)
                    write(part)
                size += len(block)
        return size, digest.hexdigest()

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[Any]:
        if self.local is not None:
            target = self.local / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb", buffering=0) as stream:
                try:
                    yield lambda part: _write_all(stream.fileno(), part)
                    os.fsync(stream.fileno())
                except BaseException:
                    with contextlib.suppress(OSError):  # else it takes room that others need
                        target.unlink()
                    raise
            _sync(target.parent)
            return
        with self._explained(path):
            remote = self.fs.open(self._in_store(path), "wb")
            try:
                yield remote.write
            except BaseException:
                # Closing would finish the upload: half a file under the whole one's name. What
                # undoing raises, of whatever kind, is not what went wrong.
                with contextlib.suppress(Exception):
                    getattr(remote, "discard", remote.close)()
                with contextlib.suppress(Exception):
                    self.fs.rm_file(self._in_store(path))
                raise
            remote.close()

    def put(self, path: str, data: bytes) -> None:
        """Make or replace a small file: readers see the old or the new one, never half of it."""
        if self.local is not None:
            target = self.local / path
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
            with temporary.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(target)
            _sync(target.parent)
            return
        with self._explained(path):
            self.fs.pipe_file(self._in_store(path), data)

    def remove(self, path: str = "") -> None:
        """Remove a file or a folder with all in it; nothing happens when there is none."""
        if self.local is not None:
            target = self.local / path
            if target.is_dir():
                shutil.rmtree(target, ignore_errors=False)
            else:
                target.unlink(missing_ok=True)
            return
        with self._explained(path), contextlib.suppress(FileNotFoundError):
            self.fs.rm(self._in_store(path), recursive=True)

    # --- reading ------------------------------------------------------------------------

    def names(self, folder: str = "") -> list[str]:
        """Names directly below a folder, sorted; empty when there is none."""
        if self.local is not None:
            try:
                return sorted(os.listdir(self.local / folder))
            except (FileNotFoundError, NotADirectoryError):
                return []
        with self._explained(folder):
            try:
                found: list[Any] = self.fs.ls(self._in_store(folder), detail=False)
            except FileNotFoundError:
                return []
        return sorted({str(p).rstrip("/").rsplit("/", 1)[-1] for p in found})

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytearray:
        """Bytes `start` to `end` (by default all) of a file, in memory of the caller's own.

        Fewer are returned where the file is shorter.
        """
        if self.local is not None:
            with (self.local / path).open("rb", buffering=0) as stream:
                size = os.fstat(stream.fileno()).st_size
                buffer = bytearray(max(0, min(size, size if end is None else end) - start))
                stream.seek(start)
                view, got = memoryview(buffer), 0
                while got < len(buffer):
                    got += stream.readinto(view[got : got + BLOCK]) or 0
                return buffer
        with self._explained(path):
            return bytearray(self.fs.cat_file(self._in_store(path), start=start, end=end))

    def size(self, path: str) -> int:
        """Bytes of a file."""
        if self.local is not None:
            return (self.local / path).stat().st_size
        with self._explained(path):
            return int(self.fs.info(self._in_store(path))["size"])

    def sha256(self, path: str) -> str:
        """Hex sha256 of a stored file, read anew."""
        digest, size = hashlib.sha256(), self.size(path)
        for start in range(0, size, BLOCK):
            digest.update(self.read(path, start, min(size, start + BLOCK)))
        return digest.hexdigest()

    def _in_store(self, path: str) -> str:
        return f"{self.base.rstrip('/')}/{path}" if path else str(self.base)

    @contextlib.contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as e:  # each fsspec backend has kinds of its own
            raise OSError(f"{self.at(path)}: {type(e).__name__}: {e}") from e


def check_storage(storage: Storage, world: World) -> None:
    """See by trying that every rank can write there and sees what the others wrote.

    Collective. Each rank writes a file, then reads those of all; all of them are removed.

    Raises:
        CheckpointError: a rank cannot write there.
        ConfigError: a rank does not see another's file, so each node has a storage of its own.
    """
    trial = world.gather(secrets.token_hex(4))[0]
    mine = f".trial-{trial}-{world.rank}"
    error = None
    try:
        storage.put(mine, mine.encode())
    except OSError as e:
        error = f"rank {world.rank} on {socket.gethostname()}: {e}"
    try:
        _raise_first(
            world.gather(error),
            lambda text: CheckpointError(
                f"{KEY}: {storage.url} cannot be written: {text}; nothing was trained", param=KEY
            ),
        )
        missing = [r for r in range(world.size) if not _sees(storage, f".trial-{trial}-{r}")]
        unseen = (
            f"rank {world.rank} on {socket.gethostname()} does not see what rank"
            f" {missing[0]} has written"
            if missing
            else None
        )
        _raise_first(
            world.gather(unseen),
            lambda text: ConfigError(
                f"{KEY}: {storage.url} is not shared by all nodes of the run: {text}; give a path"
                " on a shared file system or an fsspec URL such as s3://bucket/prefix",
                param=KEY,
            ),
        )
    finally:
        with contextlib.suppress(OSError):
            storage.remove(mine)


def _raise_first(texts: list[str | None], error: Any) -> None:
    for text in texts:
        if text is not None:
            raise error(text)


def _sees(storage: Storage, path: str) -> bool:
    deadline = time.monotonic() + _SEEN_S
    while True:
        with contextlib.suppress(OSError):
            if storage.read(path) == path.encode():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _write_all(descriptor: int, part: memoryview) -> None:
    while part:
        part = part[os.write(descriptor, part) :]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
