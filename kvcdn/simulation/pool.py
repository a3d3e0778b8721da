"""A pool: devices that prefill, one job each, in the order of asking; or none, where every reader has one of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvcdn.simulation.loop import Loop


class Pool:
    """`devices` that share one queue; 0 for as many as there are jobs. Who takes one gives it back."""

    def __init__(self, loop: Loop, devices: int) -> None:
        self.devices = devices
        self.busy_s = 0.0
        """Of all devices together."""
        self.waited_s = 0.0
        """Of all jobs together, in the queue."""
        self.jobs = 0
        self._loop = loop
        self._taken = 0
        self._expected_s = 0.0
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._updated = 0.0

    @property
    def expected_wait_s(self) -> float:
        """What a job would wait that came now: the work asked for and not yet given back, over all devices."""
        return self._expected_s / self.devices if self.devices and self._taken >= self.devices else 0.0

    def take(self, expected_s: float, call: Callable[[], None]) -> None:
        """Has `call` made once a device is free, for about `expected_s`; `give` ends it."""
        self.jobs += 1
        self._expected_s += expected_s
        if self.devices and self._taken >= self.devices:
            self._queue.append((self._loop.now, call))
        else:
            self._begin(call)

    def give(self, expected_s: float) -> None:
        """Gives a device back that was taken for `expected_s`."""
        self._count()
        self._taken -= 1
        self._expected_s -= expected_s
        if not self._taken:
            self._expected_s = 0.0
        if self._queue:
            asked, call = self._queue.popleft()
            self.waited_s += self._loop.now - asked
            self._begin(call)

    def _begin(self, call: Callable[[], None]) -> None:
        self._count()
        self._taken += 1
        call()

    def _count(self) -> None:
        self.busy_s += self._taken * (self._loop.now - self._updated)
        self._updated = self._loop.now
