"""Inputs and results too large for the store: kept as blobs, named in the store by digest.

They lie beside the registry (`registry.root`/payloads), one folder a day, and are removed by the
day once every task that could name them is past its retention.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from pathlib import Path

from hybrid.config import ProjectConfig
from hybrid.errors import IntegrityError, InvalidRequest
from hybrid.registry_store import BlobStore

_DAY_S = 86400
_REF = re.compile(r"(\d+)/([0-9a-f]{64}):(\d+)")


class Payloads:
    """Texts by reference.

    Args:
        root: local path or fsspec URL; every host and gateway must reach it.
        keep_s: seconds for which a text may be asked for.
        limit: bytes of one text.
    """

    def __init__(self, root: str | Path, *, keep_s: float, limit: int = 64 << 20) -> None:
        self._blobs = BlobStore(root)
        self._keep_s = keep_s
        self._limit = limit

    async def put(self, text: str, what: str) -> str:
        """Keep a text; its reference.

        Raises:
            InvalidRequest: it is over the limit. RegistryError: it cannot be written.
        """
        data = text.encode()
        if len(data) > self._limit:
            raise InvalidRequest(
                f"{what} has {len(data)} bytes; at most {self._limit} (store.max_payload_mib):"
                " store it yourself and send where it is"
            )
        digest = hashlib.sha256(data).hexdigest()
        day = int(time.time() // _DAY_S)
        await asyncio.to_thread(self._create, f"{day}/{digest}", data)
        return f"{day}/{digest}:{len(data)}"

    def _create(self, path: str, data: bytes) -> None:
        try:
            self._blobs.create(path, data)
        except FileExistsError:
            return  # the same bytes, sent before

    async def get(self, ref: str) -> str:
        """The text of a reference.

        Raises:
            IntegrityError: it is gone, or damaged. RegistryError: it cannot be read.
        """
        match = _REF.fullmatch(ref)
        if match is None:
            raise IntegrityError(f"{ref!r} is no payload's reference")
        day, digest, _ = match.groups()
        try:
            data = await asyncio.to_thread(self._blobs.read, f"{day}/{digest}")
        except FileNotFoundError:
            raise IntegrityError(f"{self._blobs.root}: payload {digest} is gone") from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise IntegrityError(f"{self._blobs.root}: payload {digest} is damaged")
        return data.decode()

    def prune(self, now: float | None = None) -> int:
        """Remove the days that nobody may ask for any more; returns how many."""
        last = int(((time.time() if now is None else now) - self._keep_s) // _DAY_S) - 1
        gone = [d for d in self._blobs.names("") if d.isdigit() and int(d) < last]
        for day in gone:
            self._blobs.fs.rm(f"{self._blobs.base.rstrip('/')}/{day}", recursive=True)
        return len(gone)


def payloads_of(config: ProjectConfig) -> Payloads:
    """A project's payloads, beside its registry."""
    return Payloads(
        f"{str(config.registry.root).rstrip('/')}/payloads",
        keep_s=2 * config.store.retain_s,
        limit=config.store.max_payload_mib << 20,
    )
