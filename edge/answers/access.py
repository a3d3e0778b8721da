"""The access log and the request metrics: one structured line for every answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from kvcdn.edge.http.respond import Note
from kvcdn.edge.telemetry.metrics import Metrics
from kvcdn.edge.telemetry.tracing import SPAN, Span
from kvcdn.edge.telemetry.traffic import Traffic
from kvcdn.edge.tenants.admission import TENANT
from kvcdn.edge.tenants.usage import EdgeUsage

_UNREAD = Note("unreadable")

access_log = logging.getLogger("kvcdn.edge.answers.access")


class AccessLogger(AbstractAccessLogger):
    """Sees every finished response. One is made per connection."""

    def __init__(self, metrics: Metrics, traffic: Traffic, usage: EdgeUsage | None = None) -> None:
        super().__init__(access_log, "")
        self._metrics, self._traffic, self._usage = metrics, traffic, usage

    @classmethod
    def maker(
        cls, metrics: Metrics, traffic: Traffic, usage: EdgeUsage | None = None
    ) -> Callable[[logging.Logger, str], AccessLogger]:
        """What aiohttp calls for a logger, in place of the class."""
        return lambda _logger, _format: cls(metrics, traffic, usage)

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        # Answers that are not ours are aiohttp's, to what is not HTTP.
        note: Note = getattr(response, "note", _UNREAD)
        size: int = 0 if request.method == "HEAD" else getattr(response, "sent", 0)
        answer = Answered(note, request.method, request.get(TENANT, ""), response.status, size, time)
        record(self._metrics, self._traffic, answer)
        if self._usage is not None:
            self._usage.answered(request, response, note, size)
        span = request.get(SPAN)
        if span is not None:
            _end(span, answer)


class Answered(NamedTuple):
    """One answer, as metrics and log know it."""

    note: Note
    method: str
    tenant: str
    status: int
    size: int
    """Body bytes sent."""
    seconds: float


def record(metrics: Metrics, traffic: Traffic, answer: Answered) -> None:
    """Counts and logs one answer."""
    note, method, tenant, status, size, seconds = answer
    metrics.observe(note.route, status, note.cache, size, seconds)
    metrics.observe_tenant(tenant, status, size)
    traffic.count(note, status, size, tenant)
    if access_log.isEnabledFor(logging.INFO):
        line = {
            "method": method,
            "tenant": tenant,
            "route": note.route,
            "key": note.subject,
            "status": status,
            "bytes": size,
            "seconds": round(seconds, 6),
            "cache": note.cache,
        }
        access_log.info("request", extra={"fields": line})


def _end(span: Span, answer: Answered) -> None:
    """Says in the span what the line says."""
    note, method, status = answer.note, answer.method, answer.status
    span.set(http__request__method=method, http__response__status_code=status, http__response__body__size=answer.size)
    span.set(tenant=answer.tenant, route=note.route, object=note.subject, cache=note.cache)
    span.end(f"{method} {note.route}", str(status) if status >= 500 else "")  # noqa: PLR2004 - HTTP's own
