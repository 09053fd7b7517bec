"""The report of an audit: JSON that reads back, money, a letter, one page; and the command."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybrid.audit import report
from hybrid.audit.conduct import NodeResult
from hybrid.audit.reading import Reading
from hybrid.audit.report_html import to_html
from hybrid.audit.specs import load_specs
from hybrid.audit.verdict import judge
from hybrid.cli import app
from hybrid.errors import DataError

A10G = Path(__file__).parent / "captures/01_a10g_aws_vm_idle_gen1_x8.xml"


def node(name: str, gflops: float) -> report.NodeReport:
    readings = [
        Reading(name="cpu.matmul_gflops", value=gflops, unit="GFLOP/s", source="torch",
                fakeable=False, curve=((1.0, gflops), (2.0, gflops))),
    ]  # fmt: skip
    result = NodeResult(name=name, readings=readings)
    return report.NodeReport(result=result, verdict=judge(readings, load_specs()))


def test_a_slow_node_is_told_in_money_against_its_peers() -> None:
    nodes = [node("a", 100), node("b", 102), node("c", 71)]
    found = {c.node: c for c in report.costs(nodes, usd_per_hour=10)}
    assert found["c"].share == pytest.approx(71 / 101)
    assert found["c"].usd_lost_per_hour == pytest.approx(10 * (1 - 71 / 101))
    assert found["b"].usd_lost_per_hour == 0


def test_an_audit_reads_back_and_what_is_none_is_refused(tmp_path: Path) -> None:
    nodes = [node("a", 100), node("ü", float("inf"))]
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(report.to_document(nodes, level="quick", when=0.0)))
    back = report.read_document(path)
    assert [n.result.name for n in back] == ["a", "ü"]
    assert back[0].result.readings == nodes[0].result.readings
    assert back[1].result.readings[0].value is None, "JSON has no infinities"
    for bad in ("", "[]", "{}", '{"format": 1, "nodes": [{}]}', '{"format": 99, "nodes": []}'):
        path.write_text(bad)
        with pytest.raises(DataError, match=r"audit\.json"):
            report.read_document(path)


def test_what_changed_since_an_earlier_audit() -> None:
    before, now = node("a", 100).result.readings, node("a", 80).result.readings
    [change] = report.changes(now, before)
    assert (change.name, change.ratio) == ("cpu.matmul_gflops", pytest.approx(0.8))
    assert report.changes(now, node("a", 81).result.readings) == [], "what genuine ones vary by"


def test_the_command_judges_saved_outputs_and_its_status_says_so(tmp_path: Path) -> None:
    fake = tmp_path / "fake.xml"
    fake.write_bytes(A10G.read_bytes().replace(b"NVIDIA A10G", b"NVIDIA A100-SXM4-80GB"))
    page, data, letter = (tmp_path / n for n in ("a.html", "a.json", "a.txt"))
    run = CliRunner().invoke(app, ["audit", "--from-smi", str(A10G)], env={"COLUMNS": "200"})
    assert run.exit_code == 0, run.output
    run = CliRunner().invoke(
        app,
        ["audit", "--from-smi", str(fake), "--html", str(page), "--json", str(data),
         "--letter", str(letter)],
        env={"COLUMNS": "200"},
    )  # fmt: skip
    assert run.exit_code == 1
    assert "contradicted" in run.output
    assert "name-against-memory" in run.output
    [entry] = json.loads(data.read_text())["nodes"]
    assert entry["verdict"]["identity"] == "contradicted"
    assert "23028" in letter.read_text()
    run = CliRunner().invoke(app, ["audit", "--from-smi", str(tmp_path / "absent")])
    assert run.exit_code != 0 and not isinstance(run.exception, AttributeError)


def test_the_page_needs_nothing_else_and_escapes_names() -> None:
    nodes = [node("<script>x</script>", 100), node("b", 71)]
    text = to_html(nodes, level="quick", when=0.0)
    assert "<script>x" not in text
    assert "http://" not in text.replace("http://www.w3.org/", "") and "https://" not in text

    seen: set[str] = set()

    class Tags(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            seen.add(tag)

    parser = Tags()
    parser.feed(text)
    assert {"html", "table"} <= seen
    assert text.count("<polyline") == 2, "a curve for each node"
    assert text.count("<small>GFLOP/s</small>") == 2


def test_the_page_has_the_worst_first_and_the_units_of_what_is_drawn() -> None:
    cache = Reading(name="cpu.torch.cache_bytes", value=2.0**21, unit="byte", source="chase",
                    fakeable=False, curve=((2.0**20, 5.0), (2.0**26, 25.0)))  # fmt: skip
    bad = [Reading(name="claimed.name", value="NVIDIA A10G", source="nvidia-smi", fakeable=True,
                   gpu=0),
           Reading(name="claimed.memory_mib", value=81_920, source="nvidia-smi", fakeable=True,
                   gpu=0)]  # fmt: skip
    nodes = [
        report.NodeReport(
            result=NodeResult(name=name, readings=readings), verdict=judge(readings, load_specs())
        )
        for name, readings in (("well", [cache]), ("false", bad))
    ]
    assert [n.verdict.identity for n in nodes] == ["unknown", "contradicted"]
    text = to_html(nodes, level="quick", when=0.0)
    assert "<h1>Audit of 2 nodes: 1 contradicted, 1 of unknown identity</h1>" in text
    assert text.index("<h2>false: ") < text.index("<h2>well: ")
    for told in ("<small>ns a load</small>", ">1 MiB<", ">64 MiB<", "<td>2 MiB</td>"):
        assert told in text
