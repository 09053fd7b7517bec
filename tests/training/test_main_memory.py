"""Main memory of a process: the mark that Linux keeps against what is seen without it."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from pathlib import Path

import pytest

from hybrid.errors import ConfigError
from hybrid.training import main_memory
from hybrid.training.main_memory import Peak, Watch, free_memory, held_memory

MIB = 2**20
NOWHERE = Path("/nowhere/at/all")


def hold(size: int, until: threading.Event | None = None) -> None:
    """Take memory of the kernel's, and give it back when somebody has seen it."""
    with mmap.mmap(-1, size) as taken:
        for at in range(0, size, mmap.PAGESIZE):
            taken[at] = 1
        if until is not None:
            assert until.wait(30)


class Seen(threading.Event):
    """Set once a watch has seen so many bytes."""

    def __init__(self, watch: Watch, size: int) -> None:
        super().__init__()
        threading.Thread(target=self._wait, args=(watch, size), daemon=True).start()

    def _wait(self, watch: Watch, size: int) -> None:
        while watch._seen < size:
            time.sleep(0.001)
        self.set()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="is for Linux")
def test_linux_keeps_the_peak_of_every_stretch() -> None:
    peak = Peak()
    for size in (200 * MIB, 50 * MIB):  # the smaller after the larger
        peak.clear()
        before = held_memory()
        hold(size)
        assert peak.bytes() - before == pytest.approx(size, rel=0.1)
    assert peak._watch is None
    peak.stop()


def test_a_watch_sees_what_is_held_below_the_process_own_mark() -> None:
    hold(300 * MIB)  # the mark is above all that follows
    watch = Watch()
    try:
        before = held_memory()
        hold(150 * MIB, Seen(watch, before + 140 * MIB))
        assert watch.bytes() - before == pytest.approx(150 * MIB, rel=0.1)
    finally:
        watch.stop()
    assert not [t for t in threading.enumerate() if t.name == "memory watch"]


def test_a_mark_that_rose_is_the_peak_though_nobody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_memory, "LOOK_S", 3600.0)
    highest = main_memory._ever()
    watch = Watch()
    try:
        hold(highest - held_memory() + 100 * MIB)
        assert watch.bytes() >= highest + 95 * MIB
    finally:
        watch.stop()


def test_where_linux_does_not_tell_the_process_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    real, free = held_memory(), free_memory()
    for name in ("_CLEAR", "_STATUS", "_INFO"):
        monkeypatch.setattr(main_memory, name, NOWHERE / name)
    assert held_memory() == pytest.approx(real, rel=0.1)
    assert free_memory() == pytest.approx(free, rel=0.5)
    peak = Peak()
    peak.clear()
    assert peak.bytes() >= 0.9 * real
    peak.clear()
    peak.stop()
    assert not [t for t in threading.enumerate() if t.name == "memory watch"]


def test_without_either_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CLEAR", "_STATUS", "_INFO"):
        monkeypatch.setattr(main_memory, name, NOWHERE / name)
    monkeypatch.setitem(sys.modules, "psutil", None)
    for ask in (Peak().clear, held_memory, free_memory):
        with pytest.raises(ConfigError, match="pip install psutil"):
            ask()
