"""Calling the model deployment: errors arrive as the HybridError they were raised as."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException

from hybrid.errors import HybridError, RateLimited, Unavailable
from hybrid.wire import (
    Chunk,
    EmbedRequest,
    EmbedResult,
    GenerateRequest,
    ModelCard,
    ScoreRequest,
    ScoreResult,
)

T = TypeVar("T")


def translate(error: Exception) -> HybridError:
    """The HybridError inside Ray's wrapping, or the one that says what Ray said."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, HybridError):
            return inner
        inner = inner.cause if isinstance(inner, RayTaskError) else inner.__cause__
    if isinstance(error, BackPressureError):
        return RateLimited("the model's queue is full", retry_after=1)
    if isinstance(error, RayActorError):
        return Unavailable("the model's process is gone; it is being restarted", retry_after=2)
    return Unavailable(f"the model cannot be reached ({type(error).__name__}: {error})")


async def unwrap(call: Awaitable[T]) -> T:
    """Await a call of a deployment.

    Raises:
        HybridError: see `translate`. asyncio.CancelledError: the caller was cancelled.
    """
    try:
        return await call
    except asyncio.CancelledError:
        cancel = getattr(call, "cancel", None)  # nobody wants the answer any more
        if cancel is not None:
            cancel()
        raise
    except (RayError, RayServeException, HybridError) as e:
        raise translate(e) from None


class ModelHandle:
    """The model deployment as an object.

    Args:
        handle: its DeploymentHandle.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Stream an answer; leaving the iterator cancels it."""
        stream = self._streaming.generate.remote(request)
        done = False
        try:
            async for chunk in stream:
                yield chunk
            done = True
        except (RayError, RayServeException, HybridError) as e:
            done = True
            raise translate(e) from None
        finally:
            if not done:
                stream.cancel()

    async def generate_full(self, request: GenerateRequest) -> Chunk:
        """The whole answer."""
        chunk: Chunk = await unwrap(self._handle.generate_full.remote(request))
        return chunk

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Score a closed set."""
        result: ScoreResult = await unwrap(self._handle.score.remote(request))
        return result

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Embed texts."""
        result: EmbedResult = await unwrap(self._handle.embed.remote(request))
        return result

    async def models(self) -> list[ModelCard]:
        """The base and its adapters."""
        cards: list[ModelCard] = await unwrap(self._handle.models.remote())
        return cards

    async def info(self) -> dict[str, Any]:
        """Process, digests, counters."""
        info: dict[str, Any] = await unwrap(self._handle.info.remote())
        return info
