"""What the files of the `hybrid` command share: options, consoles, opening a project, printing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from hybrid import project
from hybrid.errors import ConfigError

out = Console()
err = Console(stderr=True)

Config = Annotated[Path, typer.Option("-c", "--config", help="The project file.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a key, e.g. --set training.steps=10 (repeatable)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
DEFAULT = Path("hybrid.yaml")


def open_project(config: Path, sets: list[str] | None = None) -> project.Project:
    """The project of a file, with `--set KEY=VALUE` applied."""
    overrides = {}
    for item in sets or []:
        key, eq, value = item.partition("=")
        if not eq:
            raise ConfigError(f"--set {item}: expected KEY=VALUE, e.g. training.steps=10")
        overrides[key] = yaml.safe_load(value)
    return project.open(config, overrides)


def show(data: Any, as_json: bool, table: Table | str | None = None) -> None:
    """Print a result for people, or as JSON."""
    if as_json or table is None:
        sys.stdout.write(json.dumps(data, ensure_ascii=False, indent=2) + "\n")
    else:
        out.print(table)
