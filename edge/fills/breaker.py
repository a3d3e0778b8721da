"""The breaker: whether an origin that failed may be asked again yet. A state machine without I/O or clock.

An origin that failed FAILURES times in a row rests: nobody asks it, so that a fill goes on to the next origin, or is refused,
at once instead of after the origin's time-outs. After its rest one request tries it. Does that succeed, all may ask; does it
not, the next rest is twice as long. Times are seconds on the caller's clock.
"""

from __future__ import annotations

FAILURES = 3
"""Failures in a row that make an origin a down one: one may be a single object's, or a connection's."""

FIRST_REST_SECONDS = 1.0

LONGEST_REST_SECONDS = 30.0
"""A repaired origin is found again within this."""

PROBE_SECONDS = 60.0
"""A request that tries the origin and has no outcome after this is taken for lost: another may try."""


class Breaker:
    """One origin's recent history. Not thread-safe."""

    def __init__(self) -> None:
        self._failures = 0
        self._rest = 0.0
        self._until = 0.0

    @property
    def failures(self) -> int:
        """How often in a row the origin did not do its part."""
        return self._failures

    @property
    def open(self) -> bool:
        """Whether the origin counts as down."""
        return self._failures >= FAILURES

    def rest(self, now: float) -> float:
        """Seconds until somebody may ask again; 0 where that is now."""
        return max(self._until - now, 0.0) if self.open else 0.0

    def admit(self, now: float) -> bool:
        """Whether one request may go to the origin now. Where it is down, the one admitted is the only one for a while."""
        if self.rest(now):
            return False
        if self.open:
            self._until = now + PROBE_SECONDS
        return True

    def succeed(self) -> None:
        """The origin did its part, be it to say that there is no such object."""
        self._failures, self._rest = 0, 0.0

    def fail(self, now: float, jitter: float) -> None:
        """The origin did not do its part. `jitter`, 0 to 1, spreads edges that lost the same origin at the same moment."""
        self._failures += 1
        if self.open:
            self._rest = min(max(2 * self._rest, FIRST_REST_SECONDS), LONGEST_REST_SECONDS)
            self._until = now + self._rest * (0.5 + jitter / 2)
