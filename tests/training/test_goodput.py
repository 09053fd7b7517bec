"""Where a run's time went: every second once, also of an attempt that was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import worlds
from test_loop import job

from hybrid.training.goodput import CATEGORIES, Account, Stopwatch, account
from hybrid.training.loop import train
from hybrid.training.progress import read_progress
from hybrid.training.report import summarise


def launch(at: float, began: float, **more: Any) -> dict[str, Any]:
    return {"event": "launch", "time": at, "began": began, "workers": 2, **more}


def start(at: float, step: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "event": "start", "time": at, "step": step, "steps": 10, "world_size": 2,
        "peak_flops": 100.0, "flops_per_token": 2.0, **more,
    }  # fmt: skip


def step(at: float, number: int, seconds: float = 1.0, **more: float) -> dict[str, Any]:
    spent = {"step": seconds, **more}
    return {"event": "step", "time": at, "step": number, "tokens": 10, "spent": spent}


def spent(found: Account) -> dict[str, float]:
    return {name: round(s, 6) for name, s in found.seconds.items() if s}


def test_nested_phases_count_for_the_innermost_and_laps_add_up() -> None:
    now = [0.0]
    watch = Stopwatch(lambda: now[0])
    now[0] = 1.0
    with watch.phase("step"):
        now[0] = 3.0
        with watch.phase("data"):
            now[0] = 7.0
        now[0] = 15.0
        with contextlib.suppress(ValueError), watch.phase("checkpoint"):
            now[0] = 31.0
            raise ValueError("the phase ends all the same")
    now[0] = 63.0
    assert watch.lap() == {"other": 33.0, "step": 10.0, "data": 4.0, "checkpoint": 16.0}
    assert watch.lap() == {"other": 0.0}


def test_a_run_that_was_killed_by_the_driver_and_went_on() -> None:
    """Both the workers' fault within a launch and the driver's death are idle time."""
    found = account(
        [
            launch(101, 100, usd_per_hour=3.0),
            start(110),
            step(112, 1, 1.5, data=0.5),
            step(114, 2),
            {"event": "checkpoint", "time": 115, "step": 2, "spent": {"checkpoint": 0.75}},
            step(117, 3, 2.0),
            start(127, 2),  # a worker died; the same driver goes on
            step(129, 3, 2.0),
            step(131, 4, 2.0),
            launch(142, 141),  # the driver was killed, and someone started it again
            start(150, 4),
            step(152, 5, 2.0),
            {"event": "finished", "time": 155, "step": 5, "spent": {"export": 2.5}},
            {"event": "ended", "time": 156, "outcome": "finished"},
        ]
    )
    assert found.wall_s == 56
    assert spent(found) == {
        "startup": 19.0,  # 100 to 110, 141 to 150
        "productive": 8.5,
        "data": 0.5,
        "checkpoint": 0.75,
        "recomputed": 2.0,
        "idle": 20.0,  # 117 to 127, 131 to 141
        "export": 4.0,  # what the record says, what remains of it, and the driver's last second
        "other": 1.25,
    }
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s)
    assert (found.steps, found.tokens, found.recomputed_steps) == (5, 50, 1)
    assert [a.outcome for a in found.attempts] == ["killed", "killed", "finished"]
    assert found.goodput == pytest.approx(8.5 / 56)
    assert found.worker_s == 112
    assert found.step_flops / found.step_peak == pytest.approx(6 * 20 / (100 * 11.0))


def test_an_attempt_that_had_notice_was_not_killed() -> None:
    records = [
        launch(1, 0),
        start(2),
        step(3, 1),
        {"event": "notice", "time": 3, "step": 1, "kind": "move", "why": "room"},
        start(5, 1),
        {"event": "notice", "time": 6, "step": 1, "kind": "reclaim", "why": "spot"},
        start(8, 1),
        step(9, 2),
        {"event": "finished", "time": 10, "step": 2},
    ]
    found = account(records)
    assert [a.outcome for a in found.attempts] == ["moved", "reclaimed", "finished"]
    assert (found.seconds["idle"], found.recomputed_steps) == (4, 0)


def test_time_between_launches_counts_only_after_a_fault() -> None:
    first = [launch(1, 0), start(2), step(3, 1)]
    second = [launch(101, 100), start(102, 1), step(103, 2)]
    killed = account([*first, *second])
    assert (killed.wall_s, killed.paused_s, killed.seconds["idle"]) == (103, 0, 97)
    ended = {"event": "ended", "time": 5, "outcome": "interrupted"}
    paused = account([*first, ended, *second])
    assert (paused.wall_s, paused.paused_s, paused.seconds["idle"]) == (8, 95, 2)
    assert paused.attempts[0].outcome == "interrupted"


def test_the_first_step_of_a_compiled_model_is_compilation() -> None:
    steps = [step(60, 1, 50.0), step(62, 2, 2.0), step(64, 3, 2.0), step(66, 4, 2.0)]
    found = account([launch(1, 0), start(10, compile=True), *steps])
    assert spent(found) == {"startup": 10.0, "productive": 8.0, "compile": 48.0}
    plain = account([launch(1, 0), start(10), *steps])
    assert spent(plain) == {"startup": 10.0, "productive": 56.0}


def test_a_step_that_was_left_out_moves_nothing_forward() -> None:
    bad = {"event": "bad_step", "time": 6, "step": 2, "spent": {"step": 2.0}}
    found = account([start(2), step(4, 1, 2.0), bad])
    assert spent(found) == {"productive": 2.0, "recomputed": 2.0}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["launch", "start", "step", "eval", "checkpoint", "still", "ended"]),
        st.floats(-5, 50),  # clocks of two machines may disagree
        st.integers(0, 20),
        st.dictionaries(
            st.sampled_from(["step", "data", "checkpoint", "trials", "of a later version"]),
            st.floats(0, 60),
        ),
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(EVENTS)
def test_whatever_the_records_every_second_is_counted_once(events: list[Any]) -> None:
    now, records = 1000.0, [start(1000.0)]
    for event, delta, number, phases in events:
        now += delta
        fields = launch(now, now - 1) if event == "launch" else start(now, number)
        records.append(
            {
                **fields,
                "event": event,
                "tokens": 3,
                "eval_loss": 1.0,
                "outcome": "failed",
                "spent": phases,
            }
        )
    found = account(records)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, abs=1e-6)
    assert all(seconds >= -1e-9 for seconds in found.seconds.values())
    assert found.seconds.keys() == CATEGORIES.keys()
    high = max(r["time"] for r in records)
    assert found.wall_s + found.paused_s == pytest.approx(high - 1000.0, abs=1e-6)
    summarise("r", records)


def test_a_killed_attempt_is_accounted_for(tmp_path: Path) -> None:
    """SIGKILL amid training, and the same run again: the file adds up to the wall time."""
    made = job(tmp_path, strategy="single", steps=120, warmup_steps=4, **{"checkpoint.every": 50})
    [process] = worlds.start(1, tmp_path / "world", train, made)
    try:
        deadline = time.monotonic() + 60
        while not any(r.get("step", 0) >= 60 for r in read_progress(made.folder)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    train(made)

    records = read_progress(made.folder)
    found = account(records)
    first, second = (r for r in records if r["event"] == "start")
    before = sum(first["spent"].values())
    assert found.wall_s == pytest.approx(records[-1]["time"] - first["time"] + before, abs=1e-3)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, abs=1e-3)
    assert [a.outcome for a in found.attempts] == ["killed", "finished"]
    lost = max(r["step"] for r in records if r["time"] < second["time"] and "step" in r)
    assert found.recomputed_steps == lost - second["step"] > 0
    assert found.steps == 120
    assert found.seconds["recomputed"] > 0 < found.seconds["productive"]
    last = max(r["time"] for r in records if r["time"] < second["time"])
    assert found.seconds["idle"] == pytest.approx(second["time"] - last, abs=0.5)
    for name in ("data", "checkpoint", "evaluation", "export"):
        assert found.seconds[name] > 0, name
