"""The http tool against a real server: keys, retryable and final errors, bodies of every kind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests_support import serving

from hybrid.agents.tools import ToolCall, ToolRegistry, http, load
from hybrid.errors import ConfigError, InvalidRequest, NotFound, RateLimited, Unavailable

NO_JSON = {
    "malformed": b'{"got": ',
    "html": b"<html>",
    "nan": b"[NaN]",
    "surrogate": rb'"\ud800"',
    "deep": b"[" * 100_000,
}


class Service(ThreadingHTTPServer):
    """Answers by path; keeps the headers it saw."""

    daemon_threads = True
    keys: list[str | None]


class Handler(BaseHTTPRequestHandler):
    """See Service."""

    server: Service

    def do_POST(self) -> None:
        self.server.keys.append(self.headers["Idempotency-Key"])
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        what = self.path.strip("/").partition("?")[0]
        if what == "hang":
            time.sleep(3)
        status = int(what) if what.isdigit() else 200
        kind, answer = "application/json", json.dumps({"got": body.decode() or None}).encode()
        if what == "text":
            kind, answer = "text/plain; charset=latin-1", "naïve".encode("latin-1")
        elif what == "base64":
            kind, answer = "text/plain; charset=base64", "naïve".encode()
        elif what in NO_JSON:
            answer = NO_JSON[what]
        elif what == "huge":
            answer = b"x" * ((1 << 20) + 1)
        if status in (204, 304) or self.command == "HEAD":
            answer = b""
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "7")
        if what == "corrupt":
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(answer) + 100 * (what == "trickle")))
        self.end_headers()
        try:
            self.wfile.write(answer)
            for _ in range(100 if what == "trickle" else 0):
                self.wfile.write(b" ")
                time.sleep(0.05)
        except OSError:
            return  # the caller has had enough

    do_GET = do_HEAD = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    server = Service(("127.0.0.1", 0), Handler)
    server.keys = []
    with serving(server):
        yield server


def call(service: Service, path: str, timeout_s: float = 5, **args: Any) -> Any:
    url = f"http://127.0.0.1:{service.server_port}/{path}"
    request = ToolCall(
        name="http", args={"url": url, **args}, idempotency_key="task/1:tool http",
        timeout_s=timeout_s,
    )  # fmt: skip
    return asyncio.run(http(request))


def test_what_is_sent_and_what_comes_back(service: Service) -> None:
    service.keys.clear()
    assert call(service, "json", json={"q": "ä"})["json"] == {"got": '{"q":"ä"}'}
    assert call(service, "text") == {"status": 200, "text": "naïve"}
    assert call(service, "404")["status"] == 404, "for the behaviour to judge"
    assert (
        call(service, "json", method="GET", headers={"Idempotency-Key": "forged"})["status"] == 200
    )
    assert set(service.keys) == {"task/1:tool http"}, "the key is the task's, whatever is asked for"


def test_a_call_that_was_carried_out_is_not_repeated_for_its_answer(service: Service) -> None:
    for path, body in NO_JSON.items():
        assert call(service, path) == {"status": 200, "text": body.decode()}
    for status in (204, 304):
        assert call(service, str(status)) == {"status": status, "text": ""}
    assert call(service, "json", method="HEAD") == {"status": 200, "text": ""}
    assert call(service, "base64")["text"] == "naïve", "a charset that is none of texts"


def test_what_may_pass_is_worth_another_attempt(service: Service) -> None:
    with pytest.raises(Unavailable, match="503"):
        call(service, "503")
    with pytest.raises(RateLimited) as e:
        call(service, "429")
    assert e.value.retry_after == 7
    for path in ("hang", "trickle"):
        with pytest.raises(Unavailable, match="Timeout"):
            call(service, path, timeout_s=0.2)
    with pytest.raises(Unavailable, match="DecodingError"):
        call(service, "corrupt")
    nobody = ToolCall(
        name="http", args={"url": "http://127.0.0.1:9/"}, idempotency_key="k", timeout_s=5
    )
    with pytest.raises(Unavailable):
        asyncio.run(http(nobody))


def test_what_cannot_work_is_said_at_once(service: Service) -> None:
    with pytest.raises(InvalidRequest, match="more than 1 MiB"):
        call(service, "huge")
    with pytest.raises(InvalidRequest, match="unknown arguments"):
        call(service, "json", body="x")
    for args in ({}, {"url": "ftp://127.0.0.1/"}, {"url": "nonsense"}):
        request = ToolCall(name="http", args=args, idempotency_key="k", timeout_s=5)
        with pytest.raises(InvalidRequest):
            asyncio.run(http(request))


@pytest.mark.parametrize(
    ("args", "param"),
    [
        ({"url": ["x"]}, "url"),
        ({"url": None}, "url"),
        ({"url": "http://[::1"}, "url"),
        ({"method": 5}, "method"),
        ({"method": "Ä"}, "method"),
        ({"headers": ["x"]}, "headers"),
        ({"headers": {"x": 5}}, "headers"),
        ({"headers": {"x": "€"}}, "headers"),
        ({"headers": {"x": "a\nb"}}, None),
        ({"data": 5}, "data"),
        ({"params": 5}, "params"),
        ({"json": float("nan")}, None),
        ({"json": {1}}, None),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(
    service: Service, args: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(InvalidRequest) as e:
        call(service, "json", **args)
    assert e.value.param == param


def test_tools_are_found_by_name_or_path() -> None:
    async def mine(call: ToolCall) -> Any:
        return call.args

    tools = ToolRegistry({"mine": mine})
    assert tools.get("mine") is mine
    assert tools.get("http") is http
    with pytest.raises(NotFound, match=r"no tool 'other' \(there are: http, mine\)"):
        tools.get("other")
    assert tools.get("hybrid.agents.tools.http") is http
    for path in ("no.such.module", "hybrid.agents.tools.nothing"):
        with pytest.raises(NotFound):
            tools.get(path)
        with pytest.raises(ConfigError):
            load(path)
