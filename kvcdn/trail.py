"""The trail: the names by which one request is known at every tier that it passes (FORMAT.md 7; W3C Trace Context).

It is set where a request comes in, is seen by whatever runs for that request, tasks and threads included, and goes out with
what is asked of the next tier on its behalf. What it consists of came from a stranger: it is bounded, and only ever compared,
logged and passed on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

REQUEST_ID = "X-Request-Id"
"""Header of what is to be found in the logs of all tiers."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._~-]{1,64}")

_PARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""Version 00, as Trace Context level 1 has it; what later versions add may be left away."""

_STATE = re.compile(r"[ -~]{1,512}")

_ID_BYTES = 8
"""Unlikely to be had twice by the logs of one day."""


@dataclass(frozen=True, slots=True)
class Trail:
    """One request's names."""

    request_id: str
    traceparent: str = ""
    tracestate: str = ""

    @classmethod
    def of(cls, request_id: str | None, traceparent: str | None = None, tracestate: str | None = None) -> Self:
        """From what a request brings; a new id in place of none, or of one that is not a plain word of 64 characters at most.

        A traceparent that is none is left out, and a tracestate without one.
        """
        name = request_id if request_id is not None and _REQUEST_ID.fullmatch(request_id) else os.urandom(_ID_BYTES).hex()
        if traceparent is None or not _PARENT.fullmatch(traceparent):
            return cls(name)
        state = tracestate if tracestate is not None and _STATE.fullmatch(tracestate) else ""
        return cls(name, traceparent, state)

    @property
    def headers(self) -> dict[str, str]:
        """What to send with a request on behalf of this one."""
        headers = {REQUEST_ID: self.request_id}
        if self.traceparent:
            headers["traceparent"] = self.traceparent
            if self.tracestate:
                headers["tracestate"] = self.tracestate
        return headers


_current: ContextVar[Trail | None] = ContextVar("kvcdn trail", default=None)


def current() -> Trail | None:
    """The trail of the request for which the caller runs."""
    return _current.get()


def follow(trail: Trail) -> None:
    """From now on the caller's task, or thread, and what it begins run for `trail`."""
    _current.set(trail)


@contextmanager
def following(trail: Trail) -> Iterator[None]:
    """The caller runs for `trail` while the context lasts."""
    token = _current.set(trail)
    try:
        yield
    finally:
        _current.reset(token)


_via: ContextVar[str] = ContextVar("kvcdn via", default="")


def passing(via: str) -> None:
    """From now on the caller's task, and what it begins, send requests on that have come by `via` (RFC 9110 section 7.6.3)."""
    _via.set(via)


def headers() -> dict[str, str]:
    """What to send with a request on behalf of the current one; nothing where there is none."""
    trail, via = _current.get(), _via.get()
    return ({"Via": via} if via else {}) | ({} if trail is None else trail.headers)
