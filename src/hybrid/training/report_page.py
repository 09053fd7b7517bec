"""The page of a run's report: one HTML file with everything in it, for light and dark screens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from hybrid.training.goodput import CATEGORIES
from hybrid.training.report_charts import Line, Points, flops, line_chart, number, stacked_bar

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --rule: #d9dee3; --page: #fff;
  --panel: #f5f7f9; --a: #1f6feb; --b: #b35900;
  --productive: #2a7f4f; --recomputed: #b35900; --data: #6f42c1; --checkpoint: #1f6feb;
  --evaluation: #0f8b8d; --startup: #8a929b; --compile: #c2a300; --trials: #d16ba5;
  --idle: #c0392b; --export: #4f6272; --other: #c4cad0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --soft: #9aa5b1; --rule: #343b43;
  --page: #12161b; --panel: #1b2128; --a: #6cb0ff; --b: #f0a35e;
  --productive: #4fbf82; --recomputed: #f0a35e; --data: #b392f0; --checkpoint: #6cb0ff;
  --evaluation: #4fc3c5; --startup: #8d97a1; --compile: #e3c94a; --trials: #ec9cc6;
  --idle: #ff7b72; --export: #8fa5b8; --other: #4a525b; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.35rem; margin: 0 } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem }
.sub, small, .none, .reading { color: var(--soft) } .error { color: var(--idle) }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .75rem;
  margin: 1rem 0 }
dl div { background: var(--panel); border-radius: 6px; padding: .6rem .8rem }
dt { color: var(--soft); font-size: .85rem } dd { margin: 0; font-size: 1.15rem }
dd small { display: block; font-size: .8rem }
figure { margin: 1rem 0 } figcaption { font-weight: 600 }
svg.chart { width: 100%; height: auto; display: block } svg.bar { width: 100%; height: 36px }
.grid { stroke: var(--rule) } .tick { fill: var(--soft); font-size: 11px; text-anchor: end }
.tick.x { text-anchor: middle } .restart { stroke: var(--idle); stroke-dasharray: 4 4 }
.cursor { stroke: var(--soft) } .curve { fill: none; stroke-width: 2; stroke-linejoin: round }
.curve.a { stroke: var(--a) } .curve.b { stroke: var(--b) }
.dot.a { fill: var(--a) } .dot.b { fill: var(--b) }
.dot { stroke: var(--page); stroke-width: 1.5 }
.key { margin: 0 } .key span { margin-right: 1rem }
.key i, td i { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .4em } .key i.a { background: var(--a) } .key i.b { background: var(--b) }
.reading { min-height: 1.5em; margin: 0; font-size: .85rem; font-variant-numeric: tabular-nums }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--rule);
  font-variant-numeric: tabular-nums } th { color: var(--soft); font-weight: 500 }
th:first-child, td:first-child { text-align: left }
"""

_BAR_STYLE = "".join(f"rect.{name} {{ fill: var(--{name}) }}\n" for name in CATEGORIES)

_SCRIPT = """
for (const svg of document.querySelectorAll("svg.chart")) {
  const data = JSON.parse(svg.dataset.chart), cursor = svg.querySelector(".cursor");
  const reading = svg.parentNode.querySelector(".reading");
  const [left, right, width] = [64, 16, 720];
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * width;
    const wanted = data.low + (at - left) / (width - left - right) * (data.high - data.low);
    const nearest = data.lines.map((line) => line.points.reduce(
      (best, p) => Math.abs(p[0] - wanted) < Math.abs(best[0] - wanted) ? p : best));
    const step = nearest[0][0];
    const x = left + (step - data.low) / (data.high - data.low) * (width - left - right);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    reading.textContent = data.lines.map(
      (line, i) => `step ${nearest[i][0]}: ${line.name} ${nearest[i][1]}`).join("   ");
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden"); reading.textContent = "";
  });
}
"""


def page(figures: dict[str, Any], curves: Mapping[str, Points]) -> str:
    """The whole page.

    Args:
        figures: what `report.summarise` makes.
        curves: what `report.series` makes.
    """
    restarts = [attempt["from_step"] for attempt in figures["attempts"][1:]]
    loss = [
        Line(name="training", style="a", points=curves["loss"]),
        Line(name="held out", style="b", points=curves["eval_loss"], dots=True),
    ]
    charts = [
        line_chart("Loss", "nats a token", loss, restarts),
        line_chart("Learning rate", "", [_one("learning rate", curves["lr"])], restarts),
        line_chart("Throughput", "tokens/s", [_one("tokens/s", curves["tokens_per_s"])], restarts),
        line_chart("Gradient norm", "L2", [_one("norm", curves["grad_norm"])], restarts),
    ]
    embedded = json.dumps(figures).replace("<", "\\u003c")
    name = escape(figures["run"])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Run {name}</title><style>{_STYLE}{_BAR_STYLE}</style></head>\n<body><main>"
        f"<header><h1>Run {name}</h1>{_status(figures)}</header>\n{_tiles(figures)}\n"
        f"<section><h2>Where the time went</h2>{_goodput(figures)}</section>\n"
        f"<section><h2>Curves</h2>{''.join(charts)}{_values(curves)}</section>\n"
        f"{_trials(figures)}<section><h2>Attempts</h2>{_attempts(figures)}</section></main>\n"
        f'<script type="application/json" id="figures">{embedded}</script>\n'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _one(name: str, points: Points) -> Line:
    return Line(name=name, style="a", points=points)


def _status(figures: dict[str, Any]) -> str:
    shown = {"open": "no end recorded: it runs, or was killed"}.get(
        figures["state"], figures["state"]
    )
    text = f"{shown}; {_clock(figures['started'])} to {_clock(figures['ended'])} UTC"
    error = f'<p class="error">{escape(figures["error"])}</p>' if figures["error"] else ""
    return f'<p class="sub">{escape(text)}</p>{error}'


def _tiles(figures: dict[str, Any]) -> str:
    planned = figures["steps_planned"]
    tiles = [
        ("Goodput", _percent(figures["goodput"]), f"of {figures['wall_s']:,.1f} s wall time"),
        ("Steps", f"{figures['steps']:,}" + (f" of {planned:,}" if planned else ""), ""),
        ("Tokens", f"{figures['tokens']:,}", f"{figures['recomputed_steps']} steps done again"),
        ("Loss", _value(figures["train_loss"]), f"held out {_value(figures['eval_loss'])}"),
        (
            "Tokens/s",
            _value(figures["tokens_per_s"]),
            f"{_value(figures['tokens_per_s_wall'])} over all the wall time",
        ),
        (
            "MFU",
            _percent(figures["mfu"]),
            _peaks(figures),
        ),
    ]
    if figures["cost_usd"] is not None:
        more = f"{_value(figures['tokens_per_usd'])} tokens a dollar"
        tiles.append(("Cost", f"{figures['cost_usd']:,.4g} USD", more))
    rows = (
        f"<div><dt>{name}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    return f"<dl>{''.join(rows)}</dl>"


def _peaks(figures: dict[str, Any]) -> str:
    if not figures["peak_flops"]:
        return "no step was made"
    sheet = f"; data sheet {flops(figures['sheet_flops'])}" if figures["sheet_flops"] else ""
    return f"of {flops(figures['peak_flops'])} {figures['peak_source']}{sheet}"


def _goodput(figures: dict[str, Any]) -> str:
    shares = [(CATEGORIES[name], name, share) for name, share in figures["shares"].items()]
    said = ", ".join(f"{name} {100 * s:.1f} %" for name, _, s in shares if s >= 0.0005)
    rows = "".join(
        f'<tr><td><i style="background:var(--{key})"></i>{CATEGORIES[key]}</td>'
        f"<td>{figures['seconds'][key]:,.2f} s</td><td>{100 * share:.1f} %</td></tr>"
        for key, share in figures["shares"].items()
    )
    paused = (
        f'<p class="sub">Not counted: {figures["paused_s"]:,.0f} s between launches, after an'
        " orderly end.</p>"
        if figures["paused_s"]
        else ""
    )
    return (
        f"{stacked_bar(f'Wall time: {said}', shares)}"
        f"<table><thead><tr><th>what</th><th>time</th><th>share</th></tr></thead>{rows}</table>"
        f"{paused}"
    )


def _values(curves: Mapping[str, Points]) -> str:
    """The curves as a table, for those who do not see them: some twenty steps, evenly spaced."""
    steps = [step for step, _ in curves["loss"]]
    if not steps:
        return ""
    every = max(1, len(steps) // 20)
    shown = sorted({*steps[::every], steps[-1]})
    names = {"loss": "loss", "lr": "learning rate", "tokens_per_s": "tokens/s", "grad_norm": "norm"}
    by_step = {name: dict(curves[name]) for name in names}
    rows = [[f"{step:,}", *(_value(by_step[name].get(step)) for name in names)] for step in shown]
    table = _table(["step", *names.values()], rows)
    return f"<details><summary>The curves as a table</summary>{table}</details>"


def _trials(figures: dict[str, Any]) -> str:
    if (trials := figures.get("trials")) is None:
        return ""
    table = _table(trials["heads"], trials["rows"])
    return f"<section><h2>Strategy trials</h2><p>{escape(trials['picked'])}</p>{table}</section>\n"


def _attempts(figures: dict[str, Any]) -> str:
    rows = [
        [
            _clock(a["started"]), f"{a['ended'] - a['started']:,.1f} s", str(a["from_step"]),
            str(a["last_step"]), str(a["world_size"]), a["strategy"], a["device"], a["outcome"],
        ]
        for a in figures["attempts"]
    ]  # fmt: skip
    heads = [
        "started (UTC)", "lasted", "from step", "to step", "workers", "strategy", "device", "end",
    ]  # fmt: skip
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _value(value: float | None) -> str:
    return "–" if value is None else number(value)
