"""The OpenAI routes through the official client over real HTTP, on a scripted model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from hybrid import config
from hybrid.cluster.local import free_port
from hybrid.errors import ContextTooLong, InvalidRequest, ModelNotFound, RateLimited
from hybrid.gateway.app import create_app
from hybrid.gateway.openai import sse
from hybrid.gateway.services import Services
from hybrid.wire import (
    Chunk,
    EmbedRequest,
    EmbedResult,
    GenerateRequest,
    ModelCard,
    Provenance,
    ScoreRequest,
    ScoreResult,
    join,
)

PROVENANCE = Provenance(release="base@stable", base_digest="b" * 64)


@dataclass
class EchoModels:
    """Answers with the prompt's words, one a chunk; knows only `base`."""

    cancelled: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    def _check(self, model: str) -> None:
        if model == "base:busy":
            raise RateLimited("queue is full", retry_after=3)
        if model != "base":
            raise ModelNotFound(f"no model {model!r}", param="model")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self._check(request.model)
        if request.prompt == "":
            raise InvalidRequest("prompt is empty", param="prompt")
        words = (request.prompt or " ".join(map(str, request.prompt_ids or ()))).split()
        if len(words) > 100:
            raise ContextTooLong("prompt is too long", param="prompt")
        self.started.append(request.id)
        words = words[: request.sampling.max_tokens]
        try:
            for i, word in enumerate(words):
                if word == "hang":
                    await asyncio.sleep(3600)
                last = i == len(words) - 1
                yield Chunk(
                    text=word + " ",
                    finish_reason="stop" if last else None,
                    prompt_tokens=len(words),
                    completion_tokens=i + 1,
                    logprobs=(-0.5,) if request.sampling.logprobs else (),
                    provenance=PROVENANCE,
                )
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request.id)
            raise

    async def generate_full(self, request: GenerateRequest) -> Chunk:
        return join([chunk async for chunk in self.generate(request)])

    async def score(self, request: ScoreRequest) -> ScoreResult:
        self._check(request.model)
        values = tuple(-float(len(c)) for c in request.choices)
        return ScoreResult(
            logprobs=values, best=values.index(max(values)), prompt_tokens=1, provenance=PROVENANCE
        )

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        self._check(request.model)
        vectors = tuple((0.6, 0.8) for _ in request.inputs)
        return EmbedResult(vectors=vectors, prompt_tokens=2, provenance=PROVENANCE)

    async def info(self) -> dict[str, Any]:
        return {"pid": 1}

    async def models(self) -> list[ModelCard]:
        return [
            ModelCard(
                id="base",
                kind="base",
                digest="b" * 64,
                base_digest="b" * 64,
                release="v1",
                created=1,
            )
        ]


class NoAgents:
    """The spec store of a gateway without agents."""

    async def list(self) -> dict[str, Any]:
        return {}


@dataclass
class Server:
    url: str
    models: EchoModels


@contextlib.contextmanager
def serve(api_keys: tuple[str, ...] = ()) -> Iterator[Server]:
    """The application under uvicorn in a thread."""
    models = EchoModels()
    project = config.parse(
        {"run": {"name": "t"}, "model": {"name": "base"}, "serving": {"api_keys": list(api_keys)}}
    )
    services = Services(
        config=project,
        models=models,
        mailbox=None,  # type: ignore[arg-type]
        specs=NoAgents(),  # type: ignore[arg-type]
        events=None,  # type: ignore[arg-type]
    )
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(create_app(services), host="127.0.0.1", port=port, log_level="warning")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline, "uvicorn did not start"
        time.sleep(0.01)
    try:
        yield Server(f"http://127.0.0.1:{port}", models)
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as s:
        yield s


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as c:
        yield c


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["base"]
    assert client.models.retrieve("base").id == "base"
    with pytest.raises(openai.NotFoundError) as e:
        client.models.retrieve("nobody")
    assert e.value.code == "model_not_found"


def test_status(server: Server) -> None:
    assert httpx.get(f"{server.url}/v1/status").json() == {"model": {"pid": 1}}


def test_completion_counts_tokens_and_says_which_weights(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="base", prompt="a b c", max_tokens=2, logprobs=0)
    assert answer.choices[0].text == "a b "
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [-0.5, -0.5]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 2)
    assert answer.model_extra is not None
    assert answer.model_extra["hybrid"]["base_digest"] == "b" * 64


def test_completion_of_many_prompts_and_answers(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="base", prompt=["a", "b"], n=2)
    assert [c.text for c in answer.choices] == ["a ", "a ", "b ", "b "]
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 4)


def test_completion_of_token_ids(client: openai.OpenAI) -> None:
    assert client.completions.create(model="base", prompt=[7, 8]).choices[0].text == "7 8 "


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="base", messages=[{"role": "user", "content": "hello there"}]
    )
    assert answer.choices[0].message.content == "hello there "
    assert answer.choices[0].finish_reason == "stop"


def test_chat_streams_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": "één twee"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "één twee "
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


def test_embeddings_as_floats_and_base64(client: openai.OpenAI) -> None:
    plain = client.embeddings.create(model="base", input=["x", "y"], encoding_format="float")
    packed = client.embeddings.create(model="base", input="x")  # the client asks for base64
    assert plain.data[1].embedding == pytest.approx([0.6, 0.8])
    assert packed.data[0].embedding == pytest.approx([0.6, 0.8])


def test_score(server: Server) -> None:
    body = {"model": "base", "prompt": "p", "choices": ["long one", "short"]}
    answer = httpx.post(f"{server.url}/v1/score", json=body).json()
    assert answer["best"] == "short"


def test_an_error_before_the_first_chunk_keeps_its_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="base:nobody", prompt="x", stream=True)
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model="base", prompt="w " * 200, stream=True)
    assert e.value.code == "context_length_exceeded"


def test_a_full_queue_says_when_to_come_back(client: openai.OpenAI) -> None:
    with pytest.raises(openai.RateLimitError) as e:
        client.completions.create(model="base:busy", prompt="x")
    assert e.value.response.headers["Retry-After"] == "3"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {}, "model"),
        ("completions", {"model": "base"}, "prompt"),
        ("completions", {"model": "base", "prompt": ""}, "prompt"),
        ("completions", {"model": "base", "prompt": []}, "prompt"),
        ("completions", {"model": "base", "prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("completions", {"model": "base", "prompt": "x", "max_tokens": "many"}, "max_tokens"),
        ("completions", {"model": "base", "prompt": "x", "temperature": -1}, "temperature"),
        ("completions", {"model": "base", "prompt": "x", "stop": [""]}, "stop"),
        ("completions", {"model": "base", "prompt": "x", "echo": True}, "echo"),
        (
            "completions",
            {"model": "base", "prompt": "x", "presence_penalty": 1},
            "presence_penalty",
        ),
        ("completions", {"model": "base", "prompt": "x", "promt": "y"}, "promt"),
        ("completions", {"model": "agent/a", "prompt": "x"}, "model"),
        ("chat/completions", {"model": "base", "messages": []}, "messages"),
        ("chat/completions", {"model": "base", "messages": [{"role": "cat"}]}, "messages"),
        ("embeddings", {"model": "base", "input": [""]}, "input"),
        ("embeddings", {"model": "base", "input": 3}, "input"),
        ("score", {"model": "base", "prompt": "x", "choices": []}, "choices"),
    ],
)
def test_bad_input_names_the_field(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    response = httpx.post(f"{server.url}/v1/{path}", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"null"])
def test_a_body_that_is_no_object_is_a_400(server: Server, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}/v1/completions", content=raw, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"


def test_unknown_paths_and_methods_have_the_envelope(server: Server) -> None:
    assert httpx.get(f"{server.url}/v1/nowhere").json()["error"]["code"] == "not_found"
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405


def test_a_client_that_leaves_a_stream_cancels_the_generation(server: Server) -> None:
    body = {"model": "base", "prompt": "one hang", "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as response:
        first = next(response.iter_lines())
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "one "
    deadline = time.monotonic() + 10
    while server.models.started[-1] not in server.models.cancelled:
        assert time.monotonic() < deadline, "the generation goes on without its client"
        time.sleep(0.01)


def test_keys_are_asked_for_when_configured() -> None:
    with serve(api_keys=("acme:s3cret",)) as locked:
        url = f"{locked.url}/v1/models"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert httpx.get(url, headers={"Authorization": "Basic s3cret"}).status_code == 401
        assert httpx.get(url, headers={"Authorization": "Bearer s3cret"}).status_code == 200


def test_an_event_is_one_line_to_every_reader() -> None:
    text = "a\u2028b\u2029c\x85d 🦜"
    line, end = sse({"text": text}).splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
    assert end == ""
