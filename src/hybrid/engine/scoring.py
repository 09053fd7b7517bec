"""Scoring a closed set of continuations in one forward pass over a trie of their tokens.

Choices share beginnings, and all share the prompt. The prompt is run once; the trie's nodes are
run once each, a node seeing the prompt and its own ancestors only (a tree mask, as in SpecInfer,
Miao et al. 2024). Exact: each choice's probability is what it would be alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.engine.attention import Once
from hybrid.engine.fallback import FallbackDecoder
from hybrid.engine.lora import Adapter
from hybrid.engine.lora_plan import LoraPlan
from hybrid.engine.model import Decoder


@dataclass(frozen=True)
class Trie:
    """Nodes in order of depth. Node 0's row is the prompt's last token.

    tokens: int64 [N]; parents: int64 [N], rows of the parents (0: the prompt);
    depths: int64 [N], from 0; sees: bool [N, N], which nodes a node may attend to;
    paths: for each choice, the rows of its tokens; lengths: their number.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    sees: Tensor
    paths: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def build_trie(choices: tuple[tuple[int, ...], ...]) -> Trie:
    """Merge the common beginnings of token sequences; kept for the sets used last."""
    index: dict[tuple[int, ...], int] = {}
    for prefix in sorted({c[: i + 1] for c in choices for i in range(len(c))}, key=len):
        index[prefix] = len(index)
    n = len(index)
    parents = [index[p[:-1]] + 1 if len(p) > 1 else 0 for p in index]
    sees = torch.eye(n, dtype=torch.bool)
    for prefix, row in index.items():  # in order of depth: a parent's row is complete
        if len(prefix) > 1:
            sees[row] |= sees[index[prefix[:-1]]]
    return Trie(
        tokens=torch.tensor([p[-1] for p in index]),
        parents=torch.tensor(parents),
        depths=torch.tensor([len(p) - 1 for p in index]),
        sees=sees,
        paths=tuple(tuple(index[c[: i + 1]] for i in range(len(c))) for c in choices),
    )


def _sees(prompt: int, trie: Trie) -> Tensor:
    """bool [T, T]: prompt tokens see those before, nodes the whole prompt and their ancestors."""
    n = prompt + len(trie.tokens)
    sees = torch.ones(n, n, dtype=torch.bool).tril()
    sees[prompt:, prompt:] = trie.sees
    return sees


def score(
    decoder: Decoder | FallbackDecoder,
    adapter: Adapter | None,
    prompt: Sequence[int],
    choices: tuple[tuple[int, ...], ...],
) -> list[float]:
    """Natural-log probability of each choice's tokens after the prompt.

    Args:
        prompt: at least one token.
        choices: at least one token each.
    """
    if isinstance(decoder, FallbackDecoder):
        return decoder.score(adapter, prompt, choices)
    trie = build_trie(choices)
    device, n = decoder.device, len(prompt)
    ids = torch.cat([torch.tensor(prompt), trie.tokens]).to(device)
    positions = torch.cat([torch.arange(n), trie.depths + n]).to(device)
    plan = LoraPlan.single(adapter, len(ids))
    attend = Once(decoder.shape, positions, _sees(n, trie).to(device))
    hidden = decoder.forward(ids, positions, attend, plan)
    inner: Tensor = torch.unique(trie.parents)
    table = torch.log_softmax(decoder.logits(hidden, plan, inner.to(device) + n - 1), -1)
    row = torch.searchsorted(inner, trie.parents).to(device)
    gained = table[row, trie.tokens.to(device)].tolist()
    return [sum(gained[i] for i in path) for path in trie.paths]


def embed(
    decoder: Decoder | FallbackDecoder, adapter: Adapter | None, ids: Sequence[int]
) -> list[float]:
    """Mean of the last hidden states over the tokens, L2-normalised: `hidden` floats."""
    if isinstance(decoder, FallbackDecoder):
        return decoder.embed(adapter, ids)
    tokens = torch.tensor(ids, device=decoder.device)
    positions = torch.arange(len(ids), device=decoder.device)
    plan = LoraPlan.single(adapter, len(ids))
    hidden = decoder.forward(tokens, positions, Once(decoder.shape, positions), plan)
    vector: list[float] = F.normalize(hidden.float().mean(0), dim=0).tolist()
    return vector
