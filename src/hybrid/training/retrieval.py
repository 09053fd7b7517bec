"""Judging vectors by what they find: recall@k on held-out pairs, beside BM25 and the bare base."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hybrid.config import AdapterConfig
from hybrid.engine.engine import Engine
from hybrid.training.rows import AdapterData

KS = (1, 5, 10)


class BM25:
    """Ranking by shared words (Robertson & Zaragoza 2009), k1 = 1.2, b = 0.75."""

    def __init__(self, texts: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        self._k1 = k1
        counts = [Counter(words(text)) for text in texts]
        lengths = np.array([max(1, sum(c.values())) for c in counts], dtype=np.float64)
        self._norm = k1 * (1 - b + b * lengths / lengths.mean())
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for place, count in enumerate(counts):
            for word, n in count.items():
                self._postings[word].append((place, n))

    def scores(self, query: str) -> np.ndarray[Any, Any]:
        """float64 [texts]."""
        total = np.zeros(len(self._norm))
        for word in set(words(query)):
            found = self._postings.get(word, [])
            idf = math.log(1 + (len(total) - len(found) + 0.5) / (len(found) + 0.5))
            for place, n in found:
                total[place] += idf * n * (self._k1 + 1) / (n + self._norm[place])
        return total


def words(text: str) -> list[str]:
    """Lower-case words and numbers."""
    return re.findall(r"\w+", text.lower())


def recall(
    scores: Sequence[np.ndarray[Any, Any]],
    right: Sequence[frozenset[int]],
    ks: Sequence[int] = KS,
) -> dict[int, float]:
    """Share of queries with one of their right texts among the k with the highest scores.

    Args:
        scores: for each query one a text. right: for each query the places of its right texts.

    Texts with equal scores share their places evenly: what is right counts as the middle one, so
    that nothing is won by scoring all alike.
    """
    ranks = []
    for values, places in zip(scores, right, strict=True):
        best = max(values[p] for p in places)
        others = int((values == best).sum()) - sum(values[p] == best for p in places)
        ranks.append(int((values > best).sum()) + others / 2)
    return {k: float(np.mean([rank < k for rank in ranks])) for k in ks}


def candidates(data: AdapterData) -> tuple[list[str], list[frozenset[int]]]:
    """(every text that may be found, the places of each held-out row's right ones).

    Those of the training rows are among them: what was trained on is there to mislead.
    """
    texts = sorted({o for row in [*data.train, *data.holdout] for o in row.outputs})
    place = {text: i for i, text in enumerate(texts)}
    return texts, [frozenset(place[o] for o in row.outputs) for row in data.holdout]


def judge(engine: Engine, spec: AdapterConfig, data: AdapterData, adapter: str) -> dict[str, Any]:
    """recall_1, recall_5, recall_10 of an adapter's vectors, as shares of one; the same with
    `base_` for the base's own and `bm25_` for words; rows; candidates.

    Args:
        adapter: digest of an adapter the engine has.
    """
    texts, right = candidates(data)
    queries = [row.input for row in data.holdout]

    def vectors(digest: str | None) -> Callable[[Sequence[str]], np.ndarray[Any, Any]]:
        def embed(many: Sequence[str]) -> np.ndarray[Any, Any]:
            filled = (spec.template.replace("{input}", text) for text in many)
            return np.array([engine.embed(text, adapter=digest)[0] for text in filled])

        return embed

    words_only = BM25(texts)
    found = {
        "": recall(by_vectors(vectors(adapter), texts, queries), right),
        "base_": recall(by_vectors(vectors(None), texts, queries), right),
        "bm25_": recall([words_only.scores(q) for q in queries], right),
    }
    figures = {f"{who}recall_{k}": value for who, ks in found.items() for k, value in ks.items()}
    return {"rows": len(queries), "candidates": len(texts), **figures}


def by_vectors(
    embed: Callable[[Sequence[str]], np.ndarray[Any, Any]],
    texts: Sequence[str],
    queries: Sequence[str],
) -> list[np.ndarray[Any, Any]]:
    """Cosines [texts] of each query, where `embed` gives unit vectors [texts, size]."""
    return list(embed(queries) @ embed(texts).T)
