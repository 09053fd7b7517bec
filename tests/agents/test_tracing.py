"""One trace for a root task: attempts linked, calls and children beneath them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import behaviours
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tests_support import play

from hybrid.agents import tracing
from hybrid.agents.task import Task
from hybrid.config import AgentConfig
from hybrid.testing import Agents


class Recorded:
    """Spans, once recording has ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.end = tracing.configure(self.exporter)

    def spans(self) -> dict[str, list[ReadableSpan]]:
        self.end()
        found: dict[str, list[ReadableSpan]] = {}
        for span in sorted(self.exporter.get_finished_spans(), key=lambda s: s.start_time or 0):
            found.setdefault(span.name, []).append(span)
        return found


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    made = Recorded()
    yield made
    made.end()


def ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def test_attempts_are_linked_spans_of_one_trace(store_url: str, recorded: Recorded) -> None:
    behaviours.ran.clear()
    behaviours.failures["left"] = 2

    async def scene(agents: Agents) -> None:
        view = await agents.finish(await agents.submit("a", "x"))
        assert view.state == "done"

    play(store_url, {"a": AgentConfig(behaviour="behaviours.twice")}, scene)
    first, second, third = recorded.spans()["invoke_agent a"]
    assert len({ids(s)[0] for s in (first, second, third)}) == 1
    assert not first.links
    assert [link.context.span_id for link in second.links] == [ids(first)[1]]
    assert [link.context.span_id for link in third.links] == [ids(second)[1]]
    assert first.status.status_code is StatusCode.ERROR
    assert third.attributes is not None
    assert third.attributes["hybrid.task.outcome"] == "done"
    assert third.attributes["gen_ai.operation.name"] == "invoke_agent"
    assert third.attributes["hybrid.task.attempt"] == 3


def test_children_and_calls_lie_beneath_the_attempt_that_made_them(
    store_url: str, recorded: Recorded
) -> None:
    traceparent = f"00-{7:032x}-{9:016x}-01"

    async def scene(agents: Agents) -> None:
        task = await agents.submit("pipeline", "x", trace={"traceparent": traceparent})
        assert (await agents.finish(task)).state == "done"

    specs = {"pipeline": AgentConfig(behaviour="behaviours.pipeline"), "echo": AgentConfig()}
    play(store_url, specs, scene)
    spans = recorded.spans()
    [outer], [inner] = spans["invoke_agent pipeline"], spans["invoke_agent echo"]
    calls = spans["text_completion base"]
    assert {ids(s)[0] for s in (outer, inner, *calls)} == {7}
    assert outer.parent is not None
    assert outer.parent.span_id == 9
    assert inner.parent is not None
    assert inner.parent.span_id == ids(outer)[1]
    assert [c.parent and c.parent.span_id for c in calls] == [ids(outer)[1], ids(inner)[1]]
    assert calls[0].attributes is not None
    assert calls[0].attributes["gen_ai.usage.input_tokens"] == 3


def test_ids_are_made_of_task_and_attempt() -> None:
    task = Task(agent="a", input=1, id="x" * 32)
    assert tracing.span_id("x", 1) == tracing.span_id("x", 1) != tracing.span_id("x", 2)
    assert tracing.trace_id(task) == tracing.trace_id(task.child("b", 1, key="k"))
    odd: Any = Task(agent="a", input=1, id="x" * 32, trace={"traceparent": "nonsense"})
    assert tracing.trace_id(odd) == tracing.trace_id(task)
    assert not tracing.on()
    assert tracing.carrier() == {}
