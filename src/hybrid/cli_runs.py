"""The commands about training runs: their preflight checks, their reports, the list of them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from hybrid import project
from hybrid.cli_common import DEFAULT, AsJson, Config, err, open_project, out, show
from hybrid.show import Bars, age, count, percent


def runs(config: Config = DEFAULT, as_json: AsJson = False) -> None:
    """Every training run of the project: how far it got, its goodput, its cost."""
    data = open_project(config).runs.list()
    table = Table("run", "state", "steps", "tokens", "loss", "goodput", "tok/s", "USD", "age")
    for r in data:
        cost, loss, rate = r["cost_usd"], r["train_loss"], r["tokens_per_s"]
        table.add_row(
            r["run"],
            r["state"],
            f"{r['steps']}/{r['steps_planned'] or '?'}",
            count(r["tokens"]),
            "-" if loss is None else f"{loss:.3f}",
            percent(r["goodput"]),
            "-" if rate is None else count(rate),
            "-" if cost is None else f"{cost:.2f}",
            age(r["ended"]),
        )
    show(data, as_json, table)


def report(
    run: Annotated[str | None, typer.Argument(help="The run; by default the newest.")] = None,
    config: Config = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Where the time of a run went and what it cost; makes its page anew (report.html)."""
    runs = open_project(config).runs
    data = runs.report(run)
    if as_json:
        show(data, True)
    else:
        out.print(runs.text(data), markup=False, highlight=False, soft_wrap=True)


def preflight(p: project.Project, as_json: bool) -> None:
    """Make the checks, show them all, and exit with 1 if one of them fails."""
    with err.status("looking at the nodes"):
        checks = p.runs.preflight()
    table = Table("check", "", "finding", "what to do")
    for c in checks:
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}[c.status]
        table.add_row(c.name, f"[{colour}]{c.status}[/]", escape(c.said), escape(c.do))
    show([vars(c) for c in checks], as_json, table)
    if any(c.status == "fail" for c in checks):
        raise typer.Exit(1)


def try_strategies(p: project.Project, as_json: bool) -> None:
    """Make the trials of `training.strategy: auto` and show what came of them; nothing is kept."""
    with Bars(err) as bars:
        data = p.runs.try_strategies(bars.training)
    table = Table(*data["heads"])
    for row in data["rows"]:
        table.add_row(*map(escape, row))
    show(data, as_json, table)
    if not as_json:
        out.print(data["picked"], markup=False, highlight=False, soft_wrap=True)
        out.print("as keys of training: " + str(data["settings"]), markup=False, soft_wrap=True)
