"""What is easy: the majority class and a linear model on character n-grams, on the same split.

    python examples/legal/baselines.py DATA

A specialist that does not come near the linear model has learnt little; a table without it
convinces nobody.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline


def evaluate(data: Path) -> dict[str, dict[str, float]]:
    """Held-out exact match (0..1) by task: `{task: {majority, linear, rows}}`.

    A task is a folder of `data` with train.jsonl, holdout.jsonl and choices.json; an answer is
    right when it is any of a row's acceptable ones.
    """
    return {
        choices.parent.name: _task(choices.parent)
        for choices in sorted(data.glob("*/choices.json"))
    }


def _task(folder: Path) -> dict[str, float]:
    train, holdout = _rows(folder / "train.jsonl"), _rows(folder / "holdout.jsonl")
    names, answers = [name for name, _ in train], [accepted[0] for _, accepted in train]
    majority = Counter(answers).most_common(1)[0][0]
    linear = make_pipeline(
        TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 5), sublinear_tf=True),
        LogisticRegression(C=30, max_iter=300),
    )
    linear.fit(names, answers)
    guesses = linear.predict([name for name, _ in holdout])
    return {
        "majority": _share(majority in accepted for _, accepted in holdout),
        "linear": _share(g in a for g, (_, a) in zip(guesses, holdout, strict=True)),
        "rows": len(holdout),
    }


def _rows(path: Path) -> list[tuple[str, list[str]]]:
    """(input, acceptable outputs) of each line."""
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return [
        (r["input"], r["output"] if isinstance(r["output"], list) else [r["output"]]) for r in rows
    ]


def _share(right: Any) -> float:
    values = list(right)
    return sum(map(bool, values)) / len(values)


if __name__ == "__main__":
    print(f"{'task':<14}{'rows':>6}{'majority':>10}{'linear':>9}")
    for task, result in evaluate(Path(sys.argv[1])).items():
        print(f"{task:<14}{result['rows']:>6}{result['majority']:>10.1%}{result['linear']:>9.1%}")
