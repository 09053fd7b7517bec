"""The page of a run's report: what it reached, where its time went, its curves and attempts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hybrid.pages import (
    Colour,
    Html,
    data,
    details,
    document,
    gallery,
    group,
    paragraph,
    section,
    swatch,
    table,
    tiles,
)
from hybrid.plots import bar, number
from hybrid.training.goodput import CATEGORIES
from hybrid.training.report_charts import SCRIPT, Line, Points, flops, line_chart

COLOURS: dict[str, Colour] = {
    "productive": "green",
    "recomputed": "orange",
    "data": "purple",
    "checkpoint": "blue",
    "evaluation": "teal",
    "startup": "grey",
    "compile": "yellow",
    "trials": "pink",
    "idle": "red",
    "export": "slate",
    "other": "pale",
}
_STATES = {"open": "has no end recorded: it runs, or was killed", "interrupted": "was interrupted"}


def page(figures: dict[str, Any], curves: Mapping[str, Points]) -> str:
    """The whole page.

    Args:
        figures: what `report.summarise` makes.
        curves: what `report.series` makes.
    """
    restarts = [attempt["from_step"] for attempt in figures["attempts"][1:]]
    loss = [
        Line(name="training", colour="blue", points=curves["loss"]),
        Line(name="held out", colour="orange", points=curves["eval_loss"], dots=True),
    ]
    charts = [
        line_chart("Loss", "nats a token", loss, restarts),
        line_chart("Learning rate", "", [_one("learning rate", curves["lr"])], restarts),
        line_chart("Throughput", "tokens/s", [_one("tokens/s", curves["tokens_per_s"])], restarts),
        line_chart("Gradient norm", "L2", [_one("norm", curves["grad_norm"])], restarts),
    ]
    return document(
        _title(figures),
        paragraph(f"{_clock(figures['started'])} to {_clock(figures['ended'])} UTC", class_="soft"),
        paragraph(f"Ended by: {figures['error']}" if figures["error"] else "", class_="bad"),
        _tiles(figures),
        section("Where the time went", _goodput(figures)),
        section(
            "Curves",
            paragraph("Dashed: the workers began anew." if restarts else "", class_="note"),
            gallery(*charts),
            _values(curves),
        ),
        _trials(figures),
        section("Attempts", _attempts(figures)),
        data("figures", figures),
        script=SCRIPT,
    )


def _one(name: str, points: Points) -> Line:
    return Line(name=name, colour="blue", points=points)


def _title(figures: dict[str, Any]) -> str:
    planned = f" of {figures['steps_planned']:,}" if figures["steps_planned"] else ""
    state = _STATES.get(figures["state"], figures["state"])
    return f"Run {figures['run']} {state} after {figures['steps']:,}{planned} steps"


def _tiles(figures: dict[str, Any]) -> Html:
    planned = figures["steps_planned"]
    entries = [
        ("Goodput", _percent(figures["goodput"]), f"of {figures['wall_s']:,.1f} s wall time"),
        ("Steps", f"{figures['steps']:,}" + (f" of {planned:,}" if planned else ""), ""),
        ("Tokens", f"{figures['tokens']:,}", f"steps done again: {figures['recomputed_steps']:,}"),
        (
            "Loss, nats a token",
            _value(figures["train_loss"]),
            f"held out {_value(figures['eval_loss'])}",
        ),
        (
            "Tokens/s",
            _value(figures["tokens_per_s"]),
            f"{_value(figures['tokens_per_s_wall'])} over all the wall time",
        ),
        ("MFU", _percent(figures["mfu"]), _peaks(figures)),
    ]
    if figures["cost_usd"] is not None:
        more = f"{_value(figures['tokens_per_usd'])} tokens a dollar"
        entries.append(("Cost", f"{figures['cost_usd']:,.4g} USD", more))
    return tiles(entries)


def _peaks(figures: dict[str, Any]) -> str:
    if not figures["peak_flops"]:
        return "no step was made"
    sheet = f"; data sheet {flops(figures['sheet_flops'])}" if figures["sheet_flops"] else ""
    return f"of {flops(figures['peak_flops'])} {figures['peak_source']}{sheet}"


def _goodput(figures: dict[str, Any]) -> Html:
    shares = figures["shares"]
    said = ", ".join(f"{CATEGORIES[k]} {100 * s:.1f} %" for k, s in shares.items() if s >= 0.0005)
    rows = [
        (
            group(swatch(COLOURS[name]), CATEGORIES[name]),
            f"{figures['seconds'][name]:,.2f}",
            f"{100 * share:.1f} %",
        )
        for name, share in shares.items()
    ]
    paused = f"Not counted: {figures['paused_s']:,.0f} s between launches, after an orderly end."
    return group(
        bar(((CATEGORIES[k], COLOURS[k], s) for k, s in shares.items()), f"Wall time: {said}"),
        table(("what", "seconds", "share"), rows, numbers=(1, 2)),
        paragraph(paused if figures["paused_s"] else "", class_="note"),
    )


def _values(curves: Mapping[str, Points]) -> Html:
    """The curves as a table, for those who do not see them: some twenty steps, evenly spaced."""
    steps = [step for step, _ in curves["loss"]]
    if not steps:
        return Html("")
    every = max(1, len(steps) // 20)
    shown = sorted({*steps[::every], steps[-1]})
    names = {"loss": "loss", "lr": "learning rate", "tokens_per_s": "tokens/s", "grad_norm": "norm"}
    by_step = {name: dict(curves[name]) for name in names}
    rows = [[f"{step:,}", *(_value(by_step[name].get(step)) for name in names)] for step in shown]
    made = table(["step", *names.values()], rows, numbers=range(5))
    return details("The curves as a table", made)


def _trials(figures: dict[str, Any]) -> Html:
    if (trials := figures.get("trials")) is None:
        return Html("")
    made = table(trials["heads"], trials["rows"], numbers=(3, 4, 5))
    return section("Strategy trials", paragraph(trials["picked"]), made)


def _attempts(figures: dict[str, Any]) -> Html:
    rows = [
        [
            _clock(a["started"]), f"{a['ended'] - a['started']:,.1f}", f"{a['from_step']:,}",
            f"{a['last_step']:,}", str(a["world_size"]), a["strategy"], a["device"], a["outcome"],
        ]
        for a in figures["attempts"]
    ]  # fmt: skip
    heads = [
        "started (UTC)", "seconds", "from step", "to step", "workers", "strategy", "device", "end",
    ]  # fmt: skip
    return table(heads, rows, numbers=range(1, 5))


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _value(value: float | None) -> str:
    return "–" if value is None else number(value)
