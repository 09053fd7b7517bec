"""The table of readings has every name that a reading is made with."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from hybrid.audit.captures import read_capture_file
from hybrid.audit.names import READINGS

SOURCE = Path(__file__).parents[2] / "src/hybrid/audit"
NAME = re.compile(r"(claimed|measured|challenge|collective|cpu|disk|proof)\.[a-z0-9_.]*[a-z0-9]")


def test_every_reading_that_is_made_by_name_is_in_the_table() -> None:
    made = set()
    for path in SOURCE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "name":
                value = node.value
                if isinstance(value, ast.Constant) and NAME.fullmatch(str(value.value)):
                    made.add(value.value)
    assert len(made) > 10
    assert made <= READINGS.keys(), made - READINGS.keys()


def test_every_reading_of_the_saved_outputs_is_in_the_table() -> None:
    folder = Path(__file__).parent / "captures"
    found = {r.name for path in folder.iterdir() for r in read_capture_file(path)}
    assert len(found) > 40
    assert found <= READINGS.keys(), found - READINGS.keys()
