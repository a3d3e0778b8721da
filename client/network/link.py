"""The link: how soon a source answers and how fast bytes come from it, measured on every transfer and remembered.

Throughput is bytes over the time during which at least one reader waited for them: streams that share a link share its
time, and what a reader does between two reads (verify, decrypt, decode) is not the link's. Recent time counts most. The
latency is the median wait from a request to the first byte of its answer.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcdn.model.remembered import Remembered

HALF_LIFE_SECONDS = 2.0
"""Of waiting time, after which a measurement counts half: a link that changes is noticed within seconds."""

REMEMBERED_SECONDS = 0.25
"""What an earlier process measured counts like so much waiting time: a start, soon outweighed."""

LEAST_BYTES = 256 * 1024
"""Fewer bytes tell nothing of a link: they may have come in one packet train, with the answer's first byte."""

LEAST_SECONDS = 0.5
"""But that so few come in so long tells enough."""

LATENCIES = 64
"""First bytes that are remembered."""

SAVE_SECONDS = 10.0
"""Least time between two writes to disk, per source."""

_SENSIBLE = 1e15
"""Above any latency in seconds and any link in bytes per second; what is said to be more is damaged."""


@dataclass(frozen=True)
class LinkEstimate:
    """What is known of a link. `samples` counts answers measured by this process and, if it has none, one for an earlier's."""

    latency_s: float | None = None
    """Median seconds from a request to the first byte of its answer; None where no answer was seen."""
    bytes_per_s: float | None = None
    """Object bytes, decoding not included; None while too little was read."""
    samples: int = 0


class LinkMeter:
    """Measures one source. Thread-safe; a reader calls `waiting` before each read and `received` after it."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`name` is the source's URL without secrets, under which the estimate is remembered."""
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._answers = 0
        self._waiting = 0
        self._since = 0.0
        self._bytes, self._seconds = 0.0, 0.0
        self._total = 0
        self._before: LinkEstimate | None = None
        self._saved = -math.inf

    def answered(self, seconds: float) -> None:
        """An answer's first byte was waited for so long."""
        with self._lock:
            self._latencies.append(seconds)
            self._answers += 1

    def waiting(self) -> None:
        """A reader begins to wait for bytes of a body."""
        with self._lock:
            self._pass()
            self._waiting += 1

    def received(self, count: int) -> None:
        """That reader has got `count` bytes, or has given up with 0."""
        with self._lock:
            self._pass()
            self._waiting -= 1
            self._bytes += count
            self._total += count

    def _pass(self) -> None:
        """Counts the time since the last call, if somebody waited."""
        now = self._clock()
        if self._waiting:
            passed = now - self._since
            kept = 0.5 ** (passed / HALF_LIFE_SECONDS)
            self._bytes, self._seconds = self._bytes * kept, self._seconds * kept + passed
        self._since = now

    @property
    def total_bytes(self) -> int:
        """Bytes received since the start."""
        return self._total

    def slow_answer(self, quantile: float, least_samples: int) -> float | None:
        """The wait for a first byte that only a share of 1 - `quantile` exceeded; None with fewer than `least_samples`."""
        with self._lock:
            waits = sorted(self._latencies)
        return waits[min(int(quantile * len(waits)), len(waits) - 1)] if len(waits) >= max(least_samples, 1) else None

    def estimate(self) -> LinkEstimate:
        """The link as of now; from an earlier process where this one has measured nothing."""
        before = self._remembered()
        with self._lock:
            self._pass()
            count, seconds = self._bytes, self._seconds
            known = self._total >= LEAST_BYTES or (self._total > 0 and seconds >= LEAST_SECONDS)
            latency = statistics.median(self._latencies) if self._latencies else before.latency_s
            answers = self._answers or before.samples
        if before.bytes_per_s is not None:
            count, seconds = count + before.bytes_per_s * REMEMBERED_SECONDS, seconds + REMEMBERED_SECONDS
            known = True
        return LinkEstimate(latency, count / seconds if known and seconds > 0 else None, answers)

    def _remembered(self) -> LinkEstimate:
        if self._before is None:
            self._before = _checked(Remembered("links").get(self._name))
        return self._before

    def save(self, *, at_once: bool = False) -> None:
        """Remembers the estimate for later processes, unless that was done just now. Never raises."""
        with self._lock:
            now = self._clock()
            if not self._answers or (now - self._saved < SAVE_SECONDS and not at_once):
                return
            self._saved = now
        found = self.estimate()
        Remembered("links").put(self._name, {"latency_s": found.latency_s, "bytes_per_s": found.bytes_per_s})


def _checked(value: Any) -> LinkEstimate:
    """What a file says, as far as it makes sense."""
    if not isinstance(value, dict):
        return LinkEstimate()
    numbers = [value.get("latency_s"), value.get("bytes_per_s")]
    latency, rate = (
        float(number) if isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < _SENSIBLE else None
        for number in numbers
    )
    return LinkEstimate(latency, rate, int(latency is not None or rate is not None))
