"""What goes wrong on purpose, on a rank of a spawned world; functions that a child can import."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from hybrid.training.loop import Job, train
from hybrid.training.parallel import World
from hybrid.training.position import Position
from hybrid.training.watchdog import Watchdog


def hold_the_lock() -> None:
    """A call into C that does not let go of the interpreter's lock."""
    ctypes.PyDLL(None).sleep(3600)


def stop_and_hold(folder: Path) -> None:
    """Rank 1 is stopped in step 3 and rank 2 cannot run Python; rank 0 waits for both."""
    world, position = World.current(), Position()
    with Watchdog(folder, world, position, 2.0, node=f"node-{world.rank}"):
        for step in (1, 2, 3):
            position.at("forward", step)
            if step == 3:
                time.sleep(0.5)  # the sign of life of step 3 is written
                if world.rank == 1:
                    os.kill(os.getpid(), signal.SIGSTOP)
                if world.rank == 2:
                    hold_the_lock()
            world.sum(1.0)


def slow_storage() -> None:
    """A read that does not come back."""
    time.sleep(3600)


def train_with_slow_storage(made: Job) -> None:
    """Rank 1's loader stays in `slow_storage` in step 3."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401 - not timed

    from hybrid.training.data import ShardSet

    read = ShardSet.micro_batch

    def reading(self: Any, step: int, *args: Any) -> Any:
        if step == 2 and World.current().rank == 1:
            slow_storage()
        return read(self, step, *args)

    ShardSet.micro_batch = reading  # type: ignore[method-assign]
    train(made)
