"""The engine against transformers and PEFT, and its behaviour at the edges."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hybrid.engine.engine import Engine, Event
from hybrid.engine.scheduler import Sequence
from hybrid.errors import ContextTooLong, DeadlineExceeded, InvalidRequest, RateLimited
from hybrid.testing_models import tiny_adapter, tiny_base
from hybrid.wire import Sampling

BASE = "b" * 64
PROMPTS = ["the quick brown", "fox", "een héél kleine proef", "ABC; def! 123 the lazy dog"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny_base(root / "base")
    for i, (rank, targets) in enumerate(
        [(4, ("q_proj", "v_proj")), (2, ("k_proj", "o_proj", "down_proj")), (8, None)]
    ):
        extra: dict[str, Any] = {"targets": targets} if targets else {}
        tiny_adapter(root / "base", root / f"a{i}", rank=rank, seed=i, **extra)
    return root


@pytest.fixture
def engine(models: Path) -> Iterator[Engine]:
    made = Engine(models / "base", BASE, max_rows=8, max_queue=16, device="cpu")
    for i in range(3):
        made.add_adapter(
            made.read_adapter(models / f"a{i}", name=f"a{i}", digest=f"a{i}", base_digest=BASE)
        )
    yield made
    assert made.cache.used == 0 or made.scheduler.running
    if made.idle:
        assert all(a.in_use == 0 for a in made.adapters.values())


def drain(engine: Engine) -> list[Event]:
    events = []
    while not engine.idle:
        events += engine.step()
    return events


def reference(models: Path, adapter: str | None, ids: list[int], n: int) -> list[int]:
    """Greedy tokens of transformers, with PEFT's adapter."""
    model: Any = AutoModelForCausalLM.from_pretrained(models / "base", dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, models / adapter)
    model.eval()
    out = list(ids)
    with torch.inference_mode():
        for _ in range(n):
            out.append(int(model(torch.tensor([out])).logits[0, -1].argmax()))
    return out[len(ids) :]


def test_a_mixed_batch_equals_peft_row_by_row(engine: Engine, models: Path) -> None:
    rows = [(p, a) for a in ("a1", None, "a0", "a2") for p in PROMPTS][:8]
    sequences = [
        engine.submit(str(i), p, Sampling(max_tokens=6), adapter=a) for i, (p, a) in enumerate(rows)
    ]
    drain(engine)
    for sequence, (prompt, adapter) in zip(sequences, rows, strict=True):
        expected = reference(models, adapter, engine.codec.encode(prompt), 6)
        got = sequence.output
        assert got == expected[: len(got)]
        assert len(got) == 6 or expected[len(got)] in engine.codec.ends


@pytest.mark.parametrize("adapter", [None, "a0", "a2"])
def test_log_probabilities_equal_the_reference(
    engine: Engine, models: Path, adapter: str | None
) -> None:
    sampling = Sampling(max_tokens=1, logprobs=True)
    engine.submit("x", PROMPTS[0], sampling, adapter=adapter)
    [event] = drain(engine)
    model: Any = AutoModelForCausalLM.from_pretrained(models / "base", dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, models / adapter)
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([engine.codec.encode(PROMPTS[0])])).logits[0, -1]
    assert event.logprob == pytest.approx(float(torch.log_softmax(logits, -1).max()), abs=1e-5)


def test_joined_and_segmented_adapters_agree(engine: Engine) -> None:
    """Decoding three rows joins the adapters; alone each is a segment."""
    alone = []
    for i in range(3):
        s = engine.submit("x", PROMPTS[i], Sampling(max_tokens=8), adapter=f"a{i}")
        drain(engine)
        alone.append(s.output)
    together = [
        engine.submit("x", PROMPTS[i], Sampling(max_tokens=8), adapter=f"a{i}") for i in range(3)
    ]
    drain(engine)
    assert [s.output for s in together] == alone


def test_alone_it_is_the_same_to_the_bit_every_time(engine: Engine) -> None:
    runs = []
    for _ in range(3):
        engine.submit("x", PROMPTS[3], Sampling(max_tokens=8, logprobs=True), adapter="a2")
        runs.append([(e.token, e.logprob, e.text) for e in drain(engine)])
    assert runs[0] == runs[1] == runs[2]


def test_a_long_prompt_in_pieces_equals_the_whole(engine: Engine, models: Path) -> None:
    ids = [5 + i % 290 for i in range(100)]
    engine.scheduler._step_tokens = 16
    s = engine.submit("long", ids, Sampling(max_tokens=4), adapter="a1")
    other = engine.submit("short", PROMPTS[1], Sampling(max_tokens=4))
    engine.step()
    assert other.output, "a long prompt must not hold up a short one"
    drain(engine)
    assert s.output == reference(models, "a1", ids, 4)[: len(s.output)]


def test_seeded_sampling_repeats_and_top_k_1_is_greedy(engine: Engine) -> None:
    def run(**how: Any) -> list[int]:
        s = engine.submit("x", PROMPTS[0], Sampling(max_tokens=8, **how))
        drain(engine)
        return s.output

    first = run(temperature=1.0, seed=7)
    assert run(temperature=1.0, seed=7) == first
    assert any(run(temperature=1.0, seed=i) != first for i in range(8, 14))
    assert run(temperature=1.0, top_k=1, seed=1) == run()
    assert run(temperature=1.0, top_p=1e-6, seed=1) == run()


def test_streamed_text_is_the_decoded_text(engine: Engine) -> None:
    s = engine.submit("x", PROMPTS[2], Sampling(max_tokens=20, temperature=1.0, seed=3))
    text = "".join(e.text for e in drain(engine))
    assert text == engine.codec.decode(s.output)


def test_a_stop_string_ends_the_answer_and_is_not_returned(engine: Engine) -> None:
    engine.submit("x", PROMPTS[0], Sampling(max_tokens=12, temperature=1.0, seed=5))
    whole = "".join(e.text for e in drain(engine))
    stop = whole[3:5]
    engine.submit("x", PROMPTS[0], Sampling(max_tokens=12, temperature=1.0, seed=5, stop=(stop,)))
    events = drain(engine)
    assert "".join(e.text for e in events) == whole[: whole.find(stop)]
    assert events[-1].finish_reason == "stop"


def test_score_equals_the_reference_for_every_choice(engine: Engine, models: Path) -> None:
    choices = ["fox", "fo", "dog", "the lazy dog", "fox"]
    got, lengths, n = engine.score(PROMPTS[0], choices, adapter="a2")
    model: Any = AutoModelForCausalLM.from_pretrained(models / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, models / "a2").eval()
    prompt = engine.codec.encode(PROMPTS[0])
    assert n == len(prompt)
    for choice, value, length in zip(choices, got, lengths, strict=True):
        tokens = [*engine.codec.encode_part(choice), engine.codec.end]
        assert length == len(tokens)
        with torch.inference_mode():
            table = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0], -1)
        want = sum(float(table[len(prompt) - 1 + i, t]) for i, t in enumerate(tokens))
        assert value == pytest.approx(want, abs=1e-4)


def test_embedding_is_the_normalised_mean_of_the_last_hidden_states(
    engine: Engine, models: Path
) -> None:
    vector, n = engine.embed(PROMPTS[2])
    assert n == len(engine.codec.encode(PROMPTS[2]))
    assert math.isclose(sum(x * x for x in vector), 1, rel_tol=1e-5)
    model: Any = AutoModelForCausalLM.from_pretrained(models / "base", dtype=torch.float32)
    with torch.inference_mode():
        out = model.eval()(
            torch.tensor([engine.codec.encode(PROMPTS[2])]), output_hidden_states=True
        )
    want = torch.nn.functional.normalize(out.hidden_states[-1][0].mean(0), dim=0)
    assert torch.allclose(torch.tensor(vector), want, atol=1e-5)


def test_cancelling_frees_the_slot_and_may_be_repeated(engine: Engine) -> None:
    running = engine.submit("a", PROMPTS[0], Sampling(max_tokens=50), adapter="a0")
    engine.step()
    assert engine.cache.used > 0
    waiting = engine.submit("b", PROMPTS[0], Sampling(max_tokens=50), adapter="a0")
    for s in (running, waiting, running):
        engine.cancel(s)
    assert engine.idle
    assert engine.adapters["a0"].in_use == 0


def test_cancelling_moves_another_request_whose_answer_stays_the_same(
    engine: Engine, models: Path
) -> None:
    """As a server does it: between steps, and not in inference mode."""
    first, last = (engine.submit(str(i), PROMPTS[i], Sampling(max_tokens=8)) for i in (0, 3))
    engine.step()
    engine.cancel(first)
    drain(engine)
    assert last.output == reference(models, None, last.prompt, 8)[: len(last.output)]


def test_bad_requests_are_refused_before_they_are_queued(engine: Engine) -> None:
    for prompt, sampling, param in (
        ("", Sampling(), "prompt"),
        ([], Sampling(), "prompt"),
        ([10**6], Sampling(), "prompt"),
        ("x", Sampling(max_tokens=0), "max_tokens"),
        ("x", Sampling(top_p=0), "top_p"),
        ("x", Sampling(temperature=float("nan")), "temperature"),
        ("x", Sampling(stop=("",)), "stop"),
    ):
        with pytest.raises(InvalidRequest) as e:
            engine.submit("x", prompt, sampling)
        assert e.value.param == param
    with pytest.raises(ContextTooLong):
        engine.submit("x", [5] * 127, Sampling(max_tokens=2))
    assert engine.idle


def test_a_full_queue_and_a_passed_deadline(engine: Engine) -> None:
    for _ in range(16):
        engine.submit("x", "fox", Sampling(max_tokens=1))
    with pytest.raises(RateLimited) as e:
        engine.submit("x", "fox", Sampling(max_tokens=1))
    assert e.value.retry_after
    drain(engine)
    engine.submit("late", "fox", Sampling(max_tokens=1), deadline=time.time() - 1)
    [event] = engine.step()
    assert isinstance(event.error, DeadlineExceeded)
    assert engine.idle


def test_one_tenants_flood_does_not_starve_another(engine: Engine) -> None:
    engine.scheduler._max_queue = 1000
    flood = [
        engine.submit(f"f{i}", "fox", Sampling(max_tokens=4), tenant="loud") for i in range(100)
    ]
    quiet = engine.submit("q", "fox", Sampling(max_tokens=4), tenant="quiet")
    while not quiet.ended:
        engine.step()
    assert sum(s.ended for s in flood) < 30
    drain(engine)


def test_an_adapter_in_use_is_not_dropped(engine: Engine) -> None:
    s: Sequence = engine.submit("x", "fox", Sampling(max_tokens=4), adapter="a0")
    assert not engine.drop_adapter("a0")
    drain(engine)
    assert s.ended
    assert engine.drop_adapter("a0")
    with pytest.raises(KeyError):
        engine.submit("x", "fox", Sampling(), adapter="a0")
