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

import math
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hybrid.agents import tracing
from hybrid.agents.durable import Durable
from hybrid.agents.semantic import Embedder
from hybrid.agents.steps import Journal, Scored
from hybrid.agents.tools import ToolCall, ToolRegistry
from hybrid.errors import DeadlineExceeded, InvalidRequest, Unavailable
from hybrid.wire import Chunk, Constraint, GenerateRequest, Provenance, Sampling, ScoreRequest

if TYPE_CHECKING:
    from hybrid.agents.board import Board
    from hybrid.agents.clients import ModelClient
    from hybrid.agents.lease import Lease
    from hybrid.agents.spec import AgentSpec

_TELL_S = 0.05

Behaviour = Callable[["Context"], Awaitable[Any]]


class Context(Durable):
    """One attempt at one task.

    Attributes:
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
            task = replace(task, deadline=lease.begun + spec.timeout_s)
        assert task.deadline is not None
        # A wall clock that jumps meanwhile changes nothing.
        self._ends = time.monotonic() + task.deadline - time.time()
        super().__init__(lease, task, spec, specs, journal)
        self.board = board
        self._client = client
        self._model = model
        self._tools = tools

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
        left = self._ends - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"task {self.task.id}: its deadline passed {-left:.1f} s ago")
        return left

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
        json_schema: dict[str, Any] | None = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
    ) -> Chunk:
        """The model's whole answer.

        Args:
            input: what fills the agent's template; by default the task's entity.
            prompt: the prompt itself, instead of `input`.
            model: by default the agent's own.
            max_tokens, stop: by default the agent's own.
            json_schema, regex, choices: what the answer must be; at most one of them. It is cut
                by `max_tokens` all the same (`finish_reason` "length").

        Raises:
            InvalidRequest: two constraints, or one that the model cannot be held to.
        """
        sampling = Sampling(
            max_tokens=max_tokens or self.spec.max_tokens,
            temperature=temperature,
            seed=seed,
            stop=tuple(self.spec.stop if stop is None else stop),
            constraint=_constraint(json_schema, regex, choices),
        )

        async def run(key: str) -> tuple[Any, dict[str, float]]:
            request = GenerateRequest(
                id=self._request_id(key),
                model=model or self.model,
                prompt=self._prompt(input, prompt),
                sampling=sampling,
                tenant=self.task.tenant,
                deadline=self.task.deadline,
            )
            with tracing.model_call("text_completion", request.model) as noted:
                chunk = await (
                    self._streamed(request, key)
                    if self.task.stream
                    else self._client.generate(request)
                )
                tokens = (chunk.prompt_tokens, chunk.completion_tokens)
                noted(dict(zip(("input_tokens", "output_tokens"), tokens, strict=True)))
            used = chunk.prompt_tokens + chunk.completion_tokens
            value = {**vars(chunk), "provenance": chunk.provenance and vars(chunk.provenance)}
            return value, {"tokens": used, "model_calls": 1}

        value = dict(await self._once("generate", run, plain=True))
        for name in ("token_ids", "logprobs", "pieces", "top_logprobs"):
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
            request = ScoreRequest(
                id=self._request_id(key),
                model=model or self.model,
                prompt=self._prompt(input, prompt),
                choices=among,
                tenant=self.task.tenant,
                deadline=self.task.deadline,
            )
            with tracing.model_call("score", request.model) as noted:
                result = await self._client.score(request)
                noted({"input_tokens": result.prompt_tokens})
            top = max(result.logprobs)
            total = sum(math.exp(p - top) for p in result.logprobs)
            value = {
                "answer": among[result.best],
                "probability": math.exp(result.logprobs[result.best] - top) / total,
                "logprobs": dict(zip(among, result.logprobs, strict=True)),
                "provenance": vars(result.provenance),
            }
            return value, {"tokens": result.prompt_tokens, "model_calls": 1}

        return Scored(**await self._once("score", run))

    def embedder(self) -> Embedder:
        """Vectors through the agent's `embedder`. Nothing of it is journalled: call it in a step.

        Raises:
            InvalidRequest: the agent has none.
        """
        if self.spec.embedder is None:
            raise InvalidRequest(
                f"agent {self.spec.name!r} has no `embedder`: name an adapter of kind embed"
            )
        model = f"{self._model}:{self.spec.embedder}"
        template = self.spec.embedder_template
        return Embedder(self._client, model, template=template, tenant=self.task.tenant)

    async def tool(self, name: str, **args: Any) -> Any:
        """A tool's JSON result. The tool gets an idempotency key that retries share."""
        tool = self._tools.get(name)

        async def run(key: str) -> tuple[Any, dict[str, float]]:
            call = ToolCall(
                name=name,
                args=args,
                idempotency_key=self.task.place(key),
                timeout_s=self.remaining_s,
                tenant=self.task.tenant,
            )
            with tracing.tool_call(name, call.idempotency_key):
                return await tool(call), {"tool_calls": 1}

        return await self._once(f"tool {name}", run, pure=False)

    async def _streamed(self, request: GenerateRequest, key: str) -> Chunk:
        """The whole answer; its parts are told to who listens, a few times a second."""
        parts: list[Chunk] = []
        told, last = 0, time.monotonic()
        async with aclosing(self._client.stream(request)) as stream:
            async for chunk in stream:
                parts.append(chunk)
                now = time.monotonic()
                if now - last >= _TELL_S or chunk.finish_reason is not None:
                    text = "".join(part.text for part in parts[told:])
                    told, last = len(parts), now
                    if text:
                        await self._store.emit(self._lease, "tokens", {"step": key, "text": text})
        if not parts:
            raise Unavailable("the model ended an answer before it began")
        return replace(
            parts[-1],
            text="".join(part.text for part in parts),
            token_ids=tuple(i for part in parts for i in part.token_ids),
            logprobs=tuple(p for part in parts for p in part.logprobs),
        )

    def _prompt(self, input: str | None, prompt: str | None) -> str:
        if prompt is not None:
            return prompt
        return self.spec.template.replace("{input}", self.entity if input is None else input)

    def _request_id(self, key: str) -> str:
        step = f"{zlib.crc32(key.encode()):08x}"
        return f"{self.task.id}-{self._lease.task.attempt}-{step}"


def _constraint(
    json_schema: dict[str, Any] | None, regex: str | None, choices: Sequence[str] | None
) -> Constraint | None:
    given = [
        *([] if json_schema is None else [Constraint.json_schema(json_schema)]),
        *([] if regex is None else [Constraint.regex(regex)]),
        *([] if choices is None else [Constraint.choice(choices)]),
    ]
    if len(given) > 1:
        raise InvalidRequest("give one of json_schema, regex and choices", param=given[1].kind)
    return given[0] if given else None
