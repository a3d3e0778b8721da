"""The scrub: reads every cached file again and again, slowly, and drops what is not what was stored.

A disk may return other bytes than it was given, and readers would find out one by one. Whatever fails is dropped, and filled
again when somebody asks for it; the log says what was wrong with it. A response that is being sent from the file goes on: its
reader checks all hashes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from enum import StrEnum
from io import FileIO

from kvcdn.access.tasks import beside
from kvcdn.edge.disk.storage import DiskCache, Entry, Harm
from kvcdn.edge.fills.inspection import BodyCheck, inspect_file
from kvcdn.edge.fills.revocations import Revoked
from kvcdn.edge.http.target import ObjectName
from kvcdn.edge.telemetry.metrics import Metrics
from kvcdn.edge.threads import in_thread
from kvcdn.errors import CorruptError, IntegrityError

PIECES_PER_SECOND = 20
"""Reads in which a second's worth of bytes is done. At the usual rate each takes some 0.15 ms of a core, and as much on the way
to a thread; with four a second, of 0.7 to 1.6 ms each, one in a hundred first bytes came later."""

MIN_PIECE_BYTES = 64 * 1024

MAX_PIECE_BYTES = 4 << 20
"""Bounds what is held in memory."""

REST_SECONDS = 1.0
"""Between two rounds, and after a file that could not be opened: a small cache is not read without a pause."""

log = logging.getLogger("kvcdn.edge.upkeep.scrub")


class Finding(StrEnum):
    """What became of one file."""

    SOUND = "sound"
    DAMAGED = "damaged"
    """Its bytes are not what was stored, or the disk does not give them."""
    GONE = "gone"
    """The file had vanished, or had another size."""


class Scrub:
    """Checks the files of a cache, `rate` bytes a second. For the event loop's thread; reads and hashes in others."""

    def __init__(self, cache: DiskCache, revoked: Revoked, metrics: Metrics, rate: int) -> None:
        self._cache, self._revoked, self._metrics, self._rate = cache, revoked, metrics, rate
        self._piece = min(max(rate // PIECES_PER_SECOND, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
        self._due = time.monotonic()
        """When the next byte may be read."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Scrubs while the context lasts; not at all where the rate is 0."""
        async with beside(self._scrub(), "scrub") if self._rate else contextlib.nullcontext():
            yield

    async def _scrub(self) -> None:
        while True:
            for key in self._cache.snapshot():
                try:
                    await self._check(key)
                except OSError as error:
                    log.warning("the scrub cannot open a file: %s", error.strerror)
                    await asyncio.sleep(REST_SECONDS)
            await asyncio.sleep(REST_SECONDS)

    async def _check(self, key: str) -> None:
        """Checks one object and drops it if need be. Raises OSError where the process has no file descriptors left."""
        if self._cache.size_of(key) is None:
            return
        opened = self._cache.peek(key)
        if opened is None:
            self._count(Finding.GONE)
            return
        name = ObjectName.from_path(f"/{key}")
        if name is None:
            raise AssertionError(f"{key} is in the index and names nothing")
        try:
            await self._read(name, opened.file, opened.entry)
        except (IntegrityError, OSError) as error:
            harm = Harm.of(error)
            self._cache.drop(key, opened.entry, harm, f"the scrub found it {harm}: {error}")
            self._count(Finding.DAMAGED)
        else:
            self._count(Finding.SOUND)
        finally:
            # At the edge's end a thread may still be reading: whatever it gets now, nobody looks at it.
            opened.file.close()

    async def _read(self, name: ObjectName, file: FileIO, entry: Entry) -> None:
        # The envelope is read once more with the pieces, which are what is paced.
        head = await in_thread(inspect_file, name, file, entry.size, self._revoked.trust)
        position = 0
        while position < entry.size:
            length = min(self._piece, entry.size - position)
            await self._wait(length)
            await in_thread(_check_piece, head.body, file, position, length)
            self._metrics.scrubbed_bytes.inc(length)
            position += length
        head.body.finish()
        entry.etag, entry.tokens = head.etag, head.tokens

    async def _wait(self, length: int) -> None:
        """Waits until `length` bytes more keep the rate."""
        now = time.monotonic()
        self._due = max(self._due, now) + length / self._rate
        await asyncio.sleep(self._due - now)

    def _count(self, finding: Finding) -> None:
        self._metrics.scrubbed.labels(finding).inc()


def _check_piece(body: BodyCheck, file: FileIO, position: int, length: int) -> None:
    data = os.pread(file.fileno(), length, position)
    if len(data) < length:
        raise CorruptError(f"the file ends at byte {position + len(data)}")
    body.update(data)
