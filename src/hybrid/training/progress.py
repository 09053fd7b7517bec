"""A run's progress file: one JSON object a line, written by rank 0, followed by whoever looks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hybrid.training.goodput import Phase, Stopwatch
from hybrid.training.scalars import Scalars

FILE = "progress.jsonl"


class Progress:
    """Appends events to runs/<run>/progress.jsonl: start, step, eval, checkpoint, finished, failed.

    Every record has `event`, `time` (UNIX seconds), `spent` (seconds by phase since the record
    before it) and mostly `step` (optimiser steps done). `launch` and `ended` are the driver's.

    Args:
        scalars: also write the figures of steps and evaluations for TensorBoard.
    """

    def __init__(self, folder: Path, *, enabled: bool = True, scalars: bool = False) -> None:
        self.path = folder / FILE
        self._enabled = enabled
        self._scalars = Scalars(folder / "tensorboard") if enabled and scalars else None
        self._stopwatch = Stopwatch()
        if enabled:
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, **fields: Any) -> None:
        """Append one record at once, so that a reader never sees half of it for long."""
        if not self._enabled:
            return
        record = {"event": event, "time": time.time(), **fields, "spent": self._stopwatch.lap()}
        with self.path.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        if self._scalars is not None:
            self._scalars.take(record)

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Count the block within as `name` in the account of the run's time."""
        return self._stopwatch.phase(name)


def read_progress(folder: Path) -> list[dict[str, Any]]:
    """All whole records of a run so far; empty when it has none yet."""
    path = folder / FILE
    return list(_records(path.read_bytes())) if path.exists() else []


class Follower:
    """Calls `on_progress` with every record appended while the `with` block runs.

    It runs in a thread; an error in `on_progress` ends it and is raised at the block's end.
    """

    def __init__(
        self, folder: Path, on_progress: Callable[[dict[str, Any]], None], interval_s: float = 0.2
    ) -> None:
        self._path = folder / FILE
        self._on_progress = on_progress
        self._interval_s = interval_s
        self._at = self._path.stat().st_size if self._path.exists() else 0
        self._done = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._done.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._done.wait(self._interval_s):
                self._drain()
            self._drain()
        except Exception as e:  # noqa: BLE001 - the caller's; raised in the caller's thread
            self._error = e

    def _drain(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._at)
            new = stream.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        for record in _records(whole):
            self._on_progress(record)


def _records(raw: bytes) -> Iterator[dict[str, Any]]:
    for line in raw[: raw.rfind(b"\n") + 1].splitlines():
        yield json.loads(line)
