"""The event loop: calls in the order of their time, and of their making where that is the same."""

from __future__ import annotations

import heapq
from collections.abc import Callable

TICK_EVENTS = 1 << 14
"""Events between two reports of progress: some hundredths of a second."""


class Loop:
    """A clock that jumps from event to event. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Has `call` made at `time`, or now where that is past."""
        self._made += 1
        heapq.heappush(self._heap, (max(time, self.now), self._made, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Has `call` made `seconds` from now."""
        self.at(self.now + seconds, call)

    def run(self, progress: Callable[[], None] | None = None) -> None:
        """Until nothing is left to be done."""
        heap = self._heap
        while heap:
            self.now, _, call = heapq.heappop(heap)
            call()
            self.events += 1
            if progress is not None and self.events % TICK_EVENTS == 0:
                progress()
