"""The agents over HTTP: their specs, their tasks, and an agent as a chat model."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from hybrid.agents.spec import AgentSpec
from hybrid.agents.task import Budget, Task, TaskView
from hybrid.agents.upkeep import Upkeep
from hybrid.config import AgentConfig
from hybrid.errors import Cancelled, DeadlineExceeded, TaskFailed
from hybrid.gateway import openai
from hybrid.gateway.services import Services, services, tenant

AGENT_PREFIX = "agent/"

router = APIRouter(prefix="/v1")
Svc = Annotated[Services, Depends(services)]
Tenant = Annotated[str, Depends(tenant)]


class BudgetBody(BaseModel):
    """Limits of a root task and everything beneath it."""

    model_config = ConfigDict(extra="forbid")
    tokens: int | None = Field(None, ge=1)
    usd: float | None = Field(None, gt=0)
    hops: int | None = Field(32, ge=1)


class TaskBody(BaseModel):
    """Body of POST /v1/agents/{name}/tasks."""

    model_config = ConfigDict(extra="forbid")
    input: Any
    """Any JSON value; what it means is the agent's affair."""
    wait_s: float = Field(0, ge=0, le=600)
    """Seconds to wait for the result; 0 answers at once with 202 and the task's id."""
    conversation: str | None = None
    """Tasks of one conversation are done in order."""
    timeout_s: float | None = Field(None, gt=0)
    """Seconds until the deadline; the agent's own default otherwise."""
    delay_s: float = Field(0, ge=0)
    """Seconds before the task may start."""
    priority: int = 0
    """Higher goes first."""
    budget: BudgetBody = BudgetBody()
    """What the task and its children may spend."""
    stream: bool = False
    """Whether the tokens of its model calls are among its events."""


@router.get("/agents")
async def list_agents(svc: Svc, who: Tenant) -> dict[str, Any]:
    """Every agent."""
    return {"object": "list", "data": [_spec_entry(s) for s in (await svc.specs.list()).values()]}


@router.get("/agents/{name}")
async def get_agent(name: str, svc: Svc, who: Tenant) -> dict[str, Any]:
    """One agent: its spec, and how deep its mailbox is."""
    spec = await svc.specs.get(name)
    return {**_spec_entry(spec), "mailbox": await Upkeep(svc.mailbox).depth(name)}


@router.get("/agents/{name}/dead")
async def dead_letter(name: str, svc: Svc, who: Tenant, limit: int = 100) -> dict[str, Any]:
    """The dead letter: this tenant's tasks that were given up, newest first, with their history."""
    views = await Upkeep(svc.mailbox).dead(name, max(1, min(limit, 1000)))
    mine = [view_entry(v) for v in views if v.task.tenant == who]
    return {"object": "list", "data": mine}


@router.put("/agents/{name}")
async def put_agent(name: str, body: AgentConfig, svc: Svc, who: Tenant) -> dict[str, Any]:
    """Add an agent or replace its spec; every host sees it within a second."""
    return _spec_entry(await svc.specs.put(name, body))


@router.delete("/agents/{name}", status_code=204)
async def delete_agent(name: str, svc: Svc, who: Tenant) -> None:
    """Remove an agent; its queued tasks stay until it is added again or they expire."""
    await svc.specs.delete(name)


@router.post("/agents/{name}/tasks", response_model=None)
async def submit(
    name: str,
    body: TaskBody,
    svc: Svc,
    who: Tenant,
    idempotency_key: Annotated[str | None, Header()] = None,
    traceparent: Annotated[str | None, Header()] = None,
) -> Response:
    """Submit a task: answered once it is stored, and with its result if that comes in `wait_s`."""
    spec = await svc.specs.get(name)
    task = _task(spec, body, who, idempotency_key)
    if traceparent is not None:  # the caller's trace goes on beneath the task
        task = replace(task, trace={"traceparent": traceparent})
    if body.wait_s:
        view = await svc.mailbox.run(task, body.wait_s)
    else:
        view = await svc.mailbox.view(await svc.mailbox.submit(task))
    return JSONResponse(view_entry(view), status_code=200 if view.finished else 202)


def _task(spec: AgentSpec, body: TaskBody, who: str, key: str | None) -> Task:
    now = time.time()
    timeout = body.timeout_s if body.timeout_s is not None else spec.timeout_s
    return Task(
        agent=spec.name,
        input=body.input,
        tenant=who,
        conversation=body.conversation,
        deadline=now + body.delay_s + timeout,
        not_before=now + body.delay_s if body.delay_s else None,
        priority=body.priority,
        budget=Budget(**body.budget.model_dump()),
        idempotency_key=key,
        stream=body.stream,
    )


def view_entry(view: TaskView) -> dict[str, Any]:
    """A task as JSON: state and result first, then how it came about."""
    task = view.task
    return {
        "id": task.id,
        "object": "task",
        "agent": task.agent,
        "state": view.state,
        "result": view.result,
        "error": view.error,
        "attempts": view.attempts,
        "retried": view.attempts > 1,
        "input": task.input,
        "conversation": task.conversation,
        "parent": task.parent,
        "root": task.root,
        "deadline": task.deadline,
        "created": task.created,
        "updated": view.updated,
        "usage": view.usage,
        "history": [asdict(a) for a in view.history],
    }


def _spec_entry(spec: AgentSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "object": "agent",
        "owner": spec.owner,
        "version": spec.version,
        "spec": spec.config().model_dump(mode="json"),
    }


async def agent_models(svc: Services) -> list[dict[str, Any]]:
    """The agents as entries of GET /v1/models."""
    return [
        {
            "id": f"{AGENT_PREFIX}{spec.name}",
            "object": "model",
            "created": 0,
            "owned_by": "hybrid",
            "hybrid": {"kind": "agent", "description": spec.description},
        }
        for spec in (await svc.specs.list()).values()
    ]


def answer_text(result: Any) -> str:
    """What a person is shown of a result: its `answer` if it has one, text as it is, else JSON."""
    if isinstance(result, dict) and "answer" in result:
        return answer_text(result["answer"])
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


async def answer_as_model(svc: Services, body: openai.ChatRequest, who: str) -> Response:
    """A chat completion whose answer an agent gives to the last user turn."""
    spec = await svc.specs.get(body.model.removeprefix(AGENT_PREFIX))
    task = _task(spec, TaskBody(input=body.question()), who, None)
    view = await svc.mailbox.run(task, spec.timeout_s + 1)
    if view.state == "cancelled":
        raise Cancelled(f"task {task.id} was cancelled")
    if not view.finished:
        raise DeadlineExceeded(f"task {task.id} is still {view.state}; GET /v1/tasks/{task.id}")
    if view.state != "done":
        raise TaskFailed(f"agent {spec.name}: {view.error} (task {task.id})")
    text = answer_text(view.result)
    answer_id = openai.new_id("chatcmpl")
    extra = {"hybrid": {"task": task.id, "attempts": view.attempts, "result": view.result}}
    if not body.stream:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "logprobs": None,
            "finish_reason": "stop",
        }
        tokens = int(view.usage.get("tokens", 0))
        counts = {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens}
        return JSONResponse(
            openai.envelope(
                "chat.completion", answer_id, body.model, choices=[choice], usage=counts, **extra
            )
        )

    async def events() -> AsyncIterator[str]:
        delta = {
            "index": 0,
            "delta": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        yield openai.sse(
            openai.envelope(
                "chat.completion.chunk", answer_id, body.model, choices=[delta], **extra
            )
        )
        yield openai.sse("[DONE]")

    return StreamingResponse(events(), media_type="text/event-stream")
