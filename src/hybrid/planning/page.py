"""An advice as one HTML page that needs no network: answer, rules, plans, and their plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from hybrid.planning.actual import Row
from hybrid.planning.advise import Advice
from hybrid.planning.compare import NAMES, money, part_notes, turn_text
from hybrid.planning.plans import Plan
from hybrid.planning.ranges import Range, shown, span

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --bar: #4477aa; --mid: #cc6677; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; font-size: 14px; }
td, th { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left;
  vertical-align: top; }
.off { opacity: .6; } text { font: 13px system-ui, sans-serif; fill: currentColor; }
rect { fill: var(--bar); } .axis { stroke: var(--line); } .mid { stroke: var(--mid);
  stroke-width: 3; } .warn { color: #b3261e; }
"""
_WIDTH, _LEFT, _ROW = 760, 210, 30


def to_html(advice: Advice, rows: Sequence[Row] = ()) -> str:
    """The page. Plots: each plan's cost with its range, and what moves the first plan's most."""
    w = advice.workload
    parts = [
        f"<h1>{escape(w.name)}: {escape(NAMES[advice.answer])}</h1>",
        *(f'<p class="warn">{escape(t)}</p>' for t in (*advice.notes, *advice.warnings)),
        "<h2>Why</h2>",
        _table(
            ("rule", "what follows", "why", "what would change it"),
            [
                (
                    f.rule,
                    f.effect if f.applies else "-",
                    f"{f.field}: {f.why}" if f.applies else f.why,
                    f.change if f.applies else "",
                )
                for f in sorted(advice.findings, key=lambda f: not f.applies)
            ],
        ),
    ]
    if advice.turns:
        turns = "".join(f"<li>{escape(turn_text(t))}</li>" for t in advice.turns)
        parts.append(f"<h2>What would change the answer</h2><ul>{turns}</ul>")
    if advice.plans:
        parts += [
            f"<h2>Plans</h2><p>Over {shown(w.horizon_hours)} h of serving; bars from the 10th to"
            " the 90th percentile, the mark where every input is at its middle.</p>",
            costs_plot(advice.plans),
            _table(
                ("plan", "cost", "training", "latency p50", "p99", "limits missed"),
                [
                    (
                        p.kind,
                        money(p.usd.value),
                        span(p.training_hours.value, "h") if p.training_hours else "-",
                        span(p.latency.p50_ms, "ms") if p.latency else "-",
                        span(p.latency.p99_ms, "ms") if p.latency else "-",
                        "; ".join(p.misses) or "none",
                    )
                    for p in advice.plans
                ],
            ),
            "<ul>" + "".join(f"<li>{escape(n)}</li>" for n in part_notes(advice.plans)) + "</ul>",
        ]
        first = advice.plans[0]
        if first.usd.swings:
            parts += [
                f"<h2>What matters most to {escape(first.kind)}</h2>",
                swings_plot(first),
                _table(
                    ("input", "range", "source"),
                    [(s.name, span(s.input), s.input.source) for s in first.usd.swings],
                ),
            ]
        if first.latency:
            hops = [(n, f"{shown(a)} ms", f"{shown(b)} ms") for n, a, b in first.latency.by_hop]
            parts += ["<h2>Latency by hop</h2>", _table(("hop", "p50", "p99"), hops)]
    if rows:
        parts += [
            "<h2>Predicted against actual</h2>",
            _table(
                ("figure", "predicted", "actual", "", "source"),
                [
                    (r.name, span(r.predicted, r.unit), f"{shown(r.actual)} {r.unit}", r.verdict,
                     r.source)
                    for r in rows
                ],
            ),
        ]  # fmt: skip
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(w.name)}</title>'
        f"<style>{_STYLE}</style><body>{body}</body></html>\n"
    )


def costs_plot(plans: Sequence[Plan]) -> str:
    """SVG: one bar a plan from low to high, a mark at the middle; a logarithmic axis of dollars."""
    bars = [(p.kind, p.usd.value) for p in plans]
    return _bars(bars, "cost of each plan, USD")


def swings_plot(plan: Plan, top: int = 8) -> str:
    """SVG: what the plan costs as each input goes through its range (a tornado chart)."""
    mid = plan.usd.value.mid
    bars = [
        (s.name, Range(min(s.at_low, s.at_high), mid, max(s.at_low, s.at_high)))
        for s in plan.usd.swings[:top]
    ]
    return _bars(bars, "cost as each input goes through its range, USD")


def _bars(bars: Sequence[tuple[str, Range]], label: str) -> str:
    low = min(max(r.low, 1e-3) for _, r in bars)
    high = max(min(max(r.high, 1e-3), 1e15) for _, r in bars)
    bottom, top = math.log10(low / 1.3), math.log10(high * 1.3)

    def x(usd: float) -> float:
        at = (math.log10(min(max(usd, low), high)) - bottom) / (top - bottom)
        return _LEFT + at * (_WIDTH - _LEFT - 20)

    height = _ROW * len(bars) + 50
    drawn = []
    for usd in _ticks(low, high):
        drawn.append(
            f'<line class="axis" x1="{x(usd):.1f}" x2="{x(usd):.1f}" y1="22" y2="{height - 22}"/>'
            f'<text x="{x(usd):.1f}" y="{height - 6}" text-anchor="middle">${shown(usd)}</text>'
        )
    for i, (name, r) in enumerate(bars):
        y = 28 + i * _ROW
        drawn.append(
            f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{x(r.low):.1f}" y="{y + 2}" height="16"'
            f' width="{max(2.0, x(r.high) - x(r.low)):.1f}"/>'
            f'<line class="mid" x1="{x(r.mid):.1f}" x2="{x(r.mid):.1f}" y1="{y - 1}" y2="{y + 21}">'
            f"<title>{escape(money(r))}</title></line>"
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" role="img"'
        f' aria-label="{escape(label)}">'
        f'<text x="{_LEFT}" y="14">{escape(label)}</text>{"".join(drawn)}</svg>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between, few enough to be read."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
    inside = [t for t in found if low <= t <= high] or [low]
    return inside[:: max(1, math.ceil(len(inside) / 6))]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in r) + "</tr>" for r in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
