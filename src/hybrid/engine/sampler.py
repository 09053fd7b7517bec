"""From logits to the next token: greedy, or sampled with the request's own generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.wire import Sampling


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
    logits: Tensor, how: Sequence[tuple[Sampling, torch.Generator | None]]
) -> tuple[list[int], list[float]]:
    """Choose a token for each row.

    Args:
        logits: float32 [N, vocab].
        how: N settings with their generators.

    Returns:
        N token ids, and their log probabilities under the model (before temperature and cuts);
        0.0 for rows that did not ask.
    """
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, (sampling, draws) in enumerate(how):
        if draws is not None:
            tokens[row] = _draw(logits[row].cpu(), sampling, draws)
    logprobs = [0.0] * len(tokens)
    wanted = [row for row, (sampling, _) in enumerate(how) if sampling.logprobs]
    if wanted:
        table = torch.log_softmax(logits[wanted], -1)
        for i, row in enumerate(wanted):
            logprobs[row] = float(table[i, tokens[row]])
    return tokens, logprobs


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
