"""One OpenTelemetry trace for a root task, across agents, hosts and retries.

Every attempt at a task is a span, `invoke_agent NAME`; its model and tool calls are spans beneath
it, a child task's attempts beneath the attempt that asked. An attempt links to the one before it.
Span ids of attempts are made of task and attempt number, so that a host can link to an attempt
whose own host was killed before it could report it.

Names and attributes follow OpenTelemetry's semantic conventions for generative AI. Nothing is
recorded until `configure` was called, by the host when OTEL_EXPORTER_OTLP_ENDPOINT is set; what an
attempt costs then is a few dictionary look-ups.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from hybrid.agents.task import Task

log = logging.getLogger(__name__)
_ids: ContextVar[tuple[int, int] | None] = ContextVar("attempt_ids", default=None)
_tracer: Any = None
# What the SDK's propagator takes up, no more: ids made of what it refuses would fit no parent.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?"
)


def configure(
    exporter: SpanExporter | None = None, service: str = "hybrid-agents"
) -> Callable[[], None]:
    """Record spans in this process.

    Args:
        exporter: where they go; by default OTLP over HTTP, if OTEL_EXPORTER_OTLP_ENDPOINT is set
            and `opentelemetry-exporter-otlp-proto-http` is installed, and else nowhere.
        service: the resource's `service.name`.

    Returns:
        What ends it and sends what is left.
    """
    global _tracer
    if exporter is None:
        if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            return lambda: None
        try:
            otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        except ImportError:
            log.warning(
                "OTEL_EXPORTER_OTLP_ENDPOINT is set, but nothing is traced:"
                " pip install opentelemetry-exporter-otlp-proto-http"
            )
            return lambda: None
        exporter = cast("SpanExporter", otlp.OTLPSpanExporter())
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator

    class AttemptIds(IdGenerator):
        """An attempt's own ids where one is begun, random ones otherwise."""

        _random = RandomIdGenerator()

        def generate_trace_id(self) -> int:
            ids = _ids.get()
            return ids[0] if ids else self._random.generate_trace_id()

        def generate_span_id(self) -> int:
            ids = _ids.get()
            return ids[1] if ids else self._random.generate_span_id()

    # A provider of our own: another one may be set for the process.
    provider = TracerProvider(
        resource=Resource.create({"service.name": service}), id_generator=AttemptIds()
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = provider.get_tracer("hybrid.agents")

    def shut_down() -> None:
        global _tracer
        _tracer = None
        provider.shutdown()

    return shut_down


def on() -> bool:
    """Whether spans are recorded."""
    return _tracer is not None


def carrier() -> dict[str, str]:
    """The current span as a W3C carrier, for `Task.trace` of what is submitted in it."""
    try:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return {}
    found: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(found)
    return found


def span_id(task_id: str, attempt: int) -> int:
    """The span id of an attempt: 64 bits of SHA-256, never 0."""
    return int.from_bytes(hashlib.sha256(f"{task_id}/{attempt}".encode()).digest()[:8]) or 1


def trace_id(task: Task) -> int:
    """The trace id: the sender's, or 128 bits of SHA-256 of the root's id."""
    if sender := _sender(task):
        return int(sender[0], 16)
    return int.from_bytes(hashlib.sha256(task.root.encode()).digest()[:16]) or 1


def child_carrier(task: Task) -> dict[str, str]:
    """What a child of this attempt carries: the attempt is its parent span."""
    ids = f"{trace_id(task):032x}-{span_id(task.id, task.attempt):016x}"
    sender = _sender(task)
    # Who began the trace has said whether it is sampled; a child does not decide it anew.
    sampled = sender is None or int(sender[1], 16) & 1
    return {**task.trace, "traceparent": f"00-{ids}-{'01' if sampled else '00'}"}


def _sender(task: Task) -> tuple[str, str] | None:
    """Trace id and flags of the sender's `traceparent`, in hexadecimal; None if it is not one."""
    found = _TRACEPARENT.fullmatch(task.trace.get("traceparent", ""))
    if found is None or (found[1] == "00" and found[4]):
        return None
    return found[2], found[3]


@contextmanager
def attempt(task: Task) -> Iterator[Callable[[str, str | None], None]]:
    """The span of an attempt; yields what notes how it ended: `(outcome, error or None)`."""
    if _tracer is None:
        yield lambda outcome, error: None
        return
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    trace_number = trace_id(task)
    links = []
    if task.attempt > 1:
        before = trace.SpanContext(
            trace_number,
            span_id(task.id, task.attempt - 1),
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        links.append(trace.Link(before, {"hybrid.link": "previous_attempt"}))
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": task.agent,
        "hybrid.task.id": task.id,
        "hybrid.task.root": task.root,
        "hybrid.task.attempt": task.attempt,
        "hybrid.tenant": task.tenant,
    }
    if task.conversation:
        attributes["gen_ai.conversation.id"] = task.conversation
    # Never the current context: a host starts an attempt while another one is ending.
    context = TraceContextTextMapPropagator().extract(task.trace, Context())
    token = _ids.set((trace_number, span_id(task.id, task.attempt)))
    try:
        span = _tracer.start_span(
            f"invoke_agent {task.agent}",
            context=context,
            kind=trace.SpanKind.CONSUMER,
            attributes=attributes,
            links=links,
        )
    finally:
        _ids.reset(token)

    def ended(outcome: str, error: str | None) -> None:
        span.set_attribute("hybrid.task.outcome", outcome)
        if error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, error))

    with trace.use_span(span, end_on_exit=True):
        yield ended


@contextmanager
def model_call(operation: str, model: str) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """The span of a model call (`text_completion`, `score`); yields what notes its usage."""
    if _tracer is None:
        yield lambda usage: None
        return
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "hybrid",
        "gen_ai.request.model": model,
    }
    with _tracer.start_as_current_span(
        f"{operation} {model}", kind=_kind("CLIENT"), attributes=attributes
    ) as span:

        def used(usage: Mapping[str, float]) -> None:
            for name, value in usage.items():
                span.set_attribute(f"gen_ai.usage.{name}", value)

        yield used


@contextmanager
def tool_call(name: str, key: str) -> Iterator[None]:
    """The span of a tool call; `key` is its idempotency key."""
    if _tracer is None:
        yield
        return
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.call.id": key,
    }
    with _tracer.start_as_current_span(
        f"execute_tool {name}", kind=_kind("INTERNAL"), attributes=attributes
    ):
        yield


def _kind(name: str) -> Any:
    from opentelemetry.trace import SpanKind

    return SpanKind[name]
