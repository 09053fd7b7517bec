"""Memory on a profile's page: each rank's timeline by category, and who holds the peak."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.pages import Colour, Html, bullets, figure, key, section, table
from hybrid.planning.allocations import CATEGORIES
from hybrid.planning.memory_timeline import Memory, size, told
from hybrid.plots import Axis, Plot, number

COLOURS: dict[str, Colour] = {
    "parameters": "green",
    "gradients": "blue",
    "optimiser": "yellow",
    "activations": "red",
    "input": "grey",
    "other": "purple",
}


def memory_section(memories: Sequence[Memory]) -> Html:
    """HTML of all ranks; nothing where there are none."""
    parts = []
    for memory in memories:
        rows = [(h.category, str(h), size(h.bytes), f"{h.blocks:,}") for h in memory.holders[:12]]
        heads = ("category", "who holds it at the peak", "bytes", "blocks")
        parts += [bullets(told(memory)), chart(memory), table(heads, rows, numbers=(2, 3))]
    return section("Memory", *parts)


def chart(memory: Memory) -> Html:
    """Areas stacked by category over the recorded steps; the peak is marked."""
    seconds = [t for t, _ in memory.timeline]
    last, most = max(seconds[-1], 1e-9), memory.total or 1
    plot = Plot(
        Axis(low=0, high=last, ticks=(0, last / 2, last), told=lambda s: number(1e3 * s)),
        Axis(low=0, high=most, ticks=(0, most / 2, most), told=size),
        across="ms",
        height=220,
    )
    base = [0] * len(seconds)
    for n, name in enumerate(CATEGORIES):
        top = [b + held[n] for b, (_, held) in zip(base, memory.timeline, strict=True)]
        if top != base:
            lower, upper = zip(seconds, base, strict=True), zip(seconds, top, strict=True)
            plot.area(lower, upper, COLOURS[name], name)
        base = top
    plot.mark(memory.peak_at, "ink", f"peak, {size(most)}")
    count = len(memory.step_peaks)
    return figure(
        plot.svg(f"memory of rank {memory.rank} by category, {size(most)} at the peak"),
        f"Memory of rank {memory.rank} over {count} step" + "s" * (count != 1),
        unit="by category",
        legend=key(COLOURS.items()),
        note="Dashed: the peak.",
    )
