"""What the mailbox hands out and takes back: leases, outcomes, and how both are stored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from hybrid.agents.board import BoardWrite
from hybrid.agents.task import Attempt, State, Task, TaskView
from hybrid.errors import InvalidRequest

PAYLOAD_LIMIT = 256 * 1024
"""Bytes of an envelope or a result; larger things belong in a blob store, named by digest."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A task in hand. `journal` holds earlier attempts' finished steps and children's outcomes."""

    task: Task
    owner: str
    expires: float
    journal: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a task ends. `failed` is an answer too: it is not tried again."""

    state: Literal["done", "failed"]
    result: Any = None
    error: str | None = None
    board: tuple[BoardWrite, ...] = ()
    children: tuple[Task, ...] = ()
    usage: Mapping[str, float] = field(default_factory=dict)


def prefix(partition: int) -> str:
    """What every key of a partition starts with; the braces are its hash tag."""
    return f"hybrid:{{h{partition}}}"


def envelope_text(task: Task) -> str:
    """A task as stored. Raises InvalidRequest: over 256 KiB."""
    return _limited(task.to_json(), "the task")


def payload_text(value: Any, what: str) -> str:
    """A JSON value as stored. Raises InvalidRequest: no JSON, or over 256 KiB."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as e:
        raise InvalidRequest(f"{what} is not JSON: {e}") from None
    return _limited(text, what)


def _limited(text: str, what: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as e:
        raise InvalidRequest(f"{what} holds text that is no Unicode: {e.reason}") from None
    if size > PAYLOAD_LIMIT:
        raise InvalidRequest(
            f"{what} has {size} bytes; at most {PAYLOAD_LIMIT}: store it and send where it is"
        )
    return text


def read_view(fields: Mapping[str, str], history: Sequence[str]) -> TaskView:
    """A task from its hash and history."""
    return TaskView(
        task=Task.from_json(fields["envelope"]).with_attempt(int(fields["attempt"])),
        state=cast(State, fields["state"]),
        result=json.loads(fields["result"]) if fields["result"] else None,
        error=fields["error"] or None,
        attempts=int(fields["tries"]),
        updated=int(fields["updated"]) / 1000,
        history=tuple(Attempt(**json.loads(entry)) for entry in history),
        usage={k[2:]: float(v) for k, v in fields.items() if k.startswith("u:")},
    )
