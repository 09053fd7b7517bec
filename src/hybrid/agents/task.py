"""The task envelope: what one agent is asked, by whom, until when and at what cost. Versioned.

    scheduled → queued → leased → waiting (on a child, a person, a timer: lease and slot are free)
                                → done | failed | cancelled | dead

`failed` is an answer ("this cannot be done"), `dead` is a task given up after its attempts.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import quote

from hybrid.errors import InvalidRequest

ENVELOPE_VERSION = 1

_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

State = Literal["scheduled", "queued", "leased", "waiting", "done", "failed", "cancelled", "dead"]
TERMINAL: frozenset[State] = frozenset({"done", "failed", "cancelled", "dead"})


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a root task and everything beneath it may spend; None is no limit."""

    tokens: int | None = None
    usd: float | None = None
    hops: int | None = 32


@dataclass(frozen=True, kw_only=True)
class Task:
    """One request to one agent. Children inherit root, deadline, tenant, trace and budget.

    Times are UNIX seconds. `input` is any JSON value. `attempt` is the fencing token: 0 until the
    first lease, then the number of the current one. `payload` names the input where it is kept as a
    blob, too large for the store. `stream`: whether the tokens of its model calls
    are told to who listens.
    """

    agent: str
    input: Any
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tenant: str = "default"
    conversation: str | None = None
    parent: str | None = None
    root: str = ""
    reply_to: str | None = None
    deadline: float | None = None
    budget: Budget = field(default_factory=Budget)
    idempotency_key: str | None = None
    priority: int = 0
    not_before: float | None = None
    attempt: int = 0
    max_attempts: int | None = None
    trace: dict[str, str] = field(default_factory=dict)
    stream: bool = False
    payload: str | None = None
    created: float = field(default_factory=time.time)
    v: int = ENVELOPE_VERSION

    def __post_init__(self) -> None:
        if not self.root:
            object.__setattr__(self, "root", self.id)

    def child(self, agent: str, input: Any, *, key: str) -> Task:
        """A task beneath this one. `key` makes its id the same on every retry of the parent."""
        return Task(
            id=hashlib.sha256(self.place(key).encode()).hexdigest()[:32],
            agent=agent,
            input=input,
            tenant=self.tenant,
            parent=self.id,
            root=self.root,
            reply_to=self.id,
            deadline=self.deadline,
            budget=self.budget,
            priority=self.priority,
            trace=self.trace,
            stream=self.stream,
        )

    def place(self, key: str) -> str:
        """A name for one step of this task, that no step of another task has."""
        return f"{quote(self.id, safe='')}/{key}"  # ids of our own are hexadecimal, and stay as is

    def with_attempt(self, attempt: int) -> Task:
        """The same task under another lease."""
        return replace(self, attempt=attempt)

    def to_json(self) -> str:
        """Compact JSON, as stored. Raises InvalidRequest: the input is no JSON."""
        # Not `asdict`: it copies the input, which may be large, on the busiest path there is.
        fields = {**vars(self), "budget": vars(self.budget)}
        try:
            return _compact(fields)
        except (TypeError, ValueError, RecursionError) as e:
            raise InvalidRequest(f"the input is not JSON, or nested too deeply: {e}") from None

    @classmethod
    def from_json(cls, raw: str | bytes, **now: Any) -> Task:
        """Read a stored envelope.

        Args:
            now: fields that have other values by now.

        Raises:
            InvalidRequest: not an envelope, or of a version this code does not know.
        """
        try:
            data = json.loads(raw)
            version = data["v"]
            if version != ENVELOPE_VERSION:
                raise InvalidRequest(
                    f"task envelope version {version!r}; this hybrid reads {ENVELOPE_VERSION}"
                )
            data["budget"] = Budget(**data["budget"])
            return cls(**{**data, **now})
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise InvalidRequest(f"not a task envelope: {e!r}") from None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One line of a task's history."""

    attempt: int
    host: str
    at: float
    outcome: str
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class TaskView:
    """What `GET /v1/tasks/{id}` shows: the envelope, where it stands, and what became of it."""

    task: Task
    state: State
    result: Any = None
    error: str | None = None
    attempts: int = 0
    updated: float = 0.0
    history: tuple[Attempt, ...] = ()
    usage: dict[str, float] = field(default_factory=dict)
    result_ref: str | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in TERMINAL
