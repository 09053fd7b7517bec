"""The batch of a bad step, written down so that a person can look at it.

    runs/<run>/bad-batches/step-000012.json

It holds the loss of every micro-batch of the step and, of the suspects, token ids and text. What is
left out can be made again: a micro-batch follows from seed, step and its index.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hybrid.training.parallel import World
from hybrid.training.policy import Verdict
from hybrid.training.step import StepResult

FOLDER = "bad-batches"
MOST_NOT_FINITE = 16
"""Micro-batches with a loss that is not finite whose text is recorded, at most."""
MOST_SUSPECTS = 4
"""Micro-batches whose text is recorded where all losses are finite: those of highest loss."""


def record_batch(
    folder: Path,
    world: World,
    *,
    step: int,
    verdict: Verdict,
    result: StepResult,
    tokenizer: Any,
    origin: dict[str, Any],
) -> Path:
    """Gather the step's losses and the suspects' tokens; rank 0 writes them. Collective.

    Args:
        folder: of the run.
        step: counted from 1.
        origin: what besides step and index decides a micro-batch: seed, data digest.

    Returns:
        The file's path.
    """
    mine = {m.index: m for m in result.micro_batches if m.tokens}
    losses = {index: (world.rank, float(m.loss) / m.tokens, m.tokens) for index, m in mine.items()}
    everyone = dict(sorted(item for part in world.gather(losses) for item in part.items()))
    wrong = [index for index, (_, loss, _) in everyone.items() if not math.isfinite(loss)]
    by_loss = sorted(everyone, key=lambda index: -everyone[index][1])
    suspects = wrong[:MOST_NOT_FINITE] or by_loss[:MOST_SUSPECTS]
    tokens = {index: mine[index].batch["input_ids"].tolist() for index in suspects if index in mine}
    rows = {index: rows for part in world.gather(tokens) for index, rows in part.items()}
    path = folder / FOLDER / f"step-{step:06d}.json"
    if world.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "step": step,
            "action": verdict.action,
            "reason": verdict.reason,
            "loss": _number(result.loss),
            "grad_norm": _number(result.grad_norm),
            "made_from": {**origin, "step_from_zero": step - 1},
            "not_finite": wrong,
            "micro_batches": [
                {"index": index, "rank": rank, "loss": _number(loss), "tokens": count}
                for index, (rank, loss, count) in everyone.items()
            ],
            "suspects": [
                {
                    "index": index,
                    "rank": everyone[index][0],
                    "rows": [
                        {"token_ids": row, "text": tokenizer.decode(row)} for row in rows[index]
                    ],
                }
                for index in suspects
            ],
        }
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False))
    world.gather(None)
    return path


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)
