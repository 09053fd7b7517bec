"""A hang under Ray Train: reported, the workers started again, the run finished."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_loop import project

from hybrid.errors import TrainingError
from hybrid.registry import Registry
from hybrid.training.progress import read_progress
from hybrid.training.trainer import train_base

HANG_S = 8.0


def stop_rank_1(folder: Path, given_up: threading.Event) -> None:
    """SIGSTOP rank 1 of the first attempt once it has saved a checkpoint and gone on."""
    while not given_up.wait(0.05):
        events = read_progress(folder)
        if any(r["event"] == "checkpoint" for r in events) and events[-1]["event"] == "step":
            [start] = [r for r in events if r["event"] == "start"]
            os.kill(start["workers"][1]["pid"], signal.SIGSTOP)
            return


@pytest.mark.full
@pytest.mark.parametrize("max_failures", [1, 0])
def test_a_stopped_worker_costs_a_restart_from_the_last_checkpoint_if_one_is_allowed(
    tmp_path: Path, ray_cluster: object, max_failures: int
) -> None:
    config = project(
        tmp_path,
        **{
            "steps": 100,
            "eval_every": 100,
            "checkpoint.every": 10,
            "faults.hang_s": HANG_S,
            "faults.max_failures": max_failures,
        },
    )
    folder = tmp_path / "runs/run"
    given_up = threading.Event()
    stopper = threading.Thread(target=stop_rank_1, args=(folder, given_up))
    stopper.start()
    registry = Registry(tmp_path / "registry")
    try:
        if max_failures:
            train_base(config, registry, run_id="run")
        else:
            with pytest.raises(TrainingError, match=r"run run hangs: .*rank 1 .*stopped"):
                train_base(config, registry, run_id="run")
    finally:
        given_up.set()
        stopper.join()
    events = read_progress(folder)
    [hang] = [r for r in events if r["event"] == "hang"]
    assert "is missing from it: stopped (SIGSTOP)" in hang["message"]
    assert Path(hang["report"]).exists()
    first, *more = [r for r in events if r["event"] == "start"]
    for worker in first["workers"]:
        assert not Path(f"/proc/{worker['pid']}").exists()
    assert len(more) == max_failures
    if more:
        saved = [r["step"] for r in events[: events.index(hang)] if r["event"] == "checkpoint"]
        assert more[0]["step"] == max(saved)
        assert [r["event"] for r in events[-2:]] == ["finished", "ended"]
