"""Lodging: the place that a fill's bytes get: in the cache, as a guest for a moment, or beside the cache, just to pass."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvcdn.edge.fill import Fill
from kvcdn.edge.guests import Guests
from kvcdn.edge.staging import DISK_FULL, Memory, Room, Staging
from kvcdn.edge.storage import DiskCache
from kvcdn.edge.target import ObjectName
from kvcdn.edge.threads import in_thread

log = logging.getLogger("kvcdn.edge.fetch")


@dataclass(frozen=True)
class Lodging:
    """Where one object is written."""

    staging: Staging
    size: int
    room: Room | None = None
    """In the cache, where it is to stay."""
    guest: bool = False
    """Whether it may stay a moment."""

    @property
    def stored(self) -> bool:
        """Whether the object is meant for the cache."""
        return self.room is not None


class Lodgings:
    """Gives places and takes them back. For the event loop's thread."""

    def __init__(self, cache: DiskCache, guests: Guests) -> None:
        self._cache, self._guests = cache, guests
        self._memory = Memory()

    async def find(self, name: ObjectName, size: int, *, guest: bool) -> Lodging:
        """A place for an object; `guest` where it is not to stay. Raises OSError where there is none."""
        found = await (self._as_guest(size) if guest else self._in_cache(name, size))
        return found or Lodging(await in_thread(Staging.passing, size, self._memory), size)

    def settle(self, lodging: Lodging, fill: Fill, *, kept: bool) -> None:
        """The thread that wrote has ended; `kept`: the object is whole, and durable where it is to stay."""
        if not kept:
            self.give_back(lodging)
        elif lodging.room is not None:
            self._cache.commit(lodging.room, fill.etag, fill.tokens)
        elif lodging.guest:
            self._guests.hold(fill)

    def give_back(self, lodging: Lodging) -> None:
        """Nothing lies there."""
        if lodging.room is not None:
            self._cache.release(lodging.room)
        elif lodging.guest:
            self._guests.release(lodging.size)

    async def _in_cache(self, name: ObjectName, size: int) -> Lodging | None:
        """After making room where the disk is full below the cap."""
        for _ in range(2):
            room = self._cache.reserve(name, size)
            if room is None:
                break
            try:
                return Lodging(await in_thread(Staging.within, room), size, room)
            except OSError as error:
                self._cache.release(room)
                log.warning("no room for %s in %s: %s", name, self._cache.folder, error.strerror)
                if error.errno not in DISK_FULL:
                    break
                self._cache.relieve(size)
        return None

    async def _as_guest(self, size: int) -> Lodging | None:
        if not self._guests.admit(size):
            return None
        try:
            return Lodging(await in_thread(Staging.nameless, size, self._cache.folder / "staging"), size, guest=True)
        except OSError as error:
            self._guests.release(size)
            log.warning("no room for a guest in %s: %s", self._cache.folder, error.strerror)
            return None
