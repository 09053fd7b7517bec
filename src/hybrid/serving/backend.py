"""The Backend protocol: what any model server must do to stand behind the gateway.

Our engine implements it above its own `step()`; vLLM, which schedules for itself, implements it
too. What a backend cannot do it answers with `Unsupported` (501), never with something else.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hybrid.wire import Chunk, EmbedRequest, EmbedResult, GenerateRequest, ScoreRequest, ScoreResult


@dataclass(frozen=True, kw_only=True)
class AdapterRef:
    """An adapter to load: its name in the release, its digest, and where its files are."""

    name: str
    digest: str
    base_digest: str
    path: Path

    def kind(self) -> str | None:
        """What it was trained for (`adapters.NAME.kind`); None where its maker does not say."""
        try:
            about = json.loads((self.path / "hybrid.json").read_text(encoding="utf-8"))
        except FileNotFoundError:  # PEFT's own files alone
            return None
        kind: str | None = about.get("kind")
        return kind


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """What a backend is and how it does: static facts and current counters by name."""

    kind: str
    base_digest: str
    context: int
    counters: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Backend(Protocol):
    """One resident base and the adapters loaded beside it.

    `adapter` names a digest that `load` has been awaited for; None is the base itself. All
    methods run on an event loop and never block it. `release` is what answers name as theirs; it
    changes when the same base is served in another release.
    """

    release: str

    def generate(
        self, request: GenerateRequest, adapter: AdapterRef | None
    ) -> AsyncIterator[Chunk]:
        """Stream an answer; the last chunk has `finish_reason`.

        Closing the iterator cancels the request and frees its slot within one step.

        Raises:
            InvalidRequest, ContextTooLong, RateLimited, DeadlineExceeded: before the first chunk.
        """
        ...

    async def score(self, request: ScoreRequest, adapter: AdapterRef | None) -> ScoreResult:
        """Log probabilities of a closed set of continuations."""
        ...

    async def embed(self, request: EmbedRequest, adapter: AdapterRef | None) -> EmbedResult:
        """One L2-normalised vector a text."""
        ...

    async def load(self, adapter: AdapterRef) -> int:
        """Make an adapter ready; idempotent. `AdapterCache` calls it once at a time for a digest.

        Returns:
            Bytes it takes in memory.

        Raises:
            AdapterRefused: wrong base, targets, rank, shapes, NaN, or truncated files.
        """
        ...

    async def unload(self, digest: str) -> None:
        """Forget an adapter once its running requests are done."""
        ...

    async def cancel(self, request_id: str) -> bool:
        """Cancel a running request; False when it is not known."""
        ...

    async def info(self) -> BackendInfo:
        """Facts and counters."""
        ...

    async def close(self) -> None:
        """Stop; running requests end as cancelled."""
        ...
