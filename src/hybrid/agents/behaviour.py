"""What a behaviour is given: durable steps over a journal, and how one is run to its next stop.

A behaviour is an async function `(ctx) -> output`. Whatever it does through the context is
journalled under its place in the order of calls; when the task is run again, after a crash, a
retry or a wait, finished steps return what they returned and only the rest is done.

    async def triage(ctx: Context) -> Any:
        facts = await ctx.tool("http", url=SEARCH, json={"q": ctx.text})
        draft = await ctx.ask("writer", {"text": ctx.text, "facts": facts})
        return {"answer": draft["answer"]}

Branches that run side by side go through `ctx.gather`, which numbers each branch on its own:
under a bare `asyncio.gather` the order of calls would be a matter of luck.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from hybrid.agents.steps import (
    Journal,
    Scored,
    Suspended,
    answer_of,
    place_of,
    to_json,
)
from hybrid.agents.tools import ToolCall, ToolRegistry
from hybrid.errors import Conflict, DeadlineExceeded, InvalidRequest, NotFound
from hybrid.wire import Chunk, GenerateRequest, Provenance, Sampling, ScoreRequest

if TYPE_CHECKING:
    from hybrid.agents.board import Board
    from hybrid.agents.clients import ModelClient
    from hybrid.agents.lease import Lease
    from hybrid.agents.spec import AgentSpec
    from hybrid.agents.task import Task

log = logging.getLogger(__name__)

Behaviour = Callable[["Context"], Awaitable[Any]]

_lane: ContextVar[str] = ContextVar("lane", default="")


class Context:
    """One attempt at one task.

    Attributes:
        task: the envelope, with its effective deadline.
        spec: the agent whose behaviour this is.
        specs: all agents, as this host sees them.
        board: the tenant's blackboard.
    """

    def __init__(
        self,
        lease: Lease,
        spec: AgentSpec,
        *,
        specs: Mapping[str, AgentSpec],
        journal: Journal,
        client: ModelClient,
        model: str,
        board: Board,
        tools: ToolRegistry,
    ) -> None:
        task = lease.task
        if task.deadline is None:
            start = max(task.created, task.not_before or 0.0)
            task = replace(task, deadline=start + spec.timeout_s)
        self.task = task
        self.spec = spec
        self.specs = specs
        self.board = board
        self._lease = lease
        self._store = journal
        self._client = client
        self._model = model
        self._tools = tools
        self._journal = dict(lease.journal)
        self._places = {place_of(key): key for key in self._journal}
        self._calls: dict[str, int] = {}
        self._busy = 0
        self._children: dict[str, Task] = {}
        self._until: float | None = None
        self.suspended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def text(self) -> str:
        """The task's input as text: a string, or the `text` of an object.

        Raises:
            InvalidRequest: it is neither.
        """
        value = self.task.input
        if isinstance(value, dict):
            value = value.get("text")
        if not isinstance(value, str):
            raise InvalidRequest(
                f"agent {self.spec.name!r} takes a string or {{'text': string}} as input,"
                f" not {type(self.task.input).__name__}",
                param="input",
            )
        return value

    @property
    def entity(self) -> str:
        """The text, or what `params.extract` finds in it."""
        pattern = self.spec.params.get("extract")
        match = re.search(pattern, self.text) if pattern else None
        return match.group(1) if match and match.group(1) else self.text

    @property
    def model(self) -> str:
        """The model this agent speaks through, as clients write it."""
        return f"{self._model}:{self.spec.adapter}" if self.spec.adapter else self._model

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline.

        Raises:
            DeadlineExceeded: it has passed.
        """
        assert self.task.deadline is not None
        left = self.task.deadline - time.time()
        if left <= 0:
            raise DeadlineExceeded(f"task {self.task.id}: its deadline passed {-left:.1f} s ago")
        return left

    async def step(self, name: str, fn: Callable[[], Any]) -> Any:
        """Run `fn` once and for all; its JSON value is what every later attempt gets.

        `fn` is called in a thread unless it is a coroutine function. It runs again only when the
        host died after it began and before its value was stored.
        """

        async def run(key: str) -> tuple[Any, None]:
            if inspect.iscoroutinefunction(fn):
                return await fn(), None
            value = await asyncio.to_thread(fn)
            return (await value if inspect.isawaitable(value) else value), None

        return await self._once(name, run)

    async def ask(self, agent: str, input: Any) -> Any:
        """Another agent's output. While it works this task waits, without lease or slot.

        Raises:
            NotFound: no such agent.
            TaskFailed: it failed, died or was cancelled; the message carries its error.
        """
        key = self._next(f"ask {agent}")
        child = self.task.child(agent, input, key=key)
        if child.id in self._journal:
            return answer_of(agent, self._journal[child.id])
        if agent not in self.specs:
            raise NotFound(f"agent {self.spec.name!r} asks {agent!r}, which is not there")
        if key not in self._journal:
            # The place is remembered with the step, so that a changed order is noticed.
            await self._store.record(self._lease, key, child.id)
            self._journal[key] = child.id
        self._children[child.id] = child
        return await self._wait()

    async def sleep(self, seconds: float) -> None:
        """Wait without lease or slot; counted from the first attempt that came here."""

        async def wake_at(key: str) -> tuple[float, None]:
            return time.time() + seconds, None

        wake = await self._once("sleep", wake_at)
        if time.time() < wake:
            self._until = wake if self._until is None else min(wake, self._until)
            await self._wait()

    async def generate(
        self,
        input: str | None = None,
        *,
        prompt: str | None = None,
        model: str | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        stop: Sequence[str] | None = None,
        seed: int | None = None,
    ) -> Chunk:
        """The model's whole answer.

        Args:
            input: what fills the agent's template; by default the task's entity.
            prompt: the prompt itself, instead of `input`.
            model: by default the agent's own.
            max_tokens, stop: by default the agent's own.
        """
        sampling = Sampling(
            max_tokens=max_tokens or self.spec.max_tokens,
            temperature=temperature,
            seed=seed,
            stop=tuple(self.spec.stop if stop is None else stop),
        )

        async def run(key: str) -> tuple[Any, dict[str, float]]:
            chunk = await self._client.generate(
                GenerateRequest(
                    id=self._request_id(key),
                    model=model or self.model,
                    prompt=self._prompt(input, prompt),
                    sampling=sampling,
                    tenant=self.task.tenant,
                    deadline=self.task.deadline,
                )
            )
            used = chunk.prompt_tokens + chunk.completion_tokens
            return asdict(chunk), {"tokens": used, "model_calls": 1}

        value = dict(await self._once("generate", run))
        for name in ("token_ids", "logprobs"):
            value[name] = tuple(value[name])
        if value["provenance"] is not None:
            value["provenance"] = Provenance(**value["provenance"])
        return Chunk(**value)

    async def score(
        self,
        choices: Sequence[str] | None = None,
        *,
        input: str | None = None,
        prompt: str | None = None,
        model: str | None = None,
    ) -> Scored:
        """The likeliest of a closed set of answers; by default the agent's own choices."""
        among = tuple(choices or self.spec.choices or ())
        if not among:
            raise InvalidRequest(
                f"agent {self.spec.name!r} has no choices to score", param="choices"
            )

        async def run(key: str) -> tuple[Any, dict[str, float]]:
            result = await self._client.score(
                ScoreRequest(
                    id=self._request_id(key),
                    model=model or self.model,
                    prompt=self._prompt(input, prompt),
                    choices=among,
                    tenant=self.task.tenant,
                    deadline=self.task.deadline,
                )
            )
            top = max(result.logprobs)
            total = sum(math.exp(p - top) for p in result.logprobs)
            value = {
                "answer": among[result.best],
                "probability": math.exp(result.logprobs[result.best] - top) / total,
                "logprobs": dict(zip(among, result.logprobs, strict=True)),
                "provenance": asdict(result.provenance),
            }
            return value, {"tokens": result.prompt_tokens, "model_calls": 1}

        return Scored(**await self._once("score", run))

    async def tool(self, name: str, **args: Any) -> Any:
        """A tool's JSON result. The tool gets an idempotency key that retries share."""
        tool = self._tools.get(name)

        async def run(key: str) -> tuple[Any, dict[str, float]]:
            call = ToolCall(
                name=name,
                args=args,
                idempotency_key=f"{self.task.id}/{key}",
                timeout_s=self.remaining_s,
                tenant=self.task.tenant,
            )
            return await tool(call), {"tool_calls": 1}

        return await self._once(f"tool {name}", run)

    async def gather(self, *branches: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run branches side by side; each numbers its own steps. Waits for all of them.

        Raises:
            Exception: the first failing branch's (by position), once all have ended.
        """
        place = self._count()

        async def run(index: int, branch: Coroutine[Any, Any, Any]) -> Any:
            _lane.set(f"{place}.{index}/")
            return await branch

        results = await asyncio.gather(
            *(run(i, branch) for i, branch in enumerate(branches)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def _prompt(self, input: str | None, prompt: str | None) -> str:
        if prompt is not None:
            return prompt
        return self.spec.template.replace("{input}", self.entity if input is None else input)

    def _request_id(self, key: str) -> str:
        step = uuid.uuid5(uuid.NAMESPACE_OID, key).hex[:8]
        return f"{self.task.id}-{self._lease.task.attempt}-{step}"

    def _count(self) -> str:
        lane = _lane.get()
        self._calls[lane] = self._calls.get(lane, 0) + 1
        return f"{lane}{self._calls[lane]}"

    def _next(self, name: str) -> str:
        """The journal key of the next call in this branch.

        Raises:
            Conflict: an earlier attempt did something else at this place.
        """
        place = self._count()
        key = f"{place}:{name}"
        before = self._places.get(place, key)
        if before != key:
            raise Conflict(
                f"step {place} of agent {self.spec.name!r} was {before.partition(':')[2]!r} when"
                f" task {self.task.id} first ran and is {name!r} now: its behaviour changed or"
                " depends on something outside its steps; submit the task anew"
            )
        return key

    async def _once(
        self, name: str, run: Callable[[str], Awaitable[tuple[Any, Mapping[str, float] | None]]]
    ) -> Any:
        key = self._next(name)
        if key not in self._journal:
            with self._working():
                value, usage = await run(key)
                value = to_json(value, f"step {name!r} of agent {self.spec.name!r}")
                await self._store.record(self._lease, key, value, usage=usage)
                self._journal[key] = value
        return self._journal[key]

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self._suspend_when_idle()

    async def _wait(self) -> Any:
        """Never returns in this attempt: `run` cancels the behaviour once nothing else runs."""
        self._suspend_when_idle()
        return await asyncio.get_running_loop().create_future()

    def _suspend_when_idle(self) -> None:
        # Later, so that branches that are about to call something get to do so. Suspending
        # early would be only slower: the next attempt goes on from the same journal.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._suspend)

    def _suspend(self) -> None:
        waiting = self._children or self._until is not None
        if waiting and not self._busy and not self.suspended.done():
            self.suspended.set_result(None)

    def stopped(self) -> Suspended:
        """What is waited on."""
        return Suspended(tuple(self._children.values()), self._until)
