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
    RateLimited,
    Unavailable,
)
from hybrid.wire import Chunk, Constraint, EmbedRequest, GenerateRequest, Sampling, ScoreRequest

PROVENANCE = {"release": "v1", "base_digest": "b" * 64, "adapter": None, "adapter_digest": None}


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
            case _, "/v1/completions" if body.get("stream"):
                events = [
                    {"choices": [{"text": t, "finish_reason": None}]} for t in ("Ohio ", "🦜")
                ]
                if body["model"] != "breaks":
                    last = {"text": "", "finish_reason": "stop"}
                    events.append({"choices": [last], "usage": usage, "hybrid": PROVENANCE})
                lines = [f"data: {json.dumps(e)}\n\n" for e in events]
                self._send(200, "".join([*lines, "data: [DONE]\n\n"]).encode())
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


def request(model: str = "m") -> GenerateRequest:
    return GenerateRequest(id="1", model=model, prompt="Where?", sampling=Sampling(max_tokens=5))


async def collect(client: HttpModelClient, model: str) -> list[Chunk]:
    return [chunk async for chunk in client.stream(request(model))]


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
                for model in ("garbage", "hang"):
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
