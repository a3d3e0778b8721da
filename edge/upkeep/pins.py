"""Pins: documents that stay in the cache whatever else is asked for, until somebody unpins or purges them.

A pin is a manifest and the blocks that it lists. It counts against the capacity, of which all pins together take half at most,
so that the rest goes on being a cache. Pins are on disk, durably, before they are promised; what a damaged disk loses of their
objects is fetched again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvcdn.digest import Digest
from kvcdn.edge.disk.eviction import charge
from kvcdn.edge.disk.storage import DiskCache
from kvcdn.edge.http.body import read_fields
from kvcdn.edge.http.target import ObjectName
from kvcdn.edge.threads import in_thread
from kvcdn.errors import CorruptError

PIN_SHARE = 0.5
"""Of the capacity, for all pins together."""

MAX_PINS = 10_000
"""Documents; a list of them has some 2 MB."""

MAX_PINNED_OBJECTS = 262_144
"""Bounds what pins take in memory, some 60 MB, and on disk."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pins (manifest TEXT PRIMARY KEY, since REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS objects (
    manifest TEXT NOT NULL, key TEXT NOT NULL, size INTEGER NOT NULL, PRIMARY KEY (manifest, key)
) WITHOUT ROWID;
"""

log = logging.getLogger("kvcdn.edge.upkeep.pins")


@dataclass(frozen=True)
class Pin:
    """One document."""

    manifest: str
    """The manifest's object key."""
    since: float
    """Unix time in seconds."""
    sizes: Mapping[str, int] = field(repr=False)
    """Of all its objects, the manifest included, by object key."""

    @property
    def charged(self) -> int:
        """Bytes of disk."""
        return sum(map(charge, self.sizes.values()))


@dataclass(frozen=True)
class UnpinRequest:
    """What is to be pinned no more: the documents of these manifests, or all."""

    manifests: frozenset[str] = frozenset()
    all: bool = False

    @classmethod
    def parse(cls, body: bytes) -> UnpinRequest:
        """Reads the JSON of a request, which has one field. Raises CorruptError for anything else."""
        fields = read_fields(body, "unpin request")
        if fields.names == ("manifests",):
            values = fields.array("manifests", 1, MAX_PINS)
            return cls(manifests=frozenset(str(Digest.parse(value, "unpin request: manifest")) for value in values))
        if fields.names == ("all",) and fields.any("all") is True:
            return cls(all=True)
        raise CorruptError("unpin request: has one field, which is manifests, or all with the value true")

    def covers(self, key: str) -> bool:
        return self.all or key[-64:] in self.manifests


class Pins:
    """The pins of a cache. For the event loop's thread."""

    def __init__(self, cache: DiskCache) -> None:
        """Reads what an earlier process pinned; what is more than fits now, the latest first, is pinned no more."""
        self._cache = cache
        self._path = cache.folder / "pins"
        self.limit = int(cache.capacity * PIN_SHARE)
        self._pins: dict[str, Pin] = {}
        self._uses: Counter[str] = Counter()
        self._sizes: dict[str, int] = {}
        self.used = 0
        """Bytes of disk charged, each object once."""
        for pin in self._load():
            if self._room_for(pin):
                self._take(pin)
            else:
                log.warning("%s is pinned no more: pins take %d bytes at most", pin.manifest, self.limit)

    def __len__(self) -> int:
        return len(self._pins)

    def missing(self) -> list[str]:
        """Keys of what is pinned and not here."""
        return [key for key in self._uses if self._cache.size_of(key) is None]

    async def add(self, manifest: ObjectName, sizes: Mapping[str, int]) -> bool:
        """Pins a document, durably; False where there is no room for it beside other pins. Raises OSError of the disk."""
        old = self._pins.get(manifest.key)
        if old is not None and old.sizes == sizes:
            return True
        pin = Pin(manifest.key, time.time(), dict(sizes))
        if not self._room_for(pin):
            return False
        # Taken before the disk has it, so that no other order is promised the same room meanwhile.
        self._take(pin)
        try:
            await in_thread(self._write, pin)
        except OSError:
            self._drop(pin.manifest)
            raise
        return True

    async def remove(self, chosen: Callable[[Pin], bool]) -> int:
        """Unpins the documents that are `chosen`, durably; how many. Raises OSError of the disk, and then none is unpinned."""
        gone = [pin.manifest for pin in self._pins.values() if chosen(pin)]
        if gone:
            await in_thread(self._erase, gone)
            for manifest in gone:
                self._drop(manifest)
        return len(gone)

    def encode(self, visible: Callable[[str], bool]) -> bytes:
        """JSON: the pins whose object keys are `visible`, oldest first, and how much room all pins take."""
        listed = [
            {
                "model": pin.manifest[3:35],
                "manifest": pin.manifest[-64:],
                "objects": len(pin.sizes),
                "here": sum(self._cache.size_of(key) is not None for key in pin.sizes),
                "bytes": sum(pin.sizes.values()),
                "since": round(pin.since, 3),
            }
            for pin in self._pins.values()
            if visible(pin.manifest)
        ]
        return json.dumps({"pins": listed, "bytes": self.used, "limit": self.limit}).encode("ascii")

    def _room_for(self, pin: Pin) -> bool:
        new = {key: size for key, size in pin.sizes.items() if key not in self._uses}
        return (
            self.used + sum(map(charge, new.values())) <= self.limit
            and len(self._uses) + len(new) <= MAX_PINNED_OBJECTS
            and len(self._pins) < MAX_PINS
        )

    def _take(self, pin: Pin) -> None:
        self._drop(pin.manifest)
        self._pins[pin.manifest] = pin
        for key, size in pin.sizes.items():
            if not self._uses[key]:
                self._sizes[key] = size
                self.used += charge(size)
                self._cache.pin(key)
            self._uses[key] += 1

    def _drop(self, manifest: str) -> None:
        pin = self._pins.pop(manifest, None)
        for key in pin.sizes if pin is not None else ():
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self.used -= charge(self._sizes.pop(key))
                self._cache.unpin(key)

    def _load(self) -> list[Pin]:
        if not self._path.exists():
            return []
        try:
            with self._open() as database:
                rows = database.execute(
                    "SELECT manifest, since, key, size FROM pins JOIN objects USING (manifest) ORDER BY since, manifest"
                ).fetchall()
        except OSError as error:
            log.warning("pins are lost, and are taken anew: %s", error)
            for suffix in ("", "-journal"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            return []
        found: dict[tuple[str, float], dict[str, int]] = {}
        for manifest, since, key, size in rows:
            found.setdefault((manifest, since), {})[key] = size
        return [Pin(manifest, since, sizes) for (manifest, since), sizes in found.items()]

    def _write(self, pin: Pin) -> None:
        with self._open() as database:
            database.execute("DELETE FROM objects WHERE manifest = ?", (pin.manifest,))
            database.execute("INSERT OR REPLACE INTO pins VALUES (?, ?)", (pin.manifest, pin.since))
            rows = [(pin.manifest, key, size) for key, size in pin.sizes.items()]
            database.executemany("INSERT INTO objects VALUES (?, ?, ?)", rows)

    def _erase(self, manifests: list[str]) -> None:
        with self._open() as database:
            for table in ("pins", "objects"):
                database.executemany(f"DELETE FROM {table} WHERE manifest = ?", [(one,) for one in manifests])  # noqa: S608 - ours

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """The database, in one durable transaction. Raises OSError."""
        try:
            with contextlib.closing(sqlite3.connect(self._path)) as database, database:
                database.execute("PRAGMA synchronous = FULL")
                database.executescript(_SCHEMA)
                yield database
        except sqlite3.Error as error:
            raise OSError(errno.EIO, f"{self._path}: {error}") from None
