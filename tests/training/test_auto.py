"""`strategy: auto` on real processes: trials, one of which is killed, a choice that is kept."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import worlds
from test_loop import job, project
from trial_worlds import killed_under
from typer.testing import CliRunner

from hybrid.cli import app
from hybrid.errors import TrainingError
from hybrid.registry import Registry
from hybrid.training.auto import FOLDER, settled, try_strategies
from hybrid.training.goodput import account
from hybrid.training.loop import Job
from hybrid.training.progress import read_progress
from hybrid.training.report import launched, lines, report_of
from hybrid.training.trial_loop import Book
from hybrid.training.trials import Row

TRIALS = {"warmup": 1, "steps": 2, "most": 4, "vary": ["micro_batch"]}


class Starts:
    """Starts workers that are killed in a trial of fsdp; counts how often."""

    def __init__(self, folder: Path, kill: str = "fsdp") -> None:
        self.folder, self.kill, self.count = folder, kill, 0

    def __call__(self, made: Job, workers: int, avoid: Any) -> None:
        self.count += 1
        at = self.folder / f"world-{self.count}"
        worlds.run(workers, at, killed_under, self.kill, made, made.folder / FOLDER)


def test_a_trial_that_is_killed_is_a_row_and_the_choice_is_kept(
    ray_cluster: Any, tmp_path: Path
) -> None:
    made, said = job(tmp_path, strategy="auto", trials=TRIALS, usd_per_hour=2), []
    starts = Starts(tmp_path)
    with launched(made.folder, began=time.time(), workers=2, usd_per_hour=2):
        chosen = settled(made, lambda r: said.append(r["message"]), start=starts)
    assert starts.count == 2, "once more, after fsdp ended the first"
    [record] = [r for r in read_progress(made.folder) if r["event"] == "strategy"]
    rows = [Row.of_record(row) for row in record["rows"]]
    assert [r.outcome for r in rows if r.candidate.strategy == "fsdp"] == ["rejected"]
    measured = [r for r in rows if r.outcome == "measured"]
    assert {r.candidate.strategy for r in measured} == {"ddp", "tp"}
    assert all(r.peak_bytes and r.peak_bytes > 100 << 20 and r.step_s for r in measured)
    assert len(rows) == 4
    assert "hsdp" in record["left_out"]

    training = chosen.config.training
    assert training.strategy in ("ddp", "tp")
    assert training.tokens_per_step == made.config.training.tokens_per_step
    assert (chosen.run_id, chosen.trial) == (made.run_id, False)
    assert not (made.folder / FOLDER).exists()
    assert not list((tmp_path / "checkpoints").rglob("*")), "trials save nothing"

    figures = report_of(made.folder.parent, made.run_id)
    assert figures["seconds"]["trials"] > 0.5 * sum(figures["seconds"].values())
    assert "strategy: picked " in "\n".join(lines(figures, made.folder))
    page = (made.folder / "report.html").read_text()
    assert "Strategy trials" in page and "rejected: " in page
    assert any("tokens/USD" in text for text in said)

    def never(*_: Any) -> None:
        raise AssertionError("the choice was made before")

    again = settled(made, lambda r: said.append(r["message"]), start=never)
    assert again.config == chosen.config
    assert "tried before" in said[-1]
    other = job(tmp_path, strategy="auto", trials={**TRIALS, "most": 1}, usd_per_hour=2)
    starts.kill = "none"
    settled(other, lambda r: said.append(r["message"]), start=starts)
    assert starts.count == 3, "asked otherwise, tried again"


def test_workers_that_fail_outside_of_trials_end_the_search(
    ray_cluster: Any, tmp_path: Path
) -> None:
    made, starts = job(tmp_path, strategy="auto", trials=TRIALS), []

    def fails(*_: Any) -> None:
        starts.append(1)
        raise RuntimeError("no such\nluck")

    with pytest.raises(TrainingError, match="the workers fail: luck"):
        try_strategies(made, lambda record: None, start=fails)
    assert len(starts) == 3
    assert not (made.folder / FOLDER).exists()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_under_ray_tries_is_killed_chooses_and_ends(ray_cluster: Any, tmp_path: Path) -> None:
    """The whole way; a worker is killed from outside amid the second trial."""
    from hybrid.training.trainer import train_base

    made = project(tmp_path, strategy="auto", trials={**TRIALS, "steps": 20, "most": 3})
    registry = Registry(str(tmp_path / "registry"), cache=tmp_path / "cache")
    folder, over = tmp_path / "runs/r", threading.Event()

    def kill() -> None:
        while not over.wait(0.05):
            book = Book(folder / FOLDER) if (folder / FOLDER).exists() else None
            rows = book.rows() if book else []
            trial = read_progress(folder / FOLDER / "trial")
            if len(rows) == 2 and any(r["event"] == "step" for r in trial):
                [start] = [r for r in trial if r["event"] == "start"]
                os.kill(start["workers"][1]["pid"], signal.SIGKILL)
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        manifest = train_base(made, registry, run_id="r")
    finally:
        over.set()
        killer.join()
    records = read_progress(folder)
    [choice] = [r for r in records if r["event"] == "strategy"]
    rows = [Row.of_record(row) for row in choice["rows"]]
    assert [row.outcome for row in rows] == ["measured", "rejected", "measured"]
    assert "killed" in rows[1].why, rows[1]
    [start] = [r for r in records if r["event"] == "start"]
    assert start["strategy"] == choice["candidate"]["strategy"]
    assert manifest.metrics["steps"] == 8
    assert account(records).seconds["trials"] > 1


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_look_keeps_nothing(ray_cluster: Any, tmp_path: Path) -> None:
    file = tmp_path / "hybrid.yaml"
    made = project(tmp_path, trials={**TRIALS, "most": 2})
    job(tmp_path)  # the corpus
    file.write_text(made.model_dump_json())
    done = CliRunner().invoke(app, ["train", "--try-strategies", "-c", str(file)])
    assert done.exit_code == 0, done.output
    assert "picked " in done.output and "measured" in done.output
    assert not list((tmp_path / "runs").glob("*"))
