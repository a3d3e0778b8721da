"""Outcomes: how the edge came by an answer. The same words stand in headers, logs and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvcdn.errors import CorruptError, KvcdnError, NotFoundError, RevokedError, UnavailableError, UntrustedError


class CacheOutcome(StrEnum):
    """Where an answer came from."""

    HIT = "hit"
    """From the cache."""
    MISS = "miss"
    """Filled from the origin for this request, and stored."""
    COLLAPSED = "collapsed"
    """From a fill that another request had begun."""
    PASSED = "passed"
    """Fetched from the origin and not stored: larger than the cache, or the disk is full."""
    REMEMBERED = "remembered"
    """Refused because the origin had just led to the same refusal."""
    REFUSED = "refused"
    """Refused after asking the origin, or without asking because there is no way to."""
    NONE = "none"
    """The answer has nothing to do with the cache."""


_CACHE_STATUS = {
    CacheOutcome.HIT: "kvcdn; hit",
    CacheOutcome.MISS: "kvcdn; fwd=miss; stored",
    CacheOutcome.COLLAPSED: "kvcdn; fwd=miss; collapsed",
    CacheOutcome.PASSED: "kvcdn; fwd=miss",
    CacheOutcome.REMEMBERED: "kvcdn; hit",
    CacheOutcome.REFUSED: "kvcdn; fwd=miss",
}


def cache_status(outcome: CacheOutcome, detail: Reason | None = None) -> str:
    """The Cache-Status member of an outcome (RFC 9211)."""
    return _CACHE_STATUS[outcome] + (f"; detail={detail}" if detail else "")


class Reason(StrEnum):
    """Why there is no object to serve."""

    NOT_FOUND = "not-found"
    CORRUPT = "corrupt"
    UNTRUSTED = "untrusted"
    REVOKED = "revoked"
    ORIGIN_UNAVAILABLE = "origin-unavailable"
    DISK_FULL = "disk-full"
    DISK_ERROR = "disk-error"
    BUSY = "busy"
    LOOP = "loop"
    INTERNAL = "internal"


STATUS = {
    Reason.NOT_FOUND: 404,
    Reason.CORRUPT: 502,
    Reason.UNTRUSTED: 502,
    Reason.REVOKED: 410,
    Reason.ORIGIN_UNAVAILABLE: 504,
    Reason.DISK_FULL: 503,
    Reason.DISK_ERROR: 503,
    Reason.BUSY: 503,
    Reason.LOOP: 508,
    Reason.INTERNAL: 500,
}

PASSING_TROUBLES = frozenset({Reason.ORIGIN_UNAVAILABLE, Reason.DISK_FULL, Reason.DISK_ERROR, Reason.BUSY, Reason.INTERNAL})
"""Reasons that say nothing of the object: asking again may help."""

REMEMBERED_SECONDS = {
    Reason.NOT_FOUND: 2.0,
    Reason.CORRUPT: 5.0,
    Reason.UNTRUSTED: 5.0,
    Reason.REVOKED: 5.0,
    Reason.ORIGIN_UNAVAILABLE: 1.0,
}
"""How long a refusal answers later requests: long enough to stop a stampede, short enough that what is published or repaired
a moment later is found. The disk's and our own troubles are not remembered."""


@dataclass(frozen=True)
class Refusal:
    """No object, and why."""

    reason: Reason
    message: str

    @classmethod
    def of(cls, error: KvcdnError) -> Refusal:
        """The refusal that `error`, from the origin or from checking what it sent, leads to."""
        for kind, reason in _REASONS:
            if isinstance(error, kind):
                return cls(reason, str(error))
        return cls(Reason.INTERNAL, str(error))

    @property
    def status(self) -> int:
        return STATUS[self.reason]


_REASONS: tuple[tuple[type[KvcdnError], Reason], ...] = (
    (NotFoundError, Reason.NOT_FOUND),
    (RevokedError, Reason.REVOKED),
    (UntrustedError, Reason.UNTRUSTED),
    (CorruptError, Reason.CORRUPT),
    (UnavailableError, Reason.ORIGIN_UNAVAILABLE),
)


class BrokenFillError(Exception):
    """An object that was on its way will not come to its end: the refusal says why. What was passed on of it is right."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
