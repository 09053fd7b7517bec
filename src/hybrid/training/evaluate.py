"""Judging a specialist on held-out rows, with the very engine that will serve it.

So what is published is what loads, and the figures are those of served answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid.config import AdapterConfig
from hybrid.engine.engine import Engine
from hybrid.training import retrieval
from hybrid.training.rows import AdapterData
from hybrid.wire import Sampling

_MAX_ANSWER = 96
"""Tokens of a generated answer; what is longer is wrong anyway."""


def judge(engine: Engine, spec: AdapterConfig, data: AdapterData, adapter: str | None) -> list[str]:
    """The answer to each held-out row.

    Args:
        adapter: digest of an adapter the engine has, or None for the base.
    """
    prompts = [spec.template.replace("{input}", row.input) for row in data.holdout]
    if spec.kind == "choice":
        answers = []
        for prompt, row in zip(prompts, data.holdout, strict=True):
            choices = data.choices_of(row)
            scores, _, _ = engine.score(prompt, choices, adapter=adapter)
            answers.append(choices[scores.index(max(scores))])
        return answers
    texts = [""] * len(prompts)
    waiting = list(enumerate(prompts))
    places: dict[str, int] = {}
    while waiting or not engine.idle:
        while waiting and engine.scheduler.waiting < engine.scheduler.max_rows:
            place, prompt = waiting.pop()
            room = engine.context - len(engine.codec.encode(prompt))
            if room < 1:
                continue  # does not fit: no answer, and that is wrong
            sampling = Sampling(max_tokens=min(_MAX_ANSWER, room))
            engine.submit(str(place), prompt, sampling, adapter=adapter)
            places[str(place)] = place
        for event in engine.step():
            texts[places[event.sequence.id]] += event.text
    return [text.strip() for text in texts]


def shortfall(spec: AdapterConfig, metrics: dict[str, Any]) -> str | None:
    """Why an adapter with these figures is not worth publishing; None when it is."""
    if spec.kind == "embed":
        what, has, beaten = "recall@1", metrics["recall_1"], metrics["base_recall_1"]
        whom = "the base's own vectors"
    else:
        what, has, beaten = "exact match", metrics["exact"], metrics["majority"]
        whom = "the majority class"
    if has >= beaten + spec.margin:
        return None
    return f"held-out {what} {has:.1%} does not beat {whom} ({beaten:.1%}) by {spec.margin:.1%}"


def exact_match(answers: Sequence[str], data: AdapterData) -> float:
    """Share of answers that are one of their row's acceptable ones."""
    right = sum(a in row.outputs for a, row in zip(answers, data.holdout, strict=True))
    return right / len(data.holdout)


def macro_f1(answers: Sequence[str], data: AdapterData) -> float:
    """F1 of each class that occurs in the truth, averaged with equal weight.

    The truth of a row with several acceptable answers is the one given, if it is among them.
    """
    true: dict[str, int] = defaultdict(int)
    given: dict[str, int] = defaultdict(int)
    hits: dict[str, int] = defaultdict(int)
    for answer, row in zip(answers, data.holdout, strict=True):
        truth = answer if answer in row.outputs else row.outputs[0]
        true[truth] += 1
        given[answer] += 1
        hits[truth] += answer == truth
    scores = [2 * hits[c] / (true[c] + given[c]) for c in true]
    return sum(scores) / len(scores)


def evaluate(
    base: Path,
    folder: Path,
    spec: AdapterConfig,
    data: AdapterData,
    *,
    name: str = "judged",
    device: str | None = None,
) -> dict[str, Any]:
    """Figures of an adapter and of what it is to beat, on the same rows.

    Args:
        base: the base's folder.
        folder: the adapter's.
        name: the adapter's, for the message if it is refused.
        device: the engine's; by default what is there.

    Returns:
        rows, exact, macro_f1 (closed sets only), base_exact, majority: shares of one. For `embed`
        see `retrieval.judge`.

    Raises:
        AdapterRefused: the engine would not serve it.
    """
    engine = Engine(base, "judged", max_rows=32, device=device)
    engine.add_adapter(
        engine.read_adapter(folder, name=name, digest="judged", base_digest="judged")
    )
    if spec.kind == "embed":
        return retrieval.judge(engine, spec, data, "judged")
    answers = judge(engine, spec, data, "judged")
    return {
        "rows": len(data.holdout),
        "exact": exact_match(answers, data),
        **({"macro_f1": macro_f1(answers, data)} if data.choices else {}),
        "base_exact": exact_match(judge(engine, spec, data, None), data),
        "majority": data.majority,
    }
