"""The report as one HTML page that needs nothing else: verdicts, findings, readings and curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

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
from hybrid.pages import (
    Html,
    Tone,
    details,
    document,
    figure,
    gallery,
    group,
    paragraph,
    section,
    sentence,
    table,
    tag,
    toned,
)
from hybrid.plots import Axis, Plot, number

_TONES: dict[str, Tone] = {
    "genuine": "good", "fit": "good", "unknown": "mid", "degraded": "mid", "note": "mid",
    "contradicted": "bad", "unfit": "bad",
}  # fmt: skip
_CURVES = {
    "l2_bytes": ("bytes that are read over", "ns a load"),
    "cache_bytes": ("bytes that are read over", "ns a load"),
    "chunk_": ("GiB into the memory", ""),
    "matmul_": ("repetition", ""),
    "bw_gib_s": ("bytes of a message", ""),
}
"""By part of a reading's name: what its curve is over, and its unit where it is another."""
_WORST = ("contradicted", "unfit", "degraded", "unknown")


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
    nodes = sorted(nodes, key=lambda node: min(_rank(w) for w in _words(node)))
    parts = []
    for node in nodes:
        name = node.result.name
        parts.append(
            tag(
                "section",
                tag("h2", name, ": ", _word(node.verdict.identity), ", ",
                    _word(node.verdict.health)),
                _findings(node),
                _changes(node),
                gallery(*(_figure(r) for r in node.result.readings)),
                _readings(node.result.readings),
                details(
                    "A text for the seller", tag("pre", letter(node, money.get(name), when=when))
                ),
            )
        )  # fmt: skip
    return document(
        _title(nodes),
        paragraph(
            f"{sentence(level)}, {day}. ", tag("em", "Identity"),
            ": is it what is paid for? ", tag("em", "Health"),
            ": is it well? Claims alone leave identity unknown.",
        ),
        _summary(nodes),
        section("In money", _money(nodes, usd_per_hour)),
        *parts,
    )  # fmt: skip


def _title(nodes: Sequence[NodeReport]) -> str:
    """What there is against the nodes, in numbers, or that there is nothing."""
    count = f"{len(nodes)} node" + "s" * (len(nodes) != 1)
    held = [word for node in nodes for word in _words(node)]
    told = {"unknown": "of unknown identity"}
    said = [f"{n} {told.get(word, word)}" for word in _WORST if (n := held.count(word))]
    return f"Audit of {count}: {', '.join(said) or 'genuine and fit'}"


def _words(node: NodeReport) -> tuple[str, str]:
    return node.verdict.identity, node.verdict.health


def _rank(word: str) -> int:
    """How early a verdict is to be read: 0 is the worst."""
    return _WORST.index(word) if word in _WORST else len(_WORST)


def _word(word: str) -> Html:
    return toned(word, _TONES.get(word))


def _summary(nodes: Sequence[NodeReport]) -> Html:
    rows = []
    for node in nodes:
        for gpu in node.verdict.gpus or [None]:
            rows.append(
                [
                    node.result.name,
                    "" if gpu is None else str(gpu.gpu),
                    "" if gpu is None else gpu.product or gpu.name or "?",
                    _word((gpu or node.verdict).identity),
                    _word((gpu or node.verdict).health),
                    "" if gpu is None else ", ".join(gpu.missing),
                ]
            )
    return table(("node", "GPU", "product", "identity", "health", "not measured"), rows)


def _money(nodes: Sequence[NodeReport], usd_per_hour: float | None) -> Html:
    rows = [
        [
            c.node, c.reading, f"{c.value:.4g} {c.unit}", f"{100 * c.share:.0f} % of {c.against}",
            "" if c.usd_lost_per_hour is None else f"{c.usd_lost_per_hour:.2f} USD an hour",
        ]
        for c in costs(nodes, usd_per_hour)
    ]  # fmt: skip
    heads = ("node", "figure", "value", "reaches", "costs")
    return table(heads, rows, numbers=(2, 4)) if rows else Html("")


def _findings(node: NodeReport) -> Html:
    rows = []
    for f in worst_first(node.verdict.findings):
        given = [
            group(shown(r), " ", tag("small", f"{r.source}, {forgeable(r)}"), tag("br"))
            for r in f.readings[:6]
        ]
        rows.append([_word(f.severity), f.kind, f.text, group(*given), expectation(f)])
    if not rows:
        return paragraph("No findings.")
    return table(("", "kind", "finding", "given away by", "expected"), rows)


def _changes(node: NodeReport) -> Html:
    if node.previous is None:
        return Html("")
    rows = [
        [
            "" if c.gpu is None else str(c.gpu), c.name, _value(c.name, c.before),
            _value(c.name, c.now),
            "" if c.ratio is None else f"{100 * c.ratio:.0f} %",
        ]
        for c in changes(node.result.readings, node.previous.readings)
    ]  # fmt: skip
    if not rows:
        return paragraph("Nothing changed since the earlier audit.")
    heads = ("GPU", "reading", "before", "now", "now / before")
    return table(heads, rows, numbers=(2, 3, 4), caption="Since the earlier audit")


def _value(name: str, value: object, unit: str = "") -> str:
    """With its unit; bytes in one that fits."""
    if isinstance(value, int | float) and name.endswith("_bytes"):
        return _size(value)
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)[:120]
    return f"{shown} {unit}".rstrip()


def _readings(readings: Sequence[Reading]) -> Html:
    rows = [
        [
            "" if r.gpu is None else str(r.gpu), r.name, _value(r.name, r.value, r.unit), r.source,
            "yes" if r.fakeable else "no",
        ]
        for r in readings
        if r.value is not None
    ]  # fmt: skip
    heads = ("GPU", "reading", "value", "source", "fakeable")
    return details(f"{len(rows)} readings", table(heads, rows))


def _figure(r: Reading) -> Html:
    """A curve, where a reading has one; sizes in bytes get a logarithmic axis."""
    points = [(x, y) for x, y in r.curve if math.isfinite(x) and math.isfinite(y)]
    if len(points) < 2:
        return Html("")
    across, unit = next((told for part, told in _CURVES.items() if part in r.name), ("", ""))
    unit = unit or r.unit
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    in_bytes = low > 0 and high / low >= 32
    marked = [low, math.sqrt(low) * math.sqrt(high), high] if in_bytes else [low, high]
    plot = Plot(
        Axis(low=low, high=high if high > low else low + 1, ticks=marked, log=in_bytes,
             told=_size if in_bytes else number),
        Axis.upwards([0.0, *(y for _, y in points)]),
        across=across,
        height=160,
    )  # fmt: skip
    plot.curve(points, "blue")
    title = r.name if r.gpu is None else f"{r.name} of GPU {r.gpu}"
    return figure(plot.svg(f"{title}: {unit} by {across}"), title, unit=unit)


def _size(count: float) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} B"
