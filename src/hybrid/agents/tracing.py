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

import asyncio
import hashlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

from hybrid.errors import HybridError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

    from hybrid.agents.task import Task

log = logging.getLogger(__name__)
_PROVIDER = "hybrid"
_ids: ContextVar[tuple[int, int] | None] = ContextVar("attempt_ids", default=None)
_tracer: Any = None


def configure(
    exporter: SpanExporter | None = None, service: str = "hybrid-agents"
) -> Callable[[], None]:
    """Record spans in this process, from now on only there.

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
    mine = _tracer = provider.get_tracer("hybrid.agents")

    def shut_down() -> None:
        global _tracer
        if _tracer is mine:  # another call may have taken over
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
        return sender.trace_id
    return int.from_bytes(hashlib.sha256(task.root.encode()).digest()[:16]) or 1


def child_carrier(task: Task) -> dict[str, str]:
    """What a child of this attempt carries: the attempt is its parent span."""
    ids = f"{trace_id(task):032x}-{span_id(task.id, task.attempt):016x}"
    sender = _sender(task)
    # Who began the trace has said whether it is sampled; a child does not decide it anew.
    sampled = sender is None or sender.trace_flags.sampled
    return {**task.trace, "traceparent": f"00-{ids}-{'01' if sampled else '00'}"}


def _context(task: Task) -> Context:
    """The sender's, never the current one: a host starts an attempt while another is ending."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(task.trace, Context())


def _sender(task: Task) -> SpanContext | None:
    """The sender's span; None if its `traceparent` is not one."""
    from opentelemetry.trace import get_current_span

    found = get_current_span(_context(task)).get_span_context()
    return found if found.is_valid else None


@contextmanager
def attempt(task: Task) -> Iterator[Callable[[str, str | None], None]]:
    """The span of an attempt; yields what notes how it ended: `(outcome, error or None)`."""
    if _tracer is None:
        yield lambda outcome, error: None
        return
    from opentelemetry import trace

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
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.agent.name": task.agent,
        "hybrid.task.id": task.id,
        "hybrid.task.root": task.root,
        "hybrid.task.attempt": task.attempt,
        "hybrid.tenant": task.tenant,
    }
    if task.conversation:
        attributes["gen_ai.conversation.id"] = task.conversation
    token = _ids.set((trace_number, span_id(task.id, task.attempt)))
    try:
        span = _tracer.start_span(
            f"invoke_agent {task.agent}",
            context=_context(task),
            kind=trace.SpanKind.CONSUMER,
            attributes=attributes,
            links=links,
        )
    finally:
        _ids.reset(token)

    def ended(outcome: str, error: str | None) -> None:
        span.set_attribute("hybrid.task.outcome", outcome)
        if error is not None:  # it begins with its kind
            span.set_attribute("error.type", error.partition(":")[0])
            span.set_status(trace.Status(trace.StatusCode.ERROR, error))

    with trace.use_span(span, end_on_exit=True), _typed(span):
        try:
            yield ended
        except asyncio.CancelledError:  # the task is cancelled, its lease lost, or the host ends
            ended("cancelled", None)
            raise


@contextmanager
def model_call(operation: str, model: str) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """The span of a model call (`text_completion`, `score`); yields what notes its usage."""
    if _tracer is None:
        yield lambda usage: None
        return
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": model,
    }
    with _tracer.start_as_current_span(
        f"{operation} {model}", kind=_kind("CLIENT"), attributes=attributes
    ) as span:

        def used(usage: Mapping[str, float]) -> None:
            for name, value in usage.items():
                span.set_attribute(f"gen_ai.usage.{name}", value)

        with _typed(span):
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
    with (
        _tracer.start_as_current_span(
            f"execute_tool {name}", kind=_kind("INTERNAL"), attributes=attributes
        ) as span,
        _typed(span),
    ):
        yield


@contextmanager
def _typed(span: Any) -> Iterator[None]:
    """What ends a span by failing is named on it; its status is set by who opened it."""
    try:
        yield
    except Exception as e:
        kind = e.code if isinstance(e, HybridError) else type(e).__name__
        span.set_attribute("error.type", kind)
        raise


def _kind(name: str) -> Any:
    from opentelemetry.trace import SpanKind

    return SpanKind[name]
