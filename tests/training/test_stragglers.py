"""Slow ranks: told from their own time, by median over a window, and when that changes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import worlds
from faults import train_with_slow_rank
from test_loop import job

from hybrid.training.progress import read_progress
from hybrid.training.stragglers import WINDOW, Stragglers

NODES = ["a", "a", "b", "b"]


def test_a_rank_that_is_slow_for_a_window_is_named_once_and_when_it_recovers() -> None:
    watch = Stragglers(NODES, 0.25)
    events = [watch.add([1.0, 1.0, 1.5, 1.1]) for _ in range(3 * WINDOW)]
    [first] = [event for event in events if event]
    assert events[WINDOW - 1] is first
    assert first["slow"] == [{"rank": 2, "node": "b", "slower": 0.5}]
    assert first["skew"] == 0.5
    assert first["message"].endswith("rank 2 on b by 50 %")
    assert first["p50_s"] == [1.0, 1.0, 1.5, 1.1]
    events = [watch.add([1.0, 1.0, 1.0, 1.0]) for _ in range(WINDOW)]
    [recovered] = [event for event in events if event]
    assert recovered["slow"] == []


def test_single_slow_steps_and_tiny_times_are_noise() -> None:
    watch = Stragglers(NODES, 0.25)
    for step in range(4 * WINDOW):
        assert watch.add([1.0, 9.0 if step % 3 == 0 else 1.0, 1.0, 1.0]) is None
    assert watch.report()["max_s"][1] == 9.0
    watch = Stragglers(NODES, 0.25)
    assert all(watch.add([1e-4, 9e-4, 1e-4, 1e-4]) is None for _ in range(WINDOW))


def test_one_rank_alone_and_no_steps_have_no_skew() -> None:
    alone = Stragglers(["a"], 0.25)
    assert all(alone.add([1.0]) is None for _ in range(WINDOW))
    assert alone.report() == Stragglers(NODES, 0.25).report()
    assert alone.report()["slow"] == []


def test_who_waits_for_a_slow_rank_is_not_slow(tmp_path: Path) -> None:
    """FSDP ranks meet at every layer: the quick one spends the slow one's time waiting."""
    made = job(tmp_path, strategy="fsdp", steps=WINDOW, micro_batches=2)
    final = worlds.run(2, tmp_path / "world", train_with_slow_rank, made)
    [slow] = final["slow_ranks"]
    assert (slow["rank"], slow["node"]) == (1, "node-1")
    assert final["rank_skew"] == slow["slower"]
    assert slow["slower"] > 0.25
    [event] = [r for r in read_progress(made.folder) if r["event"] == "stragglers"]
    assert event["step"] == WINDOW
    assert event["slow"] == final["slow_ranks"]
    assert event["p50_s"][1] > 0.05
    assert event["p50_s"][0] < event["p50_s"][1]
