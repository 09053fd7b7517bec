"""The command `hybrid advise`: what a workload needs, what it costs, what was true; no logic."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from hybrid.cli_common import out
from hybrid.errors import ConfigError

EPILOG = """Example: hybrid advise examples/workloads/specialists.yaml --html advice.html. Or:
hybrid advise workload.yaml --audit audit.json --prices prices.csv; hybrid advise --from-run
.hybrid/runs/RUN. docs/planning.md lists the keys of a workload."""


def advise(
    workload: Annotated[
        Path | None, typer.Argument(help="The workload; none is needed with --from-run.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="A price table (CSV) in place of the package's.")
    ] = None,
    audit: Annotated[
        Path | None, typer.Option(help="Plan with what `hybrid audit --json FILE` measured.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Plan with the speed of a run: its folder, runs/RUN.")
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option(help="Show predicted against actual of a run: its folder.")
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(help="Predicted against actual: a saved Prometheus page of the served model."),
    ] = None,
    status: Annotated[
        Path | None,
        typer.Option(help="Predicted against actual: what `hybrid status --json` printed."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all-rules", help="Also show the rules that do not apply.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots here.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Cluster, agents or hybrid: what a workload needs, why, what it costs, what changes it."""
    from hybrid.planning import actual, compare, figures, runs
    from hybrid.planning.advise import advise as decide
    from hybrid.planning.advise import to_document
    from hybrid.planning.page import to_html
    from hybrid.planning.prices import load_prices
    from hybrid.planning.workload import load

    w = load(workload) if workload is not None else None
    if w is None:
        given = {"--audit": audit, "--metrics": metrics, "--status": status, "--html": html,
                 "--prices": prices}  # fmt: skip
        if needs := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"{', '.join(needs)}: needs a workload, e.g. hybrid advise w.yaml")
        if from_run is None:
            raise ConfigError(
                "WORKLOAD: missing; name a workload.yaml, or --from-run a run's folder"
            )
    rows: list[actual.Row] = []
    said: list[str] = []
    if from_run is not None:
        rows += actual.from_run(runs.read_run(from_run), w)
        if calibrate is not None:
            rows.append(actual.whole_run(runs.read_run(calibrate), runs.read_run(from_run)))
    data: dict[str, Any] = {}
    advice = None
    if w is not None:
        if audit is not None:
            audited = figures.read_audit(audit)
            rows += actual.from_audit(audited, w)
            w, text = figures.measured_workload(w, audited)
            said.append(text)
        if calibrate is not None:
            w, text = actual.calibrate(w, runs.read_run(calibrate))
            said.append(text)
        if metrics is not None:
            rows += actual.from_metrics(actual.read_metrics(metrics), w, str(metrics))
        if status is not None:
            rows += actual.from_status(status, w)
        advice = decide(w, load_prices(prices))
        data = to_document(advice)
        if html is not None:
            html.write_text(to_html(advice, rows), encoding="utf-8")
    if as_json:
        data |= {"measured": said, "actual": [actual.row_document(r) for r in rows]}
        sys.stdout.write(json.dumps(data, ensure_ascii=False, indent=1) + "\n")
        return
    if advice is not None:
        out.print(f"{escape(advice.workload.name)}: [bold]{compare.NAMES[advice.answer]}[/]")
        out.print(compare.rules_table(advice.findings, every=every))
        for turn in advice.turns:
            out.print(f"- {escape(compare.turn_text(turn))}", highlight=False)
        if advice.plans:
            out.print(compare.plans_table(advice.plans))
            for text in compare.part_notes(advice.plans):
                out.print(f"- {escape(text)}", highlight=False)
            if advice.plans[0].usd.swings:
                out.print(compare.sensitivity_table(advice.plans[0]))
        for text in (*said, *advice.notes):
            out.print(f"[yellow]note[/] {escape(text)}", highlight=False)
        for text in advice.warnings:
            out.print(f"[red]prices[/] {escape(text)}", highlight=False)
    if rows:
        out.print(compare.rows_table(rows))
