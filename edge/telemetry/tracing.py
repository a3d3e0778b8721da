"""Tracing: spans of requests, of fills, and of what origins are asked, where an edge is told whom to send them to.

A span says what a line in the log says, and no more: no token, no address in full, no message that might hold one. Its parent
is the trail's, and what is done within it follows a trail on which it is the parent (`kvcdn.trail`). Where nobody is told,
there are no spans, and the library that makes them is not loaded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Protocol

from aiohttp import web

from kvcdn.edge.settings import EdgeSettings
from kvcdn.errors import UsageError

Value = str | int | float | bool


class SpanKind(StrEnum):
    """On which side of a request a span is (OpenTelemetry's words)."""

    SERVER = "server"
    INTERNAL = "internal"
    CLIENT = "client"


class Span:
    """A piece of work that somebody may look at. This one is nobody's."""

    def follow(self) -> None:
        """From now on the caller's task runs within the span."""

    def within(self) -> AbstractContextManager[None]:
        """The caller runs within the span while the context lasts."""
        return nullcontext()

    def set(self, **attributes: Value) -> None:
        """Adds `attributes`, under `kvcdn.` and their names, or under names of HTTP's."""

    def end(self, name: str = "", error: str = "") -> None:
        """It is over, by the `name` that is known by now, and with an `error` of one word where it failed."""


NO_SPAN = Span()


class Tracing(Protocol):
    """Makes spans. Thread-safe."""

    def begin(self, name: str, kind: SpanKind, **attributes: Value) -> Span:
        """A span of the current trail."""

    def close(self) -> None:
        """Sends what is left, within a few seconds. Blocks."""


def begin(tracing: Tracing | None, name: str, kind: SpanKind, **attributes: Value) -> Span:
    """A span of the current trail, nobody's where there is no tracing."""
    return NO_SPAN if tracing is None else tracing.begin(name, kind, **attributes)


def open_tracing(settings: EdgeSettings) -> Tracing | None:
    """What `settings` say; sends nothing yet. Raises UsageError where the library is not installed."""
    require_tracing(settings)
    if settings.otlp_endpoint is None:
        return None
    from kvcdn.edge.telemetry.otel import OpenTelemetry  # noqa: PLC0415 - an extra

    return OpenTelemetry(settings.otlp_endpoint, settings.trace_ratio)


def require_tracing(settings: EdgeSettings) -> None:
    """Raises UsageError where `settings` want spans, and the library that makes them is not installed."""
    if settings.otlp_endpoint is None:
        return
    try:
        import kvcdn.edge.telemetry.otel  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise UsageError(
            "otlp_endpoint is set, and OpenTelemetry is not installed", hint="pip install 'kvcdn[otel]', or leave it out"
        ) from None


SPAN = web.RequestKey("span", Span)
"""That of a request, which its line in the log ends."""
