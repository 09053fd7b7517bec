"""A hang under Ray Train: reported, the workers started again, the run finished."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_loop import project

from hybrid.errors import TrainingError
from hybrid.registry import Registry
from hybrid.training.progress import read_progress
from hybrid.training.trainer import train_base

HANG_S = 8.0


def stop_rank_1(folder: Path, attempts: int) -> None:
    """SIGSTOP rank 1 of the first `attempts` attempts, each once a step has followed its start."""
    for attempt in range(attempts):
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            events = read_progress(folder)
            starts = [n for n, r in enumerate(events) if r["event"] == "start"]
            if len(starts) > attempt and events[-1]["event"] in ("step", "checkpoint"):
                workers = events[starts[attempt]]["workers"]
                os.kill(workers[1]["pid"], signal.SIGSTOP)
                break
            time.sleep(0.05)


@pytest.mark.full
@pytest.mark.parametrize("max_failures", [1, 0])
def test_a_stopped_worker_costs_a_restart_from_the_last_checkpoint_if_one_is_allowed(
    tmp_path: Path, ray_cluster: object, max_failures: int
) -> None:
    config = project(
        tmp_path,
        **{
            "steps": 400,
            "eval_every": 400,
            "checkpoint.every": 10,
            "faults.hang_s": HANG_S,
            "faults.max_failures": max_failures,
        },
    )
    folder = tmp_path / "runs/run"
    stopper = threading.Thread(target=stop_rank_1, args=(folder, 1))
    stopper.start()
    registry = Registry(config.registry.root)
    try:
        if max_failures:
            train_base(config, registry, run_id="run")
        else:
            with pytest.raises(TrainingError, match=r"run run hangs: .*rank 1 .*stopped"):
                train_base(config, registry, run_id="run")
    finally:
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
        assert more[0]["step"] == max(saved, default=0)
        assert events[-1]["event"] == "finished"
