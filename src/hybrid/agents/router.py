"""The router: which agent an input is for, from descriptions and examples alone.

Words and character n-grams, weighted by how few agents use them (tf-idf, Salton & Buckley 1988),
compared by cosine with each agent's examples and description. The score is calibrated: a softmax
whose temperature is fitted on the agents' own examples, each left out in turn (temperature
scaling, Guo et al. 2017). Nothing is trained; a new agent is routable as soon as it is described.
With vectors of the texts (see `semantic`) nearness is half that of words and half that of meaning.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid.agents.spec import AgentSpec

Vector = Mapping[str, float]
Meaning = Sequence[float]
_NGRAMS = (3, 4, 5)
_WORD_WEIGHT = 2.0
_DESCRIPTION_WEIGHT = 0.6
_TEMPERATURES = (0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3)
_FAMILIAR = 0.08
"""Below this cosine an input resembles nothing any agent is for, whichever is nearest."""
_UNRELATED = 0.9
"""Share of the examples of different agents whose cosine of meanings counts as none."""


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
        meanings: a unit vector for each of their examples and descriptions, by text.
    """

    def __init__(
        self, specs: Sequence[AgentSpec], *, meanings: Mapping[str, Meaning] | None = None
    ) -> None:
        self._meanings = {
            s.name: [meanings.get(e, ()) for e in (*s.examples, s.description)]
            for s in specs
            if meanings is not None
        }
        self._floor = _floor(list(self._meanings.values()))
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

    def route(
        self, text: str, *, threshold: float = 0.35, meaning: Meaning | None = None
    ) -> Decision:
        """The agent for a text.

        Args:
            threshold: the calibrated score below which nobody is chosen.
            meaning: the text's unit vector, where the agents' were given.
        """
        if not self._examples:
            return Decision(None, 0.0, {}, "there are no agents to choose among")
        if not re.search(r"\w", text):
            return Decision(None, 0.0, {}, "the input has no words")
        similar = self._similarities(_weigh(_features(text), self._idf), meaning)
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
        self,
        vector: Vector,
        meaning: Meaning | None = None,
        leave_out: tuple[str, int] | None = None,
    ) -> dict[str, float]:
        """Nearness to the nearest example, or a share of that to the description."""
        out = {}
        for name, examples in self._weighted.items():
            meanings = self._meanings.get(name, [])

            def near(other: Vector, place: int, meanings: list[Meaning] = meanings) -> float:
                words = _cosine(vector, other)
                if not meaning or not meanings:
                    return words
                cosine: float = sum(map(mul, meaning, meanings[place]))
                return (words + max(0.0, (cosine - self._floor) / (1 - self._floor))) / 2

            out[name] = max(
                _DESCRIPTION_WEIGHT * near(self._described[name], -1),
                *(near(e, i) for i, e in enumerate(examples) if (name, i) != leave_out),
                0.0,
            )
        return out

    def _calibrate(self) -> float:
        """The temperature with the least negative log likelihood of left-out examples."""
        cases = [
            (name, self._similarities(example, self._meaning_of(name, i), (name, i)))
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

    def _meaning_of(self, name: str, example: int) -> Meaning | None:
        return self._meanings[name][example] if self._meanings else None


def _floor(agents: Sequence[Sequence[Meaning]]) -> float:
    """The cosine that examples of different agents reach: what is alike in all texts is no sign."""
    between = sorted(
        sum(map(mul, a, b))
        for i, one in enumerate(agents)
        for other in agents[:i]
        for a in one[:-1]
        for b in other[:-1]
    )
    return min(0.99, between[int(_UNRELATED * len(between))]) if between else 0.5


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
