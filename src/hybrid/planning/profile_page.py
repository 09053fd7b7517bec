"""A profile as one HTML page: where each rank's steps went, the verdict, its evidence and knobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hybrid.pages import (
    Colour,
    Html,
    bullets,
    document,
    figure,
    group,
    key,
    paragraph,
    prose,
    section,
    table,
    tag,
    toned,
)
from hybrid.planning.memory_page import memory_section
from hybrid.planning.memory_timeline import Memory
from hybrid.planning.trace import RankTrace
from hybrid.planning.verdict import Verdict
from hybrid.plots import bar

PARTS: dict[str, Colour] = {
    "compute": "green",
    "exposed": "red",
    "copies": "yellow",
    "host_wait": "purple",
    "idle": "grey",
}
"""What a step's time goes to, and the colour it is drawn in."""
TRIED = ("knob", "outcome", "tokens/s, times", "what")
"""Columns of what knobs did."""


def as_json(ranks: Sequence[RankTrace], verdict: Verdict) -> dict[str, Any]:
    """Verdict and ranks as plain data, seconds throughout."""
    return {
        "verdict": {
            **asdict(verdict),
            "knobs": [{"name": k.name, "text": k.text} for k in verdict.knobs],
        },
        "ranks": [
            {
                **{k: v for k, v in asdict(t).items() if k not in ("path", "steps", "ops")},
                "trace": str(t.path),
                "steps": [
                    {**asdict(s), "communication": s.communication, "overlap": s.overlap}
                    for s in t.steps
                ],
                "longest": [{"name": n, "seconds": s, "calls": c} for n, s, c in t.ops],
            }
            for t in ranks
        ],
    }


def to_html(
    ranks: Sequence[RankTrace],
    verdict: Verdict,
    *,
    name: str,
    tried: Sequence[Sequence[str]] = (),
    memories: Sequence[Memory] = (),
) -> str:
    """The whole page.

    Args:
        name: of the project.
        tried: rows by `TRIED`.
        memories: of each rank, where it was recorded.
    """
    knobs = [group(tag("strong", k.name), ": ", prose(k.text)) for k in verdict.knobs]
    return document(
        f"{name} is {verdict.bound}-bound, {1e3 * verdict.seconds:.1f} ms a step",
        *(paragraph(toned(w, "bad")) for w in verdict.warnings),
        bullets(verdict.evidence),
        section(
            "Where the time went",
            key((_told(part), colour) for part, colour in PARTS.items()),
            *(_bar(t) for t in ranks),
        ),
        section(
            "What to try", bullets(knobs), table(TRIED, tried, numbers=(2,)) if tried else ""
        ),
        memory_section(memories),
        section("Each step of each rank", _steps(ranks)),
        section("What took longest", *(_longest(t) for t in ranks)),
        paragraph("The traces open in Perfetto (ui.perfetto.dev) or chrome://tracing.",
                  class_="note"),
    )  # fmt: skip


def _told(part: str) -> str:
    return "exposed communication" if part == "exposed" else part.replace("_", " ")


def _steps(ranks: Sequence[RankTrace]) -> Html:
    rows = []
    for t in ranks:
        for s in t.steps:
            parts = (s.seconds, s.compute, s.matmul, s.exposed, s.overlapped)
            waits = (s.copies, s.host_wait, s.idle, s.input_wait)
            hidden = "" if s.overlap is None else f"{100 * s.overlap:.0f} %"
            shown = [[f"{1e3 * seconds:.1f}" for seconds in some] for some in (parts, waits)]
            rows.append([f"{t.rank}", f"{s.step}", *shown[0], hidden, *shown[1]])
    heads = ("rank", "step", "whole", "compute", "of it matmul", "exposed communication",
             "overlapped", "overlap", "copies", "host wait", "idle", "of these input")  # fmt: skip
    return table(heads, rows, numbers=range(12), caption="Milliseconds")


def _bar(trace: RankTrace) -> Html:
    """One rank's time as a stacked bar."""
    whole = sum(s.seconds for s in trace.steps) or 1.0
    shares = {part: sum(getattr(s, part) for s in trace.steps) / whole for part in PARTS}
    said = ", ".join(f"{_told(part)} {100 * share:.0f} %" for part, share in shares.items())
    label = f"Rank {trace.rank}: {said}"
    drawn = bar(((_told(part), PARTS[part], share) for part, share in shares.items()), label)
    return figure(drawn, f"Rank {trace.rank}", unit=said)


def _longest(trace: RankTrace) -> Html:
    rows = [[n[:100], f"{1e3 * s:.2f}", f"{c:,}"] for n, s, c in trace.ops]
    heads = ("name", "ms", "calls")
    return table(heads, rows, numbers=(1, 2), caption=f"Rank {trace.rank}") if rows else Html("")
