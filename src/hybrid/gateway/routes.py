"""The OpenAI-compatible routes: models, completions, chat, embeddings, and scoring."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response, StreamingResponse

from hybrid.errors import HybridError, InvalidRequest, ModelNotFound
from hybrid.gateway import openai, probabilities
from hybrid.gateway.agent_routes import AGENT_PREFIX, agent_models, answer_as_model
from hybrid.gateway.guided import refuse_guides
from hybrid.gateway.services import Services, services, tenant
from hybrid.wire import Chunk, EmbedRequest, GenerateRequest, Sampling, ScoreRequest

router = APIRouter(prefix="/v1")
Svc = Annotated[Services, Depends(services)]
Tenant = Annotated[str, Depends(tenant)]


@router.get("/models")
async def list_models(svc: Svc, who: Tenant) -> dict[str, Any]:
    """The base, its adapters, and the agents."""
    cards = await svc.models.models()
    entries = [openai.model_entry(card) for card in cards]
    return {"object": "list", "data": entries + await agent_models(svc)}


@router.get("/status")
async def status(svc: Svc, who: Tenant) -> dict[str, Any]:
    """What a model replica is and does: process, release, digests, counters."""
    return {"model": await svc.models.info()}


@router.get("/models/{model_id:path}")
async def get_model(model_id: str, svc: Svc, who: Tenant) -> dict[str, Any]:
    """One model by its id."""
    listing = await list_models(svc, who)
    for entry in listing["data"]:
        if entry["id"] == model_id:
            found: dict[str, Any] = entry
            return found
    known = ", ".join(entry["id"] for entry in listing["data"])
    raise ModelNotFound(f"no model {model_id!r}; there are: {known}", param="model")


@router.post("/completions", response_model=None)
async def completions(body: openai.CompletionRequest, svc: Svc, who: Tenant) -> Response:
    """Complete each prompt `n` times."""
    _not_an_agent(body.model, "completions")
    prompts = body.prompts()
    samplings = body.samplings(body.max_tokens or 16, body.logprobs)
    requests = [_request(body.model, who, p, s) for p in prompts for s in samplings]
    answer_id = openai.new_id("cmpl")
    shown = probabilities.CompletionLogprobs(body.logprobs or 0)

    def choice(index: int, chunk: Chunk) -> dict[str, Any]:
        return {
            "index": index,
            "text": chunk.text,
            "logprobs": None if body.logprobs is None else shown.render(index, chunk),
            "finish_reason": openai.finish(chunk),
        }

    return await _answer(
        svc,
        body,
        requests,
        len(prompts),
        answer_id,
        "text_completion",
        "text_completion",
        choice,
        choice,
    )


@router.post("/chat/completions", response_model=None)
async def chat(body: openai.ChatRequest, svc: Svc, who: Tenant) -> Response:
    """Answer a conversation: a model continues it, an agent is asked its last user turn."""
    if body.model.startswith(AGENT_PREFIX):
        body.refuse_penalties()
        refuse_guides(body, "an agent's answer is its behaviour's; ask a model")
        return await answer_as_model(svc, body, who)
    samplings = body.samplings(body.limit(), body.likeliest())
    requests = [_request(body.model, who, body.prompt(), s) for s in samplings]

    def whole(index: int, chunk: Chunk) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": chunk.text},
            "logprobs": probabilities.chat(chunk) if body.logprobs else None,
            "finish_reason": openai.finish(chunk),
        }

    def delta(index: int, chunk: Chunk) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": chunk.text},
            "logprobs": probabilities.chat(chunk) if body.logprobs else None,
            "finish_reason": openai.finish(chunk),
        }

    return await _answer(
        svc, body, requests, 1, openai.new_id("chatcmpl"), "chat.completion",
        "chat.completion.chunk", whole, delta,
    )  # fmt: skip


@router.post("/embeddings")
async def embeddings(body: openai.EmbeddingRequest, svc: Svc, who: Tenant) -> dict[str, Any]:
    """One vector a text."""
    _not_an_agent(body.model, "embeddings")
    request = EmbedRequest(
        id=openai.new_id("emb"), model=body.model, inputs=body.inputs(), tenant=who
    )
    result = await svc.models.embed(request)

    def shown(vector: tuple[float, ...]) -> Any:
        if body.encoding_format == "float":
            return list(vector)
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

    return {
        "object": "list",
        "model": body.model,
        "data": [
            {"object": "embedding", "index": i, "embedding": shown(v)}
            for i, v in enumerate(result.vectors)
        ],
        "usage": {"prompt_tokens": result.prompt_tokens, "total_tokens": result.prompt_tokens},
        "hybrid": openai.provenance(result.provenance),
    }


@router.post("/score")
async def score(body: openai.ScoreBody, svc: Svc, who: Tenant) -> dict[str, Any]:
    """Log probability of each choice as a continuation of the prompt."""
    _not_an_agent(body.model, "score")
    request = ScoreRequest(
        id=openai.new_id("score"),
        model=body.model,
        prompt=body.prompt,
        choices=tuple(body.choices),
        normalise=body.normalise,
        tenant=who,
    )
    result = await svc.models.score(request)
    return {
        "object": "score",
        "model": body.model,
        "choices": [
            {"text": text, "logprob": p}
            for text, p in zip(body.choices, result.logprobs, strict=True)
        ],
        "best": body.choices[result.best],
        "usage": {"prompt_tokens": result.prompt_tokens, "total_tokens": result.prompt_tokens},
        "hybrid": openai.provenance(result.provenance),
    }


def _not_an_agent(model: str, endpoint: str) -> None:
    if model.startswith(AGENT_PREFIX):
        raise InvalidRequest(
            f"{model} is an agent; ask it on /v1/chat/completions or /v1/agents, not on"
            f" /v1/{endpoint}",
            param="model",
        )


def _request(
    model: str, who: str, prompt: str | tuple[int, ...], sampling: Sampling
) -> GenerateRequest:
    text = prompt if isinstance(prompt, str) else None
    ids = None if isinstance(prompt, str) else prompt
    return GenerateRequest(
        id=openai.new_id("gen"),
        model=model,
        prompt=text,
        prompt_ids=ids,
        sampling=sampling,
        tenant=who,
    )


Render = Callable[[int, Chunk], dict[str, Any]]


async def _answer(
    svc: Services,
    body: openai.CompletionRequest | openai.ChatRequest,
    requests: list[GenerateRequest],
    prompts: int,
    answer_id: str,
    kind: str,
    chunk_kind: str,
    whole: Render,
    delta: Render,
) -> Response:
    """Collect or stream the answers of `requests`, rendered by `whole` or `delta`."""
    if not body.stream:
        with body.telling_field():
            chunks = await _gather(svc, requests)
        return JSONResponse(
            openai.envelope(
                kind,
                answer_id,
                body.model,
                choices=[whole(i, c) for i, c in enumerate(chunks)],
                usage=openai.usage(chunks, prompts),
                hybrid=openai.provenance(chunks[0].provenance),
            )
        )
    pieces = _merge(svc, requests)
    # The first piece is awaited before the response starts, so that an error keeps its status.
    with body.telling_field():
        first = await anext(pieces)

    async def events() -> AsyncIterator[str]:
        last: dict[int, Chunk] = {}
        async with aclosing(pieces):
            piece: tuple[int, Chunk] | None = first
            try:
                while piece is not None:
                    index, chunk = piece
                    last[index] = chunk
                    yield openai.sse(
                        openai.envelope(
                            chunk_kind,
                            answer_id,
                            body.model,
                            choices=[delta(index, chunk)],
                            hybrid=openai.provenance(chunk.provenance),
                        )
                    )
                    piece = await anext(pieces, None)
            except HybridError as e:  # the status is sent; the error becomes the last event
                yield openai.sse(e.envelope())
                return
        if body.stream_options and body.stream_options.include_usage:
            counts = openai.usage([last[i] for i in sorted(last)], prompts)
            yield openai.sse(
                openai.envelope(chunk_kind, answer_id, body.model, choices=[], usage=counts)
            )
        yield openai.sse("[DONE]")

    return StreamingResponse(events(), media_type="text/event-stream")


async def _gather(svc: Services, requests: list[GenerateRequest]) -> list[Chunk]:
    """Whole answers, in the order of `requests`; the first error cancels the rest."""

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(svc.models.generate_full(r)) for r in requests]
    except* HybridError as errors:
        raise _first(errors) from None
    return [t.result() for t in tasks]


async def _merge(
    svc: Services, requests: list[GenerateRequest]
) -> AsyncGenerator[tuple[int, Chunk]]:
    """Pieces of all answers as they come, each with its index."""
    queue: asyncio.Queue[tuple[int, Chunk] | HybridError | None] = asyncio.Queue(maxsize=64)

    async def pump(index: int, request: GenerateRequest) -> None:
        try:
            async for chunk in svc.models.generate(request):
                await queue.put((index, chunk))
            await queue.put(None)
        except HybridError as e:
            await queue.put(e)

    tasks = [asyncio.create_task(pump(i, r)) for i, r in enumerate(requests)]
    try:
        open_answers = len(tasks)
        while open_answers:
            item = await queue.get()
            if item is None:
                open_answers -= 1
            elif isinstance(item, HybridError):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _first(errors: BaseExceptionGroup[HybridError]) -> HybridError:
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
