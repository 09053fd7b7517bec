"""An advice as one HTML page that needs no network: answer, rules, plans, and their plots."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybrid.pages import Html, bullets, document, figure, paragraph, prose, section, table, tag
from hybrid.planning.actual import Row
from hybrid.planning.advise import Advice
from hybrid.planning.compare import NAMES, money, part_notes, turn_text
from hybrid.planning.plans import Plan
from hybrid.planning.ranges import Range, shown, span
from hybrid.plots import Axis

_ROW = 46


def to_html(advice: Advice, rows: Sequence[Row] = ()) -> str:
    """The page. Plots: each plan's cost with its range, and what moves the first plan's most."""
    w = advice.workload
    return document(
        f"{w.name}: {NAMES[advice.answer]}",
        *(paragraph(told, class_="bad") for told in (*advice.notes, *advice.warnings)),
        section("Why", _rules(advice)),
        section("What would change the answer", bullets(turn_text(t) for t in advice.turns)),
        section("Plans", *_plans(advice)) if advice.plans else "",
        *(_first(advice.plans[0]) if advice.plans else ()),
        section("Predicted against actual", _actual(rows) if rows else ""),
    )


def _rules(advice: Advice) -> Html:
    """Those that apply, then, beneath, those that do not."""
    rows = [
        (f.rule, f.effect, prose(f"{f.field}: {f.why}"), prose(f.change))
        if f.applies
        else (f.rule, "-", prose(f.why), "")
        for f in sorted(advice.findings, key=lambda f: not f.applies)
    ]
    return table(("rule", "what follows", "why", "what would change it"), rows)


def _plans(advice: Advice) -> tuple[Html, ...]:
    rows = [
        (
            p.kind,
            money(p.usd.value),
            span(p.training_hours.value, "h") if p.training_hours else "-",
            span(p.latency.p50_ms, "ms") if p.latency else "-",
            span(p.latency.p99_ms, "ms") if p.latency else "-",
            "; ".join(p.misses) or "none",
        )
        for p in advice.plans
    ]
    heads = ("plan", "cost", "training", "latency p50", "p99", "limits missed")
    return (
        paragraph(f"Over {shown(advice.workload.horizon_hours)} h of serving."),
        costs_plot(advice.plans),
        table(heads, rows, numbers=range(1, 5)),
        bullets(part_notes(advice.plans)),
    )


def _first(plan: Plan) -> tuple[Html, ...]:
    """What is to be known of the answer's own plan."""
    swings = [(s.name, span(s.input), s.input.source) for s in plan.usd.swings]
    hops = plan.latency.by_hop if plan.latency else ()
    shown_hops = [(name, shown(p50), shown(p99)) for name, p50, p99 in hops]
    moved = (swings_plot(plan), table(("input", "range", "source"), swings)) if swings else ()
    heads = ("hop", "p50, ms", "p99, ms")
    return (
        section(f"What matters most to {plan.kind}", *moved),
        section("Latency by hop", table(heads, shown_hops, numbers=(1, 2)) if hops else ""),
    )


def _actual(rows: Sequence[Row]) -> Html:
    cells = [
        (r.name, span(r.predicted, r.unit), f"{shown(r.actual)} {r.unit}", r.verdict, r.source)
        for r in rows
    ]
    heads = ("figure", "predicted", "actual", "", "source")
    return table(heads, cells, numbers=(1, 2))


def costs_plot(plans: Sequence[Plan]) -> Html:
    """One bar a plan from low to high, a mark at the middle; a logarithmic axis of dollars."""
    bars = [(p.kind, p.usd.value) for p in plans]
    note = "From the 10th to the 90th percentile; the mark: every input at its middle."
    return _bars(bars, "Cost of each plan", note)


def swings_plot(plan: Plan, top: int = 8) -> Html:
    """What the plan costs as each input goes through its range (a tornado chart)."""
    mid = plan.usd.value.mid
    bars = [
        (s.name, Range(min(s.at_low, s.at_high), mid, max(s.at_low, s.at_high)))
        for s in plan.usd.swings[:top]
    ]
    note = "Each input alone goes through its range; the mark: all at their middle."
    return _bars(bars, "Cost by input", note)


def _bars(bars: Sequence[tuple[str, Range]], caption: str, note: str) -> Html:
    """Ranges on a logarithmic axis of dollars, each under its name."""
    low = min(max(r.low, 1e-3) for _, r in bars)
    high = max(min(max(r.high, 1e-3), 1e15) for _, r in bars)
    axis = Axis(low=low / 1.3, high=high * 1.3, log=True)

    def x(usd: float) -> str:
        return f"{100 * axis.at(min(max(usd, low), high)):.2f}%"

    height = _ROW * len(bars) + 8
    drawn = []
    for usd in _ticks(low, high):
        drawn += [
            tag("line", x1=x(usd), x2=x(usd), y1=0, y2=height, class_="grid"),
            tag("text", f"${shown(usd)}", x=x(usd), y=height + 16, text_anchor="middle"),
        ]
    for i, (name, r) in enumerate(bars):
        y, told = i * _ROW + 4, f"{name}: {money(r)}"
        width = 100 * (axis.at(min(max(r.high, low), high)) - axis.at(min(max(r.low, low), high)))
        drawn += [
            tag("text", name, x="6", y=y + 14),
            tag("rect", tag("title", told), x=x(r.low), y=y + 20, height="18",
                width=f"{max(0.3, width):.2f}%", fill="var(--blue)"),
            tag("line", tag("title", told), x1=x(r.mid), x2=x(r.mid), y1=y + 18, y2=y + 40,
                stroke="var(--orange)", stroke_width="3"),
        ]  # fmt: skip
    plot = tag(
        "svg", *drawn, class_="plot rows", height=height, role="img",
        aria_label=f"{caption}, USD: " + "; ".join(f"{name} {money(r)}" for name, r in bars),
    )  # fmt: skip
    return figure(plot, caption, unit="USD, logarithmic", note=note)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between, few enough to be read."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    inside: list[float] = []
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        found = [m * 10.0**e for e in range(first, last + 1) for m in steps]
        inside = [t for t in found if low <= t <= high]
        if len(inside) >= 3:
            break
    inside = inside or [low]
    return inside[:: max(1, math.ceil(len(inside) / 4))]
