"""Allocations made by hand, whose every byte is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.errors import DataError
from hybrid.planning.allocations import blocks_of
from hybrid.planning.memory_page import memory_section
from hybrid.planning.memory_timeline import Memory, as_json, read_memory, told


def span(name: str, start: float, end: float, cat: str = "user_annotation", **args: Any) -> Any:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": 1,
            "args": args}  # fmt: skip


def memory(at: float, address: int, size: int, device: int = 0, total: int = 0) -> Any:
    args = {"Addr": address, "Bytes": size, "Device Type": device, "Total Allocated": total}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": at, "tid": 1,
            "args": args}  # fmt: skip


STEPS = [span("ProfilerStep#1", 0, 100), span("ProfilerStep#2", 100, 200)]
NOTES = {
    "names": ["layers.0.weight", "layers.1.weight", ""],
    "marks": [
        [["parameters", 0, 1000, 40], ["optimiser", 0, 2000, 80]],
        [["gradients", 1, 5000, 40], ["input", 2, 9999, 7]],
    ],
}
EVENTS = [
    *STEPS,
    span("hybrid::mark 0", 1, 1),
    span("data", 2, 10),
    memory(5, 3000, 16),
    span("forward and backward", 10, 80),
    span("hybrid::forward layers.0", 12, 30),
    span("aten::linear", 13, 20, "cpu_op", **{"Sequence number": 7}),
    memory(14, 4000, 100),
    span("hybrid::forward layers.1", 31, 38),
    span("aten::mul", 32, 37, "cpu_op"),
    memory(33, 4500, 60),
    span(
        "autograd::engine::evaluate_function: MmBackward0", 40, 60, "cpu_op",
        **{"Sequence number": 7},
    ),
    memory(45, 5000, 40),
    memory(50, 6000, 24),
    span("hybrid::mark 1", 70, 70),
    memory(75, 6000, -24),
    memory(76, 4000, -100),
    memory(90, 5000, -40),
    memory(95, 3000, -16),
    memory(150, 4500, 8),
]  # fmt: skip


def read(folder: Path, events: list[Any], notes: Any = NOTES) -> Memory:
    path = folder / "memory-0.json"
    path.write_text(json.dumps({"traceEvents": events, "hybrid_memory": notes}))
    return read_memory(path)


def test_each_block_has_its_category_owner_and_end(tmp_path: Path) -> None:
    found = read(tmp_path, EVENTS)
    assert found.peak == {
        "parameters": 40, "gradients": 40, "optimiser": 80, "activations": 184, "input": 16,
        "other": 0,
    }  # fmt: skip
    assert (found.total, found.peak_step, found.peak_phase) == (360, 1, "forward and backward")
    assert found.peak_at == pytest.approx(50e-6)
    assert found.owner.owner == "layers.*"
    assert (found.owner.bytes, found.owner.blocks, found.owner.op) == (184, 3, "aten::linear")
    # Nothing told of the free of 4500: it ends with its step, not with the address' next use.
    assert found.step_peaks == {1: 360, 2: 128}
    assert found.unseen == 68
    assert any("gloo" in line for line in told(found))
    data = as_json(found)
    assert data["peak"]["owner"]["category"] == "activations"
    assert max(sum(v for k, v in p.items() if k != "second") for p in data["timeline"]) == 360
    page = memory_section([found])
    assert page.count("<polygon") == 6
    assert "layers.*" in page


def test_an_accelerators_events_go_before_the_hosts_and_its_total_shows_what_was_there(
    tmp_path: Path,
) -> None:
    events = [
        *STEPS,
        memory(5, 1, 10**6),
        memory(6, 512, 512, device=1, total=4096),
        memory(7, 512, -512, device=1, total=3584),
        memory(8, 9000, -1024, device=1, total=2560),  # was there before, freed in view
    ]
    found = read(tmp_path, events, None)
    assert found.peak["other"] == found.total == 4096
    assert found.step_peaks[2] == 2560


def test_what_holds_no_allocations_or_no_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--memory"):
        read(tmp_path, STEPS)
    with pytest.raises(DataError, match="marks no steps"):
        read(tmp_path, [memory(1, 1, 1), span("data", 0, 1)])


@given(
    st.lists(st.tuples(st.integers(0, 220), st.integers(0, 20), st.integers(-30, 30)), max_size=30)
)
def test_whatever_the_events_no_two_blocks_share_an_address_at_once(
    drawn: list[tuple[int, int, int]],
) -> None:
    trace = {"traceEvents": [*STEPS, *(memory(t, a, b) for t, a, b in drawn)]}
    blocks = [b for b in blocks_of(trace, [(0, 100), (100, 200)]) if b.start > -math.inf]
    for n, one in enumerate(blocks):
        assert one.end >= one.start
        for other in blocks[n + 1 :]:
            apart = one.end <= other.start or other.end <= one.start
            disjoint = (
                one.address + one.bytes <= other.address
                or other.address + other.bytes <= one.address
            )
            assert apart or disjoint
