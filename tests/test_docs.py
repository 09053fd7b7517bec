"""What README and docs show is true: snippets run, commands and files exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybrid.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block of a language."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(rf"```{language}\n(.*?)```", text, re.DOTALL):
            found.append((page.name, match[1]))
    return found


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_snippets_run(page: str, code: str) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_shown_commands_exist_with_their_options() -> None:
    lines = [line for _, code in blocks("sh") for line in code.replace("\\\n", " ").splitlines()]
    hybrid = [shlex.split(line, comments=True) for line in lines if line.startswith("hybrid ")]
    assert len(hybrid) >= 6
    for words in hybrid:
        name = words[1]
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, f"no command {name!r}"
        for word in words[2:]:
            if word.startswith("-"):
                assert word in shown.output, f"hybrid {name} has no {word}"
    makefile = (ROOT / "Makefile").read_text()
    for line in lines:
        if line.startswith("make "):
            assert f"\n{line.split()[1]}:" in makefile


def test_shown_files_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in re.findall(r"(?:jobs|serve|examples|docs)/[\w./-]+\.\w+", readme):
        assert (ROOT / path).exists(), path
    tree = readme.split("src/hybrid/\n")[1].split("```")[0]
    names = re.findall(r"(?:^|\s{3,})(\w+(?:\.py|/))", tree)
    assert len(names) > 8
    for name in names:
        assert (ROOT / "src/hybrid" / name).exists(), name
