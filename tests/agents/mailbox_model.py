"""What the mailbox promises, as a plain model: tasks, their lines, their parents and children."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hybrid.agents.task import Task

ATTEMPTS = 3
OVER = {"done", "failed", "cancelled", "dead"}


@dataclass
class Known:
    """A task as the model knows it."""

    task: Task
    since: int
    state: str = "queued"
    attempt: int = 0
    tries: int = 0
    owner: str = ""
    result: Any = None
    pending: set[str] = field(default_factory=set)
    children: list[str] = field(default_factory=list)
    delegate: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)
    steps: set[str] = field(default_factory=set)
    signals: set[str] = field(default_factory=set)
    awaits: str = ""

    @property
    def over(self) -> bool:
        return self.state in OVER


class Model:
    """What the mailbox promises, in a page."""

    def __init__(self) -> None:
        self.tasks: dict[str, Known] = {}
        self.lines: dict[tuple[str, str], list[str]] = {}

    def add(self, task: Task, since: int) -> None:
        self.tasks[task.id] = Known(task, since)
        if task.conversation and not task.parent:
            self.lines.setdefault((task.agent, task.conversation), []).append(task.id)

    def line(self, known: Known) -> list[str]:
        if not known.task.conversation or known.task.parent:
            return [known.task.id]
        return self.lines[known.task.agent, known.task.conversation]

    def next(self, agent: str) -> Known | None:
        ready = [
            k
            for k in self.tasks.values()
            if k.task.agent == agent and k.state == "queued" and self.line(k)[0] == k.task.id
        ]
        return min(ready, key=lambda k: (-k.task.priority, k.since, k.task.id), default=None)

    def open(self, agent: str) -> int:
        return sum(k.task.agent == agent and not k.over for k in self.tasks.values())

    def finish(self, known: Known, state: str, result: Any = None) -> None:
        known.state, known.result, known.owner = state, result, ""
        if known.task.conversation and not known.task.parent:
            self.line(known).remove(known.task.id)
        parent = self.tasks.get(known.task.parent or "")
        if parent is None or parent.over:
            return
        if parent.state == "waiting" and parent.delegate == known.task.id:
            self.finish(parent, state, result)
            return
        parent.outcomes[known.task.id] = state
        parent.pending.discard(known.task.id)
        if parent.state == "waiting" and not parent.pending:
            parent.state = "queued"

    def lose(self, known: Known) -> None:
        if known.tries >= ATTEMPTS:
            self.finish(known, "dead")
        else:
            known.state, known.owner = "queued", ""

    def cancel(self, known: Known) -> None:
        if not known.over:
            self.finish(known, "cancelled")
        for child in [*known.children, known.delegate]:
            if child:
                self.cancel(self.tasks[child])
