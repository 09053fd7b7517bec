"""The report as one HTML page that needs nothing else: verdicts, findings, readings and curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

from hybrid.audit.reading import Reading
from hybrid.audit.report import (
    NodeReport,
    changes,
    costs,
    expectation,
    forgeable,
    letter,
    shown,
    worst_first,
)

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --mid: #9a6700; --bad: #cf222e; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; font-size: 14px; }
td, th { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left;
  vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.genuine, .fit { color: var(--good); } .unknown, .degraded, .note { color: var(--mid); }
.contradicted, .unfit { color: var(--bad); } .tag { font-weight: 600; }
figure { display: inline-block; margin: .5rem 1rem .5rem 0; } figcaption { font-size: 13px; }
svg { background: #8881; } pre { white-space: pre-wrap; background: #8881; padding: 1rem; }
small { opacity: .75; }
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 380, 200, 52, 24


def to_html(
    nodes: Sequence[NodeReport], *, level: str, when: float, usd_per_hour: float | None = None
) -> str:
    """The whole page.

    Args:
        nodes: of one audit.
        level: "quick", "full", or where saved outputs were read "saved outputs".
        when: UNIX time.
        usd_per_hour: price of one node.
    """
    day = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M UTC")
    money = {c.node: c for c in costs(nodes, usd_per_hour)}
    count = f"{len(nodes)} node" + "s" * (len(nodes) != 1)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Audit of {count}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Audit of {count}</h1><p>{escape(level)}, {day}. <em>Identity</em>: is it"
        " what is paid for? <em>Health</em>: is it well? Claims alone leave identity unknown.</p>",
        _summary(nodes),
    ]
    if money:
        parts.append(_money(nodes, usd_per_hour))
    for node in nodes:
        parts += [
            f"<h2>{escape(node.result.name)} {_tag(node.verdict.identity)}"
            f" {_tag(node.verdict.health)}</h2>",
            _findings(node),
            _changes(node),
            "".join(_figure(r) for r in node.result.readings if len(r.curve) > 1),
            _readings(node.result.readings),
            "<details><summary>A text for the seller</summary><pre>"
            + escape(letter(node, money.get(node.result.name), when=when))
            + "</pre></details>",
        ]
    return "\n".join(p for p in parts if p) + "\n</body></html>\n"


def _tag(word: str) -> str:
    return f'<span class="tag {escape(word)}">{escape(word)}</span>'


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    top = "".join(f"<th>{h}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _summary(nodes: Sequence[NodeReport]) -> str:
    rows = []
    for node in nodes:
        for gpu in node.verdict.gpus or [None]:
            rows.append(
                [
                    escape(node.result.name),
                    "" if gpu is None else str(gpu.gpu),
                    "" if gpu is None else escape(gpu.product or gpu.name or "?"),
                    _tag((gpu or node.verdict).identity),
                    _tag((gpu or node.verdict).health),
                    "" if gpu is None else escape(", ".join(gpu.missing)),
                ]
            )
    return _rows(("node", "GPU", "product", "identity", "health", "not measured"), rows)


def _money(nodes: Sequence[NodeReport], usd_per_hour: float | None) -> str:
    rows = [
        [
            escape(c.node), escape(c.reading), f"{c.value:.4g} {escape(c.unit)}",
            f"{100 * c.share:.0f} % of {escape(c.against)}",
            "" if c.usd_lost_per_hour is None else f"{c.usd_lost_per_hour:.2f} USD an hour",
        ]
        for c in costs(nodes, usd_per_hour)
    ]  # fmt: skip
    return "<h2>In money</h2>" + _rows(("node", "figure", "value", "reaches", "costs"), rows)


def _findings(node: NodeReport) -> str:
    rows = [
        [
            _tag(f.severity), escape(f.kind), escape(f.text),
            "<br>".join(
                f"{escape(shown(r))} <small>{escape(r.source)}, {forgeable(r)}</small>"
                for r in f.readings[:6]
            ),
            escape(expectation(f)),
        ]
        for f in worst_first(node.verdict.findings)
    ]  # fmt: skip
    if not rows:
        return "<p>No findings.</p>"
    return _rows(("", "kind", "finding", "given away by", "expected"), rows)


def _changes(node: NodeReport) -> str:
    if node.previous is None:
        return ""
    rows = [
        [
            "" if c.gpu is None else str(c.gpu), escape(c.name), escape(_short(c.before)),
            escape(_short(c.now)), "" if c.ratio is None else f"{100 * c.ratio:.0f} %",
        ]
        for c in changes(node.result.readings, node.previous.readings)
    ]  # fmt: skip
    if not rows:
        return "<p>Nothing changed since the earlier audit.</p>"
    head = ("GPU", "reading", "before", "now", "now / before")
    return "<h3>Since the earlier audit</h3>" + _rows(head, rows)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:120]


def _readings(readings: Sequence[Reading]) -> str:
    rows = [
        [
            "" if r.gpu is None else str(r.gpu), escape(r.name),
            f"{escape(_short(r.value))} {escape(r.unit)}", escape(r.source),
            "yes" if r.fakeable else "no",
        ]
        for r in readings
        if r.value is not None
    ]  # fmt: skip
    head = ("GPU", "reading", "value", "source", "fakeable")
    return f"<details><summary>{len(rows)} readings</summary>{_rows(head, rows)}</details>"


def _figure(r: Reading) -> str:
    """A curve as SVG; sizes in bytes get a logarithmic axis."""
    points = [(x, y) for x, y in r.curve if math.isfinite(x) and math.isfinite(y)]
    if len(points) < 2:
        return ""
    wide = min(x for x, _ in points) > 0 and points[-1][0] / max(points[0][0], 1e-12) >= 32
    xs = [math.log2(x) if wide else x for x, _ in points]
    ys = [y for _, y in points]
    left, right, top = min(xs), max(xs), max(0.0, *ys)

    def place(x: float, y: float) -> str:
        across = (x - left) / ((right - left) or 1.0)
        up = y / (top or 1.0)
        return (
            f"{_LEFT + across * (_WIDTH - _LEFT - 8):.1f},"
            f"{(_HEIGHT - _BOTTOM) - max(0.0, up) * (_HEIGHT - _BOTTOM - 12):.1f}"
        )

    line = " ".join(place(x, y) for x, y in zip(xs, ys, strict=True))
    gpu = "" if r.gpu is None else f" of GPU {r.gpu}"
    base = _HEIGHT - _BOTTOM
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        f' role="img" aria-label="{escape(r.name)}{gpu}">'
        f'<path d="M{_LEFT} 12V{base}H{_WIDTH - 8}" fill="none" stroke="currentColor"'
        ' stroke-opacity=".5"/>'
        f'<polyline points="{line}" fill="none" stroke="#0969da" stroke-width="1.8"/>'
        f'<g font-size="11" fill="currentColor"><text x="4" y="18">{top:.3g}</text>'
        f'<text x="4" y="{base}">0</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">{_axis(points[0][0], wide)}</text>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 8}" text-anchor="end">'
        f"{_axis(points[-1][0], wide)}</text></g></svg>"
        f"<figcaption>{escape(r.name)}{gpu}, {escape(r.unit)}</figcaption></figure>"
    )


def _axis(value: float, is_bytes: bool) -> str:
    if not is_bytes:
        return f"{value:.3g}"
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} B"
