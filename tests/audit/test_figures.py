"""What an audit leaves behind: measured figures for planning, and files to compare with."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid.audit import history
from hybrid.audit.conduct import NodeResult
from hybrid.audit.figures import measured_figures
from hybrid.audit.reading import Finding, Reading
from hybrid.errors import DataError


def node(name: str, *tflops: float, bad: bool = False) -> NodeResult:
    readings = [
        Reading(
            name="measured.matmul_tflops.bf16", value=t, unit="TFLOP/s", source="torch",
            fakeable=False, gpu=i, curve=((0.0, t),),
        )
        for i, t in enumerate(tflops)
    ]  # fmt: skip
    readings += [
        Reading(name="claimed.name", value="NVIDIA L4", source="nvml", fakeable=True, gpu=0),
        Reading(name="challenge.correct", value=True, source="driver", fakeable=False, gpu=0),
        Reading(name="cpu.steal_fraction", value=None, source="/proc/stat", fakeable=True),
    ]
    found = [
        Finding(kind="sm-count", axis="identity", severity="contradicted", text="no",
                readings=(readings[0],))
    ]  # fmt: skip
    devices = [f"cuda:{i}" for i in range(len(tflops))]
    return NodeResult(
        name=name, node_id=name, pool="gpu", devices=devices, readings=readings,
        findings=found if bad else [],
    )  # fmt: skip


def test_planning_gets_medians_of_what_fit_nodes_do(tmp_path: Path) -> None:
    nodes = [node("a", 100, 90), node("b", 80, 80), node("c", 10, bad=True)]
    file = tmp_path / "audit.json"
    file.write_text(json.dumps(history.document(nodes, level="quick", when=1.0)))
    figures = measured_figures(file)
    assert figures["pools"] == {"gpu": {"measured.matmul_tflops.bf16": 87.5}}
    assert {n: f["fit"] for n, f in figures["nodes"].items()} == {"a": True, "b": True, "c": False}
    assert figures["nodes"]["a"]["gpus"] == 2
    assert figures["nodes"]["c"]["figures"] == {"measured.matmul_tflops.bf16": 10}
    command = [sys.executable, "-m", "hybrid.audit.figures", str(file)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout) == figures


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2, "nodes": []}', '{"format": 1, "nodes": [3]}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(DataError, match=r"x\.json"):
        measured_figures(file)
    with pytest.raises(DataError, match=r"none\.json"):
        measured_figures(tmp_path / "none.json")


def test_a_kept_audit_is_what_was_found(tmp_path: Path) -> None:
    first, second = node("gpu/1 ü", 100, bad=True), node("gpu/1 ü", 90)
    assert history.previous(tmp_path, first.name) is None
    history.save(tmp_path, first, level="quick", when=1000.0)
    assert history.previous(tmp_path, first.name) == first
    history.save(tmp_path, second, level="quick", when=1000.5)
    assert history.previous(tmp_path, first.name) == second
    assert history.previous(tmp_path, "another") is None


@pytest.mark.parametrize("damage", ["", "{}", '{"name": 1', '{"name": "a", "readings": 3}', "[]"])
def test_a_damaged_file_is_passed_over_and_said(tmp_path: Path, damage: str, caplog: Any) -> None:
    history.save(tmp_path, node("a", 100), level="quick", when=1000.0)
    history.save(tmp_path, node("a", 90), level="quick", when=2000.0).write_text(damage)
    with caplog.at_level(logging.WARNING):
        found = history.previous(tmp_path, "a")
    assert found is not None and found.readings[0].value == 100
    assert "is not compared with" in caplog.text
