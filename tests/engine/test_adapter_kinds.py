"""Every kind of adapter that PEFT writes, in one mixed batch, against PEFT itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybrid.engine.engine import Engine
from hybrid.engine.kernels import kernels
from hybrid.testing_models import ALL_LINEAR, tiny_base
from hybrid.wire import Sampling

BASE = "b" * 64
PROMPTS = ["the quick brown", "een héél kleine proef"]
FEW = ["q_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": list(ALL_LINEAR), "r": 5},
    "rank-20": {"target_modules": ["gate_proj", "k_proj"], "r": 20},
    "patterns": {
        "target_modules": [*FEW, "lm_head", "embed_tokens"],
        "rank_pattern": {"down_proj": 7, "lm_head": 3, r"layers\.1\..*q_proj": 1},
        "alpha_pattern": {"embed_tokens": 11, "model.layers.0.self_attn.q_proj": 0.5},
    },
    "rslora": {"target_modules": [*FEW, "embed_tokens", "lm_head"], "use_rslora": True, "r": 6},
    "some-layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "excluded": {"target_modules": r".*\.(v|o)_proj", "exclude_modules": ["layers.0.o_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "lora-embedding": {"target_modules": [*FEW, "embed_tokens"]},
    "lora-head": {"target_modules": [*FEW, "lm_head"]},
    "lora-ends": {"target_modules": [*FEW, "embed_tokens", "lm_head"]},
    "lora-only-ends": {"target_modules": ["embed_tokens", "lm_head"]},
    "lora-one": {"target_modules": [*FEW, "embed_tokens"], "ensure_weight_tying": True},
    "own-embedding": {"target_modules": FEW, "modules_to_save": ["embed_tokens"]},
    "own-head": {"target_modules": FEW, "modules_to_save": ["lm_head"]},
    "own-ends": {"target_modules": FEW, "modules_to_save": ["embed_tokens", "lm_head"]},
    "own-one": {
        "target_modules": FEW,
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "own-embedding-lora-head": {
        "target_modules": [*FEW, "lm_head"],
        "modules_to_save": ["embed_tokens"],
    },
    "copies": {"target_modules": FEW, "save": {"save_embedding_layers": True}},
    "bias": {"target_modules": FEW, "bias": "all"},
    "gaussian": {"target_modules": FEW, "init_lora_weights": "gaussian"},
    "bfloat16": {"target_modules": [*FEW, "embed_tokens"], "disk": torch.bfloat16},
    "float16": {"target_modules": [*FEW, "lm_head"], "disk": torch.float16},
}


def make(base: Path, folder: Path, seed: int, spec: dict[str, Any]) -> None:
    """Write an adapter with PEFT, each of its trained weights moved far from where it began."""
    how = {"r": 4, "lora_alpha": 6, **spec}
    disk, save = how.pop("disk", None), how.pop("save", {})
    torch.manual_seed(seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **how)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder, **save)
    if disk is not None:
        path = folder / "adapter_model.safetensors"
        state = load_file(path)
        # Not the copies of the base: PEFT would put the rounded ones into its base.
        save_file({k: v if "base_layer" in k else v.to(disk) for k, v in state.items()}, path)


@pytest.fixture(scope="module", params=["tied", "untied"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    tiny_base(root / "base", tie_word_embeddings=request.param == "tied")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of embeddings that are saved or tied
        for seed, (kind, spec) in enumerate(KINDS.items()):
            make(root / "base", root / kind, seed, spec)
    return root


@pytest.fixture(params=["kernels", "torch"])
def engine(
    root: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    if request.param == "torch":
        monkeypatch.setenv("HYBRID_KERNELS", "off")
    kernels.cache_clear()
    made = Engine(root / "base", BASE, max_rows=64, device="cpu")
    for kind in KINDS:
        read = made.read_adapter(root / kind, name=kind, digest=kind, base_digest=BASE)
        made.add_adapter(read)
    yield made
    kernels.cache_clear()


@cache
def peft(root: Path, kind: str | None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    if kind is None:
        return model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, root / kind).eval()


def logprobs(root: Path, kind: str | None, ids: list[int]) -> torch.Tensor:
    """[T, vocab]"""
    with torch.inference_mode():
        table: torch.Tensor = torch.log_softmax(peft(root, kind)(torch.tensor([ids])).logits[0], -1)
    return table


def test_generation_in_one_batch_equals_peft(engine: Engine, root: Path) -> None:
    rows = [(p, k) for p in PROMPTS for k in (*KINDS, None)]
    sampling = Sampling(max_tokens=5, logprobs=True)
    engine.codec.ends = frozenset()
    sequences = [engine.submit(str(i), p, sampling, adapter=k) for i, (p, k) in enumerate(rows)]
    got: dict[str, list[float]] = {s.id: [] for s in sequences}
    while not engine.idle:
        for event in engine.step():
            got[event.sequence.id].append(event.logprob)
    for sequence, (_, kind) in zip(sequences, rows, strict=True):
        table = logprobs(root, kind, sequence.prompt + sequence.output)
        want = table[len(sequence.prompt) - 1 : -1]
        assert sequence.output == want.argmax(-1).tolist(), kind
        assert got[sequence.id] == pytest.approx(want.max(-1).values.tolist(), abs=2e-4), kind


def test_scores_and_embeddings_equal_peft(engine: Engine, root: Path) -> None:
    ids = engine.codec.encode(PROMPTS[0])
    for kind in (*KINDS, None):
        [got], _, _ = engine.score(PROMPTS[0], ["fox"], adapter=kind)
        choice = [*engine.codec.encode_part("fox"), engine.codec.end]
        table = logprobs(root, kind, ids + choice)
        want = sum(float(table[len(ids) - 1 + i, t]) for i, t in enumerate(choice))
        assert got == pytest.approx(want, abs=5e-4), kind
        vector, _ = engine.embed(PROMPTS[0], adapter=kind)
        with torch.inference_mode():
            states = peft(root, kind)(torch.tensor([ids]), output_hidden_states=True).hidden_states
        mean = torch.nn.functional.normalize(states[-1][0].mean(0), dim=0)
        assert torch.allclose(torch.tensor(vector), mean, atol=2e-5), kind


def test_what_is_the_bases_is_not_held_twice(engine: Engine) -> None:
    copies = engine.adapters["copies"]
    assert copies.embedding is None
    assert copies.head is None
    own = engine.adapters["own-embedding"]
    assert own.head is None, "a tied base's head stays the base's, as PEFT has it"
    assert own.size_bytes == own.row.nbytes + 300 * 64 * 4
