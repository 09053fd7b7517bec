"""Which ranks are slow: each one's own time of a step, without what it waits for the others.

Own time is that of making the micro-batches, and of the decoder blocks' forward pass over the first
one: between two collectives, so no rank's waiting is in it (tensor-parallel ranks wait for their
partners within a block). It travels with the step's loss: no collective is added.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

WINDOW = 20
"""Steps over which a rank must be slow."""
FLOOR_S = 0.002
"""What a slow rank must lose at least in a step: on tiny steps everything is noise."""


class OwnTime:
    """Times this rank's own work in a step.

    Args:
        model: a causal LM before it is spread: its blocks' hooks then run within FSDP's own, after
            parameters were gathered. None: only data is timed.
        device: that it will run on.
    """

    def __init__(
        self, model: nn.Module | None = None, device: torch.device = torch.device("cpu")
    ) -> None:
        self._device = device
        self._on = False
        self._marks: list[Any] = []
        self._data_s = 0.0
        blocks: Any = [] if model is None else model.get_decoder().layers  # type: ignore[operator]
        for block in blocks:
            mark = torch.compiler.disable(self._mark)  # type: ignore[no-untyped-call]
            block.register_forward_pre_hook(mark)
            block.register_forward_hook(mark)

    def _mark(self, *_: object) -> None:
        if not self._on:
            return
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    @contextmanager
    def data(self) -> Iterator[None]:
        """The block within makes the step's micro-batches."""
        started = time.perf_counter()
        yield
        self._data_s = time.perf_counter() - started

    @contextmanager
    def forward(self, on: bool) -> Iterator[None]:
        """The block within is a forward pass; `on` for the one that counts."""
        self._on = on
        yield
        self._on = False

    def seconds(self) -> float:
        """Of the step since the last call; the device must have finished its forward pass."""
        marks, self._marks = self._marks, []
        pairs = zip(marks[::2], marks[1::2], strict=True)
        cuda = self._device.type == "cuda"
        forward_s = sum(float(a.elapsed_time(b)) / 1e3 if cuda else b - a for a, b in pairs)
        return float(self._data_s + forward_s)


class Stragglers:
    """Compares the ranks over windows of `WINDOW` steps.

    Args:
        nodes: of each rank.
        share: a rank is slow if its median exceeds that of the others' medians by this share.
    """

    def __init__(self, nodes: Sequence[str], share: float) -> None:
        self._nodes = nodes
        self._share = share
        self._steps: list[Sequence[float]] = []
        self._window: list[Sequence[float]] = []
        self._slow: list[int] = []

    def add(self, seconds: Sequence[float]) -> dict[str, Any] | None:
        """One step's own times, by rank. At a window's end: the report, if other ranks are slow."""
        self._steps.append(seconds)
        if len(self._steps) < WINDOW:
            return None
        self._window, self._steps = self._steps, []
        report = self.report()
        slow = [entry["rank"] for entry in report["slow"]]
        changed, self._slow = slow != self._slow, slow
        return report if changed else None

    def report(self) -> dict[str, Any]:
        """Of the last whole window, or of what there is of the first.

        Returns:
            `p50_s` and `max_s` of each rank, `skew` (by what share the slowest rank's median
            exceeds the others'), `slow` (rank, node, `slower`, a share, of each slow rank), and a
            `message` of it.
        """
        steps = self._window or self._steps
        if len(self._nodes) < 2 or not steps:
            return {"p50_s": [], "max_s": [], "skew": 0.0, "slow": [], "message": _message([])}
        ranks = list(zip(*steps, strict=True))
        medians = [statistics.median(times) for times in ranks]
        ordered = sorted(medians)
        slow, skew = [], 0.0
        for rank, mine in enumerate(medians):
            others = _median_without(ordered, mine)
            slower = mine / others - 1 if others > 0 else 0.0
            skew = max(skew, slower)
            if slower > self._share and mine - others > FLOOR_S:
                slow.append({"rank": rank, "node": self._nodes[rank], "slower": round(slower, 4)})
        return {
            "p50_s": [round(median, 6) for median in medians],
            "max_s": [round(max(times), 6) for times in ranks],
            "skew": round(skew, 4),
            "slow": slow,
            "message": _message(slow),
        }


def _message(slow: list[dict[str, Any]]) -> str:
    if not slow:
        return "no rank is slower than the others"
    said = (f"rank {s['rank']} on {s['node']} by {100 * s['slower']:.0f} %" for s in slow)
    return f"slower than the others, in their own work: {', '.join(said)}"


def _median_without(ordered: list[float], one: float) -> float:
    """The median of sorted numbers but for one of them."""
    rest = list(ordered)
    rest.remove(one)
    return statistics.median(rest)
