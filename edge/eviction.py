"""Eviction: which objects leave when room is needed. Pure accounting: it returns victims, storage deletes them.

Everything runs in one thread, between two awaits, so that used, reserved and the cap always agree: used + reserved never
exceeds the capacity, except after `add`, which records what a restart found, until `trim`.
"""

from __future__ import annotations

from collections import OrderedDict

CHARGE_UNIT_BYTES = 4096
"""Objects are charged in whole disk blocks: a small manifest takes one."""


def charge(size: int) -> int:
    """Bytes of disk that an object of `size` bytes is charged for."""
    return -(-size // CHARGE_UNIT_BYTES) * CHARGE_UNIT_BYTES


class LruEviction:
    """Least recently used first, by bytes, under a hard cap."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.reserved = 0
        self._charges: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._charges)

    def __contains__(self, key: object) -> bool:
        return key in self._charges

    def add(self, key: str, size: int) -> None:
        """Records an object that is there already, as the most recently used."""
        self.remove(key)
        self._charges[key] = charge(size)
        self.used += self._charges[key]

    def trim(self) -> list[str]:
        """Victims whose going brings what is used under the cap."""
        return self._evict(0)

    def reserve(self, size: int) -> list[str] | None:
        """Sets room for `size` bytes aside: the victims that must be deleted before the first byte is written.

        None, and nothing is evicted, where even an empty cache has no room beside what others have reserved.
        """
        room = charge(size)
        if self.reserved + room > self.capacity:
            return None
        victims = self._evict(room)
        self.reserved += room
        return victims

    def commit(self, key: str, size: int) -> None:
        """Turns a reservation into an object."""
        self.release(size)
        self.add(key, size)

    def release(self, size: int) -> None:
        """Gives a reservation back."""
        self.reserved -= charge(size)

    def relieve(self, size: int) -> list[str]:
        """Victims of at least `size` bytes together, or all there are: for a disk that is smaller than the cap."""
        goal = max(self.used - charge(size), 0)
        victims = []
        while self.used > goal:
            victims.append(self._pop())
        return victims

    def touch(self, key: str) -> None:
        """Records a use."""
        self._charges.move_to_end(key)

    def remove(self, key: str) -> None:
        """Forgets an object, if it is known."""
        self.used -= self._charges.pop(key, 0)

    def _evict(self, room: int) -> list[str]:
        victims = []
        while self.used + self.reserved + room > self.capacity and self._charges:
            victims.append(self._pop())
        return victims

    def _pop(self) -> str:
        key, size = self._charges.popitem(last=False)
        self.used -= size
        return key
