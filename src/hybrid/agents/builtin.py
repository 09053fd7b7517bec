"""The behaviours and verifiers that come with hybrid, and how a spec's names become functions."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hybrid.agents.tools import load
from hybrid.errors import ConfigError, TaskFailed

if TYPE_CHECKING:
    from hybrid.agents.behaviour import Behaviour, Context
    from hybrid.agents.spec import AgentSpec

Verifier = Callable[[str, str], str | None]
"""(input, output) → None when the output is fine, else what is wrong with it."""


async def answer(ctx: Context) -> dict[str, Any]:
    """Fill the template with the entity, ask the model, check the answer.

    A closed set of choices is scored; without one the model writes.

    Raises:
        TaskFailed: the agent's verifier refuses the answer.
    """
    result: dict[str, Any] = {"agent": ctx.spec.name}
    if ctx.spec.choices:
        scored = await ctx.score()
        result |= {
            "answer": scored.answer,
            "score": round(scored.probability, 6),
            "provenance": scored.provenance,
        }
    else:
        chunk = await ctx.generate()
        provenance = chunk.provenance
        result |= {
            "answer": chunk.text.strip(),
            "finish_reason": chunk.finish_reason,
            "provenance": vars(provenance) if provenance else {},
        }
    wrong = verify(ctx.spec, ctx.entity, str(result["answer"]))
    if wrong is not None:
        raise TaskFailed(f"agent {ctx.spec.name!r} answered {result['answer']!r}: {wrong}")
    return result


async def route(ctx: Context) -> dict[str, Any]:
    """Choose one agent for the input and return its result.

    Raises:
        TaskFailed: no agent is sure enough and there is no fallback, or the chosen one failed.
    """
    chosen = await _choose(ctx)
    result = await ctx.ask(chosen["agent"], ctx.task.input)
    return result if isinstance(result, dict) else {"agent": chosen["agent"], "answer": result}


async def chain(ctx: Context) -> dict[str, Any]:
    """Route, have it answered, verify the answer, respond; each step is in the result.

    An answer that does not pass is asked of the fallback agent once; what does not pass then
    fails the task. It is never replaced by something unverified.

    Raises:
        TaskFailed: no agent is sure enough, or no answer passes.
    """
    steps: list[dict[str, Any]] = []
    chosen = await _choose(ctx)
    steps.append({"step": "route", **chosen})
    agents = [chosen["agent"]]
    fallback = ctx.spec.fallback
    if fallback and fallback not in agents:
        agents.append(fallback)
    problem = ""
    for agent in agents:
        try:
            found = await ctx.ask(agent, ctx.task.input)
        except TaskFailed as e:
            problem = e.message
            steps.append({"step": "answer", "agent": agent, "error": problem})
            continue
        result = found if isinstance(found, dict) else {"answer": found}
        steps.append({"step": "answer", "agent": agent, "answer": result.get("answer")})
        wrong = verify(ctx.spec, ctx.text, str(result.get("answer", "")))
        steps.append({"step": "verify", "problem": wrong})
        if wrong is None:
            return {**result, "agent": agent, "verified": True, "steps": steps}
        problem = f"agent {agent!r} answered {result.get('answer')!r}: {wrong}"
    raise TaskFailed(problem)


async def _choose(ctx: Context) -> dict[str, Any]:
    """The router's decision, journalled: a retry asks the same agent."""
    from hybrid.agents.router import Router
    from hybrid.agents.semantic import router_of

    names = ctx.spec.routes or tuple(
        name for name, spec in ctx.specs.items() if spec.behaviour not in ("route", "chain")
    )
    text, threshold = ctx.text, ctx.spec.threshold
    specs = [ctx.specs[n] for n in names if n in ctx.specs]

    async def decide() -> dict[str, Any]:
        if ctx.spec.embedder is None:
            decision = await asyncio.to_thread(
                lambda: Router(specs).route(text, threshold=threshold)
            )
        else:
            embed = ctx.embedder()
            decision = await router_of(specs, embed).route(text, embed, threshold=threshold)
        return {
            "agent": decision.agent,
            "score": round(decision.score, 4),
            "reason": decision.reason,
        }

    chosen: dict[str, Any] = await ctx.step("route", decide)
    if chosen["agent"] is None:
        if ctx.spec.fallback is None:
            raise TaskFailed(f"no agent is sure enough: {chosen['reason']}")
        chosen = {**chosen, "agent": ctx.spec.fallback}
    return chosen


async def search(ctx: Context) -> dict[str, Any]:
    """The texts of `params.documents` that are nearest to the input in meaning.

    `params.k` of them, 5 by default, the nearest first: `hits` with `text`, `place` (of the text
    in `documents`) and `score` (the cosine). `answer` is the first.

    Raises:
        InvalidRequest: there is no embedder, or it is not of kind embed; the input is empty.
        ModelNotFound: the embedder is not in the served release.
    """
    from hybrid.agents.semantic import index_of

    documents, k = ctx.spec.params["documents"], ctx.spec.params.get("k", 5)
    text = ctx.entity

    async def find() -> list[dict[str, Any]]:
        embed = ctx.embedder()
        hits = await index_of(documents, embed).search(text, embed, k=k)
        return [{**vars(hit), "score": round(hit.score, 6)} for hit in hits]

    hits = await ctx.step("search", find)
    return {"agent": ctx.spec.name, "answer": hits[0]["text"], "hits": hits}


def check_search(spec: AgentSpec, where: str) -> None:
    """Refuse a `search` agent that could not find anything.

    Raises:
        ConfigError: no embedder, no documents, or a `k` below 1.
    """
    documents, k = spec.params.get("documents"), spec.params.get("k", 5)
    texts = documents if isinstance(documents, list | tuple) else ()
    if spec.embedder is None:
        raise ConfigError(f"{where}: embedder: behaviour search needs an adapter of kind embed")
    if not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        raise ConfigError(f"{where}: params.documents: must be a list of texts, none of them empty")
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ConfigError(f"{where}: params.k: {k!r} must be a whole number, 1 or more")


BEHAVIOURS: dict[str, Behaviour] = {
    "answer": answer,
    "route": route,
    "chain": chain,
    "search": search,
}


def _nonempty(text: str, output: str) -> str | None:
    return None if output.strip() else "the answer is empty"


def _json(text: str, output: str) -> str | None:
    try:
        json.loads(output)
    except ValueError as e:
        return f"not JSON: {e}"
    return None


VERIFIERS: dict[str, Verifier] = {"nonempty": _nonempty, "json": _json}
IN_CHOICES = "in_choices"


def verify(spec: AgentSpec, text: str, output: str) -> str | None:
    """What the spec's verifier finds wrong with an output; None when nothing, or none is set."""
    if spec.verify is None:
        return None
    if spec.verify == IN_CHOICES:
        return None if output in (spec.choices or ()) else f"{output!r} is none of the choices"
    return resolve_verifier(spec.verify, f"agent {spec.name!r}")(text, output)


def resolve_behaviour(name: str, where: str) -> Behaviour:
    """The function a spec's `behaviour` names.

    Raises:
        ConfigError: no built-in, and no importable asynchronous function of one argument.
    """
    if name in BEHAVIOURS:
        return BEHAVIOURS[name]
    if "." not in name:
        raise ConfigError(
            f"{where}: behaviour: no {name!r}; allowed are {', '.join(BEHAVIOURS)} or the dotted"
            " path of an async function (ctx) -> output"
        )
    try:
        found = load(name)
    except ConfigError as e:
        raise ConfigError(f"{where}: behaviour: {e.message}") from None
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(f"{where}: behaviour: {name!r} is no async function (ctx) -> output")
    behaviour: Behaviour = found
    return behaviour


def resolve_verifier(name: str, where: str) -> Verifier:
    """The function a spec's `verify` names.

    Raises:
        ConfigError: no built-in, and nothing importable that can be called.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    if name == IN_CHOICES:
        return _nonempty  # `verify` knows the choices; here only the name is checked
    if "." not in name:
        allowed = ", ".join([*VERIFIERS, IN_CHOICES])
        raise ConfigError(
            f"{where}: verify: no {name!r}; allowed are {allowed} or the dotted path of a function"
            " (input, output) -> None | str"
        )
    try:
        found: Any = load(name)
    except ConfigError as e:
        raise ConfigError(f"{where}: verify: {e.message}") from None
    if not callable(found):
        raise ConfigError(f"{where}: verify: {name!r} cannot be called")
    verifier: Verifier = found
    return verifier
