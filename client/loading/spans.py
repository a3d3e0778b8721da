"""Spans: the trace that an application runs in, by OpenTelemetry, handed on to the edges that it asks."""

from __future__ import annotations

import sys


def traceparent() -> str | None:
    """The active span's, as W3C Trace Context writes it; None where the application traces nothing.

    An application that traces has imported the library, so that nobody else pays for it, in time or in dependencies.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
