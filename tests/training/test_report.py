"""The report of a run: figures, text, and a page that needs nothing but itself."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hybrid.errors import NotFound, TrainingError
from hybrid.training.progress import Progress, read_progress
from hybrid.training.report import (
    duration,
    launched,
    lines,
    report_of,
    reports,
    series,
    summarise,
    write_report,
)
from hybrid.training.report_charts import flops, thinned

EVIL = '</script><script src="https://example.invalid/x.js">alert(1)</script>&"'
VOID = {"meta", "line", "rect", "circle", "polyline"}


class Strict(HTMLParser):
    """Refuses what is not closed or nested; collects tags, ids and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text += data


def write_run(folder: Path, steps: int = 30, nan_at: int | None = None) -> None:
    progress = Progress(folder)
    progress.write(
        "start", step=0, steps=steps, world_size=2, strategy="fsdp", device="cuda:0",
        parameters=10, flops_per_token=60.0, peak_flops=4.2e12, peak_source="measured: x",
        sheet_flops=9.9e14,
    )  # fmt: skip
    for n in range(1, steps + 1):
        loss = math.nan if n == nan_at else 5 / n
        with progress.phase("step"):
            math.factorial(3000)
        progress.write(
            "step", step=n, steps=steps, tokens=64, loss=loss, lr=1e-3, grad_norm=1.0 + n % 3
        )
    progress.write("eval", step=steps, eval_loss=0.5)
    progress.write("finished", step=steps)


def test_a_run_ends_with_a_report_of_which_json_text_and_page_agree(tmp_path: Path) -> None:
    folder = tmp_path / "runs/r1"
    said: list[dict[str, Any]] = []
    began = __import__("time").time() - 3600
    with launched(folder, began=began, workers=2, usd_per_hour=2.0, say=said.append):
        write_run(folder, nan_at=7)
    figures = json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)
    assert (figures["state"], figures["steps"], figures["tokens"]) == ("finished", 30, 30 * 64)
    assert sum(figures["shares"].values()) == pytest.approx(1)
    assert figures["wall_s"] == pytest.approx(3600, abs=60)
    assert figures["cost_usd"] == pytest.approx(2 * 2.0, abs=0.1)
    assert figures["tokens_per_usd"] == pytest.approx(30 * 64 / figures["cost_usd"])
    assert 0 < figures["mfu_wall"] < figures["mfu"]
    text = said[-1]["message"]
    assert "30 of 30 steps" in text and "tokens a dollar" in text and "start-up 60 min" in text
    assert "MFU" in text and "4.2 TFLOP/s measured (data sheet: 990 TFLOP/s)" in text
    assert str(folder / "report.html") in text
    assert report_of(tmp_path / "runs", None) == figures == reports(tmp_path / "runs")[0]

    html = (folder / "report.html").read_text(encoding="utf-8")
    page = Strict()
    page.feed(html)
    page.close()
    assert page.open == []
    [embedded] = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', html)
    assert json.loads(embedded) == figures
    # Nothing is fetched: no address, no stylesheet, no picture.
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe"), tag
        assert not {"src", "href"} & attributes.keys(), tag
    assert "http" not in html.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in html
    charts = [a for tag, a in page.tags if tag == "svg" and "role" in a]
    assert len(charts) == 5
    assert all(a["role"] == "img" and a["aria-label"] for a in charts)
    for figure in re.findall(r"<figure.*?</figure>", html, re.DOTALL):
        ElementTree.fromstring(figure)
    [loss] = [json.loads(a["data-chart"]) for a in charts if "Loss" in str(a["aria-label"])]
    steps = [p[0] for p in loss["lines"][0]["points"]]
    assert steps == [n for n in range(1, 31) if n != 7]  # what is not a number is not drawn


def test_a_run_that_fails_has_a_report_too_and_keeps_its_error(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    with (
        pytest.raises(TrainingError),
        launched(folder, began=0.0, workers=1, usd_per_hour=None),
    ):
        raise TrainingError(EVIL)
    figures = json.loads((folder / "report.json").read_text())
    assert (figures["state"], figures["error"], figures["cost_usd"]) == ("failed", EVIL, None)
    html = (folder / "report.html").read_text()
    page = Strict()
    page.feed(html)
    assert page.open == []
    assert EVIL in page.text
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert any(EVIL in line for line in lines(figures, folder))

    with (
        pytest.raises(KeyboardInterrupt),
        launched(folder, began=1.0, workers=1, usd_per_hour=None),
    ):
        raise KeyboardInterrupt
    assert summarise("r", read_progress(folder))["state"] == "interrupted"

    (folder / "report.json").unlink()
    (folder / "report.json").mkdir()  # cannot be written
    with (
        pytest.raises(TrainingError, match="the run's own"),
        launched(folder, began=1.0, workers=1, usd_per_hour=None),
    ):
        raise TrainingError("the run's own")


def test_a_run_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="none yet"):
        report_of(tmp_path, None)
    for name in ("a", "b"):
        write_run(tmp_path / name, steps=2)
    with pytest.raises(NotFound, match=r"no run c .*: a, b"):
        report_of(tmp_path, "c")
    assert [r["run"] for r in reports(tmp_path)] == ["a", "b"]
    assert report_of(tmp_path, "a")["state"] == "finished"
    (tmp_path / "d").mkdir()
    (tmp_path / "d/progress.jsonl").write_text('{"event": "launch", "ti')  # a line being written
    assert write_report(tmp_path / "d")["wall_s"] == 0


def test_a_step_done_again_is_drawn_once_as_it_was_last() -> None:
    records = [
        {"event": "step", "time": 0.0, "step": n, "loss": v} for n, v in ((1, 3.0), (2, 2.0))
    ]
    again = {"event": "step", "time": 1.0, "step": 2, "loss": 2.5, "tokens": 8}
    curves = series([*records, {**again, "spent": {"step": 1.5, "data": 0.5}}])
    assert curves["loss"] == [(1, 3.0), (2, 2.5)]
    assert curves["tokens_per_s"] == [(2, 4.0)]


def test_thinning_keeps_spikes_and_ends() -> None:
    points = [(n, 1.0) for n in range(10_000)]
    points[777] = (777, 99.0)
    points[8_888] = (8_888, -99.0)
    kept = thinned(points)
    assert len(kept) <= 610
    assert {(777, 99.0), (8_888, -99.0), (0, 1.0), (9_999, 1.0)} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(points[:5]) == points[:5]


def test_units() -> None:
    assert [duration(s) for s in (0.04, 99.0, 100.0, 5999.0, 6000.0)] == [
        "0.0 s", "99.0 s", "1 min 40 s", "99 min 59 s", "1 h 40 min",
    ]  # fmt: skip
    assert [flops(v) for v in (9.89e14, 1.5e9, 2e15, 1e6)] == [
        "989 TFLOP/s", "1.5 GFLOP/s", "2 PFLOP/s", "1 MFLOP/s",
    ]  # fmt: skip
