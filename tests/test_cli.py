"""The command line: help with examples, errors with their exit codes, JSON where it reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hybrid.cli import app

FILE = "run: {name: t}\nmodel: {name: b}\nregistry: {root: reg}\n"


def hybrid(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hybrid.cli", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def commands(group: typer.Typer, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [
        (*prefix, str(c.name or c.callback.__name__))
        for c in group.registered_commands
        if c.callback
    ]
    for sub in group.registered_groups:
        assert sub.typer_instance is not None
        found += commands(sub.typer_instance, (*prefix, str(sub.name)))
    return found


@pytest.mark.parametrize("words", commands(app))
def test_every_command_has_help_with_an_example(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"])
    assert shown.exit_code == 0
    if words != ("version",):
        assert f"Example: hybrid {' '.join(words)}" in shown.output


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("status", "-c", "none.yaml"), 2, "none.yaml: no such file"),
        (("train", "--set", "training.stepps=3"), 2, "did you mean 'steps'?"),
        (("train", "--set", "oops"), 2, "expected KEY=VALUE"),
        (("specialise", "nobody"), 5, "no nobody"),
        (("up",), 5, "hybrid train"),
        (("ask", "x"), 5, "no chain or route agent"),
        (("ask", "x", "--agent", "a"), 14, "hybrid up"),
        (("models", "show", "b"), 5, "no base b"),
        (("models", "show", "B!"), 2, "no reference"),
        (("models", "show", "b", "--kind", "x"), 2, "base and adapter"),
        (("agents", "add", "a", "none.yaml"), 2, "none.yaml"),
    ],
)
def test_errors_have_exit_codes_and_say_what_to_do(
    tmp_path: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    (tmp_path / "hybrid.yaml").write_text(FILE)
    done = hybrid(tmp_path, *words)
    assert done.returncode == code, done.stderr
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_reports_are_json_when_asked(tmp_path: Path) -> None:
    (tmp_path / "hybrid.yaml").write_text(FILE)
    assert json.loads(hybrid(tmp_path, "models", "list", "--json").stdout) == []
    status = json.loads(hybrid(tmp_path, "status", "--json").stdout)
    assert status == {"project": "t", "cluster": None, "url": None}
    assert json.loads(hybrid(tmp_path, "down", "--json").stdout) == {"stopped": False}
    checks = json.loads(hybrid(tmp_path, "doctor", "--json").stdout)
    assert {"python", "machine", "disk", "endpoint"} <= {c["check"] for c in checks}
