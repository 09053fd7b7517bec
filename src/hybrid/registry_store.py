"""Where the registry keeps bytes: exclusive creation and verified reads over fsspec.

Two operations carry all of its guarantees: `create` makes a file only if there is none, whole or
not at all, and `sequence` reads the highest number of a run of files made that way. On a local
path `create` is a flushed temporary file and a hard link; on an object store it is a conditional
put (S3: If-None-Match).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from hybrid.errors import IntegrityError, RegistryError

_CHUNK = 1 << 20
_STALE_S = 3600
"""A temporary file this old belongs to a publisher that is gone."""


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RegistryError(
                f"{what}: no space left ({e.strerror}); free some and publish again, nothing was"
                " half-written"
            ) from e
        raise RegistryError(f"{what}: {e}") from e


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


class BlobStore:
    """Files below one root, a local path or an fsspec URL."""

    def __init__(self, root: str | Path) -> None:
        self.root = str(root)
        self.fs, self.base = fsspec.core.url_to_fs(self.root)
        self.local = Path(self.base) if "file" in _protocols(self.fs) else None

    def _at(self, path: str) -> str:
        return f"{self.base.rstrip('/')}/{path}"

    # --- writing ------------------------------------------------------------------------

    def create(self, path: str, data: bytes) -> None:
        """Make a small file.

        Raises:
            FileExistsError: there is one already; it is left as it is.
            RegistryError: it cannot be written.
        """
        with _explained(f"{self.root}: {path}"):
            if self.local is not None:
                with self._temporary() as temp:
                    temp.write_bytes(data)
                    self._link(temp, self.local / path)
            else:
                self.fs.pipe_file(self._at(path), data, mode="create")

    def put_file(self, path: str, source: Path, sha256: str) -> bool:
        """Copy a file in unless it is there, whole; True when damaged bytes were replaced.

        Raises:
            IntegrityError: the source is not (or no longer) what `sha256` says.
            RegistryError: it cannot be written.
        """
        there = self.exists(path)
        if there and self.digest(path) == sha256:
            return False
        changed = IntegrityError(f"{source} changed while it was published; publish it again")
        with _explained(f"{self.root}: {path}"):
            if self.local is None:
                self.fs.put_file(str(source), self._at(path))
                if sha256_file(source) != sha256:
                    raise changed
                return there
            with self._temporary() as temp:
                shutil.copyfile(source, temp)
                if sha256_file(temp) != sha256:
                    raise changed
                if there:
                    (self.local / path).unlink()
                with contextlib.suppress(FileExistsError):
                    self._link(temp, self.local / path)
        return there

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Path]:
        assert self.local is not None
        folder = self.local / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > _STALE_S:
                    old.unlink()
        fd, name = tempfile.mkstemp(dir=folder)
        os.close(fd)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    @staticmethod
    def _link(temp: Path, target: Path) -> None:
        """Give a written file its name: durable before it is visible, and never over another."""
        temp.chmod(0o444)
        _fsync(temp)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(temp, target)
        _fsync(target.parent)

    # --- reading ------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        with _explained(self.root):
            return bool(self.fs.exists(self._at(path)))

    def read(self, path: str) -> bytes:
        """All bytes of a small file. Raises FileNotFoundError when there is none."""
        try:
            data: bytes = self.fs.cat_file(self._at(path))
            return data
        except FileNotFoundError:
            raise
        except OSError as e:
            raise RegistryError(f"{self.root}: {path}: {e}") from e

    def names(self, folder: str) -> list[str]:
        """Names directly below a folder, sorted; empty when there is none."""
        if self.local is not None:
            try:
                return sorted(os.listdir(self.local / folder))
            except (FileNotFoundError, NotADirectoryError):
                return []
        with _explained(self.root):
            try:
                listing: list[Any] = self.fs.ls(self._at(folder), detail=False, refresh=True)
            except FileNotFoundError:
                return []
        return sorted({str(p).rstrip("/").rsplit("/", 1)[-1] for p in listing})

    def sequence(self, folder: str) -> int:
        """The highest number of `000001.json`, `000002.json`, … in a folder; 0 when empty."""
        numbers = [int(n[:-5]) for n in self.names(folder) if n.endswith(".json")]
        return max(numbers, default=0)

    def fetch(self, path: str, target: Path, sha256: str) -> None:
        """Bring a blob to `target`: a hard link or copy locally, a verified download otherwise.

        Raises:
            IntegrityError: the bytes are missing or not those of `sha256`.
        """
        try:
            if self.local is not None:
                source = self.local / path
                try:
                    os.link(source, target)
                except OSError as e:
                    if e.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                        raise
                    shutil.copyfile(source, target)
            else:
                self.fs.get_file(self._at(path), str(target))
        except FileNotFoundError:
            raise IntegrityError(f"{self.root}: {path} is missing; publish it again") from None
        except OSError as e:
            raise RegistryError(f"{self.root}: {path}: {e}") from e
        if self.local is None and sha256_file(target) != sha256:
            raise IntegrityError(f"{self.root}: {path}: downloaded bytes do not match the digest")

    def digest(self, path: str) -> str:
        """Hex sha256 of a stored file, read anew. Raises IntegrityError when it is missing."""
        hasher = hashlib.sha256()
        try:
            with self.fs.open(self._at(path), "rb") as f:
                while block := f.read(_CHUNK):
                    hasher.update(block)
        except FileNotFoundError:
            raise IntegrityError(f"{self.root}: {path} is missing; publish it again") from None
        return hasher.hexdigest()


def _protocols(fs: Any) -> tuple[str, ...]:
    protocol = fs.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
