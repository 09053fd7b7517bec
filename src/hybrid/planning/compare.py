"""An advice as text: the rules, what would change the answer, the plans side by side."""

from __future__ import annotations

from rich.table import Table

from hybrid.planning.actual import Row
from hybrid.planning.advise import Turn
from hybrid.planning.plans import Plan
from hybrid.planning.ranges import Range, span
from hybrid.planning.rules import Finding

NAMES = {
    "cluster": "a cluster of GPU nodes",
    "agents": "agents on CPU nodes",
    "hybrid": "hybrid: a cluster for the base, agents for the skills",
    "single": "neither: one served model",
}


def money(figure: Range) -> str:
    """A range of US dollars."""
    return "$" + span(figure)


def turn_text(turn: Turn) -> str:
    """One change, as an instruction with its outcome."""
    value = "none" if turn.value is None else f"{turn.value:g}" if isinstance(
        turn.value, float | int
    ) else str(turn.value)  # fmt: skip
    return f"{turn.field}: {value} would make it {NAMES[turn.answer]}"


def rules_table(findings: tuple[Finding, ...], *, every: bool) -> Table:
    """The rules that apply, or all of them: question, what follows, why, what would change it."""
    table = Table("rule", "", "why", "what would change it")
    for f in findings:
        if f.applies:
            table.add_row(f.rule, f.effect, f"{f.field}: {f.why}", f.change)
        elif every:
            table.add_row(f"[dim]{f.rule}[/]", "[dim]-[/]", f"[dim]{f.why}[/]", "")
    return table


def plans_table(plans: tuple[Plan, ...]) -> Table:
    """One column a plan: cost, parts, training time, latency, limits missed."""
    table = Table("", *(p.kind for p in plans))
    table.add_row("cost", *(f"[bold]{money(p.usd.value)}[/]" for p in plans))
    names = list(dict.fromkeys(name for p in plans for name, _, _ in p.parts))
    for name in names:
        cells = []
        for plan in plans:
            part = next((p for p in plan.parts if p[0] == name), None)
            cells.append(money(part[1].value) if part else "-")
        table.add_row(name, *cells)
    if any(p.training_hours for p in plans):
        table.add_row(
            "training",
            *(span(p.training_hours.value, "h") if p.training_hours else "-" for p in plans),
        )
    if any(p.latency for p in plans):
        for label in ("p50_ms", "p99_ms"):
            table.add_row(
                f"latency {label[:3]}",
                *(span(getattr(p.latency, label), "ms") if p.latency else "-" for p in plans),
            )
    table.add_row("limits missed", *("\n".join(p.misses) or "none" for p in plans))
    return table


def sensitivity_table(plan: Plan, top: int = 6) -> Table:
    """What moves a plan's cost most."""
    table = Table("what matters most", "from – to", "cost then", "source")
    for swing in plan.usd.swings[:top]:
        table.add_row(
            swing.name,
            span(swing.input),
            f"{money(Range(swing.at_low, swing.at_low, swing.at_low))} – "
            f"{money(Range(swing.at_high, swing.at_high, swing.at_high))}",
            swing.input.source,
        )
    return table


def part_notes(plans: tuple[Plan, ...]) -> list[str]:
    """What is to be known of the plans' parts, each once."""
    return list(dict.fromkeys(f"{name}: {n}" for p in plans for name, _, ns in p.parts for n in ns))


def rows_table(rows: list[Row]) -> Table:
    """Predicted against actual."""
    table = Table("predicted against actual", "predicted", "actual", "", "source")
    for row in rows:
        table.add_row(
            row.name,
            span(row.predicted, row.unit),
            span(Range(row.actual, row.actual, row.actual), row.unit),
            row.verdict,
            f"{row.source}; predicted from: {row.predicted.source}",
        )
    return table
