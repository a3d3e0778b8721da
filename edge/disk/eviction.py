"""Eviction: which objects leave when room is needed. Pure accounting: it returns victims, storage deletes them.

Everything runs in one thread, between two awaits, so that used, reserved and the cap always agree: used + reserved never
exceeds the capacity, except after `restore`, which records what a restart found, until `trim`. Which object is worth least is
for `ranking` to say. Seconds are the caller's clock, which never goes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcdn.edge.disk.ranking import Ranking

CHARGE_UNIT_BYTES = 4096
"""Objects are charged in whole disk blocks: the smallest manifest takes one."""


def charge(size: int) -> int:
    """Bytes of disk that an object of `size` bytes is charged for."""
    return max(-(-size // CHARGE_UNIT_BYTES), 1) * CHARGE_UNIT_BYTES


class Eviction:
    """Least worth first, by bytes, under a hard cap."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = 0
        self._ranking = Ranking()

    @property
    def used(self) -> int:
        """Bytes charged for objects."""
        return self._ranking.total

    def __len__(self) -> int:
        return self._ranking.stored

    def __contains__(self, key: str) -> bool:
        return self._ranking.size(key) > 0

    def evicted(self, key: str) -> bool:
        """Whether an object was a victim and is not back."""
        return self._ranking.evicted(key)

    def restore(self, objects: Iterable[tuple[str, int]]) -> None:
        """Records objects with their sizes that an earlier process left, oldest first; the next use of each counts as one."""
        self._ranking.restore((key, charge(size)) for key, size in objects)

    def trim(self) -> list[str]:
        """Victims whose going brings what is used under the cap."""
        return self._evict(0)

    def reserve(self, size: int) -> list[str] | None:
        """Sets room for `size` bytes aside: the victims that must be deleted before the first byte is written.

        None, and nothing is evicted, where even without all that may leave there is no room beside what others have reserved.
        """
        room = charge(size)
        if self.reserved + self._ranking.pinned + room > self.capacity:
            return None
        victims = self._evict(room)
        self.reserved += room
        return victims

    def set_aside(self, size: int) -> bool:
        """Sets room for `size` bytes aside where that takes no victim; whether it did."""
        room = charge(size)
        fits = self.used + self.reserved + room <= self.capacity
        self.reserved += room if fits else 0
        return fits

    def clear(self, size: int) -> list[str]:
        """Victims whose going lets `size` bytes be set aside, as far as any may go."""
        return self._evict(charge(size))

    def commit(self, key: str, size: int, seconds: float) -> None:
        """Turns a reservation into an object."""
        self.release(size)
        self._ranking.store(key, charge(size), seconds)

    def release(self, size: int) -> None:
        """Gives a reservation back."""
        self.reserved -= charge(size)

    def relieve(self, size: int) -> list[str]:
        """Victims of at least `size` bytes together, or all there are: for a disk that is smaller than the cap."""
        goal = max(self.used - charge(size), 0)
        victims = []
        while self.used > max(goal, self._ranking.pinned):
            victims.append(self._ranking.pop())
        return victims

    def touch(self, key: str, seconds: float) -> None:
        """Records that an object is read."""
        self._ranking.touch(key, seconds)

    def visit(self, keys: Sequence[str]) -> None:
        """Records that a chain is looked up, which will be read in this order, whether its objects are here already or not."""
        self._ranking.visit(keys)

    def remove(self, key: str) -> None:
        """Forgets an object, if it is known."""
        self._ranking.leave(key)

    def pin(self, key: str) -> None:
        """An object, stored or not, is no victim from now on."""
        self._ranking.pin(key)

    def unpin(self, key: str) -> None:
        self._ranking.unpin(key)

    def _evict(self, room: int) -> list[str]:
        victims = []
        while self.used > self._ranking.pinned and self.used + self.reserved + room > self.capacity:
            victims.append(self._ranking.pop())
        return victims
