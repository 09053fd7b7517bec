"""What the registry keeps and how it is named: manifests, releases, references, digests."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from hybrid.config import NAME
from hybrid.errors import IntegrityError, InvalidRequest

Kind = Literal["base", "adapter"]
KINDS: Final[tuple[Kind, ...]] = ("base", "adapter")


class Record(BaseModel):
    """A frozen JSON record."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(Record):
    """One file of a version: `path` is relative, with forward slashes."""

    path: str
    sha256: str
    size: int


class Manifest(Record):
    """What was published: its files, what it came from, how good it is.

    `digest` (hex sha256) covers kind, files and base digest: the same content has the same digest
    under any name.
    """

    kind: Kind
    name: str
    version: int
    digest: str
    files: tuple[FileEntry, ...]
    base_digest: str | None = None
    run_id: str = ""
    data_digest: str = ""
    metrics: dict[str, Any] = {}
    created: float


class Release(Record):
    """One base and the adapters served with it: they change over together."""

    name: str
    version: int
    base_digest: str
    adapters: dict[str, str]
    created: float


@dataclass(frozen=True)
class Resolved:
    """A manifest and the local folder that holds its files; read only."""

    manifest: Manifest
    path: Path


@dataclass(frozen=True)
class Ref:
    """A parsed reference; at most one of the last three is set."""

    name: str
    version: int | None = None
    digest: str | None = None
    alias: str | None = None


def parse_ref(ref: str) -> Ref:
    """Parse `name`, `name@v3`, `name@<64 hex digits>` or `name@alias`.

    Raises:
        InvalidRequest: it is none of these.
    """
    name, at, rest = ref.partition("@")
    if not re.fullmatch(NAME, name) or (at and not re.fullmatch(NAME, rest) and len(rest) != 64):
        raise InvalidRequest(
            f"{ref!r} is no reference: write name, name@alias, name@v3 or name@<sha256>",
            param="ref",
        )
    if not at:
        return Ref(name)
    if re.fullmatch(r"v[1-9][0-9]{0,8}", rest):
        return Ref(name, version=int(rest[1:]))
    if re.fullmatch(r"[0-9a-f]{64}", rest):
        return Ref(name, digest=rest)
    if len(rest) == 64:
        raise InvalidRequest(f"{ref!r}: not a hex sha256", param="ref")
    return Ref(name, alias=rest)


def check_name(name: str) -> None:
    """Raises InvalidRequest for what is no name."""
    if not re.fullmatch(NAME, name):
        raise InvalidRequest(
            f"{name!r} is no name: lower-case letters, digits, '.', '_', '-', at most 63",
            param="name",
        )


def content_digest(kind: Kind, files: Sequence[FileEntry], base_digest: str | None) -> str:
    """Hex sha256 over kind, files and base digest, in canonical JSON."""
    body = {"kind": kind, "base": base_digest, "files": sorted([f.path, f.sha256] for f in files)}
    return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()


def blob_path(sha256: str) -> str:
    """Where a blob lies below the root."""
    return f"blobs/{sha256[:2]}/{sha256}"


def check_safetensors(path: Path) -> None:
    """Whether a safetensors file is whole: header length, JSON, and offsets that end at the end.

    Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON
    header, data).

    Raises:
        IntegrityError: it is truncated or malformed.
    """
    size = path.stat().st_size
    with path.open("rb") as f:
        first = f.read(8)
        if len(first) < 8 or (length := struct.unpack("<Q", first)[0]) > size - 8:
            raise IntegrityError(f"{path}: truncated: {size} bytes do not hold the header")
        try:
            header = json.loads(f.read(length))
            spans = sorted(v["data_offsets"] for k, v in header.items() if k != "__metadata__")
            at = 0
            for start, stop in spans:
                if start != at or stop < start:
                    raise ValueError("gaps or overlaps")
                at = stop
        except (ValueError, KeyError, TypeError, AttributeError):
            raise IntegrityError(f"{path}: its header is no safetensors header") from None
    expected = 8 + length + at
    if expected != size:
        raise IntegrityError(f"{path}: truncated: {size} bytes, its header says {expected}")
