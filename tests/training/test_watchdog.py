"""Hangs, for real: a stopped process, a held interpreter lock, a rank asleep in Python."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import worlds
from faults import stop_and_hold, train_with_slow_storage
from test_loop import job

from hybrid.training.parallel import World
from hybrid.training.position import Position
from hybrid.training.processes import STOPPED
from hybrid.training.progress import read_progress
from hybrid.training.watchdog import EXIT_CODE, FOLDER, Watchdog

DEADLINE_S = 90.0


def exits(size: int, folder: Path, function: Any, *args: Any) -> list[int | None]:
    """Exit codes of all ranks; none of them is left behind."""
    processes = worlds.start(size, folder, function, *args)
    deadline = time.monotonic() + DEADLINE_S
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def the_report(folder: Path) -> dict[str, Any]:
    [path] = folder.glob("hang-*.json")
    report: dict[str, Any] = json.loads(path.read_text())
    [event] = [r for r in read_progress(folder) if r["event"] == "hang"]
    assert event["report"] == str(path)
    assert event["message"] == f"{report['summary']}; the whole report: {path}"
    assert report["error"]["code"] == "training_error"
    assert path.with_suffix(".txt").read_text().startswith(report["summary"])
    return report


def test_a_stopped_rank_and_one_that_cannot_run_python_are_named_by_the_one_that_waits(
    tmp_path: Path,
) -> None:
    codes = exits(3, tmp_path / "world", stop_and_hold, tmp_path)
    assert codes == [EXIT_CODE, -signal.SIGKILL, 1]
    report = the_report(tmp_path)
    assert report["step"] == 3
    first = report["collectives"][0]
    assert (first["name"], first["waiting"], first["missing"]) == ("gloo:all_reduce", [0], [1, 2])
    stopped, locked = report["silent"]
    assert (stopped["rank"], stopped["state"], stopped["node"]) == (1, STOPPED, "node-1")
    assert stopped["last_seen"]["step"] == 3
    assert locked["rank"] == 2
    assert "hold_the_lock" in locked["native_stacks"]
    [waiting] = report["ranks"]
    assert waiting["rank"] == 0
    assert any("all_reduce" in frame for frame in waiting["threads"][0]["stack"])
    assert any("stop_and_hold" in frame for frame in waiting["flight"]["unfinished"][0]["frames"])
    assert f"gloo:all_reduce #{first['seq']}" in report["summary"]
    assert (
        f"rank 1 (pid {stopped['pid']} on node-1) is missing from it: stopped"
        in (report["summary"])
    )


def test_a_rank_asleep_in_its_loader_is_shown_with_the_function(tmp_path: Path) -> None:
    made = job(tmp_path, strategy="fsdp", **{"faults.hang_s": 5.0})
    codes = exits(2, tmp_path / "world", train_with_slow_storage, made)
    assert codes == [EXIT_CODE, EXIT_CODE]
    report = the_report(made.folder)
    assert report["step"] == 3
    first = report["collectives"][0]
    assert (first["waiting"], first["missing"]) == ([0], [1])
    assert report["silent"] == []
    waiting, asleep = report["ranks"]
    assert waiting["phase"] == "token count"
    assert asleep["phase"] == "data"
    assert "slow_storage" in asleep["threads"][0]["stack"][-1]
    assert "never entered it: in data of step 3" in report["summary"]
    assert "slow_storage" in report["summary"]


@pytest.fixture
def told(tmp_path: Path) -> Any:
    """A watchdog of this process alone, and what it would have ended it with."""
    said: list[str] = []
    ended = threading.Event()

    def end(summary: str) -> None:
        said.append(summary)
        ended.set()

    alone = World.current()
    return lambda position: (Watchdog(tmp_path, alone, position, 0.6, end=end), said, ended)


def test_who_moves_or_is_to_wait_is_left_alone(tmp_path: Path, told: Any) -> None:
    position = Position()
    dog, said, ended = told(position)
    with dog:
        for step in range(12):
            position.at("data", step)
            assert not ended.wait(0.1)
        assert list((tmp_path / FOLDER).glob("*/rank-0.json"))
        position.wait("standing still")
        assert not ended.wait(1.2)
    assert said == []
    assert list(tmp_path.rglob("*")) == [tmp_path / FOLDER]


def test_who_stands_still_alone_is_told_where(tmp_path: Path, told: Any) -> None:
    position = Position()
    dog, said, ended = told(position)
    with dog:
        position.at("checkpoint", 7)
        assert ended.wait(DEADLINE_S)
    assert "no progress for 0.6 s in step 7; rank 0" in said[0]
    assert "in checkpoint of step 7" in said[0]
    assert the_report(tmp_path)["collectives"] == []


def test_a_report_that_cannot_be_written_ends_the_process_all_the_same(
    tmp_path: Path, told: Any
) -> None:
    position = Position()
    dog, said, ended = told(position)
    with dog:
        for path in (tmp_path / FOLDER).iterdir():
            path.rename(tmp_path / "elsewhere")
        assert ended.wait(DEADLINE_S)
    assert "no report could be written" in said[0]
