"""Requests that come, go and are cut off at random: each gets what it would get alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid.engine.engine import Engine
from hybrid.engine.scheduler import Sequence
from hybrid.testing_models import tiny_adapter, tiny_base
from hybrid.wire import Sampling

BASE = "b" * 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Five rows at most, and a cache for about two long requests, so that rows are taken away."""
    root = tmp_path_factory.mktemp("arrivals")
    tiny_base(root / "base", max_position_embeddings=256)
    made = Engine(root / "base", BASE, max_rows=5, max_queue=64, kv_tokens=384, device="cpu")
    made.codec.ends = frozenset()
    for i, rank in enumerate((2, 8, 20)):
        tiny_adapter(root / "base", root / f"a{i}", rank=rank, seed=i)
        made.add_adapter(
            made.read_adapter(root / f"a{i}", name=f"a{i}", digest=f"a{i}", base_digest=BASE)
        )
    return made


def submit(engine: Engine, name: str, prompt: list[int], n: int, **how: Any) -> Sequence:
    sampling = Sampling(max_tokens=n, logprobs=True)
    return engine.submit(name, prompt, sampling, **how)


def at_rest(engine: Engine) -> None:
    """Every counter of rows, blocks and references is at zero."""
    assert engine.idle
    assert engine.cache.used == 0
    assert engine.scheduler.waiting == 0
    assert all(a.in_use == 0 for a in engine.adapters.values())
    assert not any(engine.cache._rows.values())


ARRIVAL = st.fixed_dictionaries(
    {
        "step": st.integers(0, 12),
        "prompt": st.integers(1, 90),
        "n": st.integers(1, 40),
        "adapter": st.sampled_from([None, "a0", "a1", "a2"]),
        "tenant": st.sampled_from(["x", "y"]),
        "priority": st.integers(-1, 1),
        "cancel": st.none() | st.integers(0, 30),
    }
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    arrivals=st.lists(ARRIVAL, min_size=1, max_size=9), step_tokens=st.sampled_from([7, 64, 512])
)
def test_each_request_is_as_if_alone(
    engine: Engine, arrivals: list[dict[str, Any]], step_tokens: int
) -> None:
    def prompt(i: int) -> list[int]:
        return torch.randint(5, 290, (arrivals[i]["prompt"],), generator=made(i)).tolist()

    def made(i: int) -> torch.Generator:
        return torch.Generator().manual_seed(i)

    engine.scheduler._step_tokens = step_tokens
    sequences: dict[int, Sequence] = {}
    logprobs: dict[int, list[float]] = {}
    names = {str(i): i for i in range(len(arrivals))}
    step = 0
    while not engine.idle or len(sequences) < len(arrivals):
        for i, a in enumerate(arrivals):
            if a["step"] == step:
                how = {k: a[k] for k in ("adapter", "tenant", "priority")}
                sequences[i] = submit(engine, str(i), prompt(i), a["n"], **how)
            if i in sequences and a["cancel"] is not None and step == a["step"] + a["cancel"]:
                engine.cancel(sequences[i])
        for event in engine.step():
            logprobs.setdefault(names[event.sequence.id], []).append(event.logprob)
        held = sum(s.row.capacity for s in engine.scheduler.running if s.row) // 16
        assert engine.cache.used == held <= engine.cache.blocks
        step += 1
        assert step < 2000, "somebody starves"
    at_rest(engine)

    engine.scheduler._step_tokens = 512
    for i, a in enumerate(arrivals):
        alone = submit(engine, "alone", prompt(i), a["n"], adapter=a["adapter"])
        expected = [
            event.logprob for _ in iter(lambda: engine.idle, True) for event in engine.step()
        ]
        count = len(sequences[i].output)
        assert count == a["n"] or a["cancel"] is not None
        assert sequences[i].output == alone.output[:count]
        assert logprobs.get(i, [])[:count] == pytest.approx(expected[:count], abs=2e-4)
    at_rest(engine)


def test_rows_are_taken_away_and_nothing_is_lost(engine: Engine) -> None:
    engine.scheduler._step_tokens = 512
    before = engine.scheduler.preemptions
    prompts = [[5 + i] * 60 for i in range(5)]
    together = [submit(engine, str(i), p, 150) for i, p in enumerate(prompts)]
    while not engine.idle:
        engine.step()
    assert engine.scheduler.preemptions > before
    for p, s in zip(prompts, together, strict=True):
        alone = submit(engine, "alone", p, 150)
        while not engine.idle:
            engine.step()
        assert s.output == alone.output
    at_rest(engine)


def test_a_higher_priority_begins_first_and_a_lower_one_in_the_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.engine.scheduler._AGE_STEPS", 20)
    low = submit(engine, "low", [7] * 8, 4, priority=-2)
    flood: Counter[str] = Counter()
    for i in range(8):
        submit(engine, f"h{i}", [9] * 8, 12, priority=0)
    for step in range(200):
        for event in engine.step():
            if event.finish_reason:
                flood[event.sequence.id] += 1
        while engine.scheduler.waiting < 8:  # urgent work never ends
            submit(engine, f"h{100 + step}", [9] * 8, 12, priority=0)
        if low.ended:
            break
    assert low.ended, "it starves"
    assert flood.total() > 5, "it went before the urgent ones"
    for s in [
        *engine.scheduler.running,
        *(x for q in engine.scheduler._waiting.values() for x in q),
    ]:
        engine.cancel(s)
    at_rest(engine)
