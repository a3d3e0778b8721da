"""OpenTelemetry: spans by its SDK, sent by OTLP over HTTP from a thread that never holds up a request."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvcdn import __version__, trail
from kvcdn.edge.telemetry.tracing import Span, SpanKind, Value
from kvcdn.trail import Trail

EXPORT_SECONDS = 5.0
"""What sending a batch may take, the last one included. Spans that find no place meanwhile are dropped."""

QUEUED_SPANS = 8192

_KINDS = {
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
}

_PROPAGATOR = TraceContextTextMapPropagator()


class OpenTelemetry:
    """Spans for one receiver. Changes nothing that other users of the library in this process see."""

    def __init__(self, endpoint: str, ratio: float) -> None:
        """`ratio` of the traces that begin here are sent; others are if their callers' are."""
        resource = Resource.create({SERVICE_NAME: "kvcdn-edge", SERVICE_VERSION: __version__})
        self._provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(ratio)), resource=resource)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=QUEUED_SPANS, export_timeout_millis=EXPORT_SECONDS * 1000)
        )
        self._tracer = self._provider.get_tracer("kvcdn.edge", __version__)

    def begin(self, name: str, kind: SpanKind, **attributes: Value) -> Span:
        followed = trail.current() or Trail.of(None)
        parent = _PROPAGATOR.extract(followed.headers)
        span = self._tracer.start_span(name, context=parent, kind=_KINDS[kind])
        made = _Span(span, followed)
        made.set(request_id=followed.request_id, **attributes)
        return made

    def close(self) -> None:
        self._provider.shutdown()


class _Span(Span):
    def __init__(self, span: trace.Span, followed: Trail) -> None:
        self._span = span
        carried: dict[str, str] = {}
        _PROPAGATOR.inject(carried, trace.set_span_in_context(span))
        state = carried.get("tracestate", "")
        self._trail = replace(followed, traceparent=carried.get("traceparent", ""), tracestate=state)

    def follow(self) -> None:
        trail.follow(self._trail)

    def within(self) -> AbstractContextManager[None]:
        return trail.following(self._trail)

    def set(self, **attributes: Value) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(name.replace("__", ".") if "__" in name else f"kvcdn.{name}", value)

    def end(self, name: str = "", error: str = "") -> None:
        if name:
            self._span.update_name(name)
        if error:
            self._span.set_status(trace.StatusCode.ERROR)
            self._span.set_attribute("error.type", error)
        self._span.end()
