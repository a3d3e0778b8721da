"""Patience: how long, and how often, one prompt bears with its sources before it gives up and the model prefills.

A sick source costs a prompt at most SICK_SECONDS, whatever it does: the time lost on it is counted as wall time during which
some request waited in vain, and every wait is cut to what is left. A caller may set a limit of its own besides. Retries are
at most a share of the requests, so that readers do not multiply the load of an edge that has too much of it.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import Protocol, Self

from kvcdn.client.network.tally import Tally
from kvcdn.errors import UnavailableError
from kvcdn.trail import Trail, current

SICK_SECONDS = 20.0
"""The total delay that failing, stalling or dripping edges may add to one prompt."""

STALL_SECONDS = 15.0
"""Longest silence of a peer before it counts as gone."""

STALL_WITH_CHOICE_SECONDS = 3.0
"""The same where another edge could go on: above three retransmissions of a lost packet."""

SLOWEST_BYTES_PER_SECOND = 16 * 1024
"""An edge from which less arrives over all its streams together counts as silent: any model prefills faster."""

RETRY_SHARE = 0.5
RETRIES_ALWAYS = 8
"""Retries of one prompt: so many, and this share of its requests. An edge that restarts breaks all its streams at once."""

PAUSE_SECONDS = 0.05
"""Before the first retry at the same edge; doubles, with jitter, so that many readers do not come back together."""

LONGEST_PAUSE_SECONDS = 5.0
"""A Retry-After beyond this is a no: who would wait longer had better prefill."""


STOPPED = "stopped by its reader"


class Abortable(Protocol):
    """Something on which a thread may be waiting."""

    def abort(self) -> None:
        """Ends the wait at once, from any thread."""


class StoppedError(UnavailableError):
    """Nothing failed: the reader was told to stop, or its time is over."""


class Budget:
    """What one prompt may lose: time, and retries. Thread-safe."""

    def __init__(self, stall_s: float, sick_s: float, clock: Callable[[], float], tally: Tally | None = None) -> None:
        self.clock = clock
        self.tally = tally
        """Where what comes for the prompt is counted, if it is."""
        self.stall_s, self._sick_s = stall_s, sick_s
        self._lost, self._lost_until = 0.0, -math.inf
        self._requests, self._retries = 0, 0
        self.failing_limit_s = math.inf
        """Requests that have failed for so long are not tried again after a pause."""
        self.failing_since: float | None = None
        """When requests began to fail, if nothing has come since."""
        self.trail = current() or Trail.of(None)
        """Under which edges log what is asked of them for it."""
        self._lock = threading.Lock()

    def sick_left(self) -> float:
        """Seconds that may still be lost."""
        with self._lock:
            return self._sick_s - self._lost

    def lose(self, since: float) -> None:
        """The time from `since` until now was in vain. What several requests lose together counts once."""
        now = self.clock()
        with self._lock:
            self._lost += max(now - max(since, self._lost_until), 0.0)
            self._lost_until = max(now, self._lost_until)

    def failed(self) -> None:
        """A request failed."""
        with self._lock:
            self.failing_since = self.clock() if self.failing_since is None else self.failing_since

    def got_on(self) -> None:
        """Bytes have come."""
        self.failing_since = None

    def asked(self) -> None:
        """A request was sent that is not a retry."""
        with self._lock:
            self._requests += 1

    def may_retry(self, pause: float) -> bool:
        """Whether one more retry, after `pause` seconds, is affordable; if so, it counts."""
        with self._lock:
            affordable = self._retries < RETRIES_ALWAYS + RETRY_SHARE * self._requests
            failing = 0.0 if self.failing_since is None else self.clock() - self.failing_since
            if pause and failing + pause > self.failing_limit_s:
                return False
            if not affordable or pause > LONGEST_PAUSE_SECONDS or self._lost + pause >= self._sick_s:
                return False
            self._retries += 1
            return True


class Patience:
    """The waits of one prompt, or of one reader as a `part` of them: bounded by a budget, and ended together. Thread-safe."""

    def __init__(self, budget: Budget, limit_s: float | None = None) -> None:
        """`limit_s` seconds from now everything ends; None for no such limit."""
        self.budget = budget
        self.clock = budget.clock
        self._ends = (math.inf, math.inf) if limit_s is None else (self.clock() + limit_s, limit_s)
        """When, and how long after the start of what set the limit."""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._waiting: set[Abortable] = set()

    @classmethod
    def of_prompt(
        cls,
        limit_s: float | None = None,
        *,
        stall_s: float = STALL_SECONDS,
        sick_s: float = SICK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        tally: Tally | None = None,
    ) -> Self:
        """A new prompt's, of which what comes is counted in `tally`."""
        return cls(Budget(stall_s, sick_s, clock, tally), limit_s)

    def part(self, limit_s: float | None = None) -> Patience:
        """Of a reader: shares the budget, ends with the whole, and can be ended by itself. `forget` it afterwards."""
        part = Patience(self.budget, limit_s)
        part._ends = min(self._ends, part._ends)
        with self._lock:
            self._waiting.add(part)
        if self._stopped.is_set():
            part.abort()
        return part

    def left(self) -> float:
        """Seconds to the limit; infinite without one."""
        return self._ends[0] - self.clock()

    def silence(self, *, choice: bool = False) -> float:
        """How long a peer may be silent from now on; `choice` where another could take over. Raises StoppedError."""
        self.check()
        return max(min(self.stall_seconds(choice=choice), self.budget.sick_left(), self.left()), 0.0)

    def stall_seconds(self, *, choice: bool = False) -> float:
        """The longest silence, whatever was lost before."""
        return min(self.budget.stall_s, STALL_WITH_CHOICE_SECONDS) if choice else self.budget.stall_s

    def check(self) -> None:
        """Raises StoppedError where it is over."""
        if self._stopped.is_set():
            raise StoppedError(STOPPED)
        if self.left() <= 0:
            raise StoppedError(f"not done within the {self._ends[1]:g} s that its reader allows")

    def pause(self, seconds: float) -> None:
        """Waits, and counts it as lost. Raises StoppedError when it ends before."""
        since = self.clock()
        self._stopped.wait(seconds)
        self.budget.lose(since)
        self.check()

    def watch(self, waiting: Abortable) -> None:
        """`waiting` will be aborted with everything else. Raises StoppedError where it is over."""
        with self._lock:
            self._waiting.add(waiting)
        self.check()

    @property
    def watched(self) -> int:
        """How many there are now."""
        with self._lock:
            return len(self._waiting)

    def forget(self, waiting: Abortable) -> None:
        """`waiting` has ended by itself."""
        with self._lock:
            self._waiting.discard(waiting)

    def abort(self) -> None:
        """Ends everything that waits, in whatever thread, at once and for good."""
        self._stopped.set()
        with self._lock:
            waiting = list(self._waiting)
        for one in waiting:
            one.abort()


def jittered(attempt: int) -> float:
    """The pause before retry 1, 2, ... at the same edge."""
    return PAUSE_SECONDS * 2.0 ** (attempt - 1) * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
