"""A store as a source: blocks straight from a folder or a bucket, in as few requests as memory allows.

A store's reads cannot be ended from outside, and a bucket's may hang for half a minute. So each reader has a thread of its own
that reads ahead, a few pieces at most; who stops waiting for it leaves it to end by itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from kvcdn.client.network.link import LinkEstimate, LinkMeter
from kvcdn.client.network.patience import STOPPED, Patience, StoppedError
from kvcdn.client.network.tally import Tally
from kvcdn.client.sources.source import RANGE_BYTES, OpenSource, Session, probe_lead
from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import CorruptError, KvcdnError, UnavailableError
from kvcdn.keys import block_key
from kvcdn.store import BlobStore

AHEAD_PIECES = 4
"""Pieces of at most STREAM_CHUNK_BYTES that a stream keeps for its reader."""

LARGEST_RANGE_BYTES = 8 << 20
"""Of a request for a part of a block: a bucket bills by the request, and a block has 8 to 16 MB."""

RANGES_TOGETHER_BYTES = 256 << 20
"""What all readers by range may hold: with many of them each asks for less at once."""

CLOSE_SECONDS = 0.05
"""How long a reader waits for its thread's end, which is at once unless the store is silent."""


class StoreSource(OpenSource):
    """Objects straight from a BlobStore: a folder, a bucket."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._meter = LinkMeter(store.url)

    @property
    def url(self) -> str:
        return self._store.url

    def session(self, limit_s: float | None = None, tally: Tally | None = None) -> Session:
        return _StoreSession(self._store, self._meter, Patience.of_prompt(limit_s, tally=tally))

    def link(self) -> LinkEstimate:
        return self._meter.estimate()

    def close(self) -> None:
        """Remembers the link: a store holds nothing open."""
        self._meter.save(at_once=True)


class _StoreSession:
    """A store for one prompt."""

    def __init__(self, store: BlobStore, meter: LinkMeter, patience: Patience) -> None:
        self._store, self._meter, self._patience = store, meter, patience
        self.cut_short = ""  # a store knows what it has

    @property
    def url(self) -> str:
        return self._store.url

    def match(self, tag: ModelTag, addresses: Sequence[Digest]) -> int:
        def exists(key: str) -> bool:
            self._patience.check()
            return self._store.stat(key) is not None

        return probe_lead([block_key(tag, address) for address in addresses], exists)

    def open(self, key: str, *, ranged: bool) -> StoreReader:
        if not ranged:
            return StoreReader(self._store, self._meter, self._patience, key, None)
        return StoreReader(self._store, self._meter, self._patience, key, self._range_bytes)

    def read(self, key: str, limit: int) -> bytes:
        reader = self.open(key, ranged=False)
        try:
            return reader.read_whole(limit)
        finally:
            reader.close()

    def _range_bytes(self) -> int:
        # Each reader that is open has a part of our patience.
        fair = RANGES_TOGETHER_BYTES // max(self._patience.watched, 1)
        return min(max(fair, RANGE_BYTES), LARGEST_RANGE_BYTES)

    def link(self) -> LinkEstimate:
        return self._meter.estimate()

    def session(self, limit_s: float | None = None, tally: Tally | None = None) -> Session:  # noqa: ARG002 - the whole's
        return _StoreSession(self._store, self._meter, self._patience.part(limit_s))

    def failing_s(self) -> float:
        """A store tries again by itself, and does not tell."""
        return 0.0

    def hurry(self, failing_s: float) -> None:
        """A store's retries are its own."""

    def abort(self) -> None:
        self._patience.abort()

    def close(self) -> None:
        """Nothing is held between reads."""


class StoreReader:
    """One object of a store: one stream, or a stream for each range."""

    def __init__(
        self, store: BlobStore, meter: LinkMeter, patience: Patience, key: str, range_bytes: Callable[[], int] | None
    ) -> None:
        """`range_bytes` tells how much to ask for at once; without it the whole object is streamed."""
        self._store, self._meter, self._key = store, meter, key
        self._whole, self._patience = patience, patience.part()
        self._range_bytes = range_bytes
        self._position = 0
        self._rest = memoryview(b"")
        self._buffer = bytearray()
        self._ahead: _ReadAhead | None = None
        if range_bytes is None:
            self._ahead = self._read_ahead(None)

    def read_exact(self, count: int, ahead: int = RANGE_BYTES) -> memoryview:
        if len(self._buffer) < count:
            self._buffer = bytearray(count)
        view, done = memoryview(self._buffer)[:count], 0
        while done < count:
            if not self._rest and not self._more(count - done, ahead - done):
                raise CorruptError(f"{self._key} is truncated: it ends before its header says")
            taken = min(len(self._rest), count - done)
            view[done : done + taken] = self._rest[:taken]
            self._rest, done, self._position = self._rest[taken:], done + taken, self._position + taken
        return view

    def read_whole(self, limit: int) -> bytes:
        """The object, of at most `limit` bytes."""
        pieces: list[memoryview] = []
        while self._more(limit, limit) and self._position <= limit:
            pieces.append(self._rest)
            self._position += len(self._rest)
        if self._position > limit:
            raise CorruptError(f"{self._key} is larger than {limit} bytes")
        return b"".join(pieces)

    def skip(self, count: int) -> int:
        if self._range_bytes is None:
            for done in range(0, count, RANGE_BYTES):
                self.read_exact(min(count - done, RANGE_BYTES))
            return count
        received = min(count, len(self._rest))
        self._rest, self._position = self._rest[received:], self._position + count
        if received < count:
            self._stop()
        return received

    def at_end(self) -> bool:
        if self._rest or self._ahead is None:
            return not self._rest
        try:
            # Of a range only what has been asked for: more requests would tell more, and cost more.
            self._rest = memoryview(self._ahead.take() or b"")
        except UnavailableError:
            return True
        return not self._rest

    def abort(self) -> None:
        self._patience.abort()

    def close(self) -> None:
        self._stop()
        self._rest = memoryview(b"")
        self._whole.forget(self._patience)

    def _more(self, missing: int, ahead: int) -> bool:
        """Waits for the next piece; False at the object's end."""
        if self._ahead is None:
            if self._range_bytes is None:
                raise UnavailableError(f"{self._key} was closed")
            self._ahead = self._read_ahead(max(missing, min(ahead, self._range_bytes())))
        piece = self._ahead.take()
        if piece is None and self._ahead.fulfilled:
            self._ahead = None
            return self._more(missing, ahead)
        self._rest = memoryview(piece or b"")
        return piece is not None

    def _read_ahead(self, length: int | None) -> _ReadAhead:
        return _ReadAhead(self._store, self._meter, self._patience, self._key, self._position, length)

    def _stop(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()


class _ReadAhead:
    """A thread that reads a span of an object; all of it where it is a range, a few pieces ahead where it is the whole."""

    def __init__(
        self, store: BlobStore, meter: LinkMeter, patience: Patience, key: str, start: int, length: int | None
    ) -> None:
        self._store, self._meter, self._patience = store, meter, patience
        self._tally = patience.budget.tally
        self._span = (key, start, length)
        self._received = 0
        self._pieces: deque[bytes] = deque()
        self._error: KvcdnError | None = None
        self._ended = self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="kvcdn-read-ahead", daemon=True)
        patience.watch(self)
        self._thread.start()

    def take(self) -> bytes | None:
        """The next piece, waited for; None at the end. Raises what the store did, or StoppedError."""
        with self._changed:
            while not self._pieces and not self._ended and not self._stopped:
                if not self._changed.wait(min(self._patience.left(), threading.TIMEOUT_MAX)):
                    self._patience.check()
            if self._stopped:
                raise StoppedError(STOPPED)
            if self._pieces:
                self._changed.notify_all()
                return self._pieces.popleft()
            if self._error is not None:
                raise self._error
            return None

    @property
    def fulfilled(self) -> bool:
        """Whether as much came as was asked for, so that more may follow."""
        return self._received == self._span[2]

    def abort(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Lets go of it; it ends by itself, at once unless the store is silent."""
        self.abort()
        self._patience.forget(self)
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        try:
            self._read()
        except KvcdnError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader must not wait for this thread for ever
            self._error = UnavailableError(f"{self._store.url}: {self._span[0]} could not be read: {error!r}")
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _read(self) -> None:
        asked = time.monotonic()
        if self._tally is not None:
            self._tally.asked_origin()
        pieces = self._store.stream(*self._span)
        self._meter.answered(time.monotonic() - asked)
        try:
            while self._has_room() and (piece := self._next(pieces)):
                with self._changed:
                    self._received += len(piece)
                    self._pieces.append(piece)
                    self._changed.notify_all()
        finally:
            if isinstance(pieces, Generator):
                pieces.close()

    def _next(self, pieces: Iterator[bytes]) -> bytes:
        piece = b""
        self._meter.waiting()
        try:
            piece = next(pieces, b"")
        finally:
            self._meter.received(len(piece))
            if self._tally is not None:
                self._tally.from_origin(len(piece))
        return piece

    def _has_room(self) -> bool:
        """Waits until the reader wants more; False where it wants nothing any more."""
        with self._changed:
            while self._span[2] is None and len(self._pieces) >= AHEAD_PIECES and not self._stopped:
                self._changed.wait()
            return not self._stopped
