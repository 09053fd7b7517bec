"""Tools that behaviours call: functions with side effects that get an idempotency key each call.

A tool that ran but whose result was lost with its host is called again, with the same key: the
other side can tell the two apart from two intended calls.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import httpx

from hybrid.errors import (
    ConfigError,
    InvalidRequest,
    NotFound,
    RateLimited,
    Unavailable,
    retry_after_s,
)

_MAX_BODY = 1 << 20
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "url": (str,),
    "method": (str,),
    "headers": (Mapping,),
    "data": (str, bytes, Mapping, NoneType),
    "json": (object,),
    "params": (str, Mapping, list, NoneType),
}


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a tool.

    `idempotency_key` is made of the task's id and the step's name: the same on every retry of the
    task, different for every other call. `timeout_s` is what is left of the task's time.
    """

    name: str
    args: dict[str, Any]
    idempotency_key: str
    timeout_s: float
    tenant: str = "default"
    headers: dict[str, str] = field(default_factory=dict)


Tool = Callable[[ToolCall], Awaitable[Any]]


class ToolRegistry:
    """Tools by name; `package.module.function` names one that nobody registered."""

    def __init__(self, tools: dict[str, Tool] | None = None) -> None:
        self._tools: dict[str, Tool] = {"http": http, **(tools or {})}

    def add(self, name: str, tool: Tool) -> None:
        """Register a tool."""
        self._tools[name] = tool

    def get(self, name: str) -> Tool:
        """Find a tool.

        Raises:
            NotFound: neither registered nor an importable dotted path.
        """
        if name in self._tools:
            return self._tools[name]
        if "." not in name:
            raise NotFound(
                f"no tool {name!r} (there are: {', '.join(sorted(self._tools))})", param="tool"
            )
        try:
            tool: Tool = load(name)
        except ConfigError as e:
            raise NotFound(f"no tool {name!r}: {e.message}", param="tool") from None
        self._tools[name] = tool
        return tool


def load(path: str) -> Any:
    """The object that a dotted path `package.module.name` (or `package.module:name`) names.

    Raises:
        ConfigError: it does not import, or the module has no such name.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"{path!r} does not import ({e}); give package.module.name of something installed"
            " on the agent hosts"
        ) from None


async def http(call: ToolCall) -> dict[str, Any]:
    """Call an HTTP service, with `Idempotency-Key`.

    Arguments: `url`; `method` (POST); `json`, `data`, `params`, `headers` (optional).

    Returns:
        `{"status": int, "json": …}` or, of what is no JSON, `{"status": int, "text": str}`;
        statuses up to 499 are results for the behaviour to judge, but for 429.

    Raises:
        Unavailable: no connection, no whole answer in time, or a 5xx: the task is retried, with the
            same key.
        RateLimited: 429, with the service's Retry-After.
        InvalidRequest: arguments that make no request, or an answer over 1 MiB.
    """
    what = ""
    try:
        # One clock for the whole call: httpx's own begins anew with every piece of an answer.
        async with asyncio.timeout(call.timeout_s), httpx.AsyncClient(timeout=None) as client:
            request = _request(client, call)
            what = f"{request.method} {request.url}"
            async with aclosing(await client.send(request, stream=True)) as response:
                return await _result(response, what)
    except httpx.UnsupportedProtocol as e:
        raise InvalidRequest(f"tool http: {what}: {e}", param="url") from None
    except httpx.LocalProtocolError as e:  # a header or a method that cannot be sent
        raise InvalidRequest(f"tool http: {what}: {e}") from None
    except TimeoutError:
        raise Unavailable(
            f"tool http: {what}: Timeout, no whole answer in {call.timeout_s:.3g} s"
        ) from None
    except httpx.RequestError as e:
        raise Unavailable(f"tool http: {what}: {e!r}") from e


def _request(client: httpx.AsyncClient, call: ToolCall) -> httpx.Request:
    """What the arguments ask for. Raises InvalidRequest, which names the argument at fault."""
    args = {"url": None, "method": "POST", "headers": {}, **call.args}
    if unknown := sorted(args.keys() - _ARGUMENTS):
        raise InvalidRequest(
            f"tool http: unknown arguments {unknown}; allowed: {', '.join(_ARGUMENTS)}"
        )
    for name, value in args.items():
        if not isinstance(value, _ARGUMENTS[name]):
            kinds = " or ".join(kind.__name__ for kind in _ARGUMENTS[name])
            said = f"tool http: {name} takes {kinds}, not {type(value).__name__}"
            raise InvalidRequest(said, param=name)
    given = {**args["headers"], **call.headers}
    # The key is the task's, however the behaviour spells a header of its own.
    headers = {k: v for k, v in given.items() if str(k).lower() != "idempotency-key"}
    headers["Idempotency-Key"] = call.idempotency_key
    at: str | None = "url"
    try:
        httpx.URL(args["url"])
        at = "method"
        args["method"].encode("ascii")
        at = "headers"
        args["headers"] = httpx.Headers(headers)
        at = None
        return client.build_request(**args)
    except (httpx.InvalidURL, AttributeError, TypeError, ValueError) as e:
        where = f"{at} {args[at]!r}" if at else "the arguments"
        raise InvalidRequest(f"tool http: {where}: {e}", param=at) from None


async def _result(response: httpx.Response, what: str) -> dict[str, Any]:
    status = response.status_code
    if status == 429:
        after = retry_after_s(response.headers.get("retry-after"))
        raise RateLimited(f"tool http: {what} answered 429", retry_after=after)
    if status >= 500:
        raise Unavailable(f"tool http: {what} answered {status}")
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > _MAX_BODY:
            raise InvalidRequest(f"tool http: {what} answered more than 1 MiB")
    if response.headers.get("content-type", "").startswith("application/json"):
        # The call was carried out: an answer that is no JSON, or none that could be journalled, is
        # no reason to repeat it.
        with suppress(ValueError, RecursionError):
            value = json.loads(body)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            return {"status": status, "json": value}
    try:
        text = body.decode(response.encoding or "utf-8", "replace")
    except (LookupError, ValueError):  # the charset is a codec, but none of texts
        text = body.decode("utf-8", "replace")
    return {"status": status, "text": text}
