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
from rich.markup import escape
from rich.table import Table

from hybrid.cli_common import DEFAULT, Config, Sets, err, open_project, out
from hybrid.errors import ConfigError, DataError
from hybrid.show import Bars

if TYPE_CHECKING:
    from hybrid.planning.sweep import Mode, Sweep


SCALE_EPILOG = """Example: hybrid scale --workers 1,2,4 --steps 20 --html scaling.html. Or: hybrid
scale --mode weak --usd-per-hour 2.5 --json scaling.json."""

JsonFile = Annotated[str | None, typer.Option("--json", help="Write all of it here; - is stdout.")]


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

    p = open_project(config, sets)
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


PROFILE_EPILOG = """Example: hybrid profile --workers 2 --html profile.html. Or: hybrid profile
--try --json profile.json; hybrid profile --memory; hybrid profile --nsight; hybrid profile --read
.hybrid/profiles/20261202T171500."""


def profile(
    config: Config = DEFAULT,
    sets: Sets = None,
    workers: Annotated[
        int | None, typer.Option(help="By default the most of training.workers.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps that are recorded.")] = 3,
    warmup: Annotated[int, typer.Option(help="Steps before them that are not.")] = 3,
    try_knobs: Annotated[
        bool, typer.Option("--try", help="Measure what each knob does, too: a run for each.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also whose memory it is: a timeline, and the peak.")
    ] = False,
    nsight: Annotated[
        bool,
        typer.Option("--nsight", help="For Nsight Systems instead: NVTX ranges, .nsys-rep files."),
    ] = False,
    read: Annotated[
        Path | None, typer.Option(help="Judge the traces (*.json, *.json.gz) of a folder instead.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page here.")] = None,
    json_file: JsonFile = None,
) -> None:
    """What a step is bound by: compute, memory, communication, input or the host; what to try."""
    from hybrid.planning import profile_page
    from hybrid.planning.memory_timeline import as_json, read_memory, size, told
    from hybrid.planning.trace import read_trace
    from hybrid.planning.verdict import judge

    if nsight:
        others = {"--try": try_knobs, "--memory": memory, "--read": read, "--html": html}
        if given := [option for option, value in others.items() if value]:
            raise ConfigError(f"--nsight has no figures for {given[0]}: use one or the other")
        _nsight(config, sets, workers, steps, warmup, json_file)
        return
    name, tried, folder = "The job", [], read
    if read is not None:
        paths = sorted([*read.glob("*.json"), *read.glob("*.json.gz")])
        if not paths:
            raise DataError(f"--read {read}: no *.json or *.json.gz in there")
        # Steps in which allocations were recorded take longer: where others are there, only those
        # tell of time.
        of_memory = [path for path in paths if path.name.startswith("memory-")]
        timed = [path for path in paths if path not in of_memory] or paths
        ranks = tuple(read_trace(path) for path in timed)
        memories = tuple(read_memory(path) for path in of_memory or paths) if memory else ()
        verdict = judge(ranks)
    else:
        p = open_project(config, sets)
        with Bars(err) as bars:
            done = p.profile(
                workers=workers,
                steps=steps,
                warmup=warmup,
                try_knobs=try_knobs,
                memory=memory,
                on_progress=bars.training,
            )
        name, ranks, verdict = p.config.run.name, done.ranks, done.verdict
        tried, folder, memories = list(done.tried), done.folder, done.memory
    rows = [[t.knob, t.outcome, f"{t.ratio:.2f}" if t.ratio else "", t.text] for t in tried]
    if html is not None:
        page = profile_page.to_html(ranks, verdict, name=name, tried=rows, memories=memories)
        html.write_text(page, encoding="utf-8")
    data = {
        **profile_page.as_json(ranks, verdict),
        "tried": [vars(t) for t in tried],
        **({"memory": [as_json(m) for m in memories]} if memories else {}),
    }
    _write(data, json_file)
    if json_file == "-":
        return
    for warning in verdict.warnings:
        out.print(warning, style="bold red", markup=False)
    out.print(f"[bold]{verdict.bound}-bound[/], {1e3 * verdict.seconds:.1f} ms a step")
    for sentence in verdict.evidence:
        out.print(f"  {sentence}", markup=False)
    if tried:
        table = Table(*profile_page.TRIED)
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        out.print(table)
    else:
        for knob in verdict.knobs:
            out.print(f"  try {knob.name}: {knob.text}", markup=False)
    for one in memories:
        first, *more = told(one)
        out.print(first, markup=False)
        for sentence in more:
            out.print(f"  {sentence}", markup=False)
        for holder in one.holders[:5]:
            text = f"  {size(holder.bytes):>12}  {holder.category}: {holder}"
            out.print(text, markup=False, highlight=False)
    out.print(
        f"traces of {len(ranks)} ranks in {folder}; they open in ui.perfetto.dev", markup=False
    )


def _nsight(
    config: Path,
    sets: list[str] | None,
    workers: int | None,
    steps: int,
    warmup: int,
    json_file: str | None,
) -> None:
    from hybrid.profiles_nsight import as_json, told, whole_command

    p = open_project(config, sets)
    with Bars(err) as bars:
        done = p.profile_nsight(
            workers=workers, steps=steps, warmup=warmup, on_progress=bars.training
        )
    arguments = ["profile", "--nsight", "--config", str(config), "--steps", str(steps)]
    arguments += ["--warmup", str(warmup)]
    arguments += [] if workers is None else ["--workers", str(workers)]
    arguments += [part for item in sets or [] for part in ("--set", item)]
    whole = whole_command(p.config.run.dir, arguments)
    _write(as_json(done, whole), json_file)
    if json_file != "-":
        for line in told(done, whole):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
