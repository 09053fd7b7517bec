"""What the mailbox hands out and takes back: leases, outcomes, and how both are stored."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from hybrid.agents.board import BoardWrite
from hybrid.agents.task import Attempt, State, Task, TaskView
from hybrid.errors import (
    BudgetExceeded,
    Cancelled,
    Conflict,
    InvalidRequest,
    StaleLease,
    Unavailable,
)

PAYLOAD_LIMIT = 256 * 1024
"""Bytes of an envelope or a result; larger things belong in a blob store, named by digest."""


BY_REFERENCE = "@"
"""What a stored result begins with that is a reference: no JSON does."""

_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A task in hand.

    Times are UNIX seconds of this machine's clock, whatever the sender's and the server's say.

    Attributes:
        task: the envelope, with the attempt that this lease is.
        expires: when another may take it, unless it is renewed.
        begun: when the task was first leased.
        journal: earlier attempts' finished steps, children's outcomes and signals.
    """

    task: Task
    owner: str
    expires: float
    begun: float = 0.0
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
    return limited(task.to_json(), "the task")


def payload_text(value: Any, what: str) -> str:
    """A JSON value as stored. Raises InvalidRequest: no JSON, or over 256 KiB."""
    return limited(json_text(value, what), what)


def json_text(value: Any, what: str) -> str:
    """A JSON value of any size. Raises InvalidRequest: it is none."""
    try:
        return _compact(value)
    except (TypeError, ValueError, RecursionError) as e:
        raise InvalidRequest(f"{what} is not JSON: {e}") from None


def limited(text: str, what: str) -> str:
    """The text, if the store takes it. Raises InvalidRequest: over 256 KiB, or no Unicode."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as e:
        raise InvalidRequest(f"{what} holds text that is no Unicode: {e.reason}") from None
    if size > PAYLOAD_LIMIT:
        raise InvalidRequest(
            f"{what} has {size} bytes; at most {PAYLOAD_LIMIT}: store it and send where it is"
        )
    return text


def fingerprint(task: Task) -> str:
    """What two submits with one idempotency key must share; empty without a key."""
    if task.idempotency_key is None:
        return ""
    what = json.dumps([task.agent, task.input, task.conversation], sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()[:32]


def usage_text(usage: Mapping[str, float]) -> str:
    """Usage as the library takes it; empty for none. By hand: it is written at every step.

    Raises:
        InvalidRequest: a unit that is no identifier, or an amount that is no finite number.
    """
    if not usage:
        return ""
    for unit, amount in usage.items():
        if not unit.isidentifier() or not math.isfinite(amount):
            raise InvalidRequest(f"usage {unit!r}: {amount!r} is no amount")
    return "{" + ",".join(f'"{unit}":{amount!r}' for unit, amount in usage.items()) + "}"


def pieces(flat: Sequence[str]) -> dict[str, str]:
    """A hash as the store lists it: name, value, name, …"""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def read_lease(item: Sequence[Any], owner: str, now: int, expires: int) -> Lease:
    """A lease from what the library handed out.

    Args:
        item: id, envelope, attempt, deadline, begin and journal.
        now, expires: milliseconds of the server's clock.

    Raises:
        InvalidRequest: an envelope of a version this code does not know.
    """
    _, envelope, attempt, deadline, begun, journal = item
    journal = journal or ()  # an empty list of the server's JSON is an empty object
    ours = time.time() - now / 1000
    until = float(deadline) / 1000 + ours if deadline != "0" else None
    task = Task.from_json(envelope, attempt=int(attempt), deadline=until)
    return Lease(
        task=task,
        owner=owner,
        expires=expires / 1000 + ours,
        begun=float(begun) / 1000 + ours,
        journal={k: json.loads(v) for k, v in pieces(journal).items()},
    )


def refused(lease: Lease, reply: list[Any]) -> list[Any]:
    """An operation's reply, if it was carried out.

    Raises:
        StaleLease, Cancelled, BudgetExceeded, Conflict, InvalidRequest: by what it says.
    """
    task = lease.task
    match reply[0]:
        case "ok":
            return reply
        case "cancelled":
            raise Cancelled(f"task {task.id} was cancelled")
        case "budget":
            raise BudgetExceeded(f"root task {task.root} has no {reply[1]} left")
        case "conflict":
            raise Conflict(f"board key {reply[1]} is at version {reply[2]}; read it again")
        case "steps":
            raise InvalidRequest(f"task {task.id} has store.max_steps journal entries already")
        case "unknown":
            raise Unavailable(
                f"the store's function library has no {reply[1]!r}; restart a host of this version"
            )
        case _:
            raise StaleLease(
                f"task {task.id}: attempt {task.attempt} of {lease.owner} no longer holds it"
            )


def read_view(fields: Mapping[str, str], history: Sequence[str]) -> TaskView:
    """A task from its hash and history."""
    usage = {k[2:]: float(v) for k, v in fields.items() if k.startswith("u:")}
    for unit, amount in json.loads(fields.get("used") or "{}").items():
        usage[unit] = usage.get(unit, 0.0) + amount
    stored = fields["result"]
    by_reference = stored.startswith(BY_REFERENCE)
    return TaskView(
        task=Task.from_json(fields["envelope"]).with_attempt(int(fields["attempt"])),
        state=cast(State, fields["state"]),
        result=json.loads(stored) if stored and not by_reference else None,
        result_ref=stored[1:] if by_reference else None,
        error=fields["error"] or None,
        attempts=int(fields["tries"]),
        updated=int(fields["updated"]) / 1000,
        history=tuple(Attempt(**json.loads(entry)) for entry in history),
        usage=usage,
    )
