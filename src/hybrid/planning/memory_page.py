"""Memory on a profile's page: each rank's timeline by category, and who holds the peak."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hybrid.planning.allocations import CATEGORIES
from hybrid.planning.memory_timeline import Memory, size, told

COLOURS = {
    "parameters": "#1a7f37",
    "gradients": "#0969da",
    "optimiser": "#9a6700",
    "activations": "#cf222e",
    "input": "#6e7781",
    "other": "#8250df",
}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 220, 72, 24, 12


def section(memories: Sequence[Memory]) -> str:
    """HTML of all ranks."""
    key = " ".join(
        f'<span style="color:{colour}">■</span> {name}' for name, colour in COLOURS.items()
    )
    parts = [f"<h2>Memory</h2><p>{key}</p>"]
    for memory in memories:
        lines = "".join(f"<li>{escape(line)}</li>" for line in told(memory))
        rows = "".join(
            f'<tr><td class="t">{h.category}</td><td class="t">{escape(str(h))}</td>'
            f"<td>{size(h.bytes)}</td><td>{h.blocks}</td></tr>"
            for h in memory.holders[:12]
        )
        parts.append(
            f"<ul>{lines}</ul>{chart(memory)}<table><thead><tr><th>category</th>"
            f"<th>who holds it at the peak</th><th>bytes</th><th>blocks</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )
    return "".join(parts)


def chart(memory: Memory) -> str:
    """Areas stacked by category over the recorded steps, as SVG; the peak is marked."""
    seconds = [t for t, _ in memory.timeline]
    last, most = max(seconds[-1], 1e-9), memory.total or 1

    def x(second: float) -> float:
        return _LEFT + second / last * (_WIDTH - _LEFT - 16)

    def y(count: float) -> float:
        return _HEIGHT - _BOTTOM - count / most * (_HEIGHT - _TOP - _BOTTOM)

    base = [0] * len(seconds)
    parts = []
    for n, name in enumerate(CATEGORIES):
        top = [b + held[n] for b, (_, held) in zip(base, memory.timeline, strict=True)]
        if top != base:
            upper = [f"{x(t):.1f},{y(v):.1f}" for t, v in zip(seconds, top, strict=True)]
            lower = [f"{x(t):.1f},{y(v):.1f}" for t, v in zip(seconds, base, strict=True)]
            parts.append(
                f'<polygon points="{" ".join([*upper, *reversed(lower)])}" fill="{COLOURS[name]}"'
                f' fill-opacity=".8"><title>{name}</title></polygon>'
            )
        base = top
    at, floor = x(memory.peak_at), _HEIGHT - _BOTTOM
    parts.append(
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{floor}" stroke="currentColor"'
        f' stroke-dasharray="3 3"/><text x="4" y="{_TOP + 8}">{size(most)}</text>'
        f'<text x="4" y="{floor}">0</text><text x="{_LEFT}" y="{_HEIGHT - 8}">0 ms</text>'
        f'<text x="{_WIDTH - 16}" y="{_HEIGHT - 8}" text-anchor="end">{1e3 * last:.4g} ms</text>'
    )
    label = f"memory of rank {memory.rank} by category, {size(most)} at the peak"
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        f' role="img" aria-label="{label}">{"".join(parts)}</svg>'
        f"<figcaption>rank {memory.rank}, over {len(memory.step_peaks)} steps; dashed: the peak"
        "</figcaption></figure>"
    )
