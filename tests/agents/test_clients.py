"""How agents reach a model: over HTTP, streaming or not, and through Serve's handles."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests_support import serving

from hybrid.agents.clients import HttpModelClient, ServeModelClient
from hybrid.errors import (
    ContextTooLong,
    HybridError,
    ModelNotFound,
    NotFound,
    RateLimited,
    Unauthorized,
    Unavailable,
)
from hybrid.wire import Chunk, Constraint, EmbedRequest, GenerateRequest, Sampling, ScoreRequest

PROVENANCE = {
    "release": "v1",
    "base_digest": "b" * 64,
    "adapter": None,
    "adapter_digest": None,
    "added_later": 1,
}
LINES = "U+2028 \u2028, U+2029 \u2029 and U+0085 \x85 end no line of a stream"
SHAPES = (
    "[]", "null", '"x"', "{}", '{"choices": []}', '{"choices": [5]}', '{"choices": {"text": "x"}}',
    '{"choices": [{"text": "x", "finish_reason": "stop"}], "hybrid": 5}',
    '{"choices": [{"text": "x", "finish_reason": "stop"}], "hybrid": {"release": "v1"}}',
    '{"error": "it is on fire"}',
)  # fmt: skip


class Endpoint(ThreadingHTTPServer):
    """An endpoint whose answer the model's name chooses."""

    daemon_threads = True
    seen: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    """See Endpoint."""

    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append({"path": self.path, "key": self.headers["Authorization"], **body})
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        match body["model"], self.path:
            case "missing", _:
                self._error(404, "model_not_found", {})
            case "busy", _:
                self._error(429, "rate_limited", {"Retry-After": "4"})
            case "garbage", _:
                self._send(200, b"<html>")
            case "hang", _:
                time.sleep(3)
            case "shape", _:
                shape = body.get("prompt") or body["input"][0]
                self._send(200, (f"data: {shape}\n\n" if body.get("stream") else shape).encode())
            case "proxy", _:
                self._send(int(body["prompt"]), b"<html>", {"Retry-After": "4"})
            case "corrupt", _:
                self._send(200, b"no gzip", {"Content-Encoding": "gzip"})
            case _, "/v1/completions" if body.get("stream"):
                texts = [LINES] if body["model"] == "lines" else ["Ohio ", "🦜"]
                events: list[dict[str, Any]] = [
                    {"choices": [{"text": t, "finish_reason": None}]} for t in texts
                ]
                if body["model"] != "breaks":
                    last = {"text": "", "finish_reason": "stop"}
                    events.append({"choices": [last], "usage": usage, "hybrid": PROVENANCE})
                end = "\r\n\r\n" if body["model"] == "lines" else "\n\n"
                lines = [f"data: {json.dumps(e, ensure_ascii=False)}{end}" for e in events]
                self._send(200, "".join([*lines, f"data: [DONE]{end}"]).encode())
            case _, "/v1/completions":
                choice = {"text": "Ohio 🦜", "finish_reason": "stop"}
                answer = {"choices": [choice], "usage": usage, "hybrid": PROVENANCE}
                self._send(200, json.dumps(answer).encode())
            case _, "/v1/score":
                choices = [{"logprob": -2.0}, {"logprob": -0.5}]
                self._send(200, json.dumps({"choices": choices, "usage": usage}).encode())
            case _:
                data = [{"embedding": [0.0, 1.0]} for _ in body["input"]]
                self._send(200, json.dumps({"data": data, "usage": usage}).encode())

    def _error(self, status: int, code: str, headers: dict[str, str]) -> None:
        error = {"message": f"it is {code}", "type": "x", "param": "model", "code": code}
        self._send(status, json.dumps({"error": error}).encode(), headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint(("127.0.0.1", 0), Handler)
    server.seen = []
    with serving(server):
        yield server


def request(model: str = "m", prompt: str = "Where?") -> GenerateRequest:
    return GenerateRequest(id="1", model=model, prompt=prompt, sampling=Sampling(max_tokens=5))


async def collect(client: HttpModelClient, model: str, prompt: str = "Where?") -> list[Chunk]:
    return [chunk async for chunk in client.stream(request(model, prompt))]


def test_answers_scores_and_vectors_over_http(endpoint: Endpoint) -> None:
    async def scene() -> None:
        client = HttpModelClient(f"http://127.0.0.1:{endpoint.server_port}", key="secret")
        try:
            whole = await client.generate(request())
            assert (whole.text, whole.finish_reason) == ("Ohio 🦜", "stop")
            assert (whole.prompt_tokens, whole.completion_tokens) == (3, 2)
            assert whole.provenance is not None
            assert whole.provenance.base_digest == "b" * 64
            pieces = await collect(client, "m")
            assert [p.text for p in pieces] == ["Ohio ", "🦜", ""]
            assert pieces[-1].finish_reason == "stop"
            assert pieces[-1].completion_tokens == 2
            assert [p.text for p in await collect(client, "lines")] == [LINES, ""]
            scored = await client.score(
                ScoreRequest(id="1", model="m", prompt="x", choices=("a", "b"))
            )
            assert (scored.best, scored.logprobs) == (1, (-2.0, -0.5))
            found = await client.embed(EmbedRequest(id="1", model="m", inputs=("a", "b")))
            assert found.vectors == ((0.0, 1.0), (0.0, 1.0))
            assert {s["key"] for s in endpoint.seen} == {"Bearer secret"}
        finally:
            await client.close()

    asyncio.run(scene())


def test_errors_keep_their_kind(endpoint: Endpoint) -> None:
    async def scene() -> None:
        url = f"http://127.0.0.1:{endpoint.server_port}"
        client = HttpModelClient(url, timeout_s=0.5)
        gone = HttpModelClient("http://127.0.0.1:9", timeout_s=1)
        try:
            for stream in (False, True):

                async def ask(model: str, of: HttpModelClient, stream: bool = stream) -> None:
                    if stream:
                        await collect(of, model)
                    else:
                        await of.generate(request(model))

                with pytest.raises(ModelNotFound, match="it is model_not_found"):
                    await ask("missing", client)
                with pytest.raises(RateLimited) as e:
                    await ask("busy", client)
                assert e.value.retry_after == 4
                for model in ("garbage", "hang", "corrupt"):
                    with pytest.raises(Unavailable):
                        await ask(model, client)
                with pytest.raises(Unavailable):
                    await ask("m", gone)
            with pytest.raises(Unavailable, match="broke off"):
                await collect(client, "breaks")
        finally:
            await client.close()
            await gone.close()

    asyncio.run(scene())


def test_a_proxys_error_has_the_kind_of_its_status(endpoint: Endpoint) -> None:
    kinds = {401: Unauthorized, 404: NotFound, 408: Unavailable, 429: RateLimited, 502: Unavailable}

    async def scene() -> None:
        client = HttpModelClient(f"http://127.0.0.1:{endpoint.server_port}")
        try:
            for status, kind in kinds.items():
                for ask in (
                    client.generate(request("proxy", str(status))),
                    collect(client, "proxy", str(status)),
                ):
                    with pytest.raises(kind, match=f"HTTP {status}") as e:
                        await ask
                    assert type(e.value) is kind
                    assert e.value.retry_after == 4
        finally:
            await client.close()

    asyncio.run(scene())


def test_an_answer_of_another_shape_is_worth_another_attempt(endpoint: Endpoint) -> None:
    async def scene() -> None:
        client = HttpModelClient(f"http://127.0.0.1:{endpoint.server_port}")
        score = ScoreRequest(id="1", model="shape", prompt='{"choices": []}', choices=("a",))
        embed = EmbedRequest(id="1", model="shape", inputs=('{"data": 5}',))
        asks = [client.score(score), client.embed(embed)]
        for shape in SHAPES:
            asks += [client.generate(request("shape", shape)), collect(client, "shape", shape)]
        try:
            for ask in asks:
                with pytest.raises(Unavailable):
                    await ask
        finally:
            await client.close()

    asyncio.run(scene())


class Response:
    """What a Serve handle returns: awaited, and told when nobody wants it any more."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.cancelled = False

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        if self.outcome is None:
            await asyncio.sleep(60)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def cancel(self) -> None:
        self.cancelled = True


def test_serves_errors_become_ours_and_cancelling_reaches_the_other_end() -> None:
    from ray.exceptions import ActorDiedError, RayTaskError
    from ray.serve.exceptions import BackPressureError

    client = ServeModelClient()

    async def scene() -> None:
        async def met(outcome: Exception) -> HybridError:
            with pytest.raises(HybridError) as e:
                await client._call(Response(outcome))
            return e.value

        assert await client._call(Response("fine")) == "fine"
        inner = ContextTooLong("too long")
        assert await met(inner) is inner
        assert await met(RayTaskError("f", "traceback", inner)) is inner
        assert isinstance(await met(RayTaskError("f", "traceback", ValueError("x"))), Unavailable)
        assert isinstance(await met(ActorDiedError()), Unavailable)
        full = BackPressureError(num_queued_requests=1, max_queued_requests=1)
        assert isinstance(await met(full), RateLimited)

        response = Response(None)
        waiting = asyncio.create_task(client._call(response))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert response.cancelled

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("constraint", "field", "value"),
    [
        (Constraint.json_schema({"type": "null"}), "guided_json", {"type": "null"}),
        (Constraint.json_object(), "guided_json", {"type": "object"}),
        (Constraint.regex("a+"), "guided_regex", "a+"),
        (Constraint.choice(["é", "b"]), "guided_choice", ["é", "b"]),
    ],
)
def test_a_constraint_goes_over_http(
    endpoint: Endpoint, constraint: Constraint, field: str, value: object
) -> None:
    async def scene() -> None:
        client = HttpModelClient(f"http://127.0.0.1:{endpoint.server_port}", key="secret")
        try:
            sampling = Sampling(constraint=constraint)
            await client.generate(GenerateRequest(id="1", model="m", prompt="x", sampling=sampling))
            assert endpoint.seen[-1][field] == value
            await client.generate(request())
            assert not [name for name in endpoint.seen[-1] if name.startswith("guided")]
        finally:
            await client.close()

    asyncio.run(scene())
