"""The report of a run: what it reached, where its time went, what it cost.

    runs/<run>/report.json     the figures
    runs/<run>/report.html     the same with plots, in one file that needs no network

Made from the progress file, at the end of every run and whenever it is asked for.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybrid.errors import HybridError, NotFound
from hybrid.training.goodput import CATEGORIES, Account, account
from hybrid.training.progress import Progress, read_progress
from hybrid.training.report_charts import flops
from hybrid.training.report_page import page
from hybrid.training.trials import Choice, shown

log = logging.getLogger(__name__)
JSON_FILE, HTML_FILE = "report.json", "report.html"


@contextmanager
def launched(
    folder: Path,
    *,
    began: float,
    workers: int,
    usd_per_hour: float | None,
    say: Callable[[dict[str, Any]], None] = lambda record: None,
) -> Iterator[None]:
    """The driver's part of the record: its launch, how the block within ended, and the report.

    Args:
        folder: runs/<run>.
        began: UNIX time at which the driver set out.
        workers: what is held until the workers say how many they are.
        say: called with the report's text at the end, whatever the end was.
    """
    progress = Progress(folder)
    progress.write("launch", began=began, workers=workers, usd_per_hour=usd_per_hour)
    try:
        yield
    except BaseException as e:
        on_purpose = isinstance(e, KeyboardInterrupt)
        said = e.message if isinstance(e, HybridError) else f"{type(e).__name__}: {e}"
        try:
            progress.write("ended", outcome="interrupted" if on_purpose else "failed", error=said)
            say({"message": "\n".join(lines(write_report(folder), folder))})
        except OSError as unwritten:  # the run's own error matters more
            log.warning("no report in %s: %s", folder, unwritten)
        raise
    progress.write("ended", outcome="finished")
    say({"message": "\n".join(lines(write_report(folder), folder))})


def write_report(folder: Path) -> dict[str, Any]:
    """Write report.json and report.html of a run; returns the figures."""
    records = read_progress(folder)
    figures = summarise(folder.name, records)
    (folder / JSON_FILE).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (folder / HTML_FILE).write_text(page(figures, series(records)), encoding="utf-8")
    return figures


def report_of(runs: Path, run_id: str | None) -> dict[str, Any]:
    """Make the report of one run anew; the newest one where none is named.

    Raises:
        NotFound: there is no such run; the message lists those there are.
    """
    known = sorted(
        (path.parent for path in runs.glob("*/progress.jsonl")),
        key=lambda folder: (folder / "progress.jsonl").stat().st_mtime,
    )
    if run_id is None and known:
        return write_report(known[-1])
    for folder in known:
        if folder.name == run_id:
            return write_report(folder)
    names = ", ".join(folder.name for folder in known) or "none yet; run `hybrid train`"
    raise NotFound(f"no run {run_id or ''} in {runs}; there are: {names}")


def reports(runs: Path) -> list[dict[str, Any]]:
    """The figures of every run, the newest last."""
    found = [
        summarise(path.parent.name, read_progress(path.parent))
        for path in runs.glob("*/progress.jsonl")
    ]
    return sorted(found, key=lambda figures: figures["ended"])


def summarise(run_id: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All figures of a run. JSON: numbers that are not finite are None.

    `tokens_per_s` and `mfu` are of the steps' own time, `…_wall` of all the wall time; both count
    only tokens that moved the run forward, except that `mfu` counts recomputed steps too.
    """
    spent = account(records)
    starts = [r for r in records if r["event"] == "start"]
    steps = [r for r in records if r["event"] == "step"]
    evals = [r for r in records if r["event"] == "eval"]
    launches = [r for r in records if r["event"] == "launch"]
    ends = [r for r in records if r["event"] == "ended"]
    choices = [Choice.of_record(r) for r in records if r["event"] == "strategy"]
    last_start: dict[str, Any] = starts[-1] if starts else {}
    price = launches[-1].get("usd_per_hour") if launches else None
    worker_hours = spent.worker_s / 3600
    cost = None if price is None else price * worker_hours
    at_work = spent.seconds["productive"] + spent.seconds["data"]
    figures: dict[str, Any] = _strict(
        {
            "run": run_id,
            "state": _state(records, spent),
            "error": ends[-1].get("error") if ends and records[-1] is ends[-1] else None,
            "started": launches[0]["began"] if launches else records[0]["time"] if records else 0,
            "ended": records[-1]["time"] if records else 0.0,
            "wall_s": spent.wall_s,
            "paused_s": spent.paused_s,
            "goodput": spent.goodput,
            "seconds": spent.seconds,
            "shares": {
                name: seconds / spent.wall_s if spent.wall_s else 0.0
                for name, seconds in spent.seconds.items()
            },
            "steps": spent.steps,
            "steps_planned": last_start.get("steps"),
            "recomputed_steps": spent.recomputed_steps,
            "tokens": spent.tokens,
            "tokens_per_s": _ratio(spent.tokens, at_work),
            "tokens_per_s_wall": _ratio(spent.tokens, spent.wall_s),
            "mfu": _ratio(spent.step_flops, spent.step_peak),
            "mfu_wall": _ratio(spent.useful_flops, spent.wall_peak),
            "peak_flops": last_start.get("peak_flops"),
            "peak_source": last_start.get("peak_source"),
            "sheet_flops": last_start.get("sheet_flops") or None,
            "parameters": last_start.get("parameters"),
            "train_loss": steps[-1].get("loss") if steps else None,
            "eval_loss": evals[-1]["eval_loss"] if evals else None,
            "usd_per_hour": price,
            "worker_hours": worker_hours,
            "cost_usd": cost,
            "tokens_per_usd": _ratio(spent.tokens, cost or 0.0),
            "trials": shown(choices[-1]) if choices else None,
            "attempts": [asdict(attempt) for attempt in spent.attempts],
        }
    )
    return figures


def series(records: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The curves of a run, each a list of (step, value): of a step done again, the last time."""
    curves: dict[str, dict[int, float]] = {
        name: {} for name in ("loss", "eval_loss", "lr", "grad_norm", "tokens_per_s")
    }
    for record in records:
        step = record.get("step")
        if record["event"] == "step":
            values = {name: record.get(name) for name in ("loss", "lr", "grad_norm")}
            spent = record.get("spent", {})
            seconds = spent.get("step", 0.0) + spent.get("data", 0.0)
            values["tokens_per_s"] = record.get("tokens", 0) / seconds if seconds else None
        elif record["event"] == "eval":
            values = {"eval_loss": record["eval_loss"]}
        else:
            continue
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                curves[name][int(step)] = float(value)  # type: ignore[arg-type]
    return {name: sorted(points.items()) for name, points in curves.items()}


def lines(figures: dict[str, Any], folder: Path) -> list[str]:
    """What the terminal shows of a report."""
    said = [
        f"run {figures['run']}: {figures['state']}, {figures['steps']} of"
        f" {figures['steps_planned'] or '?'} steps, {figures['tokens']:,} tokens"
        + (f", loss {figures['train_loss']:.3f}" if figures["train_loss"] is not None else "")
        + (f", held out {figures['eval_loss']:.3f}" if figures["eval_loss"] is not None else "")
    ]
    if figures["error"]:
        said.append(f"ended by: {figures['error']}")
    parts = sorted(figures["seconds"].items(), key=lambda item: -item[1])
    said.append(
        f"goodput {100 * figures['goodput']:.1f} % of {duration(figures['wall_s'])}: "
        + ", ".join(f"{CATEGORIES[name]} {duration(s)}" for name, s in parts if s >= 0.05)
    )
    if figures["trials"]:
        said.append(f"strategy: {figures['trials']['picked']}")
    if figures["recomputed_steps"]:
        said.append(
            f"{figures['recomputed_steps']} steps were done again after"
            f" {len(figures['attempts']) - 1} restarts"
        )
    if figures["tokens_per_s"]:
        rate = f"{figures['tokens_per_s']:,.0f} tokens/s in steps"
        rate += f", {figures['tokens_per_s_wall']:,.0f} over all"
        if figures["mfu"]:
            rate += f"; MFU {100 * figures['mfu']:.1f} % of {flops(figures['peak_flops'])} measured"
        if figures["sheet_flops"]:
            rate += f" (data sheet: {flops(figures['sheet_flops'])})"
        said.append(rate)
    if figures["cost_usd"] is not None:
        cost = f"cost {figures['cost_usd']:,.4g} USD for {figures['worker_hours']:.3g} worker hours"
        if figures["tokens_per_usd"]:
            cost += f", {figures['tokens_per_usd']:,.0f} tokens a dollar"
        said.append(cost)
    return [*said, f"report: {folder / HTML_FILE}"]


def duration(seconds: float) -> str:
    """Seconds as 12.3 s, 4 min 05 s, 3 h 20 min."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _state(records: Sequence[dict[str, Any]], spent: Account) -> str:
    """How it ended; `open` when no end is recorded: it runs, or was killed."""
    if records and records[-1]["event"] == "ended":
        return str(records[-1]["outcome"])
    if spent.attempts and spent.attempts[-1].outcome == "finished":
        return "finished"
    return "open"


def _ratio(value: float, over: float) -> float | None:
    return value / over if over > 0 else None


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
