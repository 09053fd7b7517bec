"""Tasks over HTTP: look, wait, listen, signal, cancel, replay; and schedules that submit them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from hybrid.agents.events import Event
from hybrid.agents.task import Task, TaskView
from hybrid.agents.upkeep import Upkeep
from hybrid.errors import HybridError, NotFound
from hybrid.gateway import openai
from hybrid.gateway.agent_routes import view_entry
from hybrid.gateway.services import Services, services, tenant

router = APIRouter(prefix="/v1")
Svc = Annotated[Services, Depends(services)]
Tenant = Annotated[str, Depends(tenant)]


@router.get("/tasks/{task_id}")
async def get_task(task_id: str, svc: Svc, who: Tenant, wait_s: float = 0) -> dict[str, Any]:
    """Where a task stands; with `wait_s`, as soon as it is finished."""
    await _owned(svc, task_id, who)
    return view_entry(await svc.mailbox.wait(task_id, min(wait_s, 600)))


@router.delete("/tasks/{task_id}")
async def cancel_task(task_id: str, svc: Svc, who: Tenant) -> dict[str, Any]:
    """Cancel a task and everything beneath it."""
    await _owned(svc, task_id, who)
    return view_entry(await svc.mailbox.cancel(task_id, reason="cancelled over the API"))


@router.get("/tasks/{task_id}/events")
async def task_events(
    task_id: str, svc: Svc, who: Tenant, last_event_id: Annotated[str | None, Header()] = None
) -> StreamingResponse:
    """A task's events as server-sent events, from the first one or after Last-Event-ID."""
    view = await _owned(svc, task_id, who)
    found = svc.events.follow(view, last_event_id)
    first = await anext(found)  # an error keeps its status code

    async def lines() -> AsyncIterator[str]:
        async with aclosing(found) as rest:
            yield _line(first)
            try:
                async for event in rest:
                    yield _line(event)
            except HybridError as e:  # the listener comes back with Last-Event-ID
                yield f"event: error\n{openai.sse(e.envelope())}"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def _line(event: Event | None) -> str:
    if event is None:
        return ": nothing new\n\n"
    return f"id: {event.id}\nevent: {event.kind}\n{openai.sse(event.data)}"


@router.post("/tasks/{task_id}/signals/{name}", status_code=204)
async def send_signal(
    task_id: str, name: str, svc: Svc, who: Tenant, value: Annotated[Any, Body()] = None
) -> None:
    """Tell a task what it waits for (`ctx.receive(name)`); the body is any JSON value."""
    await _owned(svc, task_id, who)
    await svc.mailbox.signal(task_id, name, value)


class ReplayBody(BaseModel):
    """Body of POST /v1/tasks/{id}/replay."""

    model_config = ConfigDict(extra="forbid")
    timeout_s: float | None = Field(None, gt=0)
    """Seconds until the new deadline; the agent's own default otherwise."""


@router.post("/tasks/{task_id}/replay")
async def replay(
    task_id: str, svc: Svc, who: Tenant, body: ReplayBody | None = None
) -> dict[str, Any]:
    """Try a dead task again, from its last finished step."""
    await _owned(svc, task_id, who)
    timeout = body.timeout_s if body else None
    return view_entry(await Upkeep(svc.mailbox).requeue(task_id, timeout_s=timeout))


class ScheduleBody(BaseModel):
    """Body of PUT /v1/schedules/{name}."""

    model_config = ConfigDict(extra="forbid")
    agent: str
    """Whose task it is."""
    input: Any
    """Any JSON value."""
    every_s: float = Field(ge=0.1)
    """Seconds from one occurrence to the next."""
    first_at: float | None = None
    """UNIX time of the first; now by default."""
    timeout_s: float | None = Field(None, gt=0)
    """Seconds an occurrence has; the agent's own default otherwise."""
    conversation: str | None = None
    """Occurrences of one conversation do not overlap."""


@router.get("/schedules")
async def list_schedules(svc: Svc, who: Tenant) -> dict[str, Any]:
    """This tenant's schedules, by when they are next due."""
    found = await Upkeep(svc.mailbox).schedules(who)
    return {"object": "list", "data": [asdict(schedule) for schedule in found]}


@router.put("/schedules/{name}", status_code=204)
async def put_schedule(name: str, body: ScheduleBody, svc: Svc, who: Tenant) -> None:
    """Submit a task every so often; replaces a schedule of that name."""
    spec = await svc.specs.get(body.agent)
    task = Task(agent=spec.name, input=body.input, tenant=who, conversation=body.conversation)
    await Upkeep(svc.mailbox).recur(
        name,
        task,
        every_s=body.every_s,
        first_at=body.first_at,
        timeout_s=body.timeout_s if body.timeout_s is not None else spec.timeout_s,
    )


@router.delete("/schedules/{name}", status_code=204)
async def delete_schedule(name: str, svc: Svc, who: Tenant) -> None:
    """End a schedule; occurrences that were submitted stay."""
    await Upkeep(svc.mailbox).unrecur(name, who)


async def _owned(svc: Services, task_id: str, who: str) -> TaskView:
    """The task, if it is this tenant's: another's looks like none at all."""
    view = await svc.mailbox.view(task_id)
    if view.task.tenant != who:
        raise NotFound(f"no task {task_id!r}")
    return view
