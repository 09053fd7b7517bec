"""Specialising on a tiny base: what is trained on, what is saved, how it is judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid.engine.engine import Engine
from hybrid.errors import ConfigError, DataError
from hybrid.training import evaluate, rows
from hybrid.training.adapter_batches import Batches
from hybrid.training.adapter_loss import AnswerLoss
from hybrid.training.lora import Base, train_adapter

sys.path.insert(0, str(Path(__file__).parent))
from lora_support import PAIRS, TEMPLATE, spec, write_rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "train.jsonl", PAIRS * 8)
    (tmp_path / "holdout.jsonl").write_text(
        '{"input": "the dog", "output": ["lazy", "brown"]}\n'
        '{"input": "the fox", "output": "quick"}\n'
    )
    return tmp_path


def test_only_the_answer_and_its_end_are_learnt(base: Path, folder: Path) -> None:
    made = Base(base, "b@1")
    data = rows.read("a", spec(folder))
    [batch] = Batches(made, spec(folder), data.train, None, 0).at(0)
    ids, labels = batch.ids, batch.labels
    assert ids.shape == labels.shape
    end = made.tokenizer.eos_token_id
    for row, wanted in zip(ids, labels, strict=True):
        answer = [int(t) for t in wanted if t >= 0]
        assert answer[-1] == end
        text = made.tokenizer.decode(answer[:-1])
        assert text in ("quick", "lazy")
        first = int((wanted >= 0).nonzero()[0])
        prompt = made.tokenizer.decode(row[: first + 1])
        assert prompt.endswith(" is\n"), "the answer is predicted from the prompt's last token on"
        assert row[first + 1 : first + len(answer)].tolist() == answer[:-1]


def test_a_trained_adapter_is_served_as_peft_computes_it(base: Path, folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made, config, out = Base(base, "b@1"), spec(folder), folder / "out"
    data = rows.read("a", config)
    before = {k: v.clone() for k, v in made.model.state_dict().items()}
    reports: list[dict[str, Any]] = []
    trained = train_adapter(made, config, data, out, seed=1, report=reports.append)
    assert trained["train_loss"] < 0.1
    assert reports[-1]["step"] == 200
    after = made.model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before), "the base is untouched"

    figures = evaluate.evaluate(base, out, config, data)
    assert figures["exact"] == 1.0
    assert figures["majority"] == 0.5
    assert figures["rows"] == 2
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out).eval()
    [batch] = Batches(made, config, data.train, None, 0).at(0)
    with torch.inference_mode():
        assert float(AnswerLoss(model.base_model.model)(batch) / batch.count) < 0.5

    saved = json.loads((out / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == "b@1"
    assert str(base) not in (out / "adapter_config.json").read_text()
    about = json.loads((out / "hybrid.json").read_text())
    assert about == {"template": TEMPLATE, "kind": "choice", "choices": ["lazy", "quick"]}


def test_the_same_seed_trains_the_same_adapter(base: Path, folder: Path) -> None:
    config = spec(folder, {"rank": 2, "steps": 5})
    data = rows.read("a", config)
    made = Base(base, "b@1")
    weights = []
    for name in ("one", "two"):
        train_adapter(made, config, data, folder / name, seed=3, report=lambda r: None)
        weights.append((folder / name / "adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_target_that_matches_nothing_is_refused(base: Path, folder: Path) -> None:
    config = spec(folder, {"targets": ("nope",), "steps": 1})
    with pytest.raises(ConfigError, match="nope"):
        train_adapter(
            Base(base, "b"), config, rows.read("a", config), folder / "x", seed=0, report=print
        )


def test_figures_by_hand(folder: Path) -> None:
    """Truth a, a, b, {b, c}; answers a, b, b, c: F1 of a is 2/3, of b 2/3, of c 1."""
    made = [("1", ("a",)), ("2", ("a",)), ("3", ("b",)), ("4", ("b", "c"))]
    holdout = [rows.Row(i, o) for i, o in made]
    data = rows.AdapterData(holdout, holdout, ("a", "b", "c"), None, "")
    answers = ["a", "b", "b", "c"]
    assert evaluate.exact_match(answers, data) == 0.75
    assert evaluate.macro_f1(answers, data) == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    assert data.majority == 0.5


def test_generated_answers_are_judged_too(base: Path, folder: Path) -> None:
    config = spec(folder, kind="generate")
    data = rows.read("a", config)
    engine = Engine(base, "d", device="cpu")
    answers = evaluate.judge(engine, config, data, None)
    assert len(answers) == 2
    assert all(isinstance(a, str) for a in answers)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"input": "x"}', "line 2: expected"),
        ("[]", "line 2: expected"),
        ("{", "line 2: not JSON"),
        ('{"input": 3, "output": "y"}', "line 2: input and output must be text"),
        ('{"input": "x", "output": []}', "line 2: output is empty"),
        ('{"input": "x", "output": ""}', "line 2: output is empty"),
    ],
)
def test_a_bad_row_is_named(folder: Path, line: str, says: str) -> None:
    path = folder / "train.jsonl"
    path.write_text('{"input": "x", "output": "y"}\n' + line + "\n")
    with pytest.raises(DataError, match=says):
        rows.read("a", spec(folder))


def test_bad_files_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        rows.read("a", spec(folder, train=str(folder / "none.jsonl")))
    (folder / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no rows"):
        rows.read("a", spec(folder, train=str(folder / "empty.jsonl")))
    (folder / "choices.json").write_text('["quick"]')
    with pytest.raises(DataError, match="'lazy' is none of the 1 choices"):
        rows.read("a", spec(folder, choices=str(folder / "choices.json")))
    with pytest.raises(ConfigError, match="no such file"):
        rows.read("a", spec(folder, augment=str(folder / "none.py:f")))
