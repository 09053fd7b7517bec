"""What Linux tells of a worker's process: its state, its threads' stacks and what they wait for."""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible wait (disk or driver)",
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
    "I": "idle",
}
GONE = "gone"
ELSEWHERE = "on another node"
STOPPED = STATES["T"]


@dataclass(frozen=True, kw_only=True)
class Process:
    """A worker's process, so that its neighbours can look it up.

    Attributes:
        rank: in the world.
        pid: as its own node and container count.
        started: clock ticks from the node's start to its own; a pid used again has another.
        host: the node's name.
        node: what the cluster calls the node; the host's name where nothing else is known.
        kernel: the same for two processes exactly if they see one another's pids.
    """

    rank: int
    pid: int
    started: int
    host: str
    node: str
    kernel: str

    @classmethod
    def current(cls, rank: int, node: str = "") -> Process:
        """This process."""
        host = socket.gethostname()
        kernel = f"{_read('/proc/sys/kernel/random/boot_id')} {os.readlink('/proc/self/ns/pid')}"
        pid = os.getpid()
        return cls(
            rank=rank,
            pid=pid,
            started=_start_of(pid) or 0,
            host=host,
            node=node or host,
            kernel=kernel,
        )

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.node})"

    def state_seen_by(self, other: Process) -> str:
        """One of STATES' values, GONE, or ELSEWHERE if `other` cannot see it."""
        if self.kernel != other.kernel:
            return ELSEWHERE
        stat = _stat(self.pid)
        if stat is None or int(stat[19]) != self.started:
            return GONE
        return STATES.get(stat[0], stat[0])


def thread_records(*, first: int, but: int) -> list[dict[str, Any]]:
    """The Python threads of this process, and the kernel's word on each.

    Each has `name`, `native_id`, `state`, `waits_in` (the kernel function it sleeps in) and `stack`
    (innermost last: `file:line function: source line`).

    Args:
        first: the ident of the thread to begin with.
        but: of one to leave out.
    """
    frames = sys._current_frames()
    known = sorted(threading.enumerate(), key=lambda thread: thread.ident != first)
    records = []
    for thread in known:
        frame = frames.get(thread.ident or 0)
        if frame is None or thread.ident == but:
            continue
        task = f"/proc/self/task/{thread.native_id}"
        records.append(
            {
                "name": thread.name,
                "native_id": thread.native_id,
                "state": STATES.get((_stat(f"self/task/{thread.native_id}") or ["?"])[0], "?"),
                "waits_in": _read(f"{task}/wchan"),
                "stack": [
                    f"{f.filename}:{f.lineno} {f.name}: {f.line}"
                    for f in traceback.extract_stack(frame)
                ],
            }
        )
    return records


def native_threads() -> dict[str, int]:
    """How many of this process' threads wait where, as `name, kernel function`."""
    counted: dict[str, int] = {}
    for task in Path("/proc/self/task").iterdir():
        key = f"{_read(task / 'comm')}, {_read(task / 'wchan')}"
        counted[key] = counted.get(key, 0) + 1
    return counted


def _start_of(pid: int) -> int | None:
    stat = _stat(pid)
    return None if stat is None else int(stat[19])


def _stat(which: int | str) -> list[str] | None:
    """The fields of /proc/…/stat from the state on; None for no such process or thread."""
    text = _read(f"/proc/{which}/stat")
    # The second field is the command in brackets and may hold anything, brackets included.
    return text[text.rindex(")") + 2 :].split() if text else None


def _read(path: str | Path) -> str:
    """A file of /proc; empty if what it was about has ended."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
