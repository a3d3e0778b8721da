"""A fill's lock: what those who wait for an object that is on its way may know of it. A state machine without I/O or clock.

    WAITING --open--> WRITING --finish--> DONE              all bytes are proven
       |                 |
       +--fail-----------+--------------> TRANSIENT_ERROR   origin, disk or place were not to be had: asking again may help
       +--fail-----------+--------------> GAVE_UP           there is no such object, or not one that may be served
       +--abandon--------+--------------> WRITER_GONE       whoever filled ended without a verdict

Two more states exist in a reader's eyes only (`seen`): WAITED_TOO_LONG, when nothing has moved for a while, and TOO_OLD, when
the fill has outlived any that can be sound, because its thread hangs in a system call. Nobody joins a fill that is too old:
whoever asks next begins another. The states are those of the cache lock of Cloudflare's pingora.

`verified` is the frontier: the bytes before it are on disk and proven, and only these may be passed on. Times are seconds on
the caller's clock, which never goes back.
"""

from __future__ import annotations

from enum import StrEnum

STILL_SECONDS = 60.0
"""How long a reader waits for a fill that does not move: longer than any silence that a store tolerates of its origin."""

GRACE_SECONDS = 60.0
"""What a fill may take beyond its own deadline, at which a sound one ends itself."""


class FillState(StrEnum):
    """What a fill is at, as seen by a reader."""

    WAITING = "waiting"
    WRITING = "writing"
    DONE = "done"
    TRANSIENT_ERROR = "transient-error"
    GAVE_UP = "gave-up"
    WRITER_GONE = "writer-gone"
    WAITED_TOO_LONG = "waited-too-long"
    TOO_OLD = "too-old"

    @property
    def running(self) -> bool:
        return self in (FillState.WAITING, FillState.WRITING)


class FillLock:
    """One fill's state and frontier."""

    def __init__(self, now: float, deadline: float) -> None:
        self.state = FillState.WAITING
        self.size = 0
        """Bytes of the whole object; 0 while WAITING."""
        self.verified = 0
        self._moved = now
        self._deadline = deadline

    def open(self, size: int, now: float, deadline: float) -> None:
        """The object has `size` bytes and comes until `deadline`: readers may join."""
        self._require(FillState.WAITING)
        self.state, self.size = FillState.WRITING, size
        self._moved, self._deadline = now, deadline

    def advance(self, verified: int, now: float) -> None:
        """Bytes have come, and those before `verified` are on disk and proven. Never goes back."""
        self._require(FillState.WRITING)
        if not self.verified <= verified <= self.size:
            raise ValueError(f"a frontier at {self.verified} of {self.size} cannot move to {verified}")
        self.verified, self._moved = verified, now

    def finish(self) -> None:
        """The object is complete."""
        self._require(FillState.WRITING)
        if self.verified != self.size:
            raise ValueError(f"{self.verified} of {self.size} bytes are no whole object")
        self.state = FillState.DONE

    def fail(self, *, transient: bool) -> None:
        """There is no object, or no more of it."""
        self._require(FillState.WAITING, FillState.WRITING)
        self.state = FillState.TRANSIENT_ERROR if transient else FillState.GAVE_UP

    def abandon(self) -> None:
        """The writer ends. Does nothing after a verdict."""
        if self.state.running:
            self.state = FillState.WRITER_GONE

    def seen(self, now: float, since: float) -> FillState:
        """The state in the eyes of a reader who has waited since `since`."""
        if not self.state.running:
            return self.state
        if now > self._deadline + GRACE_SECONDS:
            return FillState.TOO_OLD
        if now - max(since, self._moved) > STILL_SECONDS:
            return FillState.WAITED_TOO_LONG
        return self.state

    def admits(self, now: float) -> bool:
        """Whether a reader who comes now waits for this fill rather than begin another."""
        return self.seen(now, now).running

    def patience(self, now: float, since: float) -> float:
        """Seconds after which `seen` of a reader who waits since `since` may answer something else by itself."""
        return max(min(self._deadline + GRACE_SECONDS, max(since, self._moved) + STILL_SECONDS) - now, 0.0)

    def _require(self, *states: FillState) -> None:
        if self.state not in states:
            raise ValueError(f"a fill that is {self.state} was expected to be {' or '.join(states)}")
