"""The memory of a trial: what a rank may use, the most it held, whether its allocator thrashed."""

from __future__ import annotations

import contextlib
import ctypes
import gc

import torch

from hybrid.training.candidates import Place
from hybrid.training.main_memory import Peak, free_memory, held_memory
from hybrid.training.world import World
from hybrid.training.zero_setup import installed


def place_of(world: World) -> Place:
    """Where the ranks are and what each may use. Collective."""
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        mine = free + torch.cuda.memory_reserved(world.device)
    else:
        mine = free_memory()
    held = held_memory() if world.device.type == "cpu" else 0
    told = world.gather((world.node, mine, held, installed()))
    nodes = tuple(node for node, *_ in told)
    if world.device.type == "cuda":
        memory = min(free for _, free, *_ in told)
    else:  # what is free there and what they have already, shared by the ranks of a node
        memory = min(
            (
                min(free for n, free, *_ in told if n == node)
                + sum(held for n, _, held, _ in told if n == node)
            )
            // nodes.count(node)
            for node in set(nodes)
        )
    return Place(
        nodes=nodes,
        gpu=world.device.type == "cuda",
        memory=memory,
        deepspeed=all(has for *_, has in told),
    )


class Memory:
    """Of this process between `clear` and now.

    Args:
        device: that the trials compute on.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._main, self._retries = Peak(), 0

    def clear(self) -> None:
        """Give back what earlier trials left, and measure from here on."""
        torch.compiler.reset()
        gc.collect()
        if self._gpu is not None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._gpu)
            self._retries = self._all_retries()
            return
        with contextlib.suppress(AttributeError):  # not every C library has it
            ctypes.CDLL(None).malloc_trim(0)
        self._main.clear()

    def peak(self) -> int:
        """Bytes: of tensors on the GPU, or of the whole process where there is none."""
        if self._gpu is not None:
            return torch.cuda.max_memory_allocated(self._gpu)
        return self._main.bytes()

    def retries(self) -> int:
        """How often the GPU's allocator failed and gave back its cache to try again."""
        return self._all_retries() - self._retries if self._gpu is not None else 0

    def stop(self) -> None:
        """Measure no more."""
        self._main.stop()

    def _all_retries(self) -> int:
        return int(torch.cuda.memory_stats(self._gpu).get("num_alloc_retries", 0))
