"""`hybrid profile --nsight`: what is told, its command lines, and real workers under a double."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "training"))

from test_nsight_launch import put_nsys
from test_scaling_runs import project
from typer.testing import CliRunner

from hybrid.cli import app
from hybrid.profiles import ready, run_once
from hybrid.profiles_nsight import Nsight, Report, as_json, told, whole_command

ARGUMENTS = ["profile", "--nsight", "--config", "a b/hybrid.yaml", "--set", "training.steps=3"]


def done(folder: Path, *reports: Report, gpu: bool = True) -> Nsight:
    return Nsight(folder=folder / "t", gpu=gpu, worker_command="nsys profile …", reports=reports)


def test_the_command_that_is_told_parses_and_names_where_its_report_lies(tmp_path: Path) -> None:
    whole = whole_command(tmp_path / "run 1", ARGUMENTS)
    lost = Report(rank=0, report=None, why="nsys is not on PATH")
    lines = told(done(tmp_path, lost), whole)
    [line] = [shlex.split(x) for x in lines if x.strip().startswith("nsys profile")]
    assert line == whole
    assert line[-len(ARGUMENTS) - 1 :] == ["hybrid", *ARGUMENTS]
    assert {"--trace=cuda,nvtx,osrt", "--capture-range=cudaProfilerApi"} < set(line)
    assert lines[-1].endswith(f"{tmp_path}/run 1/profiles/nsight.nsys-rep")
    assert "rank 0: no report: nsys is not on PATH" in lines


def test_reports_are_named_and_nothing_else_is_asked_for(tmp_path: Path) -> None:
    reports = [Report(rank=r, report=tmp_path / f"rank-{r}.nsys-rep", why="") for r in range(2)]
    lines = told(done(tmp_path, *reports), whole_command(tmp_path, ARGUMENTS))
    assert f"  rank 1: {tmp_path}/rank-1.nsys-rep" in lines
    assert lines[-1].split()[-1] == f"{tmp_path}/rank-0.nsys-rep"
    data = as_json(done(tmp_path, *reports), ["nsys"])["nsight"]
    assert json.loads(json.dumps(data))["reports"][0]["report"] == str(reports[0].report)


def test_without_a_gpu_it_says_that_there_is_nothing_to_record(tmp_path: Path) -> None:
    lines = told(done(tmp_path, Report(rank=0, report=None, why="x"), gpu=False), ["--output=o"])
    assert "no GPU" in lines[0]
    assert not [line for line in lines if "no report" in line]


def test_what_gives_figures_is_refused_beside_it() -> None:
    refused = CliRunner().invoke(app, ["profile", "--nsight", "--memory"])
    assert refused.exit_code != 0
    assert "--memory" in refused.output + str(refused.exception)


@pytest.mark.full
@pytest.mark.ray
def test_ray_starts_its_workers_under_it(tmp_path: Path, ray_cluster: Any) -> None:
    from hybrid.training.nsight import note_path
    from hybrid.training.nsight_launch import launcher
    from hybrid.training.profiling import Profiling

    made = project(tmp_path)
    with ready(made, 2, 1, 1, lambda record: None) as (config, data, count, folder):
        # The double writes its report when the worker ends, as nsys does without a capture range:
        # here, a file that is there before is what the worker waits for.
        path = put_nsys(tmp_path / "bin")
        double = tmp_path / "bin/nsys"
        double.write_text(
            double.read_text().replace("NSYS_PROF", 'echo r >"$output.nsys-rep"\nNSYS_PROF')
        )
        folder.mkdir(parents=True)
        plan = Profiling(
            warmup=1, active=1, nsight=True,
            launcher=shlex.join(["env", f"PATH={path}"]) + " " + launcher(folder),
        )  # fmt: skip
        with run_once(config, data, count, plan, lambda record: None) as run:
            notes = [json.loads(note_path(run, rank).read_text()) for rank in range(2)]
    assert [n["report"] for n in notes] == [
        str(folder.resolve() / f"rank-{rank}.nsys-rep") for rank in range(2)
    ], os.listdir(folder)

    dry = made.profile_nsight(workers=1, steps=1, warmup=1)
    assert not dry.gpu
    assert [r.rank for r in dry.reports] == [0]
    assert "no nsys was asked" in dry.reports[0].why
