"""Calling our own endpoint: errors come back as what they were, and waiting until it is up."""

from __future__ import annotations

import time
from typing import Any

import httpx

from hybrid import errors
from hybrid.errors import Unavailable


def request(client: httpx.Client, method: str, path: str, **kwargs: Any) -> Any:
    """One call of our endpoint; its error envelope becomes the error it was.

    Raises:
        Unavailable: nobody answers. Otherwise the HybridError of the envelope's code.
    """
    try:
        response = client.request(method, path, **kwargs)
    except httpx.HTTPError as e:
        raise Unavailable(f"{client.base_url}: {e}; is it up? (`hybrid status`)") from None
    if response.is_success:
        return response.json() if response.content else None
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        raise Unavailable(f"{response.request.url}: HTTP {response.status_code}") from None
    raise errors.from_envelope(error, response.status_code, response.headers.get("retry-after"))


def wait_healthy(url: str, timeout_s: float = 60) -> None:
    """Until the gateway answers and lists its models."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            answer = httpx.get(f"{url}/healthz", timeout=5)
            if answer.is_success:
                return
            last = f"HTTP {answer.status_code}"
        except httpx.HTTPError as e:
            last = str(e)
        if time.monotonic() > deadline:
            raise Unavailable(f"{url} does not answer after {timeout_s:g} s: {last}")
        time.sleep(0.1)
