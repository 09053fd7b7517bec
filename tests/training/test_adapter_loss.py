"""Packed rows cost what they cost alone; weights follow the answers; what contrast is."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from lora_support import spec, trained, write_rows

from hybrid.engine.engine import Engine
from hybrid.errors import ConfigError, DataError
from hybrid.testing_models import tiny_base
from hybrid.training import evaluate, rows
from hybrid.training.adapter_batches import (
    Answer,
    Batches,
    Pair,
    class_weights,
    pack,
    pad,
    pair,
    split,
)
from hybrid.training.adapter_loss import AnswerLoss, PairLoss, pooled
from hybrid.training.lora import Base
from hybrid.training.rows import Row

CPU = torch.device("cpu")


def answers(count: int, seed: int = 0) -> list[Answer]:
    generator = torch.Generator().manual_seed(seed)

    def ids(most: int) -> list[int]:
        length = int(torch.randint(1, most, (1,), generator=generator))
        return torch.randint(1, 300, (length,), generator=generator).tolist()

    return [Answer(ids(20), [*ids(5), 0], 0.5 + i % 3) for i in range(count)]


def test_packed_rows_have_the_loss_and_gradient_of_rows_alone(base: Path) -> None:
    made = Base(base, "b")
    made.model.double()
    loss, head = AnswerLoss(made.model), made.model.model.layers[0].mlp.up_proj.weight
    head.requires_grad_(True)
    found = []
    for batch in (pad(answers(21), 0, CPU), pack(answers(21), 0, CPU, 64)):
        value = loss(batch)
        value.backward()
        found.append((float(value.detach()), head.grad.clone(), batch))
        head.grad = None
    (alone, alone_grad, padded), (packed, packed_grad, dense) = found
    assert packed == pytest.approx(alone, rel=1e-6)
    assert torch.allclose(packed_grad, alone_grad, atol=1e-5)
    assert dense.count == padded.count
    assert dense.ids.numel() < 0.7 * padded.ids.numel(), "there is little padding left"
    assert dense.ids.shape[1] <= 64


def test_a_packed_row_does_not_see_its_neighbours(base: Path) -> None:
    made, (one, two, other) = Base(base, "b"), answers(3)
    loss = AnswerLoss(made.model)
    silent = Answer(one.prompt, one.answer, 0.0), Answer(other.prompt, other.answer, 0.0)
    values = {round(float(loss(pack([two, row], 0, CPU, 128))), 5) for row in silent}
    assert len(values) == 1
    assert values == {round(float(loss(pad([two], 0, CPU))), 5)}


def test_packing_trains_what_padding_trains(base: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [("the fox", "quick"), ("the dog", "lazy")] * 4)
    write_rows(tmp_path / "holdout.jsonl", [("the dog", "lazy")])
    losses = [
        trained(base, spec(tmp_path, {"steps": 20, "packing": packing}), tmp_path / name / "a")
        for name, packing in (("padded", False), ("packed", True))
    ]
    assert losses[0]["train_loss"] == pytest.approx(losses[1]["train_loss"], rel=1e-4)


def test_a_base_with_windows_is_not_packed(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", family="mistral", sliding_window=16)
    write_rows(tmp_path / "train.jsonl", [("a", "b")])
    write_rows(tmp_path / "holdout.jsonl", [("a", "b")])
    with pytest.raises(ConfigError, match="windows of 16 tokens"):
        trained(base, spec(tmp_path, {"steps": 1, "batch": 1, "packing": True}), tmp_path / "a")


def test_weights_are_one_on_average() -> None:
    rows = [Row("x", ("common",))] * 9 + [Row("y", ("rare",))]
    assert class_weights(rows, "none") == {"common": 1.0, "rare": 1.0}
    balanced = class_weights(rows, "balanced")
    assert 9 * balanced["common"] == pytest.approx(balanced["rare"]) == pytest.approx(5)
    sqrt = class_weights(rows, "sqrt")
    assert sqrt["rare"] / sqrt["common"] == pytest.approx(3)
    assert (9 * sqrt["common"] + sqrt["rare"]) / 10 == pytest.approx(1)


def test_a_rare_answer_is_learnt_only_with_weights(base: Path, tmp_path: Path) -> None:
    """One input has both answers, one in ten is the rare one: only weighted it counts as much; and
    what marks the rare rows is learnt in the same steps."""
    common = [(f"the fox {i}", "quick") for i in range(40)]
    write_rows(tmp_path / "train.jsonl", [*common, *[("dog", "lazy")] * 2])
    write_rows(tmp_path / "holdout.jsonl", [("dog", "lazy"), *common[:5]])
    right = {}
    for weights in ("none", "balanced"):
        config = spec(tmp_path, {"steps": 12, "batch": 42, "weights": weights, "lr": 0.002})
        trained(base, config, tmp_path / weights / "a")
        data = rows.read("a", config)
        engine = Engine(base, "d", device="cpu")
        engine.add_adapter(
            engine.read_adapter(tmp_path / weights / "a", name="a", digest="a", base_digest="d")
        )
        right[weights] = evaluate.judge(engine, config, data, "a")
    assert right["none"] == ["quick"] * 6
    assert right["balanced"] == ["lazy"] + ["quick"] * 5


def test_validation_rows_are_cut_by_their_input() -> None:
    rows = [Row(f"input {i % 200}", (str(i),)) for i in range(400)]
    train, aside = split(rows, 0.2, "file")
    assert not {r.input for r in train} & {r.input for r in aside}
    assert 40 < len(aside) < 120
    assert sorted([*train, *aside], key=str) == sorted(rows, key=str)
    more, _ = split([*rows, Row("new", ("x",))], 0.2, "file")
    assert set(train) <= set(more), "another row moves none"
    with pytest.raises(DataError, match="file: early_stopping"):
        split(rows[:1], 0.001, "file")


def test_contrast_by_hand() -> None:
    """Two rows whose cosines are known: -log of the softmax over the batch, both ways."""

    class Fixed(torch.nn.Module):
        def forward(self, **what: Any) -> Any:
            table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
            return type("Out", (), {"last_hidden_state": table[what["input_ids"]]})

    model: Any = torch.nn.Module()
    model.base_model = Fixed()
    loss = PairLoss(model, temperature=0.5)
    value = float(loss(pair([Pair([0], [2], 0), Pair([1], [1], 1)], 0, CPU)))
    table = torch.tensor([[0.6, 0.0], [0.8, 1.0]]) / 0.5
    wanted = sum(
        math.log(sum(math.exp(x) for x in line)) - float(line[i])
        for t in (table, table.T)
        for i, line in enumerate(t)
    )
    assert value == pytest.approx(wanted / 2, rel=1e-5)
    alike = float(loss(pair([Pair([0], [2], 7), Pair([1], [2], 7)], 0, CPU)))
    assert alike == pytest.approx(0, abs=1e-6), "rows with one output are no negatives"


def test_vectors_in_training_are_the_engines(base: Path) -> None:
    made, engine = Base(base, "b"), Engine(base, "d", device="cpu")
    texts = ["the quick fox", "dog", "ABC; def! 123"]
    ids = [made.tokenizer(text)["input_ids"] for text in texts]
    batch = pair([Pair(i, i, n) for n, i in enumerate(ids)], 0, CPU)
    with torch.inference_mode():
        vectors = pooled(made.model, batch)[: len(texts)]
    for text, vector in zip(texts, vectors, strict=True):
        assert torch.allclose(torch.tensor(engine.embed(text)[0]), vector, atol=1e-5)


def test_a_batch_is_known_by_its_step(base: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [(f"row {i}", "x") for i in range(30)])
    write_rows(tmp_path / "holdout.jsonl", [("a", "x")])
    config = spec(tmp_path, {"batch": 8, "micro_batches": 3})
    data, made = rows.read("a", config), Base(base, "b")

    def batches() -> Batches:
        return Batches(made, config, data.train, lambda t, rng: t + str(rng.random())[:4], 5)

    onwards, later = batches(), batches()
    ids = [[b.ids.tolist() for b in onwards.at(step)] for step in range(9)]
    assert ids[6] == [b.ids.tolist() for b in later.at(6)]
    assert [len(step) for step in ids[:4]] == [3, 3, 3, 3]
    sizes = [sum(len(b) for b in step) for step in ids]
    assert onwards.per_epoch == 4 and sum(sizes[:4]) == sum(sizes[4:8]) == 30
    assert ids[0] != ids[4], "each epoch is augmented and ordered anew"
