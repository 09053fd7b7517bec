"""What crosses between rooms when a model is asked something: requests, results, provenance.

Plain frozen dataclasses that pickle and import nothing heavy, so that an agent host without
torch, the gateway and a model replica all speak the same types. Token ids are Python ints;
probabilities are natural-log probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Which weights produced an answer: digests are hex sha256 of registry manifests."""

    release: str
    base_digest: str
    adapter: str | None = None
    adapter_digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. `temperature=0` is greedy. `stop` strings are not returned."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt for `model` (`base` or `base:adapter`, as clients write it).

    Exactly one of `prompt` and `prompt_ids` is set. `tenant` separates prefix caches and fair
    shares. `deadline` is a UNIX time in seconds.
    """

    id: str
    model: str
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    tenant: str = "default"
    deadline: float | None = None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of an answer. The last chunk of a request has `finish_reason` set.

    `prompt_tokens` and `completion_tokens` count from the start of the request.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    provenance: Provenance | None = None


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
