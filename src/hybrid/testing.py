"""Doubles for users' tests: a scripted model, agents in this process, a throw-away store.

with throwaway_store() as url:
    async with run_agents({"echo": AgentConfig()}, ScriptedModelClient(), url) as agents:
        assert (await agents.ask("echo", "hello"))["answer"] == "hello"
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybrid import config
from hybrid.agents.aio import end
from hybrid.agents.host import AgentHost
from hybrid.agents.mailbox import Mailbox
from hybrid.agents.payloads import payloads_of
from hybrid.agents.spec import SpecStore
from hybrid.agents.store import EmbeddedStore, connect
from hybrid.agents.task import Task, TaskView
from hybrid.agents.tools import Tool, ToolRegistry
from hybrid.config import AgentConfig, ProjectConfig
from hybrid.errors import TaskFailed
from hybrid.testing_chaos import EffectSink, kill, processes
from hybrid.testing_models import tiny_adapter, tiny_base
from hybrid.wire import (
    Chunk,
    EmbedRequest,
    EmbedResult,
    GenerateRequest,
    Provenance,
    ScoreRequest,
    ScoreResult,
)

__all__ = [
    "Agents",
    "EffectSink",
    "ScriptedModelClient",
    "kill",
    "processes",
    "run_agents",
    "throwaway_store",
    "tiny_adapter",
    "tiny_base",
]

PROVENANCE = Provenance(release="scripted", base_digest="0" * 64)


@dataclass
class ScriptedModelClient:
    """A model that answers what it is told to.

    Attributes:
        answer: the answer to a prompt; by default the prompt itself.
        delay_s: seconds every call takes.
        failures: raised, one a call, before any answer is given.
        calls: every request, in order.
    """

    answer: Callable[[str], str] = str.strip
    delay_s: float = 0.0
    failures: list[Exception] = field(default_factory=list)
    calls: list[GenerateRequest | ScoreRequest | EmbedRequest] = field(default_factory=list)

    async def _called(self, request: GenerateRequest | ScoreRequest | EmbedRequest) -> None:
        self.calls.append(request)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.failures:
            raise self.failures.pop(0)

    async def generate(self, request: GenerateRequest) -> Chunk:
        """The scripted answer; a token a word."""
        await self._called(request)
        text = self.answer(request.prompt or "")
        return Chunk(
            text=text,
            finish_reason="stop",
            prompt_tokens=len((request.prompt or "").split()),
            completion_tokens=len(text.split()),
            provenance=PROVENANCE,
        )

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """The scripted answer, a word a piece."""
        whole = await self.generate(request)
        for word in re.findall(r"\s*\S+\s*$|\s*\S+", whole.text):
            yield Chunk(text=word)
        yield replace(whole, text="")

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """The choice equal to the scripted answer is best; else the first."""
        await self._called(request)
        wanted = self.answer(request.prompt)
        best = request.choices.index(wanted) if wanted in request.choices else 0
        return ScoreResult(
            logprobs=tuple(0.0 if i == best else -9.0 for i in range(len(request.choices))),
            best=best,
            prompt_tokens=len(request.prompt.split()),
            provenance=PROVENANCE,
        )

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """The same unit vector for every text."""
        await self._called(request)
        return EmbedResult(
            vectors=tuple((1.0, 0.0) for _ in request.inputs),
            prompt_tokens=len(request.inputs),
            provenance=PROVENANCE,
        )


@contextlib.contextmanager
def throwaway_store() -> Iterator[str]:
    """The URL of a real store in a temporary folder, gone at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="hybrid-store-") as folder,
        EmbeddedStore(Path(folder)) as store,
    ):
        yield store.url


@dataclass
class Agents:
    """Running agents: `ask` one, or use the mailbox and the spec store themselves."""

    mailbox: Mailbox
    specs: SpecStore
    hosts: list[AgentHost]

    async def submit(self, agent: str, input: Any, **envelope: Any) -> str:
        """Submit a task; returns its id."""
        return await self.mailbox.submit(Task(agent=agent, input=input, **envelope))

    async def finish(self, task_id: str, timeout_s: float = 30) -> TaskView:
        """The finished task.

        Raises:
            TimeoutError: it is not finished by then.
        """
        view = await self.mailbox.wait(task_id, timeout_s)
        if not view.finished:
            raise TimeoutError(f"task {task_id} is {view.state} after {timeout_s:g} s")
        return view

    async def ask(self, agent: str, input: Any, **envelope: Any) -> Any:
        """The output for an input.

        Raises:
            TaskFailed: it ended in any other way than done.
        """
        view = await self.finish(await self.submit(agent, input, **envelope))
        if view.state != "done":
            raise TaskFailed(f"{view.state}: {view.error}")
        return view.result


@contextlib.asynccontextmanager
async def run_agents(
    specs: Mapping[str, AgentConfig],
    model: Any,
    store_url: str,
    *,
    hosts: int = 1,
    tools: Mapping[str, Tool] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[Agents]:
    """Agent hosts in this process, on a real store and the given model.

    Args:
        specs: agents by name, applied as owner `file`.
        model: a ModelClient.
        hosts: how many hosts.
        tools: further tools by name.
        settings: further sections of a project, e.g. `{"store": {"lease_s": 1}}`.
    """
    project: ProjectConfig = config.parse(
        {"run": {"name": "test"}, "model": {"name": "base"}, **(settings or {})}
    )
    client = connect(store_url)
    mailbox = Mailbox(client, project.store, payloads_of(project))
    running: list[asyncio.Task[None]] = []
    try:
        await mailbox.install()
        spec_store = SpecStore(client)
        await spec_store.apply_file(specs)
        made = [
            AgentHost(f"host-{i}", store_url, project, model, ToolRegistry(dict(tools or {})))
            for i in range(hosts)
        ]
        running += [asyncio.create_task(host.run()) for host in made]
        yield Agents(mailbox, spec_store, made)
    finally:
        await end(*running)
        await mailbox.close()
        await client.aclose()
