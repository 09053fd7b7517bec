"""Work beside training: one function on a thread of its own, which yields to training."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
NICE = 5
"""Added to the thread's niceness on Linux, so that a core is training's first."""


class Work(threading.Thread, Generic[T]):
    """Runs `function` at once; a process that ends does not wait for it.

    Attributes:
        error: what it raised, once it has ended.
    """

    def __init__(self, function: Callable[[], T], name: str, *, yielding: bool) -> None:
        super().__init__(name=name, daemon=True)
        self._function = function
        self._yielding = yielding
        self._result: T
        self.error: Exception | None = None
        self.start()

    @property
    def ended(self) -> bool:
        """Whether it has returned or raised."""
        return not self.is_alive()

    def result(self) -> T:
        """Wait for it, then what it returned. Raises what it raised."""
        self.join()
        if self.error is not None:
            raise self.error
        return self._result

    def run(self) -> None:
        """Called by the thread itself."""
        if self._yielding and sys.platform == "linux":
            own = threading.get_native_id()  # Linux takes a thread's id where it says process
            with contextlib.suppress(PermissionError):  # it was at the lowest already
                os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICE)
        try:
            self._result = self._function()
        except Exception as e:  # noqa: BLE001 - the owner's; it looks at `error`
            self.error = e
