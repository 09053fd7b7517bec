"""What the engine does not serve is refused before it is trained; what it serves is PEFT's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).parent))
from lora_support import spec, trained

from hybrid.engine.engine import Engine
from hybrid.errors import AdapterRefused
from hybrid.testing_models import tiny_base
from hybrid.training import evaluate, rows
from hybrid.training.servable import check_servable


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"dora": True}, "use_dora=True is not supported"),
        ({"rank": 5000}, "r=5000"),
        ({"modules_to_save": ("norm",)}, "modules_to_save='norm' is not supported"),
        ({"rank_pattern": {"q_proj(": 4}}, "rank_pattern: .* no regular expression"),
    ],
)
def test_what_is_not_served_is_refused_before_training(
    base: Path, folder: Path, lora: dict[str, Any], says: str
) -> None:
    for where in (None, base):
        with pytest.raises(AdapterRefused, match=f"adapters.cargo: .*{says}"):
            check_servable("cargo", spec(folder, lora), where)


def test_what_depends_on_the_base_and_the_server_is_refused_too(
    base: Path, folder: Path, tmp_path: Path
) -> None:
    other = tiny_base(tmp_path / "other", family="gpt_neox")
    check_servable("a", spec(folder), other)
    check_servable("a", spec(folder, {"modules_to_save": ("embed_tokens",)}), base)
    with pytest.raises(AdapterRefused, match="not served on this base"):
        check_servable("a", spec(folder, {"modules_to_save": ("embed_tokens",)}), other)
    for changed in (
        spec(folder, kind="embed"),
        spec(folder, {"modules_to_save": ("lm_head",)}),
    ):
        with pytest.raises(AdapterRefused, match="vllm"):
            check_servable("a", changed, base, "vllm")


def test_publishing_reads_the_folder_as_the_engine_does(base: Path, folder: Path) -> None:
    """An adapter that was trained all the same is refused when it is judged, by name."""
    config = spec(folder, {"dora": True, "steps": 1})
    trained(base, config, folder / "out" / "adapter")
    with pytest.raises(AdapterRefused, match=r"adapter cargo .*use_dora"):
        evaluate.evaluate(
            base, folder / "out" / "adapter", config, rows.read("a", config), name="cargo"
        )


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    "lora",
    [
        {"rslora": True, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"0.mlp.up_proj": 5.0}},
        {"modules_to_save": ("embed_tokens", "lm_head"), "base_precision": "bfloat16"},
        {"base_precision": "nf4", "targets": ("q_proj", "embed_tokens", "lm_head")},
        {"base_precision": "int8"},
    ],
)
def test_what_is_trained_is_served_as_peft_computes_it(
    base: Path, folder: Path, lora: dict[str, Any]
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    config, out = spec(folder, {"steps": 40, **lora}), folder / "out" / "adapter"
    assert trained(base, config, out)["train_loss"] < 2
    weights = load_file(out / "adapter_model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.float32}, "whatever the base is"
    assert evaluate.evaluate(base, out, config, rows.read("a", config))["exact"] == 1.0
    engine = Engine(base, "d", device="cpu")
    engine.add_adapter(engine.read_adapter(out, name="a", digest="a", base_digest="d"))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out).eval()
    prompt = "the fox is\n"
    ids = engine.prompt_ids(prompt)
    with torch.inference_mode():
        table = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), -1)
    choice = engine.codec.encode_part("quick")[0]
    text = engine.codec._tokenizer.decode([choice])
    [score], _, _ = engine.score(prompt, [text], adapter="a", end=False)
    assert score == pytest.approx(float(table[choice]), abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora": {"workers": 2}}, r"workers \(2\) is more than micro_batches"),
        ({"lora": {"micro_batches": 9, "batch": 8}}, "more than batch"),
        ({"lora": {"workers": 2, "micro_batches": 2, "base_precision": "nf4"}}, "one worker"),
        ({"kind": "embed", "choices": "x.json"}, "choices does not apply"),
        ({"kind": "embed", "lora": {"packing": True}}, "lora.packing does not apply"),
        ({"lora": {"early_stopping": {"share": 1.5}}}, "less than 1"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(
    folder: Path, changes: dict[str, Any], says: str
) -> None:
    from hybrid.config import AdapterConfig

    paths = {"train": "t", "holdout": "h"}
    with pytest.raises(ValidationError, match=says):
        AdapterConfig.model_validate({**paths, **changes})
