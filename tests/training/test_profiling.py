"""The profiler around real steps: jobs made to be bound by one thing are told to be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import worlds
from profiled_jobs import (
    PLAN,
    Work,
    big_matmuls,
    heavy_all_reduce,
    host_bound,
    profiled,
    slow_loader,
)
from test_loop import job

from hybrid.planning.trace import RankTrace, read_trace
from hybrid.planning.verdict import Verdict, judge
from hybrid.training.loop import train
from hybrid.training.parallel import World
from hybrid.training.position import Position
from hybrid.training.profiling import trace_path, watched_position


def verdict_of(folder: Path, ranks: int = 1) -> tuple[list[RankTrace], Verdict]:
    traces = [read_trace(trace_path(folder, rank)) for rank in range(ranks)]
    assert all(len(t.steps) == PLAN.active for t in traces)
    return traces, judge(traces)


@pytest.mark.parametrize(
    ("work", "bound"), [(big_matmuls, "compute"), (slow_loader, "input"), (host_bound, "host")]
)
def test_a_job_made_so_is_told_so(tmp_path: Path, work: Work, bound: str) -> None:
    profiled(work, tmp_path)
    [trace], found = verdict_of(tmp_path)
    assert found.bound == bound, found.evidence
    assert found.warnings == ()
    assert {"data", "forward and backward"} <= trace.phases.keys()
    assert not trace.collectives


def test_a_tiny_batch_with_a_heavy_all_reduce_is_bound_by_communication(tmp_path: Path) -> None:
    worlds.run(2, tmp_path / "world", profiled, heavy_all_reduce, tmp_path)
    traces, found = verdict_of(tmp_path, 2)
    assert found.bound == "communication", found.evidence
    assert [(t.rank, t.world_size, t.backend) for t in traces] == [(0, 2, "gloo"), (1, 2, "gloo")]
    assert traces[0].collectives.keys() == {"all_reduce"}
    assert "all_reduce" in found.evidence[1]
    assert found.warnings == ()


def test_the_loop_itself_is_profiled_by_its_own_phases(tmp_path: Path) -> None:
    made = job(tmp_path, strategy="single", steps=PLAN.steps, eval_every=100)
    made = type(made)(config=made.config, data=made.data, run_id="run", profiling=PLAN)
    final = train(made)
    [trace], found = verdict_of(made.folder)
    assert final["steps"] == PLAN.steps
    expected = {"data", "token count", "forward and backward", "gradient norm", "update", "report"}
    assert expected <= trace.phases.keys()
    assert found.seconds > 0


def test_a_run_that_ends_early_leaves_what_it_has_and_no_profiler(tmp_path: Path) -> None:
    def stopped() -> None:
        with watched_position(PLAN, tmp_path, World.current()) as position:
            for step in range(1, PLAN.warmup + 3):
                position.at("step", step)
                big_matmuls(position)
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        stopped()
    assert read_trace(trace_path(tmp_path, 0)).steps
    profiled(big_matmuls, tmp_path)  # the profiler is free again
    with watched_position(None, tmp_path, World.current()) as plain:
        assert type(plain) is Position
