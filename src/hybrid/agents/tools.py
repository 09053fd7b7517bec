"""Tools that behaviours call: functions with side effects that get an idempotency key each call.

A tool that ran but whose result was lost with its host is called again, with the same key: the
other side can tell the two apart from two intended calls.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from hybrid.errors import ConfigError, InvalidRequest, NotFound, RateLimited, Unavailable

_MAX_BODY = 1 << 20


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
        `{"status": int, "json": …}` or `{"status": int, "text": str}`; statuses up to 499 are
        results for the behaviour to judge, but for 429.

    Raises:
        Unavailable: no connection, a time-out, or a 5xx: the task is retried, with the same key.
        RateLimited: 429, with the service's Retry-After.
        InvalidRequest: arguments that make no request, or an answer over 1 MiB.
    """
    args = dict(call.args)
    try:
        method, url = args.pop("method", "POST"), args.pop("url")
    except KeyError:
        raise InvalidRequest("tool http: url is missing", param="url") from None
    given = {**args.pop("headers", {}), **call.headers}
    # The key is the task's, however the behaviour spells a header of its own.
    headers = {k: v for k, v in given.items() if str(k).lower() != "idempotency-key"}
    headers["Idempotency-Key"] = call.idempotency_key
    allowed = {"json", "data", "params"}
    if not args.keys() <= allowed:
        raise InvalidRequest(
            f"tool http: unknown arguments {sorted(args.keys() - allowed)};"
            f" allowed: url, method, headers, {', '.join(sorted(allowed))}"
        )
    try:
        async with (
            httpx.AsyncClient(timeout=call.timeout_s) as client,
            client.stream(method, url, headers=headers, **args) as response,
        ):
            body = bytearray()
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > _MAX_BODY:
                    if response.status_code == 429 or response.status_code >= 500:
                        break  # it is worth another attempt, whatever it says
                    raise InvalidRequest(f"tool http: {url} answered more than 1 MiB")
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as e:
        raise InvalidRequest(f"tool http: {url!r}: {e}", param="url") from None
    except httpx.TransportError as e:
        raise Unavailable(f"tool http: {method} {url}: {e!r}") from e
    if response.status_code == 429:
        after = response.headers.get("retry-after", "")
        raise RateLimited(
            f"tool http: {method} {url} answered 429",
            retry_after=float(after) if after.isdigit() else None,
        )
    if response.status_code >= 500:
        raise Unavailable(f"tool http: {method} {url} answered {response.status_code}")
    if response.headers.get("content-type", "").startswith("application/json"):
        # what does not parse is the service's fault, and worth another attempt
        try:
            return {"status": response.status_code, "json": json.loads(body)}
        except ValueError as e:
            raise Unavailable(f"tool http: {method} {url} sent malformed JSON: {e}") from None
    return {
        "status": response.status_code,
        "text": body.decode(response.encoding or "utf-8", "replace"),
    }
