"""Main memory of this machine and this process: as Linux counts it, elsewhere through psutil."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import threading
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError

_INFO = Path("/proc/meminfo")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
LOOK_S = 0.005
"""Seconds between looks at the process where nothing else tells its peak."""


def free_memory() -> int:
    """Bytes of main memory that may still be taken here, within the control group's limit.

    Raises:
        ConfigError: there is no Linux and no psutil.
    """
    if _INFO.exists():
        available = _kilobytes(_INFO, "MemAvailable")
    else:
        available = int(_psutil().virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no version 2 of control groups, or "max"
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    return available


def held_memory() -> int:
    """Bytes of main memory that this process holds. Raises as `free_memory` does."""
    if _STATUS.exists():
        return _kilobytes(_STATUS, "VmRSS")
    return int(_psutil().Process().memory_info().rss)


class Peak:
    """The most main memory that this process held since `clear`.

    Linux sets its own mark of it back when asked. Where it does not, the process is watched.
    """

    def __init__(self) -> None:
        self._watch: Watch | None = None

    def clear(self) -> None:
        """Measure from here on. Raises as `free_memory` does."""
        self.stop()
        try:
            _CLEAR.write_text("5")
        except OSError:  # no Linux, or one that keeps this file to itself
            self._watch = Watch()

    def bytes(self) -> int:
        """The most that was held until now."""
        return self._watch.bytes() if self._watch else _kilobytes(_STATUS, "VmHWM")

    def stop(self) -> None:
        """Watch no more."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None


class Watch:
    """A thread that looks at this process every few milliseconds, until `stop`.

    What lives shorter than that may be missed, but for what is more than the process ever held: the
    system's own mark, which only rises, then tells it.

    Raises:
        ConfigError: psutil is not installed.
    """

    def __init__(self) -> None:
        self._process = _psutil().Process()
        self._began, self._seen = _ever(), 0
        self._look()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory watch", daemon=True)
        self._thread.start()

    def bytes(self) -> int:
        """The most that was held until now."""
        self._look()
        return ever if (ever := _ever()) > self._began else self._seen

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        self._seen = max(self._seen, int(self._process.memory_info().rss))


def _ever() -> int:
    """The most that this process held since it began: macOS counts bytes, others kilobytes."""
    mark = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return mark if sys.platform == "darwin" else mark << 10


def _kilobytes(file: Path, key: str) -> int:
    """Bytes, of a line `key: N kB` of the kernel's."""
    text = file.read_text(encoding="utf-8")
    return int(re.search(rf"^{key}:\s*(\d+) kB", text, re.MULTILINE)[1]) << 10  # type: ignore[index]


def _psutil() -> Any:
    try:
        import psutil
    except ModuleNotFoundError:
        raise ConfigError(
            "main memory cannot be measured here: without Linux's /proc/self/clear_refs it takes"
            " the package psutil: pip install psutil on every node"
        ) from None
    return psutil
