"""What crosses between rooms when a model is asked something: requests, results, provenance.

Plain frozen dataclasses that pickle and import nothing heavy, so that an agent host without
torch, the gateway and a model replica all speak the same types. Token ids are Python ints;
probabilities are natural-log probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid.errors import InvalidRequest

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Which weights produced an answer: digests are hex sha256 of registry manifests."""

    release: str
    base_digest: str
    adapter: str | None = None
    adapter_digest: str | None = None


@dataclass(frozen=True)
class Constraint:
    """What an answer's text must be: JSON of a schema, a match of a regex, one of a few choices.

    `text` is the schema as JSON, the pattern, or the choices as a JSON list. Whether it can be
    held to is found out where it is compiled, by the model.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice"]
    text: str = ""

    @classmethod
    def json_schema(cls, schema: dict[str, Any]) -> Constraint:
        """A JSON schema; an object's properties come in the schema's order.

        Raises:
            InvalidRequest: it is no JSON.
        """
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as e:
            raise InvalidRequest(f"json_schema is no JSON: {e}", param="json_schema") from None

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls("json_object", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A pattern that the whole answer matches: no look-around, no references back."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Constraint:
        """One of a closed set of answers."""
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. `temperature=0` is greedy. `stop` strings are not returned.

    `logprobs` asks for each token's log probability, `top_logprobs` (0 to 20, with `logprobs`)
    for the likeliest tokens in its place. They are the model's own: before temperature, cuts and
    the constraint. An answer under a `constraint` ends with "stop" once it is whole; a stop string
    or `max_tokens` ("length") may cut it before.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    constraint: Constraint | None = None


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt for `model` (`base` or `base:adapter`, as clients write it).

    Exactly one of `prompt` and `prompt_ids` is set. `tenant` separates prefix caches and fair
    shares. `deadline` is a UNIX time in seconds. A higher `priority` begins earlier. Without
    `stream` nobody looks at pieces: the answer may come as one chunk.
    """

    id: str
    model: str
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    tenant: str = "default"
    deadline: float | None = None
    priority: int = 0
    stream: bool = True


@dataclass(frozen=True)
class Alternative:
    """A token that could have been chosen; `piece` is its bytes."""

    token: int
    piece: bytes
    logprob: float


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of an answer. The last chunk of a request has `finish_reason` set.

    `prompt_tokens` and `completion_tokens` count from the start of the request. Where
    log probabilities were asked for, `logprobs[i]`, `pieces[i]` (bytes) and `top_logprobs[i]`
    (likeliest first) belong to `token_ids[i]`; else the three are empty.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    pieces: tuple[bytes, ...] = ()
    top_logprobs: tuple[tuple[Alternative, ...], ...] = ()
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    provenance: Provenance | None = None


def join(parts: list[Chunk]) -> Chunk:
    """The pieces of one answer as one chunk."""
    end = parts[-1]
    return Chunk(
        text="".join(p.text for p in parts),
        token_ids=tuple(t for p in parts for t in p.token_ids),
        logprobs=tuple(x for p in parts for x in p.logprobs),
        pieces=tuple(x for p in parts for x in p.pieces),
        top_logprobs=tuple(x for p in parts for x in p.top_logprobs),
        finish_reason=end.finish_reason,
        prompt_tokens=end.prompt_tokens,
        completion_tokens=end.completion_tokens,
        provenance=end.provenance,
    )


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Score a closed set of continuations of one prompt.

    `normalise="sum"` returns the log probability of the whole choice, `"mean"` per token.
    `end`: the end-of-text token belongs to each choice, as it does to the answers specialists are
    trained on; without it a choice that begins another would be favoured.
    """

    id: str
    model: str
    prompt: str
    choices: tuple[str, ...]
    normalise: Literal["sum", "mean"] = "sum"
    end: bool = True
    tenant: str = "default"
    deadline: float | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """`logprobs[i]` belongs to `choices[i]`; `best` is the index of the largest."""

    logprobs: tuple[float, ...]
    best: int
    prompt_tokens: int
    provenance: Provenance


@dataclass(frozen=True, kw_only=True)
class EmbedRequest:
    """Embed texts: mean of the last hidden states over the text's tokens, L2-normalised."""

    id: str
    model: str
    inputs: tuple[str, ...]
    tenant: str = "default"


@dataclass(frozen=True, kw_only=True)
class EmbedResult:
    """`vectors[i]` (hidden_size floats) belongs to `inputs[i]`."""

    vectors: tuple[tuple[float, ...], ...]
    prompt_tokens: int
    provenance: Provenance


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """One line of `GET /v1/models`."""

    id: str
    kind: Literal["base", "adapter"]
    digest: str
    base_digest: str
    release: str
    created: int
    metrics: dict[str, Any] = field(default_factory=dict)
