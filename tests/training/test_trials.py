"""The search of `strategy: auto` on made-up machines: what is tried, and what is picked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.config import TrainingConfig
from hybrid.errors import ConfigError, TrainingError
from hybrid.training.candidates import Candidate, Place, Space
from hybrid.training.trials import Choice, Row, Search, choose, latest, lines

LLAMA = SimpleNamespace(
    model_type="llama", num_attention_heads=8, num_key_value_heads=8, attention_dropout=0.0
)
GIB = 2**30
Trial = Callable[[Candidate], tuple[float, int]]
"""Tokens/s and bytes of a combination."""


def settings(**training: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {"strategy": "auto", "workers": 4, "micro_batch": 4, "micro_batches": 16, **training}
    )


def place(*counts: int, gpu: bool = True, memory: int = 80 * GIB, deepspeed: bool = False) -> Place:
    nodes = [f"node {n}" for n, count in enumerate(counts) for _ in range(count)]
    return Place(nodes=tuple(nodes), gpu=gpu, memory=memory, deepspeed=deepspeed)


def search(space: Space, trial: Trial, most: int = 100) -> list[Row]:
    """Every row of a search on a machine that behaves like `trial`."""
    rows: list[Row] = []
    searching = Search(space, most)
    while (candidate := searching.next(latest(rows))) is not None:
        assert candidate not in {row.candidate for row in rows}
        if (why := searching.hopeless(candidate, rows)) is not None:
            rows.append(Row(candidate=candidate, outcome="left out", why=why, memory=True))
            continue
        rate, held = trial(candidate)
        if held > space.place.memory:
            rows.append(Row(candidate=candidate, outcome="rejected", why="memory", memory=True))
            continue
        measured = Row(candidate=candidate, outcome="measured", tokens_per_s=rate, peak_bytes=held)
        rows.append(measured)
    return rows


def spread_costs(c: Candidate) -> tuple[float, int]:
    """A GPU: more rows at once are faster up to 16, recomputation costs, ddp holds everything."""
    rate = (
        min(c.micro_batch, 16)
        * {"none": 1.0, "selective": 0.9, "full": 0.75}[c.activation_checkpointing]
    )
    kept = {"none": 4, "selective": 2, "full": 1}[c.activation_checkpointing]
    states = 90 if c.strategy == "ddp" else 20 if c.reshard else 25
    rate *= {"ddp": 1.2, "fsdp": 1.0, "hsdp": 0.8, "tp": 0.5, "deepspeed": 0.95}[c.strategy]
    rate *= (1.02 if not c.reshard else 1.0) * (1.3 if c.compile else 1.0)
    return rate, (states + kept * c.micro_batch) * GIB


def test_the_fastest_that_fits_is_found() -> None:
    space = Space(settings(), LLAMA, place(4))
    assert {c.strategy for c in space.ways} == {"ddp", "fsdp", "tp"}
    assert space.left_out["hsdp"] == "all workers are on one node: the same as fsdp"
    rows = search(space, spread_costs)
    choice = choose(rows, space.left_out, workers=4, usd_per_hour=2.0)
    best = max(row.tokens_per_s or 0 for row in rows)
    assert best == 16 * 0.9 * 1.02 * 1.3, "16 rows fit with selective checkpointing"
    assert choice.candidate.as_settings() == {
        "strategy": "fsdp", "micro_batch": 16, "micro_batches": 4,
        "parallel": {"activation_checkpointing": "selective", "compile": True},
    }, "what is kept gathered gains 2 % only"  # fmt: skip
    ddp = [row for row in rows if row.candidate.strategy == "ddp"]
    assert {row.outcome for row in ddp} <= {"rejected", "left out"}
    assert [row.candidate.activation_checkpointing for row in ddp][:3] == [
        "none", "selective", "full",
    ]  # fmt: skip
    assert len(rows) < 40, "a search, not all combinations"


def test_what_needs_more_than_one_that_failed_is_not_tried() -> None:
    space = Space(settings(), LLAMA, place(4))
    failed = Candidate(
        strategy="fsdp", activation_checkpointing="selective", micro_batch=8, micro_batches=8
    )
    row = Row(candidate=failed, outcome="rejected", why="it ran full", memory=True)
    hopeless = Search(space, 10).hopeless
    for more in (
        {"activation_checkpointing": "none"}, {"reshard": False},
        {"micro_batch": 16, "micro_batches": 4},
    ):  # fmt: skip
        said = hopeless(replace(failed, **more), [row])
        assert said == "needs more memory than fsdp, selective checkpointing, 8 rows x 8"
    for other in (
        {"activation_checkpointing": "full"}, {"strategy": "ddp"}, {"compile": True},
        {"micro_batch": 4, "micro_batches": 16},
    ):  # fmt: skip
        assert hopeless(replace(failed, **other), [row]) is None
    assert hopeless(replace(failed, reshard=False), [replace(row, memory=False)]) is None


@given(
    seed=st.integers(0, 2**32),
    most=st.integers(1, 20),
    capacity=st.floats(0, 1),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    gpu=st.booleans(),
    deepspeed=st.booleans(),
)
def test_on_any_machine_the_search_ends_and_the_maths_stay(
    seed: int, most: int, capacity: float, counts: list[int], gpu: bool, deepspeed: bool
) -> None:
    size = sum(counts)
    asked = settings(workers=size, micro_batch=6, micro_batches=24)

    def trial(c: Candidate) -> tuple[float, int]:
        digest = hashlib.sha256(f"{seed}{c!r}".encode()).digest()
        return 1.0 + digest[0], int(GIB * digest[1] / 256)

    made = place(*counts, gpu=gpu, memory=int(capacity * GIB), deepspeed=deepspeed)
    rows = search(Space(asked, LLAMA, made), trial, most)
    assert sum(row.outcome != "left out" for row in rows) <= most
    for row in rows:
        applied = row.candidate.applied(asked)
        assert applied.tokens_per_step == asked.tokens_per_step
        assert not row.candidate.compile or gpu
    measured = [row for row in rows if row.outcome == "measured"]
    if not measured:
        with pytest.raises(TrainingError, match="no combination works"):
            choose(rows, {}, workers=size, usd_per_hour=None)
        return
    choice = choose(rows, {"x": "y"}, workers=size, usd_per_hour=1.0)
    rate = next(r.tokens_per_s for r in measured if r.candidate == choice.candidate)
    assert (rate or 0) >= 0.98 * max(r.tokens_per_s or 0 for r in measured)
    assert Choice.of_record(json.loads(json.dumps(choice.as_record()))) == choice
    assert len(lines(choice)) == len(rows) + 3  # the heads, what is left out, what was picked


def test_what_is_set_stays_as_it_is() -> None:
    kept = settings(
        parallel={"activation_checkpointing": "full", "tensor": 2},
        trials={"vary": ["micro_batch"]},
    )
    space = Space(kept, LLAMA, place(4))
    assert [str(c) for c in space.ways] == ["tp x 2, full checkpointing"]
    assert "training.parallel.tensor" in space.left_out["ddp x 2, full checkpointing"]
    rows = search(space, spread_costs)
    assert {(r.candidate.compile, r.candidate.reshard) for r in rows} == {(False, True)}
    assert len({r.candidate.micro_batch for r in rows}) > 2
    compressed = settings(compression={"kind": "powersgd"})
    assert {c.strategy for c in Space(compressed, LLAMA, place(4)).ways} == {"ddp"}


def test_what_makes_no_sense_is_left_out_with_the_reason() -> None:
    alone = Space(settings(workers=1), LLAMA, place(1))
    assert [c.strategy for c in alone.ways] == ["single"]
    assert alone.left_out["fsdp"] == "one worker: there is nothing to spread"
    nodes = Space(settings(), LLAMA, place(2, 2))
    assert [str(c) for c in nodes.ways] == ["ddp", "fsdp", "hsdp", "tp x 2"]
    heads = SimpleNamespace(**{**vars(LLAMA), "num_key_value_heads": 3})
    assert "3 num_key_value_heads" in Space(settings(), heads, place(4)).left_out["tp x 2"]
    apart = Space(settings(), LLAMA, place(1, 1, 1, 1)).left_out
    assert apart["hsdp"] == "one worker a node: the same as ddp"
    assert "cross the network" in apart["tp x 2"]
    elastic = Space(settings(workers=[2, 4]), LLAMA, place(2))
    assert "parallel.shard" in elastic.left_out["hsdp"]
    assert all(c.micro_batches >= 4 for way in elastic.ways for c in elastic.neighbours(way))
    dropout = SimpleNamespace(**{**vars(LLAMA), "attention_dropout": 0.1})
    rows = search(Space(settings(), dropout, place(4)), spread_costs)
    assert {r.candidate.micro_batch for r in rows} == {4}
    none = Space(settings(parallel={"tensor": 3}), LLAMA, place(4))
    with pytest.raises(ConfigError, match="nothing to try: single x 3: "):
        none.frugal()


def test_deepspeed_is_tried_on_gpus_or_when_asked_for_where_it_is_installed() -> None:
    asked = settings(trials={"vary": ["micro_batch", "deepspeed"]})
    cases = [
        (settings(), {"gpu": True, "deepspeed": True}, None),
        (settings(), {"gpu": True, "deepspeed": False}, "pip install 'hybrid[deepspeed]'"),
        (settings(), {"gpu": False, "deepspeed": True}, "list it in training.trials.vary"),
        (asked, {"gpu": False, "deepspeed": True}, None),
        (asked, {"gpu": False, "deepspeed": False}, "pip install 'hybrid[deepspeed]'"),
        (settings(parallel={"compile": True}), {"deepspeed": True}, "parallel.compile: strategy"),
        (settings(precision="float64"), {"deepspeed": True}, "training.precision: strategy"),
    ]
    for made, at, why in cases:
        space = Space(made, LLAMA, place(4, **at))
        tried = [c for c in space.ways if c.strategy == "deepspeed"]
        assert len(tried) == (why is None), (made, at)
        told = "".join(t for name, t in space.left_out.items() if name.startswith("deepspeed"))
        assert (why or "") in told and bool(why) == bool(told)
    alone = Space(settings(workers=1), LLAMA, place(1, deepspeed=True))
    assert alone.left_out["deepspeed"] == "one worker: there is nothing to spread"

    def ahead(c: Candidate) -> tuple[float, int]:
        rate, held = spread_costs(c)
        return rate * (2 if c.strategy == "deepspeed" else 1), held

    rows = search(Space(settings(), LLAMA, place(4, deepspeed=True)), ahead)
    theirs = [r.candidate for r in rows if r.candidate.strategy == "deepspeed"]
    assert len(theirs) > 3, "it is the fastest: what is near it is tried as well"
    assert not any(c.compile or not c.reshard for c in theirs)


def test_of_equals_the_smaller_is_picked_and_a_dollar_is_counted() -> None:
    def row(strategy: str, rate: float, held: int) -> Row:
        c = Candidate(strategy=strategy, micro_batch=4, micro_batches=16)
        return Row(candidate=c, outcome="measured", tokens_per_s=rate, peak_bytes=held)

    rows = [row("ddp", 1000.0, 60 * GIB), row("fsdp", 990.0, 20 * GIB), row("tp", 500.0, GIB)]
    choice = choose(rows, {}, workers=4, usd_per_hour=2.0)
    assert choice.candidate.strategy == "fsdp"
    assert choice.why.startswith("as fast as ddp, 4 rows x 16, in less memory; 0.99 times")
    text = "\n".join(lines(choice))
    assert "450,000" in text, "1000 tokens/s for 8 USD an hour"
    assert text.splitlines()[-1].startswith("picked fsdp, 4 rows x 16 on 4 workers: as fast as")
    assert choice.candidate.as_settings() == {
        "strategy": "fsdp", "micro_batch": 4, "micro_batches": 16,
    }  # fmt: skip
