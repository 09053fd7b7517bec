"""From logits to the next token: greedy, or sampled with the request's own generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.engine.constraint import Masks
from hybrid.engine.kernels import argmax
from hybrid.wire import Sampling

Top = tuple[tuple[int, float], ...]
"""Token ids with their log probabilities, likeliest first."""


def generator(sampling: Sampling) -> torch.Generator | None:
    """The generator of a request that samples; the same seed gives the same draws."""
    if sampling.temperature == 0:
        return None
    made = torch.Generator()
    if sampling.seed is None:
        made.seed()
    else:
        made.manual_seed(sampling.seed)
    return made


def sample(
    logits: Tensor,
    how: Sequence[tuple[Sampling, torch.Generator | None]],
    masks: Masks | None = None,
) -> tuple[list[int], list[float], list[Top]]:
    """Choose a token for each row.

    Args:
        logits: float32 [N, vocab].
        how: N settings with their generators.
        masks: what the constrained ones of the N rows may choose from.

    Returns:
        N token ids; their log probabilities, 0.0 for rows that did not ask; the likeliest tokens
        of each row, empty for rows that did not ask. Log probabilities are of the model's own
        distribution: before temperature, cuts and masks.
    """
    best = argmax(logits)
    masked: dict[int, Tensor] = {}
    if masks is not None:
        allowed = masks.apply(logits)
        best[masks.rows] = allowed.argmax(-1)
        masked = dict(zip(masks.rows, allowed, strict=True))
    tokens: list[int] = best.tolist()
    for row, (sampling, draws) in enumerate(how):
        if draws is not None:
            scores = masked[row] if row in masked else logits[row]
            tokens[row] = _draw(scores.cpu(), sampling, draws)
    logprobs = [0.0] * len(tokens)
    top: list[Top] = [()] * len(tokens)
    wanted = [row for row, (sampling, _) in enumerate(how) if sampling.logprobs]
    if wanted:
        table = torch.log_softmax(logits[wanted], -1)
        chosen = torch.tensor([tokens[row] for row in wanted], device=table.device)
        for row, value in zip(wanted, table.gather(1, chosen[:, None])[:, 0].tolist(), strict=True):
            logprobs[row] = value
        counts = [how[row][0].top_logprobs for row in wanted]
        if any(counts):
            found = table.topk(min(max(counts), table.shape[1]))
            rows = zip(wanted, counts, found.indices.tolist(), found.values.tolist(), strict=True)
            for row, count, ids, values in rows:
                top[row] = tuple(zip(ids[:count], values[:count], strict=True))
    return tokens, logprobs, top


def _draw(logits: Tensor, sampling: Sampling, draws: torch.Generator) -> int:
    logits = logits / sampling.temperature
    if sampling.top_k and sampling.top_k < logits.shape[0]:
        least = torch.topk(logits, sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = torch.softmax(logits, -1)
    if sampling.top_p < 1:
        ordered, index = probabilities.sort(descending=True)
        # The smallest set whose mass reaches top_p: drop what comes after it is reached.
        drop = ordered.cumsum(0) - ordered >= sampling.top_p
        probabilities[index[drop]] = 0
    return int(torch.multinomial(probabilities, 1, generator=draws))
