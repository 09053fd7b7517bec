"""A thread on every rank that ends a run which stands still, and says in words where it stood.

Ranks tell one another what they know through files in the run's folder: a hung collective cannot
carry it, nor can a store that lives in a process that may be the hung one. All of a run's files:

    runs/<run>/watch/<attempt>/rank-3.json     where rank 3 is, now and then; at last its account
    runs/<run>/watch/<attempt>/rank-3.native   stacks written without Python's interpreter lock
    runs/<run>/hang-<time>.json, .txt          the report, written by whoever is first
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from hybrid.training.flight import read_flight
from hybrid.training.hang_report import MOST_UNFINISHED, as_text, compose
from hybrid.training.parallel import World
from hybrid.training.position import Position
from hybrid.training.processes import STOPPED, Process, native_threads, thread_records
from hybrid.training.progress import Progress

log = logging.getLogger(__name__)

EXIT_CODE = 86
"""What a rank of a hung run ends with."""
FOLDER = "watch"


class Watchdog:
    """Watches one rank while the `with` block runs. Entering it is collective.

    When a rank's position does not change for `limit_s`, every rank that can writes its account,
    one of them writes the report and the progress event `hang`, and all of them end: a rank within
    a collective cannot be made to raise. Time in which this process did not run at all (stopped,
    a suspended machine) is not counted against it. A rank whose interpreter lock is held for
    `limit_s` cannot write; Python's fault handler, which needs no lock, writes its stacks and ends
    it. Processes of silent ranks that are stopped are killed: nothing else would end them.

    Args:
        folder: of the run, seen by every rank.
        position: updated by the training thread.
        limit_s: seconds without a change of position.
        node: what the cluster calls this node.
        end: ends the process, with the summary; must not return.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        position: Position,
        limit_s: float,
        *,
        node: str = "",
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._folder = folder
        self._home = folder / FOLDER
        self._world = world
        self._position = position
        self._limit_s = limit_s
        self._tick_s = min(max(limit_s / 20, 0.05), 5.0)
        self._collect_s = min(max(limit_s / 2, 2.0), 15.0)
        self._me = Process.current(world.rank, node)
        self._end = end or _end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        told = self._world.gather((self._me, uuid.uuid4().hex[:8]))
        self.processes: list[Process] = [process for process, _ in told]
        """Of all ranks, in order of rank."""
        if self._world.rank == 0:
            shutil.rmtree(self._home, ignore_errors=True)  # of attempts that were killed
        self._home = self._home / told[0][1]
        if self._world.rank == 0:
            self._home.mkdir(parents=True)
        self._world.gather(None)
        self._native: IO[bytes] = self._mine(".native").open("wb")
        self._trains = threading.get_ident()  # Ray Train's is not the process' main thread
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._native.close()
        if self._world.rank == 0 and kind is None:  # else others may still need it
            shutil.rmtree(self._home, ignore_errors=True)

    def _mine(self, suffix: str) -> Path:
        return self._home / f"rank-{self._world.rank}{suffix}"

    # --- the thread -------------------------------------------------------------------------

    def _watch(self) -> None:
        place, stood, ticked = self._position.now, 0.0, time.monotonic()
        while not self._over.wait(self._tick_s):
            faulthandler.dump_traceback_later(
                self._limit_s, file=self._native, exit=self._world.size > 1
            )
            now = time.monotonic()
            asleep, ticked = now - ticked - self._tick_s, now
            if self._position.now is not place:
                place, stood = self._position.now, 0.0
                self._beat()
            elif asleep > max(1.0, self._tick_s):
                stood += asleep
            if now - place.since - stood > self._limit_s or self._declared():
                self._declare()
                return

    def _beat(self) -> None:
        """Tell where this rank is. Storage that fails for a while is no reason to end a run."""
        with contextlib.suppress(OSError):
            self._write({**self._position.as_record(), "time": time.time()})

    def _write(self, record: dict[str, Any]) -> None:
        new = self._mine(".new")
        new.write_text(json.dumps(record))
        new.replace(self._mine(".json"))

    def _declared(self) -> bool:
        return (self._home / "hung").exists()

    def _declare(self) -> None:
        faulthandler.dump_traceback_later(  # should the storage hang as well
            self._limit_s + 3 * self._collect_s, file=self._native, exit=self._world.size > 1
        )
        try:
            (self._home / "hung").touch()
            self._write(self._account())
            everyone = set(range(self._world.size))
            self._wait(lambda: self._read_all()[0].keys() == everyone)
            try:
                (self._home / "reporter").touch(exist_ok=False)
            except FileExistsError:  # another rank writes it
                self._wait((self._home / "reported").exists)
            else:
                (self._home / "reported").write_text(self._report())
            summary = (self._home / "reported").read_text()
        except OSError as e:
            summary = f"no progress for {self._limit_s:g} s, and no report could be written: {e}"
        self._end(summary)

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Until it is so, or until there is no use in waiting."""
        deadline = time.monotonic() + self._collect_s
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _account(self) -> dict[str, Any]:
        flight = read_flight().as_record()
        flight["unfinished"] = flight["unfinished"][:MOST_UNFINISHED]
        return {
            **asdict(self._me),
            **self._position.as_record(),
            "time": time.time(),
            "threads": thread_records(first=self._trains, but=threading.get_ident()),
            "native_threads": native_threads(),
            "flight": flight,
            "neighbours": {
                str(other.rank): other.state_seen_by(self._me)
                for other in self.processes
                if other.rank != self._me.rank
            },
        }

    def _read_all(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """Accounts, and the last signs of life of ranks that have written none."""
        accounts: dict[int, Any] = {}
        seen: dict[int, Any] = {}
        for rank in range(self._world.size):
            path = self._home / f"rank-{rank}.json"
            if path.exists():
                record = json.loads(path.read_text())
                (accounts if "flight" in record else seen)[rank] = record
        return accounts, seen

    def _report(self) -> str:
        """Write the report and the progress event; returns the summary."""
        accounts, seen = self._read_all()
        native = {
            rank: path.read_text(errors="replace")
            for rank in range(self._world.size)
            if (path := self._home / f"rank-{rank}.native").exists()
        }
        report = compose(
            accounts, seen, self.processes, limit_s=self._limit_s, native_stacks=native
        )
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = self._folder / f"hang-{stamp}.json"
        path.write_text(json.dumps(report, indent=1))
        path.with_suffix(".txt").write_text(as_text(report))
        message = f"{report['summary']}; the whole report: {path}"
        Progress(self._folder).write("hang", step=report["step"], message=message, report=str(path))
        for other in self.processes:
            if other.rank not in accounts and other.state_seen_by(self._me) == STOPPED:
                os.kill(other.pid, signal.SIGKILL)
        return message


def _end(summary: str) -> None:
    """End this process, whatever its other threads are stuck in."""
    log.error("the run hangs: %s", summary)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(EXIT_CODE)
