"""The access log and the request metrics: one structured line for every answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from kvcdn.edge.admission import TENANT
from kvcdn.edge.metrics import Metrics
from kvcdn.edge.respond import Note
from kvcdn.edge.traffic import Traffic

_UNREAD = Note("unreadable")

access_log = logging.getLogger("kvcdn.edge.access")


class AccessLogger(AbstractAccessLogger):
    """Sees every finished response. One is made per connection."""

    def __init__(self, metrics: Metrics, traffic: Traffic) -> None:
        super().__init__(access_log, "")
        self._metrics, self._traffic = metrics, traffic

    @classmethod
    def maker(cls, metrics: Metrics, traffic: Traffic) -> Callable[[logging.Logger, str], AccessLogger]:
        """What aiohttp calls for a logger, in place of the class."""
        return lambda _logger, _format: cls(metrics, traffic)

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        # Answers that are not ours are aiohttp's, to what is not HTTP.
        note: Note = getattr(response, "note", _UNREAD)
        size: int = 0 if request.method == "HEAD" else getattr(response, "sent", 0)
        answer = Answered(note, request.method, request.get(TENANT, ""), response.status, size, time)
        record(self._metrics, self._traffic, answer)


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
