"""One attempt owns a run: the newest. What an earlier one still writes does not count.

A driver that is killed leaves workers behind for a while, and two people may start the same run:
the attempt that began last takes the run over, and the others end when they see it.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from hybrid.errors import TrainingError

FILE = "attempt"


class Fence:
    """The mark of this attempt in a run's folder, which every worker sees.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.attempt = uuid.uuid4().hex

    def take(self) -> None:
        """Own the run from now on."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        mine = self._path.with_name(f"{FILE}.{self.attempt}")
        mine.write_text(self.attempt)
        os.replace(mine, self._path)

    def lost(self) -> bool:
        """Whether a later attempt owns it."""
        try:
            return self._path.read_text() != self.attempt
        except FileNotFoundError:  # the run was started afresh: its folder is new
            return True

    def taken(self) -> TrainingError:
        """What to raise then."""
        return TrainingError(
            f"another attempt has taken over the run in {self._path.parent}; this one ends"
        )
