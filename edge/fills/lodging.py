"""Lodging: the place that a fill's bytes get: in the cache, as a guest for a moment, or beside the cache, just to pass."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvcdn.edge.disk.eviction import CHARGE_UNIT_BYTES
from kvcdn.edge.disk.staging import DISK_FULL, Memory, Room, Staging
from kvcdn.edge.disk.storage import DiskCache
from kvcdn.edge.fills.arrival import Arrival
from kvcdn.edge.fills.fill import Fill
from kvcdn.edge.fills.guests import Guests
from kvcdn.edge.http.target import ObjectName
from kvcdn.edge.threads import begin_in_thread

ASIDE_BYTES = 32 << 20
"""Set aside for an object before it is known: twice a block of the usual size."""

ASIDE_SHARE = 64
"""Of the capacity no more than this part is set aside for one object."""

log = logging.getLogger("kvcdn.edge.reads.fetch")


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
        self._aside = min(ASIDE_BYTES, cache.capacity // ASIDE_SHARE) // CHARGE_UNIT_BYTES * CHARGE_UNIT_BYTES

    async def receive(self, name: ObjectName, begin: Callable[[], Arrival]) -> tuple[Arrival, Lodging | None]:
        """What `begin` gives, and a place in the cache, where room was set aside in advance. Raises as `begin`.

        Both in one call in a thread: with another for the place, who waits for the first byte waits for two threads more.
        """
        aside = self._aside if self._aside and self._cache.set_aside(self._aside) else 0
        beginning = begin_in_thread(self._begin, name, begin, aside)
        # Also when nobody waits any more: a thread that hangs keeps its room until it ends.
        beginning.add_done_callback(lambda done: self._begun(aside, done))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(self._undo)
            raise

    def clear(self) -> None:
        """Has room for the next object: what leaves for it is deleted when this one is stored."""
        if self._aside:
            self._cache.clear(self._aside)

    def _begin(self, name: ObjectName, begin: Callable[[], Arrival], aside: int) -> tuple[Arrival, Lodging | None]:
        arrival = begin()
        size = arrival.head.size
        if size <= aside:
            # A disk that does not take it is met with again, by `find`.
            with suppress(OSError):
                room = self._cache.room(name, size)
                return arrival, Lodging(Staging.within(room), size, room)
        return arrival, None

    def _begun(self, aside: int, done: asyncio.Future[tuple[Arrival, Lodging | None]]) -> None:
        lodging = None if done.cancelled() or done.exception() is not None else done.result()[1]
        if aside:
            self._cache.use(aside, None if lodging is None else lodging.room)

    def _undo(self, done: asyncio.Future[tuple[Arrival, Lodging | None]]) -> None:
        """Nobody waits for what has begun."""
        if not done.cancelled() and done.exception() is None:
            arrival, lodging = done.result()
            arrival.abandon()
            if lodging is not None:
                self.leave(lodging)

    def leave(self, lodging: Lodging) -> None:
        """Nothing is to lie there after all."""
        lodging.staging.discard()
        if lodging.room is not None:
            self._cache.release(lodging.room)
        elif lodging.guest:
            self._guests.release(lodging.size)

    async def find(self, name: ObjectName, size: int, *, guest: bool, early: Lodging | None = None) -> Lodging:
        """A place for an object, `early` if that will do; `guest` where it is not to stay. Raises OSError."""
        if early is not None and not guest:
            return early
        if early is not None:
            self.leave(early)
        found = await (self._as_guest(size) if guest else self._in_cache(name, size))
        return found or Lodging(await _made(lambda: Staging.passing(size, self._memory)), size)

    def settle(self, lodging: Lodging, fill: Fill, *, kept: bool) -> None:
        """Nobody writes there any more; `kept`: the object is whole, and durable where it is to stay."""
        if not kept:
            self.leave(lodging)
        elif lodging.room is not None:
            self._cache.commit(lodging.room, fill.etag, fill.tokens)
        elif lodging.guest:
            self._guests.hold(fill)

    async def _in_cache(self, name: ObjectName, size: int) -> Lodging | None:
        """After making room where the disk is full below the cap."""
        for _ in range(2):
            room = self._cache.reserve(name, size)
            if room is None:
                break
            try:
                return Lodging(await _made(partial(Staging.within, room), partial(self._cache.release, room)), size, room)
            except OSError as error:
                log.warning("no room for %s in %s: %s", name, self._cache.folder, error.strerror)
                if error.errno not in DISK_FULL:
                    break
                self._cache.relieve(size)
        return None

    async def _as_guest(self, size: int) -> Lodging | None:
        if not self._guests.admit(size):
            return None
        make = partial(Staging.nameless, size, self._cache.folder / "staging")
        try:
            return Lodging(await _made(make, partial(self._guests.release, size)), size, guest=True)
        except OSError as error:
            log.warning("no room for a guest in %s: %s", self._cache.folder, error.strerror)
            return None


async def _made(make: Callable[[], Staging], give_back: Callable[[], None] = lambda: None) -> Staging:
    """What `make` gives, in a thread. Raises as it does.

    Where it fails, or nobody waits any more, nothing is left, and its room is given back: not before the thread has ended.
    """
    making = begin_in_thread(make)

    def undo(done: asyncio.Future[Staging]) -> None:
        if done.exception() is None:
            done.result().discard()
        give_back()

    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(undo)
        raise
    except BaseException:
        give_back()
        raise
