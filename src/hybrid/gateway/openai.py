"""OpenAI's wire format: request bodies, response bodies, and how they map to hybrid.wire.

Schemas follow the OpenAI API reference (Completions, Chat Completions, Embeddings, Models).
What we cannot honour is refused by field rather than ignored. Answers carry one extra field,
`hybrid`: the release and the digests that produced them.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from hybrid.errors import InvalidRequest
from hybrid.gateway.guided import Body, Guided, ResponseFormat
from hybrid.wire import Chunk, ModelCard, Provenance, Sampling


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    """Send a last chunk with the token counts."""


class _Generation(Guided):
    model: str
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    n: int | None = Field(1, ge=1, le=16)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = 0
    frequency_penalty: float | None = 0
    user: str | None = None
    metadata: dict[str, str] | None = None

    def stops(self) -> tuple[str, ...]:
        """Stop strings, at most four, none empty."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > 4 or not all(stop):
            raise InvalidRequest("stop takes one to four non-empty strings", param="stop")
        return tuple(stop)

    def refuse_penalties(self) -> None:
        """Penalties would change the answer; ignoring them in silence would lie."""
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is not supported; leave it out or 0", param=name)

    def samplings(self, max_tokens: int, logprobs: int | None) -> list[Sampling]:
        """One `Sampling` for each of the `n` answers.

        Args:
            logprobs: how many of the likeliest tokens are shown; None for no log probabilities.
        """
        self.refuse_penalties()
        constraint = self.constraint()
        stops = self.stops()
        n = self.n or 1
        return [
            Sampling(
                max_tokens=max_tokens,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=self.top_k,
                seed=None if self.seed is None else self.seed + i,
                stop=stops,
                logprobs=logprobs is not None,
                top_logprobs=logprobs or 0,
                constraint=constraint,
            )
            for i in range(n)
        ]


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionRequest(_Generation):
    """Body of POST /v1/completions."""

    prompt: (
        str | Annotated[list[str], Field(min_length=1, max_length=64)] | TokenIds | list[TokenIds]
    )
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = None

    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each prompt as text or token ids."""
        if self.echo:
            raise InvalidRequest("echo is not supported", param="echo")
        if self.best_of not in (None, 1):
            raise InvalidRequest("best_of is not supported; use n", param="best_of")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest("prompt is empty", param="prompt")
        first = self.prompt[0]
        if isinstance(first, int):
            return [tuple(t for t in self.prompt if isinstance(t, int))]
        return [
            p if isinstance(p, str) else tuple(p) for p in self.prompt if not isinstance(p, int)
        ]


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(_Generation):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None

    def likeliest(self) -> int | None:
        """How many tokens are shown in each place beside the chosen; None for no probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else None

    def limit(self) -> int:
        """The longest answer in tokens; 64 when the client does not say."""
        return self.max_completion_tokens or self.max_tokens or 64

    def prompt(self) -> str:
        """The conversation as plain text, one turn a paragraph.

        Bases made here have no chat template; a turn's text and a newline is what the
        specialists are trained on (`template: "{input}\\n"`).
        """
        return "".join(f"{message.text()}\n" for message in self.messages)

    def question(self) -> str:
        """The last user turn: what an agent is asked."""
        for message in reversed(self.messages):
            if message.role == "user":
                return message.text()
        raise InvalidRequest("messages holds no user turn", param="messages")


class EmbeddingRequest(Body):
    """Body of POST /v1/embeddings."""

    model: str
    input: str | Annotated[list[str], Field(min_length=1, max_length=256)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None

    def inputs(self) -> tuple[str, ...]:
        """The texts."""
        if self.dimensions is not None:
            raise InvalidRequest("dimensions is not supported", param="dimensions")
        texts = (self.input,) if isinstance(self.input, str) else tuple(self.input)
        if not all(texts):
            raise InvalidRequest("input holds an empty string", param="input")
        return texts


class ScoreBody(Body):
    """Body of POST /v1/score (ours): a prompt and a closed set of continuations."""

    model: str
    prompt: Annotated[str, Field(min_length=1)]
    choices: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    normalise: Literal["sum", "mean"] = "sum"


def new_id(prefix: str) -> str:
    """A fresh identifier such as `cmpl-…`."""
    return f"{prefix}-{uuid.uuid4().hex}"


def provenance(p: Provenance | None) -> dict[str, Any] | None:
    """The `hybrid` field of an answer."""
    return asdict(p) if p else None


def usage(chunks: list[Chunk], prompts: int) -> dict[str, int]:
    """Token counts over all answers; a prompt answered `n` times is counted once."""
    per_prompt = len(chunks) // prompts
    prompt_tokens = sum(c.prompt_tokens for c in chunks[::per_prompt])
    completion_tokens = sum(c.completion_tokens for c in chunks)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def finish(chunk: Chunk) -> str | None:
    """OpenAI's finish_reason; a cancelled answer is a stopped one to the client."""
    return "stop" if chunk.finish_reason == "cancelled" else chunk.finish_reason


def model_entry(card: ModelCard) -> dict[str, Any]:
    """One entry of GET /v1/models."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "hybrid",
        "hybrid": {
            "kind": card.kind,
            "digest": card.digest,
            "base_digest": card.base_digest,
            "release": card.release,
            "metrics": card.metrics,
        },
    }


def envelope(kind: str, request_id: str, model: str, **fields: Any) -> dict[str, Any]:
    """The fields every answer has."""
    return {
        "id": request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        **fields,
    }


def sse(data: dict[str, Any] | str) -> str:
    """One server-sent event, in ASCII: not every reader leaves U+2028 in a line."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n"
