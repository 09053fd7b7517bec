"""The preflight: what does not fit is refused by name."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid.engine.engine import Engine
from hybrid.errors import AdapterRefused
from hybrid.testing_models import tiny_adapter, tiny_base

BASE = "b" * 64
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
HEAD = "base_model.model.lm_head.weight"
TARGETS = ("q_proj", "down_proj")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Path]:
    root = tmp_path_factory.mktemp("adapters")
    tiny_base(root / "base")
    tiny_adapter(root / "base", root / "good", targets=TARGETS)
    return Engine(root / "base", BASE, device="cpu"), root / "good"


def edit_config(**values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        state = load_file(folder / WEIGHTS)
        change(state)
        save_file(state, folder / WEIGHTS)

    return edit


def nan(state: dict[str, torch.Tensor]) -> None:
    next(iter(state.values()))[0, 0] = float("nan")


def rename(state: dict[str, torch.Tensor]) -> None:
    for key in [k for k in state if ".layers.1.mlp.down_proj." in k]:
        state[key.replace(".layers.1.", ".layers.9.")] = state.pop(key)


def narrow(state: dict[str, torch.Tensor]) -> None:
    key = next(k for k in state if "lora_A" in k)
    state[key] = state[key][:, :-1].contiguous()


def truncate(folder: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[: len(raw) // 2])


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda f: (f / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
        (lambda f: (f / CONFIG).unlink(), f"{CONFIG} is missing"),
        (lambda f: (f / CONFIG).write_text("{"), "cannot be read"),
        (truncate, "cannot be read"),
        (edit_weights(nan), "NaN or infinity"),
        (edit_weights(rename), "matches nothing in the base"),
        (edit_weights(narrow), "expected"),
        (edit_weights(lambda s: s.pop(next(iter(s)))), "has only lora_"),
        (edit_weights(lambda s: s.update(x=torch.zeros(1))), "matches nothing in the base"),
        (edit_config(r=3), "expected"),
        (edit_config(r=0), "rank"),
        (edit_config(use_dora=True), "use_dora"),
        (edit_config(bias="some"), "bias"),
        (edit_config(modules_to_save=["lm_head"]), "modules_to_save names lm_head"),
        (edit_config(modules_to_save=["norm"]), "modules_to_save='norm' is not supported"),
        (edit_config(peft_type="IA3"), "peft_type"),
        (edit_config(lora_bias=True), "lora_bias"),
        (edit_config(target_parameters=["x"]), "target_parameters"),
        (edit_config(trainable_token_indices=[1]), "trainable_token_indices"),
        (edit_config(init_lora_weights="pissa_niter_4"), "init_lora_weights='pissa_niter_4'"),
        (edit_config(alora_invocation_tokens=[1]), "alora_invocation_tokens"),
        (edit_config(of_peft_to_come={"x": 1}), "of_peft_to_come"),
        (edit_config(fan_in_fan_out=True), "fan_in_fan_out"),
        (edit_config(r=True), "rank"),
        (edit_config(r=10**6), "rank"),
        (edit_config(lora_alpha=float("nan")), "finite"),
        (edit_config(lora_alpha="8"), "finite"),
        (edit_config(rank_pattern={"(": 2}), "regular expression"),
        (edit_config(rank_pattern={"((q_proj|.)*x)+": 2}), "may never end"),
        (edit_config(use_rslora="no"), "true or false"),
        (edit_config(target_modules=["q_proj"]), "target_modules does not name it"),
        (edit_config(target_modules=[*TARGETS, "k_proj"]), "its weights are missing"),
        (edit_config(layers_to_transform=[0]), "target_modules does not name it"),
        (lambda f: (f / CONFIG).write_text("[]"), "holds no object"),
        (lambda f: (f / CONFIG).write_text('{"r": 1, "r": 2}'), "twice"),
        (lambda f: (f / WEIGHTS).write_bytes(b""), "cannot be read"),
        (edit_weights(lambda s: s.update({k: v.int() for k, v in s.items()})), "torch.int32"),
        (edit_weights(lambda s: s.update({HEAD: torch.zeros(310, 64)})), "vocabulary mismatch"),
        (edit_weights(lambda s: s.update({HEAD: torch.zeros(300, 64)})), "lm_head is not the base"),
        (edit_weights(lambda s: s.clear()), "no LoRA weights"),
    ],
)
def test_what_does_not_fit_is_refused(
    good: tuple[Engine, Path], tmp_path: Path, break_it: Callable[[Path], object], says: str
) -> None:
    engine, source = good
    bad = tmp_path / "bad"
    shutil.copytree(source, bad)
    break_it(bad)
    with pytest.raises(AdapterRefused, match=says) as e:
        engine.read_adapter(bad, name="bad", digest="d" * 64, base_digest=BASE)
    assert e.value.status == 422


def test_trained_biases_are_refused_where_the_base_has_some(tmp_path: Path) -> None:
    tiny_base(tmp_path / "base", attention_bias=True)
    tiny_adapter(tmp_path / "base", tmp_path / "a", targets=TARGETS, bias="all")
    engine = Engine(tmp_path / "base", BASE, device="cpu")
    with pytest.raises(AdapterRefused, match="bias"):
        engine.read_adapter(tmp_path / "a", name="a", digest="a", base_digest=BASE)


def test_a_copy_of_another_base_is_refused(good: tuple[Engine, Path], tmp_path: Path) -> None:
    engine, source = good
    base = source.parent / "base"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of the head that it saves
        tiny_adapter(base, tmp_path / "a", targets=("lm_head",))
    key = "base_model.model.lm_head.base_layer.weight"
    edit_weights(lambda s: s.update({key: s[key].bfloat16()}))(tmp_path / "a")
    engine.read_adapter(tmp_path / "a", name="a", digest="a", base_digest=BASE)
    edit_weights(lambda s: s.update({key: s[key] * 2}))(tmp_path / "a")
    with pytest.raises(AdapterRefused, match="not what the served base has there"):
        engine.read_adapter(tmp_path / "a", name="a", digest="a", base_digest=BASE)


def test_another_base_is_refused_with_both_digests(good: tuple[Engine, Path]) -> None:
    engine, source = good
    with pytest.raises(AdapterRefused) as e:
        engine.read_adapter(source, name="a", digest="d" * 64, base_digest="c" * 64)
    assert "c" * 64 in e.value.message
    assert BASE in e.value.message


def test_rslora_and_patterns_scale_as_peft_does(good: tuple[Engine, Path], tmp_path: Path) -> None:
    engine, source = good
    base = source.parent / "base"
    folder = tiny_adapter(
        base,
        tmp_path / "rs",
        rank=4,
        targets=("q_proj", "up_proj"),
        use_rslora=True,
        rank_pattern={"up_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 5},
    )
    engine.add_adapter(engine.read_adapter(folder, name="rs", digest="rs", base_digest=BASE))
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    prompt = engine.codec.encode("the lazy dog")
    choice = [*engine.codec.encode_part("fox"), engine.codec.end]
    with torch.inference_mode():
        table = torch.log_softmax(model(torch.tensor([prompt + choice])).logits[0], -1)
    want = sum(float(table[len(prompt) - 1 + i, t]) for i, t in enumerate(choice))
    got, _, _ = engine.score("the lazy dog", ["fox"], adapter="rs")
    assert got[0] == pytest.approx(want, abs=1e-4)
