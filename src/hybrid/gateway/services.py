"""What the routes stand on: the model behind Serve, the mailbox, the agents, the keys."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request

from hybrid.agents.events import Events
from hybrid.agents.mailbox import Mailbox
from hybrid.agents.spec import SpecStore
from hybrid.config import ProjectConfig
from hybrid.errors import Unauthorized
from hybrid.wire import (
    Chunk,
    EmbedRequest,
    EmbedResult,
    GenerateRequest,
    ModelCard,
    ScoreRequest,
    ScoreResult,
)


class Models(Protocol):
    """The model deployment as the gateway calls it; errors arrive as HybridError."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Stream an answer."""
        ...

    async def generate_full(self, request: GenerateRequest) -> Chunk:
        """The whole answer; cancelled with its caller."""
        ...

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Score a closed set."""
        ...

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Embed texts."""
        ...

    async def models(self) -> list[ModelCard]:
        """The base and the adapters of the served release."""
        ...

    async def info(self) -> dict[str, Any]:
        """Process, release, digests, counters."""
        ...


@dataclass(frozen=True, kw_only=True)
class Services:
    """One a gateway process; `app.state.services` of the FastAPI application."""

    config: ProjectConfig
    models: Models
    mailbox: Mailbox
    specs: SpecStore
    events: Events


def services(request: Request) -> Services:
    """FastAPI dependency."""
    found: Services = request.app.state.services
    return found


def tenant(request: Request) -> str:
    """FastAPI dependency: whose request this is, by its bearer key.

    Raises:
        Unauthorized: keys are configured and the request brings none of them.
    """
    keys = services(request).config.serving.api_keys
    if not keys:
        return "default"
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    owner = None
    for entry in keys:
        name, _, key = entry.partition(":")
        # Every key is compared, in constant time, so that timing tells nothing.
        if hmac.compare_digest(key.encode(), given.encode()) and scheme.lower() == "bearer":
            owner = name
    if owner is None:
        raise Unauthorized("send one of the configured keys as `Authorization: Bearer KEY`")
    return owner
