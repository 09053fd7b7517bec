"""Named ranges of a step: one function for torch's profiler and, on a GPU, for NVTX as well.

A range that nobody records costs some microseconds. On a CPU only torch's profiler can see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


def range_name(phase: str) -> str:
    """What the range of a phase is called: all micro-batches' are alike."""
    return phase.partition(" of micro-batch")[0]


@contextmanager
def named_range(name: str, device: torch.device) -> Iterator[None]:
    """What runs within is called `name` on the timeline of this thread."""
    with record_function(name):
        if device.type != "cuda":
            yield
            return
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
