"""Processes as Linux shows them: stopped, gone, a pid used again, another machine."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from hybrid.training.processes import (
    ELSEWHERE,
    GONE,
    STATES,
    STOPPED,
    Process,
    _start_of,
    native_threads,
    thread_records,
)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_neighbour_is_seen_stopped_running_and_gone() -> None:
    me = Process.current(0, "here")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        started = _start_of(child.pid)
        assert started is not None
        other = dataclasses.replace(me, rank=1, pid=child.pid, started=started)
        assert other.state_seen_by(me) in (STATES["R"], STATES["S"], STATES["D"])
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: other.state_seen_by(me) == STOPPED)
        assert dataclasses.replace(other, started=started + 1).state_seen_by(me) == GONE
        assert dataclasses.replace(other, kernel="another").state_seen_by(me) == ELSEWHERE
    finally:
        child.kill()
        child.wait()
    assert other.state_seen_by(me) == GONE
    assert str(other) == f"rank 1 (pid {child.pid} on here)"


def test_threads_are_shown_with_their_stacks_the_chosen_one_first() -> None:
    wake = threading.Event()

    def waiting_for_the_wake() -> None:
        wake.wait()

    thread = threading.Thread(target=waiting_for_the_wake, name="waiter")
    thread.start()
    try:
        assert thread.ident is not None
        until(lambda: "futex" in thread_records(first=thread.ident, but=0)[0]["waits_in"])
        records = thread_records(first=thread.ident, but=threading.get_ident())
        assert records[0]["name"] == "waiter"
        assert records[0]["state"] == STATES["S"]
        assert any("waiting_for_the_wake: wake.wait()" in line for line in records[0]["stack"])
        assert "MainThread" not in [record["name"] for record in records]
        assert sum(native_threads().values()) >= 2
    finally:
        wake.set()
        thread.join()
