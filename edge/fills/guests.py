"""Guests: objects that a peer keeps, and that lie here for a moment because somebody reads them here.

A reader takes a block in several ranges. Without a guest each would have this edge fetch the whole block from its owner once
more. A guest is a nameless file of a fill that is done: gone when nobody has asked for a while, or when others need the room;
what is asked for all the time stays. Guests have a share of the cache's capacity, whether they come or lie here.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvcdn.edge.disk.eviction import charge
from kvcdn.edge.disk.staging import Spool
from kvcdn.edge.fills.fill import Fill

GUEST_SECONDS = 20.0
"""After its last use: several times what a reader takes between two ranges of one block."""

CAPACITY_SHARE = 1 / 16
"""Of the edge's capacity, for all guests together."""


@dataclass
class _Guest:
    fill: Fill
    spool: Spool
    came: float
    used: float


class Guests:
    """For the event loop's thread."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit`: bytes for all guests, those on their way included; 0 where this edge has no peers."""
        self.limit = limit
        self._clock = clock
        self._held: OrderedDict[str, _Guest] = OrderedDict()
        self._taken = 0
        self._timer: asyncio.TimerHandle | None = None

    def admit(self, size: int) -> bool:
        """Sets room aside for a guest of `size` bytes, for which others leave; False where there cannot be any."""
        room = charge(size)
        while self._taken + room > self.limit and self._held:
            self._leave(next(iter(self._held)))
        if self._taken + room > self.limit:
            return False
        self._taken += room
        return True

    def release(self, size: int) -> None:
        """Gives back the room of a guest that does not stay."""
        self._taken -= charge(size)

    def hold(self, fill: Fill) -> None:
        """`fill` is done, and its room was set aside."""
        if fill.spool is None:
            raise AssertionError(f"{fill.name} is here and nowhere")
        self._drop(fill.name.key)
        self._held[fill.name.key] = _Guest(fill, fill.spool, self._clock(), self._clock())
        self._watch()

    def get(self, key: str) -> tuple[Fill, Spool, int] | None:
        """A guest, which counts as a use: fill, bytes, and for how many whole seconds it has been here."""
        guest = self._held.get(key)
        if guest is None:
            return None
        guest.used = self._clock()
        self._held.move_to_end(key)
        return guest.fill, guest.spool, int(guest.used - guest.came)

    def drop(self, chosen: Callable[[Fill], bool]) -> None:
        """Lets go of the guests that are `chosen`."""
        for key in [key for key, guest in self._held.items() if chosen(guest.fill)]:
            self._leave(key)

    def _drop(self, key: str) -> None:
        if key in self._held:
            self._leave(key)

    def _leave(self, key: str) -> None:
        self.release(self._held.pop(key).fill.size)

    def _watch(self) -> None:
        """Has the next guest leave in time, also where nobody asks for anything any more."""
        if self._timer is None and self._held:
            left = next(iter(self._held.values())).used + GUEST_SECONDS - self._clock()
            self._timer = asyncio.get_running_loop().call_later(max(left, 0), self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._clock()
        self.drop(lambda fill: self._held[fill.name.key].used + GUEST_SECONDS <= now)
        self._watch()
