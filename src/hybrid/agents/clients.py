"""How an agent reaches a model: behind Ray Serve, or over HTTP. Neither needs torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import fields
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

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """The answer in pieces, the last with its finish reason; closing it cancels the call."""
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

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """The answer in pieces."""
        stream = self._handle.options(stream=True).generate.remote(request)
        pieces = aiter(stream)
        done = False
        try:
            while True:
                try:
                    yield await self._call(anext(pieces))
                except StopAsyncIteration:
                    done = True
                    return
        finally:
            if not done:
                stream.cancel()

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
        except asyncio.CancelledError:
            # The task was cancelled, its lease lost, its deadline passed: nobody wants the answer.
            cancel = getattr(call, "cancel", None)
            if cancel is not None:
                cancel()
            raise
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
        with self._answering("/v1/completions") as path:
            body = await self._post(path, _completion(request))
            choice, usage = body["choices"][0], body.get("usage") or {}
            return Chunk(
                text=choice["text"],
                finish_reason=choice["finish_reason"],
                prompt_tokens=usage.get("prompt_tokens", 0),
                completion_tokens=usage.get("completion_tokens", 0),
                provenance=_provenance(body),
            )

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """The answer in pieces, through /v1/completions with `stream`."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {**_completion(request), **options}
        text, finish, usage = "", None, dict[str, int]()
        provenance: Provenance | None = None
        with self._answering("/v1/completions") as path:
            async with (
                self._client.stream("POST", path, json=body) as response,
                aclosing(_lines(response)) as lines,
            ):
                if not response.is_success:
                    await response.aread()
                    raise self._error(response)
                async for line in lines:
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line[6:])
                    if event.get("error"):
                        raise errors.from_envelope(event["error"], 502, None)
                    usage = event.get("usage") or usage
                    provenance = _provenance(event) or provenance
                    for choice in event.get("choices", ()):
                        finish = choice.get("finish_reason") or finish
                        text = choice.get("text") or ""
                        if text:
                            yield Chunk(text=text)
        if finish is None:
            raise Unavailable(f"{self._client.base_url}: the answer broke off")
        yield Chunk(
            text="",
            finish_reason=finish,
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
            provenance=provenance,
        )

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Through /v1/score, which only our own endpoint has."""
        asked = {
            "model": request.model,
            "prompt": request.prompt,
            "choices": list(request.choices),
            "normalise": request.normalise,
        }
        with self._answering("/v1/score") as path:
            body = await self._post(path, asked)
            values = tuple(c["logprob"] for c in body["choices"])
            return ScoreResult(
                logprobs=values,
                best=values.index(max(values)),
                prompt_tokens=body["usage"]["prompt_tokens"],
                provenance=_provenance(body) or Provenance(release="", base_digest=""),
            )

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Through /v1/embeddings."""
        with self._answering("/v1/embeddings") as path:
            body = await self._post(path, {"model": request.model, "input": list(request.inputs)})
            return EmbedResult(
                vectors=tuple(tuple(item["embedding"]) for item in body["data"]),
                prompt_tokens=body["usage"]["prompt_tokens"],
                provenance=_provenance(body) or Provenance(release="", base_digest=""),
            )

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = await self._client.post(path, json=body)
        if response.is_success:
            return response.json()
        raise self._error(response)

    @contextmanager
    def _answering(self, path: str) -> Iterator[str]:
        """A call whose failure, or whose answer of an unknown shape, is worth another attempt."""
        try:
            yield path
        except (httpx.RequestError, AttributeError, LookupError, TypeError, ValueError) as e:
            raise Unavailable(f"{self._client.base_url}{path}: {e!r}") from None

    def _error(self, response: httpx.Response) -> HybridError:
        try:
            error = response.json()["error"]
        except (ValueError, LookupError, TypeError):  # a proxy's, say: its status is all there is
            error = f"{response.request.url}: HTTP {response.status_code}"
        after = response.headers.get("retry-after")
        return errors.from_envelope(error, response.status_code, after)


async def _lines(response: httpx.Response) -> AsyncGenerator[str, None]:
    """The lines of an event stream. httpx would break them at U+2028 too, which JSON may hold."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode().rstrip("\r")
    yield rest.decode()


def _completion(request: GenerateRequest) -> dict[str, Any]:
    s = request.sampling
    held: dict[str, Any] = {}
    if s.constraint is not None:
        kind, text = s.constraint.kind, s.constraint.text
        name = {"regex": "guided_regex", "choice": "guided_choice"}.get(kind, "guided_json")
        held[name] = text if kind == "regex" else json.loads(text)
    prompt = request.prompt if request.prompt is not None else list(request.prompt_ids or ())
    return {
        "model": request.model,
        "prompt": prompt,
        "max_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "seed": s.seed,
        "stop": list(s.stop) or None,
        **held,
    }


def _provenance(body: dict[str, Any]) -> Provenance | None:
    found = body.get("hybrid")
    if not found:
        return None
    return Provenance(**{f.name: found[f.name] for f in fields(Provenance) if f.name in found})
