"""One trace for a root task: attempts linked, calls and children beneath them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import behaviours
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests_support import play, until

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
    assert first.attributes is not None
    assert first.attributes["error.type"] == "unavailable"
    assert first.attributes["hybrid.task.outcome"] == "retried"
    assert third.kind is SpanKind.CONSUMER
    assert third.attributes is not None
    assert "error.type" not in third.attributes
    assert third.attributes["gen_ai.provider.name"] == "hybrid"
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


def test_what_fails_is_named_by_its_kind(store_url: str, recorded: Recorded) -> None:
    async def scene(agents: Agents) -> None:
        nowhere = await agents.submit("post", "nonsense")
        bug = await agents.submit("crash", "x")
        assert (await agents.finish(nowhere)).state == "failed"
        assert (await agents.finish(bug)).state == "dead"

    specs = {name: AgentConfig(behaviour=f"behaviours.{name}") for name in ("post", "crash")}
    play(store_url, specs, scene)
    spans = recorded.spans()
    kinds = {name: (found[0].attributes or {})["error.type"] for name, found in spans.items()}
    assert kinds == {
        "invoke_agent post": "invalid_request",
        "execute_tool http": "invalid_request",
        "invoke_agent crash": "ZeroDivisionError",
    }


def test_a_cancelled_attempt_says_so(store_url: str, recorded: Recorded) -> None:
    behaviours.ran.clear()

    async def scene(agents: Agents) -> None:
        task = await agents.submit("forever", "x")
        await until(lambda: "started" in behaviours.ran)
        await agents.mailbox.cancel(task)
        await until(lambda: "cancelled" in behaviours.ran)

    play(store_url, {"forever": AgentConfig(behaviour="behaviours.forever")}, scene)
    [span] = recorded.spans()["invoke_agent forever"]
    assert span.attributes is not None
    assert span.attributes["hybrid.task.outcome"] == "cancelled"
    assert span.status.status_code is StatusCode.UNSET, "nothing went wrong"


@pytest.mark.parametrize(
    ("traceparent", "trace", "flags"),
    [
        (f"00-{7:032x}-{9:016x}-01", 7, "01"),
        (f" 00-{7:032x}-{9:016x}-01 ", 7, "01"),
        (f"cc-{7:032x}-{9:016x}-01-more", 7, "01"),
        (f"00-{7:032x}-{9:016x}-00", 7, "00"),
        (f"00-{0:032x}-{9:016x}-01", None, "01"),
        (f"00-{7:032x}-{0:016x}-01", None, "01"),
        (f"ff-{7:032x}-{9:016x}-01", None, "01"),
        (f"00-{7:032x}-{9:016x}-01-more", None, "01"),
        (f"00-{10:032X}-{9:016x}-01", None, "01"),
        ("nonsense", None, "01"),
        ("", None, "01"),
    ],
)
def test_any_traceparent_keeps_a_task_in_one_trace(
    recorded: Recorded, traceparent: str, trace: int | None, flags: str
) -> None:
    task = Task(agent="a", input=1, attempt=1, trace={"traceparent": traceparent})
    with tracing.attempt(task) as ended:
        child = task.child("b", 1, key="k")
        carrier = tracing.child_carrier(task)
        with tracing.attempt(replace(child, attempt=1, trace=carrier)) as child_ended:
            child_ended("done", None)
        ended("done", None)
    expected = trace or tracing.trace_id(Task(agent="a", input=1, id=task.id))
    parent = f"{tracing.span_id(task.id, 1):016x}"
    assert carrier["traceparent"] == f"00-{expected:032x}-{parent}-{flags}"
    spans = recorded.spans()
    if flags == "00":
        assert not spans, "its sender wants none"
        return
    [outer], [inner] = spans["invoke_agent a"], spans["invoke_agent b"]
    assert ids(outer) == (expected, tracing.span_id(task.id, 1))
    assert (outer.parent and outer.parent.span_id) == (9 if trace else None)
    assert ids(inner)[0] == expected
    assert inner.parent is not None
    assert inner.parent.span_id == ids(outer)[1]


@pytest.mark.parametrize("traceparent", ["nonsense", f"00-{7:032x}-{9:016x}-00"])
def test_no_traceparent_harms_a_task(store_url: str, recorded: Recorded, traceparent: str) -> None:
    async def scene(agents: Agents) -> None:
        assert await agents.ask("asker", "x", trace={"traceparent": traceparent})

    specs = {"asker": AgentConfig(behaviour="behaviours.asker"), "echo": AgentConfig()}
    play(store_url, specs, scene)
    assert bool(recorded.spans()) == (traceparent == "nonsense")


def test_spans_go_where_the_last_configure_said() -> None:
    first, second = Recorded(), Recorded()
    for end in (first.end, second.end):
        with tracing.tool_call("t", "k"):
            assert tracing.on()
        end()
    assert not tracing.on()
    assert not first.exporter.get_finished_spans()
    assert len(second.exporter.get_finished_spans()) == 2


def test_ids_are_made_of_task_and_attempt() -> None:
    task = Task(agent="a", input=1, id="x" * 32)
    assert tracing.span_id("x", 1) == tracing.span_id("x", 1) != tracing.span_id("x", 2)
    assert tracing.trace_id(task) == tracing.trace_id(task.child("b", 1, key="k"))
    odd: Any = Task(agent="a", input=1, id="x" * 32, trace={"traceparent": "nonsense"})
    assert tracing.trace_id(odd) == tracing.trace_id(task)
    assert not tracing.on()
    assert tracing.carrier() == {}
