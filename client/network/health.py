"""Health: a circuit breaker. An edge that failed is left out for a while, longer each time, and then tried by one request."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

LEFT_OUT_SECONDS = 1.0
"""After a first failure; doubles with each further one, with jitter, so that an edge that comes back is not run over."""

LONGEST_LEFT_OUT_SECONDS = 60.0

TRIAL_SECONDS = 5.0
"""While one request tries an edge that failed, the others leave it out for so long."""

OPEN_FAILURES = 2
"""After so many failures, each at its own time, an edge that is left out is asked for nothing, even if there is no other."""


class Health:
    """Of one edge. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._out_until = 0.0
        self._trial_until = 0.0

    @property
    def well(self) -> bool:
        """Whether it may be asked like any other: it did not fail, or long enough ago, and nobody is trying it just now."""
        return not self._failures or self._clock() >= max(self._out_until, self._trial_until)

    @property
    def out_for(self) -> float:
        """Seconds for which it should be asked for nothing at all; 0 where it may be tried."""
        return max(self._out_until - self._clock(), 0.0) if self._failures >= OPEN_FAILURES else 0.0

    def asked(self) -> None:
        """A request goes to it."""
        with self._lock:
            if self._failures and self._clock() >= self._out_until:
                self._trial_until = self._clock() + TRIAL_SECONDS

    def worked(self) -> None:
        """It answered one."""
        if self._failures:
            with self._lock:
                self._failures = 0

    def failed(self, asked: float, retry_after: float = 0.0) -> None:
        """A request of time `asked` failed. What fails together, as all streams do when an edge restarts, counts once."""
        with self._lock:
            if self._failures and asked < self._out_until:
                return
            self._failures += 1
            seconds = LEFT_OUT_SECONDS * 2 ** min(self._failures - 1, 10) * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
            self._out_until = self._clock() + min(max(seconds, retry_after), LONGEST_LEFT_OUT_SECONDS)
