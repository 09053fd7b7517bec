"""Llama, Mistral, Qwen2 and Qwen3, with their options, against transformers and PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybrid.engine.engine import Engine
from hybrid.engine.kernels import kernels
from hybrid.engine.scheduler import Item, Sequence
from hybrid.errors import IntegrityError
from hybrid.testing_models import tiny_adapter, tiny_base
from hybrid.wire import Sampling

BASE = "b" * 64
LONG = "the quick brown fox jumps over the lazy dog; een héél kleine proef 123"
PROMPTS = [LONG, "fox", "ABC; def! jumps"]
MIXED = [(p, a) for p in PROMPTS for a in (None, "a0", "a1")]
WINDOW = {"use_sliding_window": True, "sliding_window": 6}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, mha, untied, biases": {
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "sliding_window": 4,  # no option of this family: transformers ignores it
    },
    "llama, head_dim, linear rope": {
        "head_dim": 24,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    },
    "llama, one kv head, llama3 rope": {
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral, window": {"sliding_window": 6, "head_dim": 8},
    "mistral, no window, untied": {
        "sliding_window": None,
        "tie_word_embeddings": False,
        "attention_bias": True,  # no option of this family
    },
    "qwen2": {"num_key_value_heads": 4},
    "qwen2, untied, window from a layer on": {
        **WINDOW,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
    },
    "qwen2, window switched off": {"use_sliding_window": False, "sliding_window": 6},
    "qwen3, head_dim, biases, yarn": {
        "head_dim": 32,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3, window in some layers, untied": {
        **WINDOW,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": False,
    },
}


@pytest.fixture(scope="module", params=CASES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A base with two adapters, and transformers' and PEFT's model of them."""
    root = tmp_path_factory.mktemp("family")
    family = request.param.split(",")[0]
    tiny_base(root / "base", family=family, noise=0.3, **CASES[request.param])
    tiny_adapter(root / "base", root / "a0", rank=4, seed=1)
    tiny_adapter(root / "base", root / "a1", rank=9, seed=2, targets=("k_proj", "up_proj"))
    model: Any = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, root / "a0", adapter_name="a0")
    model.load_adapter(root / "a1", adapter_name="a1")
    return root, model.eval()


@pytest.fixture(params=["kernels", "torch"])
def engine(
    request: pytest.FixtureRequest, models: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    monkeypatch.setenv("HYBRID_KERNELS", "on" if request.param == "kernels" else "off")
    kernels.cache_clear()
    made = Engine(models[0] / "base", BASE, max_rows=16, device="cpu")
    for name in ("a0", "a1"):
        adapter = made.read_adapter(models[0] / name, name=name, digest=name, base_digest=BASE)
        made.add_adapter(adapter)
    yield made
    kernels.cache_clear()


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


@pytest.mark.parametrize("step_tokens", [512, 7])
def test_every_logit_of_a_mixed_batch_equals_the_reference(
    engine: Engine, models: Any, monkeypatch: pytest.MonkeyPatch, step_tokens: int
) -> None:
    """Prefill, whole or in pieces, and decoding; so greedy answers are the same too."""
    seen: dict[Sequence, list[torch.Tensor]] = {}
    run = engine._run

    def record(items: list[Item]) -> Any:
        chosen, logits = run(items)
        for sequence, row in zip(chosen, logits, strict=True):
            seen.setdefault(sequence, []).append(row.clone())
        return chosen, logits

    monkeypatch.setattr(engine, "_run", record)
    monkeypatch.setattr(engine.scheduler, "_step_tokens", step_tokens)
    asked = [engine.submit("x", p, Sampling(max_tokens=20), adapter=a) for p, a in MIXED]
    while not engine.idle:
        engine.step()
    for s, (_, adapter) in zip(asked, MIXED, strict=True):
        want, _ = reference(models, adapter, s.prompt + s.output)
        want = want[len(s.prompt) - 1 :][: len(seen[s])]
        got = torch.stack(seen[s])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
        greedy = want.argmax(-1).tolist()
        assert s.output == greedy[: len(s.output)]
        assert len(s.output) == 20 or greedy[len(s.output)] in engine.codec.ends


@pytest.mark.parametrize("adapter", [None, "a0"])
def test_scores_and_vectors_equal_the_reference(
    engine: Engine, models: Any, adapter: str | None
) -> None:
    choices = ["fox", "fox jumps over", "the lazy dog 123", "proef"]
    got, _, _ = engine.score(LONG, choices, adapter=adapter)
    prompt = engine.codec.encode(LONG)
    for choice, value in zip(choices, got, strict=True):
        ids = [*engine.codec.encode_part(choice), engine.codec.end]
        table = torch.log_softmax(reference(models, adapter, prompt + ids)[0], -1)
        want = sum(float(table[len(prompt) - 1 + i, t]) for i, t in enumerate(ids))
        assert value == pytest.approx(want, rel=1e-4, abs=1e-3)
    vector, _ = engine.embed(LONG, adapter=adapter)
    mean = F.normalize(reference(models, adapter, prompt)[1].mean(0), dim=0)
    torch.testing.assert_close(torch.tensor(vector), mean, rtol=1e-4, atol=1e-5)


# --- checkpoints ------------------------------------------------------------------------


def change(folder: Path, drop: str = "", **add: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    state = {k: v for k, v in load_file(path).items() if k != drop}
    save_file({**state, **add}, path)


@pytest.mark.parametrize(
    ("family", "add"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias"),
        ("mistral", "model.layers.1.mlp.down_proj.bias"),
        ("qwen2", "model.layers.0.self_attn.o_proj.bias"),
        ("qwen3", "model.layers.2.input_layernorm.weight"),
    ],
)
def test_a_weight_that_would_not_be_used_is_refused(tmp_path: Path, family: str, add: str) -> None:
    tiny_base(tmp_path, family=family)
    change(tmp_path, **{add: torch.zeros(64)})
    with pytest.raises(IntegrityError, match=add):
        Engine(tmp_path, BASE, device="cpu")


def test_a_missing_weight_is_refused(tmp_path: Path) -> None:
    tiny_base(tmp_path, family="qwen2")
    change(tmp_path, drop="model.layers.1.self_attn.k_proj.bias")
    with pytest.raises(IntegrityError, match=r"1\.self_attn\.k_proj\.bias is missing"):
        Engine(tmp_path, BASE, device="cpu")


def test_buffers_that_follow_from_the_configuration_are_harmless(tmp_path: Path) -> None:
    tiny_base(tmp_path)
    before = Engine(tmp_path, BASE, device="cpu").embed("fox")
    tied = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    change(tmp_path, **inverse, **{"lm_head.weight": tied.clone()})
    engine = Engine(tmp_path, BASE, device="cpu")
    assert engine.embed("fox") == before
    assert engine.decoder.shape.tied


def test_an_output_layer_that_is_not_the_embedding_is_used(tmp_path: Path) -> None:
    tiny_base(tmp_path)
    change(tmp_path, **{"lm_head.weight": torch.randn(300, 64)})
    engine = Engine(tmp_path, BASE, device="cpu")
    assert not engine.decoder.shape.tied
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = engine.codec.encode("the quick")
    [token] = engine.codec.encode_part("f")
    with torch.inference_mode():
        want = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)[token]
    got, _, _ = engine.score("the quick", ["f"], end=False)
    assert got[0] == pytest.approx(float(want), abs=1e-4)


def test_of_two_copies_of_the_weights_the_index_says_which(tmp_path: Path) -> None:
    tiny_base(tmp_path)
    before = Engine(tmp_path, BASE, device="cpu").embed("fox")
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(state)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({n: state[n] for n in held}, tmp_path / file)
    save_file({"tok_embeddings.weight": torch.ones(2, 2)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {n: file for file, held in parts.items() for n in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Engine(tmp_path, BASE, device="cpu").embed("fox") == before
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"model-2\.safetensors is missing"):
        Engine(tmp_path, BASE, device="cpu")
