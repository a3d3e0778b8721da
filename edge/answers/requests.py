"""Requests: what surrounds every answer, whatever it is: the trail that it belongs to, and the id that it gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from kvcdn.edge.http.hops import Hops
from kvcdn.edge.http.outcome import CacheOutcome
from kvcdn.edge.http.respond import Note, PlainResponse
from kvcdn.edge.http.wellformed import find_fault
from kvcdn.edge.telemetry.tracing import SPAN, SpanKind, Tracing
from kvcdn.trail import REQUEST_ID, Trail, follow

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def on_its_trail(handle: Handler, hops: Hops, tracing: Tracing | None = None) -> Handler:
    """`handle`, run for the trail that a request brings, or a new one, in a span where there is tracing.

    One that came in a circle is refused.

    Each request has a task of its own, up to its line in the log: nothing of the trail is left for the next.
    """

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        given = request.headers
        trail = Trail.of(given.get(REQUEST_ID), given.get("traceparent"), given.get("tracestate"))
        follow(trail)
        if tracing is not None:
            span = request[SPAN] = tracing.begin("request", SpanKind.SERVER)
            span.follow()
        fault, circle = find_fault(request), hops.pass_on(given.getall("Via", ()))
        if fault is not None:
            response: web.StreamResponse = PlainResponse.line(Note("unreadable"), fault.status, fault.message, {})
            response.force_close()
        elif circle is None:
            response = await handle(request)
        else:
            response = PlainResponse.refusal(Note("circle", "", CacheOutcome.REFUSED), circle)
        response.headers[REQUEST_ID] = trail.request_id
        return response

    return answer
