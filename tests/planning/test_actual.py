"""What a run measured: read from its records, put into a workload, held against predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_files import METRICS, STEP_S, TOKENS, audit_file, node, write_run

from hybrid.errors import DataError
from hybrid.planning import actual
from hybrid.planning.figures import measured_workload, read_audit
from hybrid.planning.runs import read_run
from hybrid.planning.workload import Workload, parse


def test_what_a_run_measured(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r"))
    assert (run.steps_done, run.evals, run.workers, run.starts) == (40, 4, 2, 1)
    assert run.step_s == pytest.approx(STEP_S)
    assert run.eval_s == pytest.approx(3.0)
    assert run.tokens_per_s == pytest.approx(TOKENS / STEP_S)
    assert run.mfu == pytest.approx(6e6 * TOKENS / STEP_S / 2e11)
    assert run.seconds == pytest.approx(40 * STEP_S + 2 * 1.5 + 4 * 3 + 2)
    assert run.other_s == pytest.approx(3 + 2)


def test_the_time_a_run_lay_still_is_not_counted(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r", starts=2))
    assert run.starts == 2
    assert run.seconds < 60


def test_one_calibration_predicts_a_longer_run(tmp_path: Path) -> None:
    short = read_run(write_run(tmp_path / "short", steps=20))
    whole = read_run(write_run(tmp_path / "long", steps=400))
    predicted = actual.run_seconds(short, 400, 40)
    assert predicted.mid == pytest.approx(whole.seconds, rel=0.01)
    row = actual.whole_run(short, whole)
    assert (row.actual, row.verdict) == (whole.seconds, "within the range")
    other = read_run(write_run(tmp_path / "other", parameters=2_000_000))
    with pytest.raises(DataError, match="short says nothing of other"):
        actual.whole_run(short, other)


def test_calibration_goes_into_the_workload(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r"))
    w = parse({"train": {"parameters": 1e6, "tokens": 1e7}, "cluster": {"gpus": 2}})
    same, said = actual.calibrate(w, run)
    assert same.cluster is not None
    assert same.cluster.tokens_per_s == pytest.approx(run.tokens_per_s)
    assert "as if" not in said
    assert "give cluster.usd_per_hour" in said
    larger = parse({"train": {"parameters": 2e6, "tokens": 1e7}, "cluster": {"gpus": 8}})
    other, said = actual.calibrate(larger, run)
    assert other.cluster is not None
    assert other.cluster.tokens_per_s == pytest.approx(run.tokens_per_s * 8 / 2 / 2)
    assert "as if FLOP/s stayed the same" in said


def test_predicted_against_actual(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r"))
    alone = {row.name: row for row in actual.from_run(run, None)}
    assert alone["MFU"].actual == pytest.approx(run.mfu)
    assert "above the range" in alone["speed"].verdict or "below" in alone["speed"].verdict
    pool = {"gpus": 2, "tokens_per_s": TOKENS / STEP_S, "usd_per_hour": 36}
    w = parse({"train": {"parameters": 1e6, "tokens": 40 * TOKENS}, "cluster": pool})
    (tmp_path / "r/report.json").write_text(json.dumps({"cost_usd": 0.3}))
    rows = {row.name: row for row in actual.from_run(read_run(tmp_path / "r"), w)}
    assert rows["speed"].verdict == "within the range"
    assert rows["speed"].ratio == pytest.approx(1)
    assert rows["cost"].predicted.mid == pytest.approx(40 * STEP_S / 3600 * 36)
    assert rows["cost"].actual == 0.3
    assert len(rows) == 4


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r"))
    with pytest.raises(DataError, match=r"train\.parameters: 7,000,000,000"):
        actual.from_run(run, parse({"train": {"parameters": "7B", "tokens": "1T"}}))
    served = parse({"serve": {"weights": "api", "requests_per_s": 1}})
    with pytest.raises(DataError, match="no `train`"):
        actual.from_run(run, served)
    with pytest.raises(DataError, match="no `train`"):
        actual.calibrate(served, run)
    with pytest.raises(DataError, match=r"no run's folder.*progress\.jsonl"):
        read_run(tmp_path / "none")
    with pytest.raises(DataError, match="too few"):
        read_run(write_run(tmp_path / "few", steps=4))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/progress.jsonl").write_text('{"event": "step"}\nnot json\n')
    with pytest.raises(DataError, match="not a run's progress"):
        read_run(tmp_path / "bad")


def test_an_audit_takes_the_place_of_assumptions(tmp_path: Path) -> None:
    file = audit_file(
        tmp_path / "a.json", [node("a", 700), node("b", 100, "unfit"), node("c", 640)]
    )
    found = read_audit(file)
    assert (found.matmul_tflops, found.fit, found.unfit) == (670, 2, ("b",))
    w = parse({"train": {"parameters": "7B", "tokens": "1T"}})
    measured, said = measured_workload(w, found)
    assert measured.cluster is not None
    assert measured.cluster.matmul_tflops == 670
    assert "b" in said
    row = actual.from_audit(found, w)[0]
    assert row.actual == 670
    assert "below the range" in row.verdict
    kept, said = measured_workload(measured, found)
    assert kept is measured
    assert "not used" in said


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2, "nodes": []}', '{"format": 1}'])
def test_other_files_are_no_audit(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=r"a\.json"):
        read_audit(tmp_path / "a.json")


def serving() -> Workload:
    return parse({"serve": {"weights": "api", "requests_per_s": 64, "call_s": 1}, "steps": 2})


def test_what_the_served_model_measured(tmp_path: Path) -> None:
    file = tmp_path / "metrics.txt"
    file.write_text(METRICS)
    rows = {r.name: r for r in actual.from_metrics(actual.read_metrics(file), serving(), "m")}
    assert rows["a model call"].actual == pytest.approx(2.0)
    assert rows["tokens of a call"].actual == pytest.approx(150)
    assert rows["nodes of agents, by the measured call"].actual == 6  # 128/s x 2 s / (64 x 0.7)
    file.write_text("ray_node_cpu_count 2\n")
    with pytest.raises(DataError, match="hybrid_adapter_answered"):
        actual.read_metrics(file)


def test_the_hosts_that_run(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    file.write_text(json.dumps({"swarm": {"wanted": 2, "hosts": [{}, {}]}}))
    row = actual.from_status(file, serving())[0]
    assert row.actual == 2
    assert row.predicted.mid == 3
    file.write_text(json.dumps({"swarm": "not running"}))
    with pytest.raises(DataError, match="status --json"):
        actual.from_status(file, serving())
