"""All-reduce curves: what shape means what, on a captured one too; pairs of nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.audit.collectives import rounds
from hybrid.audit.curves import bus_bandwidth, classify, transport

MIB = 2**20
COLLAPSES = """
 1048576 1.24
 2097152 1.73
 4194304 12.91
 8388608 16.20
 16777216 24.09
 33554432 29.50
 67108864 5.27
 134217728 5.22
 268435456 4.09
 536870912 5.31
"""
"""Bus bandwidth (GB/s) of all_reduce_perf in a public report, NVIDIA/nccl issue 1453."""


def curve(*rates: float, first: int = MIB) -> list[tuple[float, float]]:
    return [(float(first * 2**i), rate) for i, rate in enumerate(rates)]


def test_the_captured_curve_collapses() -> None:
    points = [(float(s), float(r)) for s, r in map(str.split, COLLAPSES.strip().splitlines())]
    kind, why = classify(points, nominal=450)
    assert kind == "collapse"
    assert "29.5" in why and "32 MiB" in why
    assert classify(points)[0] == "collapse"  # without knowing what was paid for


@pytest.mark.parametrize(
    ("points", "nominal", "expected"),
    [
        (curve(20, 60, 120, 200, 280, 340, 380, 400, 410, 420, 425), 450, "healthy"),
        (curve(20, 60, 120, 200, 300, 400, 470, 520, 560, 580, 590), 450, "healthy"),  # NVLS
        (curve(20, 60, 120, 200, 280, 340, 380, 400, 410, 420, 425), None, "healthy"),
        (curve(60, 118, 120, 121, 121, 120, 121, 121, 122, 121, 121), 450, "early-plateau"),
        (curve(3, 8, 11, 11, 11.5, 11.6, 11.6, 11.7, 11.7, 11.7, 11.7), 450, "socket"),
        (curve(1, 2, 4, 8, 16, 32, 64, 128, 150, 200, 240), 450, "healthy"),  # still rising
        (curve(1, 2, 2.1, 1.9, 2), None, "healthy"),
        (curve(5, 6), 450, "unknown"),
        ([], None, "unknown"),
    ],
)
def test_classes(points: list[tuple[float, float]], nominal: float | None, expected: str) -> None:
    assert classify(points, nominal)[0] == expected


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 32 MiB in 2,180.1 us on 24 ranks: algbw 15.39, busbw 29.50 GB/s in the captured run.
    gib = bus_bandwidth(33554432, 2180.1e-6, 24)
    assert gib * 2**30 / 1e9 == pytest.approx(29.50, abs=0.01)


@given(nodes=st.integers(2, 33))
def test_every_pair_plays_once_and_no_node_twice_a_round(nodes: int) -> None:
    played = rounds(nodes)
    pairs = [pair for games in played for pair in games]
    assert sorted(pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    for games in played:
        busy = [n for pair in games for n in pair]
        assert len(busy) == len(set(busy))


def test_nccls_log_names_the_transport() -> None:
    assert transport("x [0] NCCL INFO Using network Socket\n") == "Socket"
    assert transport("NCCL INFO Using network IB") == "IB"
    assert transport("nothing of that") is None
