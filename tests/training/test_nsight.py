"""Ranges for Nsight Systems: what real steps emit, in which order, and the end of the report."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from test_loop import job

from hybrid.training import nsight, profiling
from hybrid.training.loop import train
from hybrid.training.nsight import Nvtx, leave_word, note_path
from hybrid.training.nsight_launch import REPORT, WHY_NOT
from hybrid.training.parallel import World
from hybrid.training.profiling import Profiling, trace_path, watched_position

PLAN = Profiling(warmup=2, active=2, nsight=True)


class Recorder:
    """Notes what is emitted, with all that is open at that moment."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.events: list[tuple[str, ...]] = []

    def start(self) -> None:
        self.events.append(("START", *self.open))

    def stop(self) -> None:
        self.events.append(("STOP", *self.open))

    def push(self, name: str) -> None:
        assert not torch.autograd._profiler_enabled()  # CUPTI is Nsight's
        self.open.append(name)
        self.events.append(tuple(self.open))

    def pop(self) -> None:
        self.open.pop()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(profiling, "tool_for", lambda device: made)
    return made


def test_the_loop_s_ranges_nest_and_the_recorded_steps_are_those_asked_for(
    tmp_path: Path, recorder: Recorder
) -> None:
    made = job(tmp_path, strategy="single", steps=PLAN.steps, eval_every=100)
    made = dataclasses.replace(made, profiling=PLAN)
    train(made)
    assert recorder.open == []
    begin, end = recorder.events.index(("START",)), recorder.events.index(("STOP",))
    within = recorder.events[begin + 1 : end]
    assert [e[0] for e in within if len(e) == 1] == ["step 3", "step 4"]
    assert {e[0] for e in within} == {"step 3", "step 4"}
    parts = {e[1:] for e in within}
    assert {
        ("data",),
        ("forward and backward",),
        ("forward and backward", "forward"),
        ("forward and backward", "backward and reduce"),
        ("gradient norm",),
        ("update", "optimizer"),
    } <= parts
    assert all("forward and backward" in p for p in parts if "forward" in p)
    assert ("step 1",) in recorder.events[:begin]
    assert ("step 5",) in recorder.events[end:]
    assert not trace_path(made.folder, 0).exists()
    note = json.loads(note_path(made.folder, 0).read_text())
    assert note["report"] is None
    assert "no nsys was asked" in note["why"]


def test_a_run_that_ends_early_leaves_nothing_open(tmp_path: Path, recorder: Recorder) -> None:
    def stopped() -> None:
        with watched_position(PLAN, tmp_path, World.current()) as position:
            for step in range(1, PLAN.warmup + 2):
                position.at("step", step)
                position.at("update")
            with position.within("optimizer"):
                raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        stopped()
    assert recorder.open == []
    assert recorder.events[-1] == ("STOP",)
    assert not note_path(tmp_path, 0).exists()


def test_on_a_gpu_start_and_stop_wait_for_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    for owner, name in (
        (torch.cuda, "synchronize"),
        (torch.cuda.profiler, "start"),
        (torch.cuda.profiler, "stop"),
        (torch.cuda.nvtx, "range_push"),
        (torch.cuda.nvtx, "range_pop"),
    ):
        monkeypatch.setattr(
            owner, name, lambda *a, n=name: called.append(" ".join([n, *map(str, a)]))
        )
    tool = nsight.tool_for(torch.device("cuda", 0))
    assert isinstance(tool, Nvtx)
    tool.start()
    tool.push("step 1")
    tool.pop()
    tool.stop()
    wait = "synchronize cuda:0"
    assert called == [wait, "start", "range_push step 1", "range_pop", wait, "stop"]


def test_a_rank_waits_until_its_report_has_grown_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsight, "_STILL_S", 0.4)
    made = tmp_path / "node-17.nsys-rep"

    def write() -> None:
        for n in range(1, 6):
            time.sleep(0.1)
            made.write_bytes(bytes(n))

    writer = threading.Thread(target=write)
    writer.start()
    leave_word(tmp_path, 1, {REPORT: str(made)})
    writer.join()
    assert json.loads(note_path(tmp_path, 1).read_text()) == {
        "rank": 1, "report": str(tmp_path / "rank-1.nsys-rep"), "why": "",
    }  # fmt: skip
    assert (tmp_path / "rank-1.nsys-rep").stat().st_size == 5


def test_a_report_that_does_not_come_is_told_and_so_is_why_none_was_begun(tmp_path: Path) -> None:
    leave_word(tmp_path, 0, {REPORT: str(tmp_path / "none.nsys-rep")}, wait_s=0.2)
    leave_word(tmp_path, 1, {WHY_NOT: "nsys is not on PATH"})
    first, second = (json.loads(note_path(tmp_path, rank).read_text()) for rank in (0, 1))
    assert first["report"] is second["report"] is None
    assert "none.nsys-rep within 0.2 s" in first["why"]
    assert second["why"] == "nsys is not on PATH"
