"""A link: bytes a second that all transfers on it share evenly, as long TCP connections do, none above a limit of its own.

Processor sharing in virtual time: `_each` is what a transfer has been sent that was there all along, so that one that begins
at `_each` = v with n bytes ends at v + n, whatever comes and goes meanwhile, and an arrival or end costs a heap's logarithm.
Latency is not the link's: who starts a transfer waits for it first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

from kvcdn.simulation.loop import Loop


@dataclass(eq=False, slots=True)
class Transfer:
    """Bytes on their way over one link."""

    size: float
    began: float
    """`_each` at its start."""
    done: Callable[[], None]
    over: bool = False
    sent: float = 0.0
    """Once it is over."""


class Link:
    """`bytes_per_s` for all transfers together, at most `each_bytes_per_s` for one. Either may be infinite or 0."""

    def __init__(self, loop: Loop, bytes_per_s: float, each_bytes_per_s: float = math.inf) -> None:
        self.bytes_per_s, self.each_bytes_per_s = bytes_per_s, each_bytes_per_s
        self.transfers = 0
        """Under way."""
        self.sent = 0.0
        """Bytes of all transfers so far, those under way not included."""
        self.transfer_s = 0.0
        """Transfers under way, integrated over time."""
        self.busy_s = 0.0
        self._loop = loop
        self._heap: list[tuple[float, int, Transfer]] = []
        self._each = self._updated = 0.0
        self._made = self._turn = 0

    def rate(self, transfers: int) -> float:
        """Bytes a second that each of so many transfers gets."""
        return min(self.each_bytes_per_s, self.bytes_per_s / max(transfers, 1))

    @property
    def expected_rate(self) -> float:
        """What one more transfer would get now."""
        return self.rate(self.transfers + 1)

    def start(self, size: float, done: Callable[[], None]) -> Transfer:
        """Begins to send `size` bytes; `done` is called when they have arrived, never before this returns."""
        self._advance()
        transfer = Transfer(size, self._each, done)
        self.transfers += 1
        self._made += 1
        heapq.heappush(self._heap, (self._each + size, self._made, transfer))
        self._plan()
        return transfer

    def arrived(self, transfer: Transfer) -> float:
        """Bytes of it so far."""
        if transfer.over:
            return transfer.sent
        self._advance()
        return min(self._each - transfer.began, transfer.size)

    def stop(self, transfer: Transfer) -> None:
        """Ends it where it is: `done` is not called."""
        if not transfer.over:
            self._end(transfer, self.arrived(transfer))
            self._plan()

    def _end(self, transfer: Transfer, sent: float) -> None:
        transfer.over, transfer.sent = True, sent
        self.sent += sent
        self.transfers -= 1

    def _advance(self) -> None:
        elapsed = self._loop.now - self._updated
        self._updated = self._loop.now
        if self.transfers and elapsed > 0:
            self.transfer_s += elapsed * self.transfers
            self.busy_s += elapsed
            rate = self.rate(self.transfers)
            if math.isfinite(rate):
                self._each += elapsed * rate

    def _plan(self) -> None:
        """Sets the next end. Those set before are void: what they counted on has changed."""
        self._turn += 1
        while self._heap and self._heap[0][2].over:
            heapq.heappop(self._heap)
        if not self._heap:
            # Nothing is under way: what was sent to each counts for nobody, and small numbers are exact.
            self._each = 0.0
            return
        rate = self.rate(self.transfers)
        left = max(self._heap[0][0] - self._each, 0.0)
        if rate > 0:
            turn = self._turn
            self._loop.after(0.0 if math.isinf(rate) else left / rate, lambda: self._finish(turn))

    def _finish(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        end, _, transfer = heapq.heappop(self._heap)
        self._each = max(self._each, end)
        self._end(transfer, transfer.size)
        self._plan()
        transfer.done()
