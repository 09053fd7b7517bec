"""Starting a worker under nsys: the command, what becomes of it without, and a real process."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.training.nsight_launch import REPORT, WHY_NOT, command, launcher, resolve

NSYS = """#!/bin/sh
[ "$1" = --version ] && exit {version}
for part; do
  case "$part" in
    --output=*) output="${{part#--output=}}" ;;
    profile|--*) ;;
    *) break ;;
  esac
  shift
done
NSYS_PROFILING_SESSION_ID=1 "$@" || exit
echo recorded >"$output.nsys-rep"
"""
"""Takes options as nsys does, runs the rest as a child, and leaves a report."""


def put_nsys(folder: Path, version: int = 0) -> str:
    """A PATH that has a double of nsys first."""
    folder.mkdir(parents=True)
    (folder / "nsys").write_text(NSYS.format(version=version))
    (folder / "nsys").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_the_command_has_its_options_before_what_it_runs(tmp_path: Path) -> None:
    made = command(tmp_path / "a b.nsys-rep", ["python", "x.py"])
    text = shlex.join(made)
    assert shlex.split(text) == made
    assert made[:2] == ["nsys", "profile"]
    assert made[-2:] == ["python", "x.py"]
    assert all(part.startswith("--") for part in made[2:-2])
    assert f"--output={tmp_path}/a b" in made
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--kill=none"} < set(
        made
    )


def test_a_worker_runs_under_nsys_and_its_report_lies_where_it_was_told(tmp_path: Path) -> None:
    folder = tmp_path / "the reports"
    folder.mkdir()
    path = put_nsys(tmp_path / "bin")
    code = f"import os; print(os.environ['{REPORT}'])"
    # As Ray does: the text, then the arguments, in a shell.
    text = f"exec {launcher(folder)} {shlex.join(['-c', code])}"
    done = subprocess.run(
        ["bash", "-c", text],
        env={**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    [report] = folder.glob("*.nsys-rep")
    assert done.stdout.strip() == str(report)
    assert report.read_text() == "recorded\n"


@pytest.mark.parametrize(
    ("version", "more", "why"),
    [
        (None, {}, "not on PATH"),
        (3, {}, "`nsys --version` fails"),
        (0, {"NSYS_PROFILING_SESSION_ID": "1"}, "nsys of the caller"),
    ],
)
def test_where_nsys_cannot_be_the_worker_is_plain_python(
    tmp_path: Path, version: int | None, more: dict[str, str], why: str
) -> None:
    path = str(tmp_path) if version is None else put_nsys(tmp_path / "bin", version)
    run, environment = resolve(tmp_path, ["python", "x.py"], {"PATH": path, **more})
    assert run == ["python", "x.py"]
    assert why in environment[WHY_NOT]
    assert REPORT not in environment
