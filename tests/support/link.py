"""A link in the process: a source over a store whose bytes come as fast as told, stop coming, or end in an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvcdn.client.network.link import LinkEstimate
from kvcdn.client.sources.source import ObjectReader
from kvcdn.client.sources.stored import StoreSource
from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import UnavailableError
from kvcdn.store import BlobStore


class SlowLink:
    """A Source. `bytes_per_s` None is at once; from `until` bytes on the link `dies` or, without a word, stalls."""

    def __init__(
        self,
        store: BlobStore,
        *,
        bytes_per_s: float | None = None,
        until: int | None = None,
        dies: bool = False,
        known: LinkEstimate | None = None,
    ) -> None:
        self._source = StoreSource(store)
        self._bytes_per_s = bytes_per_s
        self._until = until
        self._dies = dies
        self._known = known or LinkEstimate()
        self._lock = threading.Condition()
        self._allowed: float | None = None
        self._due = 0.0
        self.passed = 0
        self.readers = 0
        """Readers that were opened and not closed."""

    @property
    def url(self) -> str:
        return "memory:"

    def match(self, tag: ModelTag, addresses: Sequence[Digest]) -> int:
        return self._source.match(tag, addresses)

    def open(self, key: str, *, ranged: bool) -> _Reader:
        with self._lock:
            self.readers += 1
        return _Reader(self, self._source.open(key, ranged=ranged))

    def read(self, key: str, limit: int) -> bytes:
        return self._source.read(key, limit)

    def link(self) -> LinkEstimate:
        return self._known

    def session(self, limit_s: float | None = None) -> SlowSession:
        return SlowSession(self)

    def close(self) -> None:
        """Nothing is held."""

    def hold(self, count: int = 0) -> None:
        """From now on only `count` bytes pass, until more are let through."""
        with self._lock:
            self._allowed = self.passed + count

    def let_through(self, count: int) -> None:
        """So many more bytes pass."""
        with self._lock:
            self._allowed = (self._allowed or 0) + count
            self._lock.notify_all()

    def take(self, count: int, reader: _Reader) -> None:
        """Waits until `count` bytes have passed, as the link is."""
        with self._lock:
            while self._allowed is not None and self.passed + count > self._allowed and not reader.aborted:
                self._lock.wait(0.05)
            stopped = self._until is not None and self.passed + count > self._until
            while stopped and not self._dies and not reader.aborted:
                self._lock.wait(0.05)
            if stopped or reader.aborted:
                raise UnavailableError("the link is gone")
            self.passed += count
            now = time.perf_counter()
            self._due = max(self._due, now) + (count / self._bytes_per_s if self._bytes_per_s else 0.0)
            wait = self._due - now
        if wait > 0:
            reader.event.wait(wait)

    def wake(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def closed(self) -> None:
        with self._lock:
            self.readers -= 1


class SlowSession:
    """The link for one prompt."""

    def __init__(self, link: SlowLink) -> None:
        self._link = link
        self._readers: list[_Reader] = []
        self.url, self.match, self.read, self.link = link.url, link.match, link.read, link.link
        self.cut_short = ""

    def open(self, key: str, *, ranged: bool) -> ObjectReader:
        reader = self._link.open(key, ranged=ranged)
        self._readers.append(reader)
        return reader

    def session(self, limit_s: float | None = None) -> SlowSession:
        return SlowSession(self._link)

    def failing_s(self) -> float:
        return 0.0

    def hurry(self, failing_s: float) -> None:
        """Nothing is tried again."""

    def abort(self) -> None:
        for reader in self._readers:
            reader.abort()

    def close(self) -> None:
        """Nothing is held."""


class _Reader:
    def __init__(self, link: SlowLink, reader: ObjectReader) -> None:
        self._link, self._reader = link, reader
        self.event = threading.Event()
        self._open = True

    @property
    def aborted(self) -> bool:
        return self.event.is_set()

    def read_exact(self, count: int, ahead: int = 1 << 20) -> memoryview:
        self._link.take(count, self)
        return self._reader.read_exact(count, ahead)

    def skip(self, count: int) -> int:
        return self._reader.skip(count)

    def at_end(self) -> bool:
        return self._reader.at_end()

    def abort(self) -> None:
        self.event.set()
        self._link.wake()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._link.closed()
            self._reader.close()
