"""Traces of GPU steps with known answers: read by us, counted µs by µs, and read by a peer."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.planning.trace import RankTrace, StepTime, analyse, read_trace
from hybrid.planning.verdict import judge
from hybrid.testing_traces import (
    COMPUTE,
    COPY,
    ELEMENTWISE,
    GEMM,
    HARD_SHAPES,
    READ,
    SHAPES,
    TALK,
    WAIT,
    Answer,
    Piece,
    Shape,
    big,
)

ROOT = Path(__file__).parents[2]
HTA = os.environ.get("HYBRID_HTA_PYTHON") or (
    sys.executable if importlib.util.find_spec("hta") else None
)
"""An interpreter that has HolisticTraceAnalysis."""


def in_us(step: StepTime) -> dict[str, float]:
    return {name: getattr(step, name) * 1e6 for name in Answer.__dataclass_fields__}


def read(shape: Shape, rank: int) -> RankTrace:
    about = {"rank": rank, "world_size": len(shape.ranks), "backend": "nccl"}
    return analyse({"traceEvents": shape.events(rank), "distributedInfo": about}, Path("made"))


@pytest.mark.parametrize("shape", [*SHAPES, *HARD_SHAPES], ids=lambda shape: shape.name)
def test_a_step_goes_to_what_was_worked_out_by_hand(shape: Shape) -> None:
    for rank, answer in enumerate(shape.answers):
        found = read(shape, rank)
        assert [step.step for step in found.steps] == list(range(shape.steps))
        for step in found.steps:
            assert in_us(step) == pytest.approx(vars(answer), abs=1e-4)
            assert step.seconds * 1e6 == pytest.approx(shape.step_us)
        talks = bool(answer.exposed or answer.overlapped)
        assert found.device
        assert set(found.collectives) == ({"all_reduce"} if talks else set())
        assert bool(found.warnings) == (not talks and len(shape.ranks) > 1)


def test_files_of_all_ranks_are_judged(tmp_path: Path) -> None:
    [exposed] = [shape for shape in SHAPES if shape.name == "communication exposed"]
    found = judge([read_trace(path) for path in exposed.write(tmp_path)])
    assert found.overlap == 0
    assert found.shares["exposed communication"] == pytest.approx(0.4)  # of who waits least
    assert found.imbalance == pytest.approx(0.15)  # rank 1 waits 300 µs more, half of the ranks


def test_a_large_trace_adds_up() -> None:
    shape = big(400)
    [step, *_] = read(shape, 0).steps
    # Of each ten: nine of 8.25 µs; the tenth talks for 12.5, of which 2.5 are beside the next, and
    # of the last nothing is beside it.
    answer = {"compute": 10 * 9 * 8.25, "overlapped": 9 * 2.5, "exposed": 10 * 10 + 2.5}
    assert {k: v for k, v in in_us(step).items() if k in answer} == pytest.approx(answer)


TIMES = st.tuples(st.integers(-20, 120), st.integers(0, 40)).map(lambda t: (t[0], t[0] + t[1]))
PIECES = st.lists(
    st.builds(
        lambda kind, times: (kind[0], *times, kind[1]),
        st.sampled_from([(GEMM, COMPUTE), (ELEMENTWISE, COMPUTE), ("collective", TALK),
                         (READ, COPY), ("data", 0), (WAIT, 0)]),
        TIMES,
    ),
    max_size=20,
)  # fmt: skip


@given(PIECES)
def test_figures_are_those_of_counting_each_microsecond(pieces: list[Piece]) -> None:
    shape = Shape(name="any", ranks=(tuple(pieces),), answers=(), steps=1, step_us=100, lead_us=4)
    counted = dict.fromkeys(Answer.__dataclass_fields__, 0)
    for now in range(100):
        going = {(name, stream) for name, start, end, stream in pieces if start <= now < end}
        streams = {stream for _, stream in going}
        launching = any(start - 4 <= now < start - 2 for _, start, _, stream in pieces if stream)
        waiting = (WAIT, 0) in going
        if COMPUTE in streams:
            counted["compute"] += 1
            counted["overlapped"] += TALK in streams
        elif TALK in streams:
            counted["exposed"] += 1
        elif COPY in streams:
            counted["copies"] += 1
        elif not waiting and (launching or ("data", 0) in going):
            counted["host_wait"] += 1
        else:
            counted["idle"] += 1
    if any(stream in (COMPUTE, TALK) for *_, stream in pieces):  # else no kernel: a CPU's trace
        [step] = read(shape, 0).steps
        assert in_us(step) == pytest.approx(counted, abs=1e-4)


@pytest.mark.skipif(
    HTA is None,
    reason="HolisticTraceAnalysis is not installed: HYBRID_HTA_PYTHON=an interpreter that has it",
)
def test_a_peer_finds_the_same() -> None:
    command = [sys.executable, ROOT / "benchmarks/profile_vs_hta.py", "--hta", HTA, "--quick"]
    done = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    claims = json.loads(done.stdout.splitlines()[-1])
    assert abs(claims["agreement"]["ours"] - claims["agreement"]["peer"]) < 0.01
    assert claims["by_hand"]["ratio"] == 1
    assert claims["hard_error"]["ours"] < 0.01
    assert claims["hard_error"]["peer"] > 10
