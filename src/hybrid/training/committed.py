"""Committed checkpoints in a storage: their markers, whether they are whole, which are kept."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from hybrid.training.storage import Storage

MARKER = "commit.json"
VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Committed:
    """What a marker says.

    Attributes:
        step: optimiser steps done.
        shards: names of the ranks' files, in order of rank.
        metadata: name of the file with DCP's metadata.
        files: of every file its size in bytes and its sha256 in hex.
        eval_loss: held-out loss (nats a token) at this very step, if it was measured.
    """

    step: int
    shards: tuple[str, ...]
    metadata: str
    files: dict[str, tuple[int, str]]
    eval_loss: float | None = None

    @property
    def folder(self) -> str:
        """Its folder's name."""
        return folder_of(self.step)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())

    def dump(self) -> bytes:
        """The marker's content."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1).encode()


def folder_of(step: int) -> str:
    """Name of the folder of a checkpoint after `step` steps."""
    return f"step-{step:06d}"


def read_marker(storage: Storage, step: int) -> Committed | str | None:
    """The marker of a step; what is wrong with it; or None where there is none."""
    try:
        raw = storage.read(f"{folder_of(step)}/{MARKER}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        content = json.loads(raw)
        if content.pop("version") != VERSION:
            return f"{MARKER} is of another version"
        content["shards"] = tuple(content["shards"])
        content["files"] = {n: (int(size), str(sha)) for n, (size, sha) in content["files"].items()}
        found = Committed(**content)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MARKER} is damaged"
    if found.step != step or not {*found.shards, found.metadata} <= found.files.keys():
        return f"{MARKER} is damaged"
    return found


def steps_in(storage: Storage) -> list[int]:
    """Steps that have a folder, committed or not, ascending."""
    matches = (re.fullmatch(r"step-(\d+)", name) for name in storage.names())
    return sorted(int(match[1]) for match in matches if match)


def fault_of(storage: Storage, record: Committed, names: Iterable[str]) -> str | None:
    """What is wrong with these files of a checkpoint, every byte of them read."""
    for name in names:
        path, (size, sha256) = f"{record.folder}/{name}", record.files[name]
        try:
            found = storage.size(path)
            if found != size:
                return f"{name} has {found} bytes, not {size}"
            if storage.sha256(path) != sha256:
                return f"{name} does not match its sha256"
        except FileNotFoundError:
            return f"{name} is missing"
    return None


def best(records: Iterable[Committed], count: int) -> list[Committed]:
    """Those of the lowest held-out loss, best first; of equals the newest."""
    judged = [r for r in records if r.eval_loss is not None and math.isfinite(r.eval_loss)]
    return sorted(judged, key=lambda r: (r.eval_loss, -r.step))[:count]


def kept(records: Iterable[Committed], keep: int, keep_best: int) -> set[int]:
    """Steps of the newest `keep` and, besides, of the best `keep_best`."""
    records = sorted(records, key=lambda r: r.step)
    return {r.step for r in records[-keep:]} | {r.step for r in best(records, keep_best)}


def sweep(storage: Storage, keep: set[int], record: Committed | None = None) -> None:
    """Remove all checkpoints but `keep`, and what `record`'s folder holds besides its own files.

    A marker goes before its files, so that nothing half removed ever counts.
    """
    for step in steps_in(storage):
        if step not in keep:
            storage.remove(f"{folder_of(step)}/{MARKER}")
            storage.remove(folder_of(step))
    if record is not None:
        for name in storage.names(record.folder):
            if name != MARKER and name not in record.files:
                storage.remove(f"{record.folder}/{name}")
