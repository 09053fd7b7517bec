"""A sweep as one HTML page that needs nothing else: the advice, the curve, the table, the check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from hybrid.pages import (
    Html,
    Tone,
    bullets,
    document,
    figure,
    paragraph,
    prose,
    section,
    sentence,
    table,
    tag,
    toned,
)
from hybrid.planning.sweep import MODES, Sweep, law
from hybrid.plots import Axis, Plot, ticks

_TONES: dict[str, Tone] = {"passed": "good", "failed": "bad", "not measured": "mid"}


def to_html(sweeps: Sequence[Sweep], *, name: str, when: float) -> str:
    """The whole page.

    Args:
        name: of the project.
        when: UNIX time.
    """
    day = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M UTC")
    said = [f"{s.recommendation.workers} by {s.mode} scaling" for s in sweeps]
    return document(
        f"Workers worth having for {name}: {', '.join(said)}",
        paragraph(
            f"{day}. The real training job, timed after a warm-up; medians of the steps, spread is"
            " half of their middle half.",
            class_="soft",
        ),
        *(_section(sweep) for sweep in sweeps),
    )


def _section(sweep: Sweep) -> Html:
    advice, check = sweep.recommendation, sweep.check
    fewest, most = advice.elastic
    verdict = toned(f"{check.name} {check.outcome}", _TONES[check.outcome])
    return section(
        sentence(f"{sweep.mode} scaling"),
        paragraph(
            tag("strong", f"training.workers: {advice.workers}"), ", elastic ",
            tag("strong", f"[{fewest}, {most}]"), ": ", prose(advice.why), ".",
        ),
        paragraph(sentence(MODES[sweep.mode]) + ".", class_="note"),
        paragraph(verdict, f": {check.text}."),
        paragraph("Likely causes:" if check.causes else ""),
        bullets(map(prose, check.causes)),
        chart(sweep),
        _table(sweep),
        paragraph(f"{law(sweep.fit)}."),
        bullets(sweep.fit.notes, class_="note"),
    )  # fmt: skip


def _table(sweep: Sweep) -> Html:
    heads = ("workers", "tokens/s", "spread", "speed-up", "efficiency", "tokens/$", "law says")
    rows = [
        (
            f"{r.workers}",
            f"{r.rate:,.0f}",
            f"± {100 * r.spread:.1f} %",
            f"{r.speedup:.2f}",
            f"{100 * r.efficiency:.0f} %",
            "" if r.tokens_per_usd is None else f"{r.tokens_per_usd:,.0f}",
            "" if r.predicted is None else f"{r.predicted:,.0f}",
        )
        for r in sweep.rows
    ]
    return table(heads, rows, numbers=range(7))


def chart(sweep: Sweep) -> Html:
    """Tokens a second over workers: points with their spread, the law, and ideal growth."""
    last = sweep.rows[-1].workers
    knee = sweep.fit.knee.value if sweep.fit.knee else math.nan
    right = max(last * 1.25, last + 1, sweep.recommendation.elastic[1] * 1.1)
    if knee <= 3 * last:
        right = max(right, 1.15 * knee)
    top = max(r.rate * (1 + r.spread) for r in sweep.rows)
    if sweep.fit.model != "none":
        top = max(top, sweep.fit.rate(min(right, knee) if knee == knee else right))
    apart = [last]  # counts whose labels do not run into one another
    for count in sorted((r.workers for r in sweep.rows), reverse=True):
        if apart[-1] - count >= right * 0.02 * (1 + len(str(count))):
            apart.append(count)
    marked = ticks(0, 1.12 * top)
    plot = Plot(
        Axis(low=0, high=right, ticks=apart, told=lambda n: f"{n:.0f}"),
        Axis(low=0, high=marked[-1], ticks=marked, told=lambda rate: f"{rate:,.0f}"),
        across="workers",
        height=280,
    )
    one = next((r.rate for r in sweep.rows if r.workers == 1), sweep.fit.gamma)
    ideal = min(right, marked[-1] / one)
    plot.curve([(0, 0), (ideal, one * ideal)], "grey", dashed=True)
    if sweep.fit.model != "none":
        at = [1 + (right - 1) * i / 120 for i in range(121)]
        rates = [(n, sweep.fit.rate(n)) for n in at]
        plot.curve([(n, rate) for n, rate in rates if rate <= marked[-1]], "blue")
    if knee <= right:
        plot.mark(knee, "pink", f"knee {knee:.1f}", written=True)
    for r in sweep.rows:
        plot.whisker(r.workers, r.rate * (1 - r.spread), r.rate * (1 + r.spread), "blue")
        said = f"{r.workers} workers: {r.rate:,.0f} tokens/s, speed-up {r.speedup:.2f}"
        plot.dot(r.workers, r.rate, "blue", said)
    told = "; ".join(f"{r.workers}: {r.rate:,.0f}" for r in sweep.rows)
    return figure(
        plot.svg(f"tokens a second by workers: {told}"),
        "Throughput",
        unit="tokens/s",
        note="Dashed: each worker as fast as the first. Line: the fitted law.",
    )
