"""Bases that transformers runs: as it and PEFT compute them alone, and refused where not."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid.engine.engine import Engine
from hybrid.engine.fallback import FallbackDecoder
from hybrid.errors import AdapterRefused, IntegrityError, Unsupported
from hybrid.testing_models import tiny_adapter, tiny_base
from hybrid.wire import Constraint, Sampling

BASE = "b" * 64
LONG = "the quick brown fox jumps over the lazy dog"
PROMPTS = [LONG, "fox", "ABC; def! jumps"]
MIXED = [(p, a) for p in PROMPTS for a in (None, "a0", "a1")]
# Family: its fields, and the targets of two adapters.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "gpt2": ({}, ("c_attn", "c_fc", "c_proj"), ("c_attn",)),
    "gpt_neox": (
        {"tie_word_embeddings": False},
        ("query_key_value", "dense"),
        ("dense_4h_to_h", "embed_out"),
    ),
    "gemma2": (  # a window in every other layer, smaller than the prompts
        {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
        ("q_proj", "down_proj"),
        ("v_proj", "o_proj"),
    ),
    "llama": (  # an option without a lean path
        {"hidden_act": "gelu"},
        ("q_proj", "gate_proj"),
        ("o_proj",),
    ),
}


def turned(family: str) -> dict[str, bool]:
    """GPT-2's layers are Conv1D, whose weights lie the other way; PEFT wants to be told."""
    return {"fan_in_fan_out": family == "gpt2"}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("fallback")
    dims, *targets = FAMILIES[request.param]
    tiny_base(root / "base", family=request.param, noise=0.3, **dims)
    for i, some in enumerate(targets):
        tiny_adapter(
            root / "base", root / f"a{i}", rank=4 + i, seed=i, targets=some, **turned(request.param)
        )
    model: Any = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, root / "a0", adapter_name="a0")
    model.load_adapter(root / "a1", adapter_name="a1")
    return root, model.eval(), request.param


@pytest.fixture
def engine(models: Any, caplog: pytest.LogCaptureFixture) -> Iterator[Engine]:
    with caplog.at_level(logging.WARNING, logger="hybrid.engine.fallback"):
        made = Engine(models[0] / "base", BASE, max_rows=16, device="cpu")
    [said] = [r.message for r in caplog.records if r.name == "hybrid.engine.fallback"]
    assert f"no lean path for model_type '{models[2]}'" in said
    for name in ("a0", "a1"):
        adapter = made.read_adapter(models[0] / name, name=name, digest=name, base_digest=BASE)
        assert adapter.size_bytes > 0
        made.add_adapter(adapter)
    yield made
    assert made.idle
    assert made.cache.used == 0
    assert not kept(made)
    assert all(made.drop_adapter(name) for name in ("a0", "a1"))


def kept(engine: Engine) -> dict[Any, Any]:
    assert isinstance(engine.decoder, FallbackDecoder)
    return engine.decoder._kept


def drain(engine: Engine) -> None:
    while not engine.idle:
        assert all(e.error is None for e in engine.step())


def reference(models: Any, adapter: str | None, ids: list[int]) -> tuple[torch.Tensor, Any]:
    """Logits [T, vocab] and last hidden states [T, hidden] of one pass."""
    model = models[1]
    with torch.inference_mode():
        if adapter is None:
            with model.disable_adapter():
                out = model(torch.tensor([ids]), output_hidden_states=True)
        else:
            model.set_adapter(adapter)
            out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0], out.hidden_states[-1][0]


def is_greedy(engine: Engine, models: Any, s: Any, adapter: str | None, n: int) -> None:
    want = reference(models, adapter, s.prompt + s.output)[0][len(s.prompt) - 1 :]
    greedy = want.argmax(-1).tolist()
    assert s.output == greedy[: len(s.output)]
    assert len(s.output) == n or greedy[len(s.output)] in engine.codec.ends


@pytest.mark.parametrize("step_tokens", [512, 7])
def test_greedy_answers_of_a_mixed_set_equal_the_reference(
    engine: Engine, models: Any, monkeypatch: pytest.MonkeyPatch, step_tokens: int
) -> None:
    monkeypatch.setattr(engine.scheduler, "_step_tokens", step_tokens)
    asked = [engine.submit("x", p, Sampling(max_tokens=8), adapter=a) for p, a in MIXED]
    drain(engine)
    for s, (_, adapter) in zip(asked, MIXED, strict=True):
        is_greedy(engine, models, s, adapter, 8)


@pytest.mark.parametrize("adapter", [None, "a0", "a1"])
def test_scores_and_vectors_equal_the_reference(
    engine: Engine, models: Any, adapter: str | None
) -> None:
    choices = ["fox", "fox jumps", "123"]
    got, lengths, n = engine.score(LONG, choices, adapter=adapter)
    prompt = engine.codec.encode(LONG)
    assert n == len(prompt)
    for choice, value, length in zip(choices, got, lengths, strict=True):
        ids = [*engine.codec.encode_part(choice), engine.codec.end]
        table = torch.log_softmax(reference(models, adapter, prompt + ids)[0], -1)
        want = sum(float(table[len(prompt) - 1 + i, t]) for i, t in enumerate(ids))
        assert value == pytest.approx(want, rel=1e-4, abs=1e-3)
        assert length == len(ids)
    vector, _ = engine.embed(LONG, adapter=adapter)
    mean = F.normalize(reference(models, adapter, prompt)[1].mean(0), dim=0)
    torch.testing.assert_close(torch.tensor(vector), mean, rtol=1e-4, atol=1e-5)


def test_what_is_cancelled_or_preempted_lets_its_cache_go(engine: Engine, models: Any) -> None:
    one, other = (
        engine.submit(n, PROMPTS[0], Sampling(max_tokens=8), adapter="a0") for n in ("one", "other")
    )
    engine.step()
    assert set(kept(engine)) == {one, other}
    engine.cancel(one)
    assert set(kept(engine)) == {other}
    with torch.inference_mode():
        engine.scheduler._preempt(other)
    drain(engine)
    assert other.preempted == 1
    is_greedy(engine, models, other, "a0", 8)


def test_an_answer_can_be_held_to_a_choice(engine: Engine) -> None:
    s = engine.submit("x", "fox", Sampling(constraint=Constraint.choice(["yes", "no"])))
    drain(engine)
    assert engine.codec.decode(s.output) in ("yes", "no")


# --- refusals ---------------------------------------------------------------------------


def write_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def of_type(kind: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        AutoConfig.for_model(kind).save_pretrained(folder)
        write_config(folder, eos_token_id=0)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (of_type("t5"), "encoder-decoder"),
        (of_type("gemma3"), "more than a model of text"),
        (of_type("vit"), "no causal language model"),
        (
            lambda f: write_config(f, model_type="mine", auto_map={"AutoConfig": "x.Y"}),
            "code of its",
        ),
        (lambda f: write_config(f, quantization_config={"quant_method": "awq"}), "quantised"),
        (lambda f: write_config(f, architectures=["GPT2ForSequenceClassification"]), "no causal"),
    ],
    ids=["encoder-decoder", "multimodal", "vision", "own code", "quantised", "no head"],
)
def test_what_cannot_be_right_is_refused_by_name(
    tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    tiny_base(tmp_path, family="gpt2")
    change(tmp_path)
    with pytest.raises(Unsupported, match=says):
        Engine(tmp_path, BASE, device="cpu")


def test_a_model_that_reads_ahead_is_refused(tmp_path: Path) -> None:
    """BERT has a causal head in transformers, and is not causal unless told so."""
    tiny_base(tmp_path, family="bert", is_decoder=False)
    write_config(tmp_path, architectures=None)
    with pytest.raises(Unsupported, match="'bert'"):
        Engine(tmp_path, BASE, device="cpu")


def test_weights_must_be_those_of_the_configuration(tmp_path: Path) -> None:
    path = tiny_base(tmp_path, family="gpt2") / "model.safetensors"
    state = load_file(path)
    save_file({**state, "score.weight": torch.ones(2, 64)}, path, {"format": "pt"})
    with pytest.raises(IntegrityError, match=r"unexpected keys: score\.weight"):
        Engine(tmp_path, BASE, device="cpu")
    del state["transformer.h.0.mlp.c_fc.bias"]
    save_file(state, path, {"format": "pt"})
    with pytest.raises(IntegrityError, match=r"missing keys: transformer\.h\.0\.mlp\.c_fc\.bias"):
        Engine(tmp_path, BASE, device="cpu")


def test_the_context_ends_where_the_frequencies_change(tmp_path: Path) -> None:
    limit = {"original_max_position_embeddings": 32}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        **limit,
    }
    tiny_base(tmp_path, family="phi3", pad_token_id=0, rope_parameters=rope, **limit)
    assert Engine(tmp_path, BASE, device="cpu").context == 32


def edit_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        state = load_file(folder / "adapter_model.safetensors")
        change(state)
        save_file(state, folder / "adapter_model.safetensors")

    return edit


def edit_config(**values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def rename(state: dict[str, torch.Tensor]) -> None:
    key = next(iter(state))
    state[key.replace(".h.0.", ".h.7.")] = state.pop(key)


def narrow(state: dict[str, torch.Tensor]) -> None:
    key = next(k for k in state if "lora_A" in k)
    state[key] = state[key][:, :-1].contiguous()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Path]:
    root = tmp_path_factory.mktemp("preflight")
    tiny_base(root / "base", family="gpt2")
    tiny_adapter(root / "base", root / "good", targets=("c_attn",), **turned("gpt2"))
    return Engine(root / "base", BASE, device="cpu"), root / "good"


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda f: (f / "adapter_model.safetensors").unlink(), "is missing"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "cannot be read"),
        (edit_weights(lambda s: next(iter(s.values())).fill_(float("nan"))), "NaN or infinity"),
        (edit_weights(rename), "matches nothing in the base"),
        (edit_weights(narrow), "expected"),
        (edit_weights(lambda s: s.pop(next(iter(s)))), "has only lora_"),
        (edit_weights(lambda s: s.clear()), "no LoRA weights"),
        (edit_config(r=3), "expected"),
        (edit_config(r=0), "rank"),
        (edit_config(bias="all"), "bias"),
        (edit_config(use_dora=True), "use_dora"),
        (edit_config(peft_type="IA3"), "peft_type"),
        (edit_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (edit_config(alora_invocation_tokens=[1]), "alora_invocation_tokens"),
        (edit_config(of_a_later_peft=True), "of_a_later_peft"),
        (edit_config(init_lora_weights="pissa"), "changes the base"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    good: tuple[Engine, Path], tmp_path: Path, break_it: Callable[[Path], object], says: str
) -> None:
    engine, source = good
    shutil.copytree(source, tmp_path / "bad")
    break_it(tmp_path / "bad")
    with pytest.raises(AdapterRefused, match=says):
        engine.read_adapter(tmp_path / "bad", name="bad", digest="d" * 64, base_digest=BASE)
