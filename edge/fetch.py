"""The read path: an object from the cache, or from the origin by one fill, however many ask.

A fill is a task of its own: it goes on when those who asked have left. Its blocking halves (`arrival`) run in threads; index
and accounting are touched by the loop's thread only. What a fill ends with, object or refusal, goes to everyone who waited;
the object as an open file, so that eviction cannot come between.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from dataclasses import dataclass
from io import FileIO
from threading import Event

from kvcdn.edge.arrival import Arrival
from kvcdn.edge.inspection import inspect_head
from kvcdn.edge.memory import FadingMemory
from kvcdn.edge.metrics import Metrics
from kvcdn.edge.outcome import REMEMBERED_SECONDS, CacheOutcome, Reason, Refusal
from kvcdn.edge.storage import DISK_FULL, DiskCache, OpenEntry
from kvcdn.edge.target import ObjectName
from kvcdn.edge.threads import in_thread
from kvcdn.envelope import MAX_ENVELOPE_BYTES
from kvcdn.errors import CorruptError, IntegrityError, KvcdnError
from kvcdn.signing import TrustList
from kvcdn.store import BlobStore

RUNNING_FILLS = 8
"""Fills that run at once. Each holds two or three pieces of a megabyte; eight fill any link from one origin."""

WAITING_FILLS = 1024
"""Fills that may wait for a place; whoever asks for more objects at once is told to come back."""

WAIT_SECONDS = 30.0
"""How long a fill waits for a place."""

STOP_SECONDS = 2.0
"""How long the end of the process waits for fills; what they leave is removed at the next start."""

REFUSALS_REMEMBERED = 16384
"""Bounds the memory of what the origin lacks: some 10 MB."""

log = logging.getLogger("kvcdn.edge.fetch")


@dataclass(frozen=True)
class Found:
    """An object to serve. Whoever gets it closes `file`."""

    file: FileIO
    size: int
    etag: str
    age: int
    """Whole seconds since the edge stored it."""
    outcome: CacheOutcome


@dataclass(frozen=True)
class Refused:
    """No object: why, and whether the origin was asked for it just now."""

    refusal: Refusal
    outcome: CacheOutcome


class _Filled:
    """What a fill leaves to those who wait: the file, open, until the last of them took its copy."""

    def __init__(self, descriptor: int, size: int, etag: str, *, stored: bool) -> None:
        self.size, self.etag, self.stored = size, etag, stored
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def open(self) -> FileIO:
        return FileIO(os.dup(self._descriptor))


class Fetcher:
    """Finds objects. For the event loop's thread."""

    def __init__(self, store: BlobStore, cache: DiskCache, trust: TrustList | None, metrics: Metrics) -> None:
        self._store, self._cache, self._trust, self._metrics = store, cache, trust, metrics
        self._flights: dict[str, asyncio.Task[_Filled | Refusal]] = {}
        self._refusals: FadingMemory[Refusal] = FadingMemory(REFUSALS_REMEMBERED)
        self._places = asyncio.Semaphore(RUNNING_FILLS)
        self._stopping = Event()

    async def get(self, name: ObjectName) -> Found | Refused:
        """The object, or why there is none. Raises OSError where the process has no file descriptors left."""
        opened = self._cache.open(name.key)
        if opened is not None and (etag := opened.entry.etag or await self._confirm(name, opened)) is not None:
            age = max(0, int(time.time() - opened.entry.stored_at))
            return Found(opened.file, opened.entry.size, etag, age, CacheOutcome.HIT)
        refusal = self._refusals.get(name.key)
        if refusal is not None:
            return Refused(refusal, CacheOutcome.REMEMBERED)
        return await self._fill_or_follow(name)

    async def stop(self) -> None:
        """Ends fills under way at their next piece, leaving nothing behind; waits a moment for those that hang."""
        self._stopping.set()
        if self._flights:
            await asyncio.wait(self._flights.values(), timeout=STOP_SECONDS)

    async def _confirm(self, name: ObjectName, opened: OpenEntry) -> str | None:
        """The tag of a file that an earlier process stored, from its envelope; None, and it is dropped, if that is bad."""
        try:
            head = await in_thread(_check_file, name, opened, self._trust)
        except (IntegrityError, OSError) as error:
            opened.file.close()
            self._cache.drop(name.key, opened.entry, str(error))
            return None
        opened.entry.etag = head
        return head

    async def _fill_or_follow(self, name: ObjectName) -> Found | Refused:
        flight = self._flights.get(name.key)
        leading = flight is None
        if flight is None:
            if len(self._flights) >= WAITING_FILLS:
                busy = Refusal(Reason.BUSY, f"{WAITING_FILLS} objects are on their way already; try again")
                return Refused(busy, CacheOutcome.REFUSED)
            flight = self._take_off(name)
        # The fill outlives a request that is cancelled while it waits.
        result = await asyncio.shield(flight)
        if isinstance(result, Refusal):
            return Refused(result, CacheOutcome.REFUSED)
        outcome = CacheOutcome.COLLAPSED if not leading else CacheOutcome.MISS if result.stored else CacheOutcome.PASSED
        return Found(result.open(), result.size, result.etag, 0, outcome)

    def _take_off(self, name: ObjectName) -> asyncio.Task[_Filled | Refusal]:
        flight = asyncio.create_task(self._fly(name), name=f"fill {name}")
        self._flights[name.key] = flight
        self._metrics.fills_running.inc()
        flight.add_done_callback(lambda _: self._land(name))
        return flight

    def _land(self, name: ObjectName) -> None:
        del self._flights[name.key]
        self._metrics.fills_running.dec()

    async def _fly(self, name: ObjectName) -> _Filled | Refusal:
        result = await self._attempt(name)
        if isinstance(result, Refusal):
            self._metrics.fills.labels(result.reason).inc()
            if seconds := REMEMBERED_SECONDS.get(result.reason):
                self._refusals.put(name.key, result, seconds)
            if result.reason is not Reason.NOT_FOUND:
                log.warning("no %s: %s: %s", name, result.reason, result.message)
        else:
            self._metrics.fills.labels("stored" if result.stored else "passed").inc()
            self._metrics.origin_bytes.inc(result.size)
        return result

    async def _attempt(self, name: ObjectName) -> _Filled | Refusal:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._places.acquire()
        except TimeoutError:
            return Refusal(Reason.BUSY, f"{name} waited {WAIT_SECONDS:.0f} s for a place to be filled")
        try:
            return await self._fill(name)
        except KvcdnError as error:
            return Refusal.of(error)
        except OSError as error:
            return Refusal(Reason.DISK_ERROR, f"{name}: the cache's disk failed ({error.strerror})")
        except Exception:
            log.exception("filling %s failed", name)
            return Refusal(Reason.INTERNAL, f"{name}: the edge failed, its log says how")
        finally:
            self._places.release()

    async def _fill(self, name: ObjectName) -> _Filled | Refusal:
        """Stores the object; where the disk is full, makes room and tries again, then does without storing."""
        for keep in (True, True, False):
            try:
                return await self._receive(name, keep=keep)
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                log.warning("the disk of %s is full below the capacity: %s", self._cache.folder, error.strerror)
        return Refusal(Reason.DISK_FULL, f"{name}: the edge's disk is full")

    async def _receive(self, name: ObjectName, *, keep: bool) -> _Filled:
        self._metrics.origin_requests.labels("get").inc()
        arrival = await in_thread(Arrival.begin, self._store, name, self._trust)
        size, etag = arrival.head.size, arrival.head.etag
        room = self._cache.reserve(name, size) if keep else None
        try:
            descriptor = await in_thread(arrival.land, room, self._stopping)
        except BaseException as error:
            if room is not None:
                self._cache.release(room)
            if room is not None and isinstance(error, OSError) and error.errno in DISK_FULL:
                self._cache.relieve(size)
            raise
        if room is not None:
            self._cache.commit(room, etag)
        return _Filled(descriptor, size, etag, stored=room is not None)


def _check_file(name: ObjectName, opened: OpenEntry, trust: TrustList | None) -> str:
    head = inspect_head(name, os.pread(opened.file.fileno(), MAX_ENVELOPE_BYTES, 0), trust)
    if head.size != opened.entry.size:
        raise CorruptError(f"{name}: the file has {opened.entry.size} bytes, its header says {head.size}")
    return head.etag
