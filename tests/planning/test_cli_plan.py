"""`hybrid advise` on the command line: its answer, its JSON, its page, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from made_files import METRICS, audit_file, node, write_run
from typer.testing import CliRunner, Result

from hybrid.cli import app
from hybrid.errors import ConfigError

ROOT = Path(__file__).parents[2]
SPECIALISTS = str(ROOT / "examples/workloads/specialists.yaml")
RENTED = str(ROOT / "examples/workloads/rented.yaml")


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["advise", *args], env={"COLUMNS": "200"})


def test_the_answer_its_rules_and_its_plans() -> None:
    shown = run(SPECIALISTS)
    assert shown.exit_code == 0, shown.output
    for text in ("hybrid: a cluster for the base", "specialists", "needs agents", "would make it",
                 "what matters most", "limits missed", "in flight", "USD a GPU-hour"):  # fmt: skip
        assert text in shown.output
    assert "latency.hops" not in shown.output
    assert "chain-latency" in run(SPECIALISTS, "--all-rules").output


def test_the_known_sums() -> None:
    shown = run(RENTED)
    for text in ("$201,600", "$1,680", "$9.38 per H100", "looks off"):
        assert text in shown.output


def test_json_is_one_object() -> None:
    data = json.loads(run(SPECIALISTS, "--json").output)
    assert data["answer"] == "hybrid"
    assert [p["kind"] for p in data["plans"]] == ["hybrid", "cluster"]
    cost = data["plans"][0]["usd"]["value"]
    assert cost["low"] < cost["mid"] < cost["high"]
    assert {"findings", "turns", "notes", "warnings", "actual", "measured"} <= set(data)


def test_the_page_needs_no_network_and_its_plots_are_whole(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    assert run(SPECIALISTS, "--html", str(page)).exit_code == 0
    html = page.read_text(encoding="utf-8")
    for loaded in ("src=", "href=", "<link", "@import", "url("):
        assert loaded not in html
    plots = html.split("<svg")[1:]
    assert len(plots) == 2
    for plot in plots:
        tree = ET.fromstring("<svg" + plot.split("</svg>")[0] + "</svg>")
        bars = tree.findall("rect")
        assert len(bars) >= 2
        for bar in bars:
            x, width = (float(bar.get(key, "nan").rstrip("%")) for key in ("x", "width"))
            assert 0 < x < x + width < 100


def test_what_was_measured(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    shown = run("--from-run", str(folder))
    assert shown.exit_code == 0, shown.output
    assert "predicted against actual" in shown.output
    assert "MFU" in shown.output
    shorter = write_run(tmp_path / "s", steps=20)
    assert "all of r, by s" in run("--from-run", str(folder), "--calibrate", str(shorter)).output
    audit = audit_file(tmp_path / "audit.json", [node("a", 500)])
    metrics = tmp_path / "m.txt"
    metrics.write_text(METRICS)
    shown = run(SPECIALISTS, "--audit", str(audit), "--metrics", str(metrics), "--json")
    data = json.loads(shown.output)
    assert data["workload"]["cluster"]["matmul_tflops"] == 500
    assert {r["name"] for r in data["actual"]} >= {"matmuls of a GPU", "a model call"}
    assert "500 TFLOP/s" in data["measured"][0]
    data = json.loads(run(SPECIALISTS, "--calibrate", str(folder), "--json").output)
    assert data["workload"]["cluster"]["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("args", "named"),
    [((), "WORKLOAD"), (("--audit", "a.json"), "--audit"), (("none.yaml",), "none.yaml")],
)
def test_what_is_missing_is_named(args: tuple[str, ...], named: str) -> None:
    failed = run(*args)
    assert isinstance(failed.exception, ConfigError)
    assert named in failed.exception.message
