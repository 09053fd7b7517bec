"""The commands `hybrid scale` and `hybrid profile`: options and what is printed; no logic."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hybrid import project
from hybrid.errors import ConfigError
from hybrid.show import Bars

if TYPE_CHECKING:
    from hybrid.planning.sweep import Mode, Sweep

out = Console()
err = Console(stderr=True)

SCALE_EPILOG = """Example: hybrid scale --workers 1,2,4 --steps 20 --html scaling.html. Or: hybrid
scale --mode weak --usd-per-hour 2.5 --json scaling.json."""

Config = Annotated[Path, typer.Option("-c", "--config", help="The project file.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a key, e.g. --set training.micro_batch=4 (repeatable)."),
]
JsonFile = Annotated[str | None, typer.Option("--json", help="Write all of it here; - is stdout.")]
DEFAULT = Path("hybrid.yaml")


class ModeChoice(StrEnum):
    """What grows with the workers."""

    strong = "strong"
    weak = "weak"
    both = "both"


MODES: dict[ModeChoice, Sequence[Mode]] = {
    ModeChoice.strong: ("strong",),
    ModeChoice.weak: ("weak",),
    ModeChoice.both: ("strong", "weak"),
}


def scale(
    config: Config = DEFAULT,
    sets: Sets = None,
    workers: Annotated[
        str | None,
        typer.Option(help="Counts, e.g. 1,2,4; by default 1, 2, 4, … up to training.workers."),
    ] = None,
    mode: Annotated[
        ModeChoice, typer.Option(help="strong: the same step; weak: it grows with the workers.")
    ] = ModeChoice.both,
    steps: Annotated[int, typer.Option(help="Steps that are timed, for each count.")] = 20,
    warmup: Annotated[int, typer.Option(help="Steps before them that are not.")] = 5,
    usd_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of one worker, for tokens a dollar.")
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Measure again what was measured before.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the curve here.")] = None,
    json_file: JsonFile = None,
) -> None:
    """How fast the real training job is on 1, 2, 4, … workers, and how many are worth it."""
    from hybrid.planning.scaling_page import to_html
    from hybrid.planning.sweep import as_json

    p = _open(config, sets)
    with Bars(err) as bars:
        sweeps = p.scale(
            workers=_counts(workers),
            modes=MODES[mode],
            steps=steps,
            warmup=warmup,
            usd_per_hour=usd_per_hour,
            fresh=fresh,
            on_progress=bars.training,
        )
    if html is not None:
        page = to_html(sweeps, name=p.config.run.name, when=time.time())
        html.write_text(page, encoding="utf-8")
    _write([as_json(sweep) for sweep in sweeps], json_file)
    if json_file != "-":
        for sweep in sweeps:
            _show(sweep)


def _open(config: Path, sets: list[str] | None) -> project.Project:
    overrides = {}
    for item in sets or []:
        key, eq, value = item.partition("=")
        if not eq:
            raise ConfigError(f"--set {item}: expected KEY=VALUE, e.g. training.micro_batch=4")
        overrides[key] = yaml.safe_load(value)
    return project.open(config, overrides)


def _counts(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--workers {text}: expected counts, e.g. 1,2,4") from None


def _write(data: Any, to: str | None) -> None:
    if to is None:
        return
    text = json.dumps(data, ensure_ascii=False, indent=1) + "\n"
    if to == "-":
        sys.stdout.write(text)
    else:
        Path(to).write_text(text, encoding="utf-8")


def _show(sweep: Sweep) -> None:
    from hybrid.planning.sweep import MODES, law

    table = Table(title=f"{sweep.mode} scaling: {MODES[sweep.mode]}", title_justify="left")
    columns = ["workers", "tokens/s", "spread", "speed-up", "efficiency"]
    priced = sweep.usd_per_worker_hour is not None
    for name in [*columns, *(["tokens/$"] if priced else [])]:
        table.add_column(name, justify="right")
    for r in sweep.rows:
        cells = [
            str(r.workers),
            f"{r.rate:,.0f}",
            f"± {100 * r.spread:.1f} %",
            f"{r.speedup:.2f}",
            f"{100 * r.efficiency:.0f} %",
        ]
        table.add_row(*cells, *([f"{r.tokens_per_usd:,.0f}"] if r.tokens_per_usd else []))
    out.print(table)
    colour = {"passed": "green", "failed": "red"}.get(sweep.check.outcome, "yellow")
    out.print(f"[{colour}]{sweep.check.name} {sweep.check.outcome}[/]: {escape(sweep.check.text)}")
    for cause in sweep.check.causes:
        out.print(f"  likely: {cause}", markup=False)
    out.print(law(sweep.fit), markup=False)
    for note in sweep.fit.notes:
        out.print(f"  {note}", style="dim", markup=False)
    fewest, most = sweep.recommendation.elastic
    out.print(
        f"[bold]training.workers: {sweep.recommendation.workers}[/], elastic"
        f" [bold]{escape(f'[{fewest}, {most}]')}[/]: {escape(sweep.recommendation.why)}"
    )
