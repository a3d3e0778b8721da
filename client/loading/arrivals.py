"""Arrivals: how fast the bytes of one fetch have come of late."""

from __future__ import annotations

import time
from collections import deque

ARRIVALS = 16
LEAST_ARRIVALS = 5
"""Segments over which the link's speed is taken: few enough to notice within a small part of a fetch that it has changed."""


class Arrivals:
    """Of segments, by when they came and how many bytes had come by then. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=ARRIVALS)

    def note(self, total: int) -> None:
        """So many bytes have come by now."""
        if total > (self._seen[-1][1] if self._seen else 0):
            self._seen.append((time.perf_counter(), total))

    def rate(self, now: float, grace_s: float) -> float | None:
        """Bytes per second; a silence of more than `grace_s` lowers it as it lasts. None while too little has come."""
        if len(self._seen) < LEAST_ARRIVALS:
            return None
        (since, before), (last, total) = self._seen[0], self._seen[-1]
        taken = max(last, now - grace_s) - since
        return (total - before) / taken if taken > 0 else None
