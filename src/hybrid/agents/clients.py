"""How an agent reaches a model: behind Ray Serve, or over HTTP. Neither needs torch."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

import httpx

from hybrid import errors
from hybrid.errors import HybridError, RateLimited, Unavailable
from hybrid.wire import (
    Chunk,
    EmbedRequest,
    EmbedResult,
    GenerateRequest,
    Provenance,
    ScoreRequest,
    ScoreResult,
)

T = TypeVar("T")


class ModelClient(Protocol):
    """What a behaviour's context asks. Cancelling a call cancels it at the other end."""

    async def generate(self, request: GenerateRequest) -> Chunk:
        """The whole answer."""
        ...

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Log probabilities of a closed set."""
        ...

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Vectors."""
        ...


class ServeModelClient:
    """The model deployment of a Serve application on the same cluster.

    Args:
        app, deployment: their names in Ray Serve.
    """

    def __init__(self, app: str = "hybrid", deployment: str = "model") -> None:
        self._names = (deployment, app)
        self._found: Any = None

    @property
    def _handle(self) -> Any:
        if self._found is None:
            from ray import serve

            try:
                self._found = serve.get_deployment_handle(*self._names)
            except Exception as e:  # noqa: BLE001 - Serve raises plain RuntimeErrors here
                raise Unavailable(f"the model is not deployed ({e})", retry_after=2) from None
        return self._found

    async def generate(self, request: GenerateRequest) -> Chunk:
        """The whole answer."""
        chunk: Chunk = await self._call(self._handle.generate_full.remote(request))
        return chunk

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Log probabilities of a closed set."""
        result: ScoreResult = await self._call(self._handle.score.remote(request))
        return result

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Vectors."""
        result: EmbedResult = await self._call(self._handle.embed.remote(request))
        return result

    async def _call(self, call: Awaitable[T]) -> T:
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import BackPressureError, RayServeException

        try:
            return await call
        except HybridError:
            raise
        except RayTaskError as e:
            cause = e.cause
            if isinstance(cause, HybridError):
                raise cause from None
            raise Unavailable(f"the model failed: {cause!r}") from None
        except BackPressureError:
            raise RateLimited("the model's queue is full", retry_after=1) from None
        except (RayError, RayServeException) as e:
            # What it was doing is unknown; the mailbox decides whether to try again.
            raise Unavailable(f"the model's process is gone ({type(e).__name__})") from None


class HttpModelClient:
    """An OpenAI-compatible endpoint: ours, or another that serves completions.

    Args:
        base_url: without `/v1`.
        key: bearer key.
    """

    def __init__(self, base_url: str, key: str | None = None, *, timeout_s: float = 120) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout_s)

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def generate(self, request: GenerateRequest) -> Chunk:
        """The whole answer, through /v1/completions."""
        s = request.sampling
        body = await self._post(
            "/v1/completions",
            {
                "model": request.model,
                "prompt": request.prompt
                if request.prompt is not None
                else list(request.prompt_ids or ()),
                "max_tokens": s.max_tokens,
                "temperature": s.temperature,
                "top_p": s.top_p,
                "seed": s.seed,
                "stop": list(s.stop) or None,
            },
        )
        choice, usage = body["choices"][0], body.get("usage") or {}
        return Chunk(
            text=choice["text"],
            finish_reason=choice["finish_reason"],
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
            provenance=_provenance(body),
        )

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Through /v1/score, which only our own endpoint has."""
        body = await self._post(
            "/v1/score",
            {
                "model": request.model,
                "prompt": request.prompt,
                "choices": list(request.choices),
                "normalise": request.normalise,
            },
        )
        values = tuple(c["logprob"] for c in body["choices"])
        return ScoreResult(
            logprobs=values,
            best=values.index(max(values)),
            prompt_tokens=body["usage"]["prompt_tokens"],
            provenance=_provenance(body) or Provenance(release="", base_digest=""),
        )

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Through /v1/embeddings."""
        body = await self._post(
            "/v1/embeddings", {"model": request.model, "input": list(request.inputs)}
        )
        return EmbedResult(
            vectors=tuple(tuple(item["embedding"]) for item in body["data"]),
            prompt_tokens=body["usage"]["prompt_tokens"],
            provenance=_provenance(body) or Provenance(release="", base_digest=""),
        )

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = await self._client.post(path, json=body)
            answer: dict[str, Any] = response.json()
        except (httpx.TransportError, ValueError) as e:
            raise Unavailable(f"{self._client.base_url}{path}: {e!r}") from None
        if response.is_success:
            return answer
        error = answer.get("error") or {}
        raise errors.from_envelope(error, response.status_code, response.headers.get("retry-after"))


def _provenance(body: dict[str, Any]) -> Provenance | None:
    found = body.get("hybrid")
    return Provenance(**found) if found else None
