"""The router: which agent an input is for, from descriptions and examples alone.

Words and character n-grams, weighted by how few agents use them (tf-idf, Salton & Buckley 1988),
compared by cosine with each agent's examples and description. The score is calibrated: a softmax
whose temperature is fitted on the agents' own examples, each left out in turn (temperature
scaling, Guo et al. 2017). Nothing is trained; a new agent is routable as soon as it is described.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid.agents.spec import AgentSpec

Vector = Mapping[str, float]
_NGRAMS = (3, 4, 5)
_WORD_WEIGHT = 2.0
_DESCRIPTION_WEIGHT = 0.6
_TEMPERATURES = (0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3)
_FAMILIAR = 0.08
"""Below this cosine an input resembles nothing any agent is for, whichever is nearest."""


@dataclass(frozen=True)
class Decision:
    """`agent` is None when the router abstains; `scores` are calibrated and sum to 1."""

    agent: str | None
    score: float
    scores: dict[str, float]
    reason: str


class Router:
    """A closed set of agents, ready to be asked.

    Args:
        specs: the agents; one without description and examples is never chosen.
    """

    def __init__(self, specs: Sequence[AgentSpec]) -> None:
        self._examples = {s.name: [_features(e) for e in s.examples] for s in specs}
        self._descriptions = {s.name: _features(s.description) for s in specs}
        self._idf = _idf(
            [
                *(self._descriptions[n] for n in self._descriptions),
                *(e for many in self._examples.values() for e in many),
            ]
        )
        self._weighted = {
            name: [_weigh(e, self._idf) for e in many] for name, many in self._examples.items()
        }
        self._described = {name: _weigh(d, self._idf) for name, d in self._descriptions.items()}
        self._temperature = self._calibrate()

    def route(self, text: str, *, threshold: float = 0.35) -> Decision:
        """The agent for a text.

        Args:
            threshold: the calibrated score below which nobody is chosen.
        """
        if not self._examples:
            return Decision(None, 0.0, {}, "there are no agents to choose among")
        if not re.search(r"\w", text):
            return Decision(None, 0.0, {}, "the input has no words")
        similar = self._similarities(_weigh(_features(text), self._idf))
        scores = _softmax(similar, self._temperature)
        best = max(scores, key=lambda n: (scores[n], n))
        if similar[best] < _FAMILIAR:
            return Decision(None, 0.0, scores, f"the input resembles no agent (nearest: {best})")
        if scores[best] < threshold:
            return Decision(
                None,
                scores[best],
                scores,
                f"{best} is likeliest with {scores[best]:.2f}, below {threshold:.2f}",
            )
        return Decision(best, scores[best], scores, f"{best} with {scores[best]:.2f}")

    def _similarities(
        self, vector: Vector, leave_out: tuple[str, int] | None = None
    ) -> dict[str, float]:
        """Cosine with the nearest example, or a share of that with the description."""
        out = {}
        for name, examples in self._weighted.items():
            near = _DESCRIPTION_WEIGHT * _cosine(vector, self._described[name])
            for i, example in enumerate(examples):
                if (name, i) != leave_out:
                    near = max(near, _cosine(vector, example))
            out[name] = near
        return out

    def _calibrate(self) -> float:
        """The temperature with the least negative log likelihood of left-out examples."""
        cases = [
            (name, self._similarities(example, (name, i)))
            for name, examples in self._weighted.items()
            for i, example in enumerate(examples)
            if len(examples) > 1
        ]
        if not cases:
            return 0.1
        return min(
            _TEMPERATURES,
            key=lambda t: sum(-math.log(_softmax(s, t)[name] + 1e-9) for name, s in cases),
        )


def _features(text: str) -> Counter[str]:
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    features: Counter[str] = Counter()
    for word in words:
        features["w " + word] += 1
    joined = f" {' '.join(words)} "
    for n in _NGRAMS:
        for i in range(len(joined) - n + 1):
            features[joined[i : i + n]] += 1
    return features


def _idf(documents: Sequence[Counter[str]]) -> dict[str, float]:
    seen: Counter[str] = Counter()
    for document in documents:
        seen.update(document.keys())
    return {f: math.log((1 + len(documents)) / (1 + n)) + 1 for f, n in seen.items()}


def _weigh(features: Counter[str], idf: Mapping[str, float]) -> Vector:
    """Unit length. Features nobody has keep their weight in the length: they are foreign."""
    rare = max(idf.values(), default=1.0)
    weighted = {
        f: (1 + math.log(n)) * idf.get(f, rare) * (_WORD_WEIGHT if f.startswith("w ") else 1.0)
        for f, n in features.items()
    }
    length = math.sqrt(sum(v * v for v in weighted.values())) or 1.0
    return {f: v / length for f, v in weighted.items()}


def _cosine(a: Vector, b: Vector) -> float:
    if len(b) < len(a):
        a, b = b, a
    return sum(v * b[f] for f, v in a.items() if f in b)


def _softmax(values: Mapping[str, float], temperature: float) -> dict[str, float]:
    top = max(values.values())
    powers = {n: math.exp((v - top) / temperature) for n, v in values.items()}
    total = sum(powers.values())
    return {n: p / total for n, p in powers.items()}
