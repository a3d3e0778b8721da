"""Latency: how long answers took, counted for ever and remembered for a while. Pure accounting, thread-safe."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from threading import Lock

BOUNDS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Upper ends of the buckets: from another edge in the same rack to the longest silence that a store bears."""

RECENT_ANSWERS = 512
"""Answers that a quantile is of: enough for a 99th, few enough to tell of now."""


@dataclass(frozen=True)
class Recent:
    """What the last answers took, in seconds; `answers` is how many they are, and the others are None where it is 0."""

    answers: int
    median: float | None
    p95: float | None


class Latency:
    """Seconds from a question to the head of its answer."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self._sum = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_ANSWERS)
        self._lock = Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
            self._sum += seconds
            self._recent.append(seconds)

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Answers up to each bound, as Prometheus wants them, and the sum of all in seconds."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        found, below = [], 0
        for bound, count in zip((*map(str, BOUNDS_SECONDS), "+Inf"), counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found, total

    def recent(self) -> Recent:
        """Of the last RECENT_ANSWERS."""
        with self._lock:
            ordered = sorted(self._recent)
        if not ordered:
            return Recent(0, None, None)
        return Recent(len(ordered), ordered[(len(ordered) - 1) // 2], ordered[(len(ordered) - 1) * 95 // 100])
