"""A profile as one HTML page: where each rank's steps went, the verdict, its evidence and knobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from hybrid.planning.scaling_page import STYLE
from hybrid.planning.trace import RankTrace
from hybrid.planning.verdict import Verdict

PARTS = (
    ("compute", "#1a7f37"),
    ("exposed", "#cf222e"),
    ("copies", "#9a6700"),
    ("host_wait", "#8250df"),
    ("idle", "#8c959f"),
)
"""What a step's time goes to, and the colour it is drawn in."""
_WIDTH = 640


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
    ranks: Sequence[RankTrace], verdict: Verdict, *, name: str, tried: str = "", memory: str = ""
) -> str:
    """The whole page.

    Args:
        name: of the project.
        tried: HTML of what knobs did.
        memory: HTML of `memory_page.section`.
    """
    title = f"{name} is {verdict.bound}-bound"
    warnings = "".join(
        f'<p class="warning"><strong>{escape(w)}</strong></p>' for w in verdict.warnings
    )
    key = " ".join(
        f'<span style="color:{colour}">■</span> {escape(part.replace("_", " "))}'
        for part, colour in PARTS
    )
    rows = [
        [
            f"{t.rank}",
            f"{s.step}",
            f"{1e3 * s.seconds:.1f}",
            f"{1e3 * s.compute:.1f}",
            f"{1e3 * s.matmul:.1f}",
            f"{1e3 * s.exposed:.1f}",
            f"{1e3 * s.overlapped:.1f}",
            "" if s.overlap is None else f"{100 * s.overlap:.0f} %",
            f"{1e3 * s.copies:.1f}",
            f"{1e3 * s.host_wait:.1f}",
            f"{1e3 * s.idle:.1f}",
            f"{1e3 * s.input_wait:.1f}",
        ]
        for t in ranks
        for s in t.steps
    ]
    head = ["rank", "step", "ms", "compute", "of it matmul", "exposed communication", "overlapped",
            "overlap", "copies", "host wait", "idle", "of these input"]  # fmt: skip
    evidence = "".join(f"<li>{escape(e)}</li>" for e in verdict.evidence)
    knobs = "".join(
        f"<li><strong>{escape(k.name)}</strong>: {escape(k.text)}</li>" for k in verdict.knobs
    )
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>{warnings}<ul>{evidence}</ul>",
            f"<p>{key}</p>",
            *(_bar(t) for t in ranks),
            f"<h2>What to try</h2><ul>{knobs}</ul>{tried}",
            memory,
            "<h2>Each step of each rank</h2>" + table(head, rows),
            "<h2>What took longest</h2>",
            *(_longest(t) for t in ranks),
            "<p><small>The traces open in Perfetto (ui.perfetto.dev) or chrome://tracing.</small></p>"
            "</body></html>\n",
        ]
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _bar(trace: RankTrace) -> str:
    """One rank's time as a stacked bar."""
    whole, at, parts = sum(s.seconds for s in trace.steps) or 1.0, 0.0, []
    told = []
    for part, colour in PARTS:
        share = sum(getattr(s, part) for s in trace.steps) / whole
        told.append(f"{part.replace('_', ' ')} {100 * share:.0f} %")
        parts.append(
            f'<rect x="{at:.1f}" y="0" width="{share * _WIDTH:.1f}" height="22" fill="{colour}">'
            f"<title>{told[-1]}</title></rect>"
        )
        at += share * _WIDTH
    label = f"rank {trace.rank}: {', '.join(told)}"
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} 22" width="{_WIDTH}" height="22" role="img"'
        f' aria-label="{label}">{"".join(parts)}</svg><figcaption>{label}</figcaption></figure>'
    )


def _longest(trace: RankTrace) -> str:
    rows = [[n[:100], f"{1e3 * s:.2f}", f"{c}"] for n, s, c in trace.ops]
    return f"<h3>Rank {trace.rank}</h3>" + table(["name", "ms", "calls"], rows)
