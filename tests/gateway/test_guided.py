"""Constrained answers and log probabilities over HTTP, from a real engine of a tiny base."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from hybrid import config
from hybrid.engine.engine import Engine
from hybrid.gateway.app import create_app
from hybrid.gateway.services import Services
from hybrid.serving.engine_backend import EngineBackend
from hybrid.testing_models import tiny_base
from hybrid.wire import Alternative, Chunk, GenerateRequest, Sampling, join

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "court": {"enum": ["één", "ca9"]}},
    "required": ["ok", "court"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


@dataclass
class OneBase:
    """The models of a gateway: one base, no adapters."""

    backend: EngineBackend
    asked: list[Sampling] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.asked.append(request.sampling)
        async for chunk in self.backend.generate(request, None):
            yield chunk

    async def generate_full(self, request: GenerateRequest) -> Chunk:
        return join([chunk async for chunk in self.generate(request)])


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineBackend]:
    folder = tiny_base(tmp_path_factory.mktemp("models") / "base", vocab_size=340)
    backend = EngineBackend(Engine(folder, "b" * 64, device="cpu"), release="base@stable")
    yield backend
    asyncio.run(backend.close())


@pytest.fixture
def models(backend: EngineBackend) -> OneBase:
    return OneBase(backend)


def post(models: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    services = Services(
        config=config.parse({"run": {"name": "t"}, "model": {"name": "base"}}),
        models=models,
        mailbox=None,  # type: ignore[arg-type]
        specs=None,  # type: ignore[arg-type]
        events=None,  # type: ignore[arg-type]
    )

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(services))
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.post(f"/v1/{path}", json={"model": "base", **body})

    return asyncio.run(ask())


def chat(models: Any, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "the fox"}]
    return post(models, "chat/completions", {"messages": messages, **body})


def complete(models: Any, **body: Any) -> httpx.Response:
    return post(models, "completions", {"prompt": "the fox", **body})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [x.removeprefix("data: ") for x in response.text.splitlines() if x]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_response_format_is_kept_to(models: OneBase) -> None:
    response = chat(models, response_format=FORMAT, max_tokens=100, seed=1, n=2)
    choices = ChatCompletion.model_validate(response.json()).choices
    for choice in choices:
        answer = json.loads(choice.message.content or "")
        assert isinstance(answer["ok"], bool)
        assert answer["court"] in ("één", "ca9")
        assert choice.finish_reason == "stop"


def test_a_response_format_is_kept_to_in_a_stream(models: OneBase) -> None:
    got = events(chat(models, response_format=FORMAT, max_tokens=100, seed=1, stream=True))
    text = "".join(e["choices"][0]["delta"]["content"] for e in got)
    assert set(json.loads(text)) == {"ok", "court"}


def test_text_is_no_constraint_and_an_object_is_one(models: OneBase) -> None:
    assert chat(models, response_format={"type": "text"}, max_tokens=1).is_success
    answer = chat(models, response_format={"type": "json_object"}, max_tokens=3, seed=1).json()
    assert models.asked[0].constraint is None
    assert answer["choices"][0]["message"]["content"].startswith("{")
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("ask", [chat, complete])
def test_the_extensions_of_vllm(models: OneBase, ask: Any) -> None:
    def text(**body: Any) -> str:
        choice = ask(models, max_tokens=100, seed=2, **body).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    assert re.fullmatch(r"\d{3}-[a-z]{2}", text(guided_regex=r"\d{3}-[a-z]{2}"))
    assert text(guided_choice=["ca9", "Hoge Raad ☃"]) in ("ca9", "Hoge Raad ☃")
    assert set(json.loads(text(guided_json=SCHEMA))) == {"ok", "court"}
    assert set(json.loads(text(guided_json=json.dumps(SCHEMA)))) == {"ok", "court"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "[a"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": {"type": "objet"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": FORMAT, "guided_json": SCHEMA}, "guided_json"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "objet"}},
                }
            },
            "response_format",
        ),
        ({"response_format": FORMAT, "model": "agent/a"}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_kept_to_names_its_field(
    models: OneBase, body: dict[str, Any], param: str, stream: bool
) -> None:
    response = chat(models, stream=stream, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param, response.text


def test_completions_know_no_response_format(models: OneBase) -> None:
    assert complete(models, response_format=FORMAT).json()["error"]["param"] == "response_format"


def test_probabilities_of_a_chat(models: OneBase) -> None:
    held = {"guided_choice": ["é☃"], "temperature": 0, "logprobs": True, "top_logprobs": 4}
    answer = ChatCompletion.model_validate(chat(models, **held).json())
    [choice] = answer.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert b"".join(bytes(c.bytes or []) for c in content).decode() == "é☃"
    assert [len(c.top_logprobs) for c in content] == [4] * len(content)
    assert content[-1].token == "bytes:\\x83"  # half of a snowman
    assert all(c.logprob <= c.top_logprobs[0].logprob <= 0 for c in content)
    streamed = [
        ChatCompletionChunk.model_validate(e) for e in events(chat(models, stream=True, **held))
    ]
    pieces = [c.choices[0].logprobs.content or [] for c in streamed if c.choices[0].logprobs]
    assert [c.token for piece in pieces for c in piece] == [c.token for c in content]


def test_probabilities_without_alternatives(models: OneBase) -> None:
    answer = chat(models, logprobs=True, max_tokens=3, temperature=0).json()
    assert all(c["top_logprobs"] == [] for c in answer["choices"][0]["logprobs"]["content"])
    plain = chat(models, max_tokens=3).json()
    assert plain["choices"][0]["logprobs"] is None


def test_probabilities_of_a_completion(models: OneBase) -> None:
    held = {"guided_choice": ["é the"], "temperature": 0, "logprobs": 2}
    answer = Completion.model_validate(complete(models, **held).json())
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens and found.top_logprobs and found.token_logprobs
    assert "".join(found.tokens[-1:]) in ("e", "the", " the", "he")
    for token, p, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == p
        assert 2 <= len(top) <= 3  # the chosen one too
    assert found.text_offset == sorted(found.text_offset or [])
    streamed = [e["choices"][0]["logprobs"] for e in events(complete(models, stream=True, **held))]
    assert [x for part in streamed for x in part["text_offset"]] == found.text_offset
    assert (
        complete(models, logprobs=0, max_tokens=2).json()["choices"][0]["logprobs"]["top_logprobs"]
        is None
    )


def test_two_tokens_that_read_alike_keep_the_likelier() -> None:
    from hybrid.gateway.probabilities import CompletionLogprobs

    chunk = Chunk(
        text="b",
        logprobs=(-3.0,),
        pieces=(b"b",),
        top_logprobs=((Alternative(1, b"a", -0.5), Alternative(2, b"a", -1.0)),),
    )
    assert CompletionLogprobs(2).render(0, chunk)["top_logprobs"] == [{"a": -0.5, "b": -3.0}]
