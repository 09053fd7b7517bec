"""Recall and BM25 by hand, and an embedding adapter that finds what the bare base does not."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from lora_support import spec, trained, write_rows

from hybrid.training import evaluate, retrieval, rows


def test_recall_by_hand() -> None:
    scores = [np.array([3.0, 2.0, 1.0]), np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 0.0])]
    right = [frozenset({0}), frozenset({0, 1}), frozenset({1})]
    assert retrieval.recall(scores, right, (1, 2, 3)) == {1: 2 / 3, 2: 1.0, 3: 1.0}
    flat = [np.zeros(9)] * 2
    assert retrieval.recall(flat, [frozenset({0})] * 2, (1, 4, 5)) == {1: 0.0, 4: 0.0, 5: 1.0}


def test_bm25_by_hand() -> None:
    """Three texts of lengths 2, 1, 3 (mean 2); `fox` is in two of them."""
    made = retrieval.BM25(["Red fox", "dog", "fox, fox den"])
    idf = math.log(1 + 1.5 / 2.5)
    assert made.scores("FOX fox cat") == pytest.approx(
        [idf * 2.2 / (1 + 1.2), 0, idf * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 1.5))]
    )
    assert made.scores("") == pytest.approx([0, 0, 0])


def test_an_embedding_adapter_finds_what_the_base_does_not(base: Path, tmp_path: Path) -> None:
    meant = {"fox": "red", "dog": "bark", "ABC": "letters", "def": "more", "123": "count", "é": "e"}
    ways = ("the quick {}", "een {}", "over {}!", "{} jumps", "lazy {}; {}", "{} 3")
    pairs = [(way.format(k, k), m) for k, m in meant.items() for way in ways]
    held = [(f"brown {k} kleine", m) for k, m in meant.items()]
    write_rows(tmp_path / "train.jsonl", pairs)
    write_rows(tmp_path / "holdout.jsonl", held)
    config = spec(tmp_path, {"steps": 40, "batch": 36, "lr": 0.01}, kind="embed")
    assert config.template == "{input} is\n"
    done = trained(base, config, tmp_path / "run/a")
    assert done["train_loss"] < 1.5
    figures = evaluate.evaluate(base, tmp_path / "run/a", config, rows.read("a", config))
    assert (figures["rows"], figures["candidates"]) == (6, 6)
    assert figures["recall_1"] > figures["base_recall_1"] + 0.3
    assert figures["recall_5"] >= figures["recall_1"]
    assert figures["bm25_recall_1"] == 0.0, "they share no word"
    assert evaluate.shortfall(config, figures) is None
    worse = {**figures, "recall_1": figures["base_recall_1"]}
    assert "does not beat the base's own vectors" in (evaluate.shortfall(config, worse) or "")
    about = json.loads((tmp_path / "run/a/hybrid.json").read_text())
    assert about == {"template": "{input} is\n", "kind": "embed", "choices": []}


def test_texts_are_embedded_bare_unless_a_template_is_given() -> None:
    from hybrid.config import AdapterConfig

    plain = AdapterConfig.model_validate({"train": "t", "holdout": "h", "kind": "embed"})
    assert plain.template == "{input}"
    assert AdapterConfig.model_validate({"train": "t", "holdout": "h"}).template == "{input}\n"
