"""Saved outputs: all are read; genuine ones are not accused; doctored ones are, by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from honest import measured_of, sku
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.audit.captures import read_capture, read_capture_file
from hybrid.audit.reading import Reading
from hybrid.audit.specs import load_specs
from hybrid.audit.verdict import NodeVerdict, judge
from hybrid.audits import read_saved
from hybrid.errors import DataError

FOLDER = Path(__file__).parent / "captures"
CAPTURES = sorted(FOLDER.iterdir())
A10G = FOLDER / "01_a10g_aws_vm_idle_gen1_x8.xml"
SPECS = load_specs()


def judged(data: bytes, measured: list[Reading] | None = None) -> NodeVerdict:
    return judge([*read_capture(data), *(measured or [])], SPECS)


@pytest.mark.parametrize("path", CAPTURES, ids=lambda p: p.stem)
def test_every_saved_output_is_read_and_nothing_genuine_is_accused(path: Path) -> None:
    readings = read_capture_file(path)
    assert readings
    verdict = judge(readings, SPECS)
    assert verdict.identity == "unknown", "claims alone prove nothing, and contradict nothing here"
    assert (verdict.health == "unfit") == path.stem.startswith("16_"), verdict.findings


def test_the_saved_curve_that_collapses_is_a_finding() -> None:
    [path] = FOLDER.glob("20_*")
    [node] = read_saved([path])
    [found] = node.verdict.findings
    assert (found.kind, node.verdict.health) == ("collective-collapse", "degraded")
    assert found.readings[0].name == "collective.class"
    assert "peaks at 27.5 with 32 MiB" in found.text  # GiB/s: 29.5 GB/s in the report
    lines = path.read_text(encoding="utf-8").splitlines()
    wrong = "\n".join([*lines[:5], lines[5].replace("      0", "      7", 1), *lines[6:]])
    assert {r.value for r in read_capture(wrong.encode()) if r.name == "collective.errors"} == {7}
    rising = "\n".join(lines[:8]).encode()
    assert {r.value for r in read_capture(rising) if r.name == "collective.class"} == {"healthy"}


def test_known_false_alarms_do_not_fire() -> None:
    """Idle at gen 1, x8 on a cloud's A10G, no host maximum in a VM, x8 of 16: all are usual."""
    for name in ("01_", "05_", "07_"):
        [path] = [p for p in CAPTURES if p.name.startswith(name)]
        assert judge(read_capture_file(path), SPECS).findings == ()


@pytest.mark.parametrize(
    ("pattern", "replacement", "kind", "reading"),
    [
        (rb"NVIDIA A10G", b"NVIDIA A100-SXM4-80GB", "name-against-memory", "claimed.memory_mib"),
        (rb"(<driver_version>)[^<]*", rb"\g<1>591.86", "windows-driver", "claimed.driver_version"),
    ],
)
def test_a_doctored_output_is_contradicted_by_the_reading_that_gives_it_away(
    pattern: bytes, replacement: bytes, kind: str, reading: str
) -> None:
    data = re.sub(pattern, replacement, A10G.read_bytes())
    verdict = judged(data)
    assert verdict.identity == "contradicted"
    [found] = [f for f in verdict.findings if f.kind == kind]
    assert reading in {r.name for r in found.readings}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_is_an_error_or_unknown_but_never_genuine(data: st.DataObject) -> None:
    """Neither alone, nor beside measurements of an A100 of which one that is needed lacks."""
    lacking = data.draw(st.sampled_from(("sm_count", "memory_bytes", "memory_gib_s")))
    measured = [r for r in measured_of(sku("A100-SXM4-80GB")) if not r.name.endswith(lacking)]
    raw = data.draw(st.sampled_from(CAPTURES)).read_bytes()
    how = data.draw(st.sampled_from(("cut", "shuffle", "corrupt")))
    if how == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    elif how == "shuffle":
        raw = b"\n".join(data.draw(st.permutations(raw.split(b"\n"))))
    else:
        for _ in range(data.draw(st.integers(1, 20))):
            at = data.draw(st.integers(0, len(raw) - 1))
            raw = raw[:at] + bytes([data.draw(st.integers(0, 255))]) + raw[at + 1 :]
    try:
        readings = read_capture(raw)
    except DataError:
        return
    for added in ([], measured):
        assert judge([*readings, *added], SPECS).identity != "genuine"


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"NVIDIA-SMI has", "Ω≠".encode() * 50])
def test_what_is_no_output_is_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        read_capture(data)


def test_entities_are_not_expanded() -> None:
    bomb = b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><x>&b;</x>'
    with pytest.raises(DataError):
        read_capture(bomb)
