"""A sweep as one HTML page that needs nothing else: the curve, the table, the check, the advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape

from hybrid.planning.sweep import MODES, Sweep, law

STYLE = """
:root { color-scheme: light dark; --line: #8884; --a: #0969da; --b: #bf3989; --good: #1a7f37;
  --bad: #cf222e; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; font-size: 14px; }
td, th { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: right;
  font-variant-numeric: tabular-nums; }
td:first-child, th:first-child, td.t { text-align: left; }
figure { margin: 1rem 0; } figcaption { font-size: 13px; }
svg { background: #8881; max-width: 100%; }
svg text { font-size: 11px; fill: currentColor; } .passed { color: var(--good); }
.failed, .warning { color: var(--bad); } small, .note { opacity: .8; }
"""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 300, 72, 16, 14, 36


def to_html(sweeps: Sequence[Sweep], *, name: str, when: float) -> str:
    """The whole page.

    Args:
        name: of the project.
        when: UNIX time.
    """
    day = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M UTC")
    title = f"How {name} scales"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{day}. The real training job, timed after a warm-up; medians"
        " of the steps, spread is half of their middle half.</p>",
        *(_section(sweep) for sweep in sweeps),
    ]
    return "\n".join(parts) + "\n</body></html>\n"


def _section(sweep: Sweep) -> str:
    advice, check = sweep.recommendation, sweep.check
    causes = "".join(f"<li>{escape(cause)}</li>" for cause in check.causes)
    notes = "".join(f'<li class="note">{escape(note)}</li>' for note in sweep.fit.notes)
    fewest, most = advice.elastic
    return "\n".join(
        [
            f"<h2>{sweep.mode.capitalize()} scaling</h2><p>{escape(MODES[sweep.mode])}.</p>",
            f"<p><strong>training.workers: {advice.workers}</strong>, elastic"
            f" <strong>[{fewest}, {most}]</strong>. {escape(advice.why)}.</p>",
            chart(sweep),
            _table(sweep),
            f'<p class="{check.outcome.replace(" ", "-")}"><strong>{escape(check.name)}'
            f" {check.outcome}</strong>: {escape(check.text)}.</p>"
            + (f"<p>Likely causes:</p><ul>{causes}</ul>" if causes else ""),
            f"<p>{escape(law(sweep.fit))}.</p><ul>{notes}</ul>",
        ]
    )


def _table(sweep: Sweep) -> str:
    head = ["workers", "tokens/s", "spread", "speed-up", "efficiency", "tokens/$", "law says"]
    rows = []
    for r in sweep.rows:
        cells = [
            f"{r.workers}",
            f"{r.rate:,.0f}",
            f"± {100 * r.spread:.1f} %",
            f"{r.speedup:.2f}",
            f"{100 * r.efficiency:.0f} %",
            "" if r.tokens_per_usd is None else f"{r.tokens_per_usd:,.0f}",
            "" if r.predicted is None else f"{r.predicted:,.0f}",
        ]
        rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    top = "".join(f"<th>{h}</th>" for h in head)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def chart(sweep: Sweep) -> str:
    """Tokens a second over workers as SVG: points with their spread, the law, and ideal growth."""
    last = sweep.rows[-1].workers
    knee = sweep.fit.knee.value if sweep.fit.knee else math.nan
    right = max(last * 1.25, last + 1, sweep.recommendation.elastic[1] * 1.1)
    if knee <= 3 * last:
        right = max(right, 1.15 * knee)
    top = 1.12 * max(r.rate * (1 + r.spread) for r in sweep.rows)
    if sweep.fit.model != "none":
        top = max(top, 1.12 * sweep.fit.rate(min(right, knee) if knee == knee else right))

    def x(workers: float) -> float:
        return _LEFT + workers / right * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / top * (_HEIGHT - _TOP - _BOTTOM)

    def line(rate: Callable[[float], float], style: str) -> str:
        at = [1 + (right - 1) * i / 120 for i in range(121)]
        points = " ".join(f"{x(n):.1f},{y(rate(n)):.1f}" for n in at if rate(n) <= top)
        return f'<polyline points="{points}" fill="none" {style}/>'

    one = next((r.rate for r in sweep.rows if r.workers == 1), sweep.fit.gamma)
    base = _HEIGHT - _BOTTOM
    parts = [
        f'<path d="M{_LEFT} {_TOP}V{base}H{_WIDTH - _RIGHT}" fill="none" stroke="currentColor"'
        ' stroke-opacity=".5"/>',
        line(
            lambda n: one * n, 'stroke="currentColor" stroke-opacity=".45" stroke-dasharray="4 4"'
        ),
    ]
    if sweep.fit.model != "none":
        parts.append(line(sweep.fit.rate, 'stroke="var(--a)" stroke-width="1.8"'))
    if knee <= right:
        parts.append(
            f'<line x1="{x(knee):.1f}" x2="{x(knee):.1f}" y1="{_TOP}" y2="{base}"'
            f' stroke="var(--b)" stroke-dasharray="3 3"/><text x="{x(knee) + 4:.1f}"'
            f' y="{_TOP + 10}">knee {knee:.1f}</text>'
        )
    for r in sweep.rows:
        low, high = y(r.rate * (1 - r.spread)), y(r.rate * (1 + r.spread))
        at = x(r.workers)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="var(--a)"/>'
            f'<circle cx="{at:.1f}" cy="{y(r.rate):.1f}" r="4" fill="var(--a)"><title>{r.workers}'
            f" workers: {r.rate:,.0f} tokens/s, speed-up {r.speedup:.2f}</title></circle>"
            f'<text x="{at:.1f}" y="{base + 16}" text-anchor="middle">{r.workers}</text>'
        )
    parts.append(
        f'<text x="4" y="{_TOP + 8}">{top:,.0f}</text><text x="4" y="{base}">0</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">workers</text>'
    )
    told = "; ".join(f"{r.workers}: {r.rate:,.0f}" for r in sweep.rows)
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        f' role="img" aria-label="tokens a second by workers: {told}">{"".join(parts)}</svg>'
        "<figcaption>tokens a second over workers; dashed: each worker as fast as the first; line:"
        " the fitted law</figcaption></figure>"
    )
