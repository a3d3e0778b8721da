"""Transport: objects from an edge over HTTP, or from a store directly, read front to back in exact pieces.

Over HTTP a block is one GET on a connection of its own, and bytes are received into place. Where a prefix has more
blocks than is fair to hold connections for, blocks are read in ranges instead, over as many connections as there are
threads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

from kvcdn.client.connections import STALL_SECONDS, ConnectionPool, Exchange
from kvcdn.client.link import LinkEstimate, LinkMeter
from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import CorruptError, UnavailableError
from kvcdn.keys import block_key
from kvcdn.store import BlobStore

RANGE_BYTES = 1 << 20
"""Piece of a block read in ranges: a request costs some 0.4 ms, so smaller pieces would be mostly requests."""

MATCH_ADDRESSES = 4096
"""Addresses an edge accepts in one match (FORMAT.md section 7)."""

MATCH_REPLY_BYTES = 1 << 20


class ObjectReader(Protocol):
    """One object, front to back. Used by one thread at a time."""

    def read_exact(self, count: int, ahead: int = RANGE_BYTES) -> memoryview:
        """The next `count` bytes; valid until the next call. Raises CorruptError where the object ends before.

        `ahead` bytes from here on will be asked for without a gap: a hint of how much to read at once.
        """

    def skip(self, count: int) -> int:
        """Passes over the next `count` bytes and tells how many of them were received nevertheless."""

    def at_end(self) -> bool:
        """False where more bytes are known to follow."""

    def close(self) -> None:
        """Lets go of what the reader holds; may be called twice."""


class Source(Protocol):
    """Where blocks come from. Thread-safe. Failures are NotFoundError, UnavailableError or CorruptError."""

    @property
    def url(self) -> str: ...

    def match(self, tag: ModelTag, addresses: Sequence[Digest]) -> int:
        """How many of the block `addresses`, a chain, exist from its front."""

    def open(self, key: str, *, ranged: bool) -> ObjectReader:
        """A reader of the object `key`; `ranged` holds no connection between reads."""

    def read(self, key: str, limit: int) -> bytes:
        """The whole object `key`, of at most `limit` bytes."""

    def link(self) -> LinkEstimate:
        """How soon answers come from here and how fast bytes do, as measured so far."""

    def close(self) -> None: ...


class StoreSource:
    """Objects straight from a BlobStore: a folder, a bucket."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._meter = LinkMeter(store.url)

    @property
    def url(self) -> str:
        return self._store.url

    def match(self, tag: ModelTag, addresses: Sequence[Digest]) -> int:
        return probe_lead([block_key(tag, address) for address in addresses], lambda key: self._store.stat(key) is not None)

    def open(self, key: str, *, ranged: bool) -> ObjectReader:  # noqa: ARG002 - a store read holds nothing in between
        return _RangedReader(lambda start, length: self._read(key, start, length), key)

    def read(self, key: str, limit: int) -> bytes:
        data = self._read(key, 0, limit + 1)
        if len(data) > limit:
            raise CorruptError(f"{key} is larger than {limit} bytes")
        return data

    def _read(self, key: str, start: int, length: int) -> bytes:
        asked, data = time.monotonic(), b""
        pieces = self._store.stream(key, start, length)
        self._meter.answered(time.monotonic() - asked)
        self._meter.waiting()
        try:
            data = b"".join(pieces)
        finally:
            self._meter.received(len(data))
        return data

    def link(self) -> LinkEstimate:
        return self._meter.estimate()

    def close(self) -> None:
        """Remembers the link: a store holds nothing open."""
        self._meter.save(at_once=True)


def probe_lead(keys: Sequence[str], exists: Any) -> int:
    """How many of `keys` lead the chain, by bisection: where one exists, so do those before it (FORMAT.md section 7)."""
    low, high = 0, len(keys)
    while low < high:
        # The last key first: a published document is the common case, and one probe then tells.
        middle = high if low == 0 and high == len(keys) else (low + high + 1) // 2
        if exists(keys[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low


class EdgeSource:
    """Objects from a kvcdn edge, or from any web server over the same keys."""

    def __init__(self, url: str, token: str | None = None, *, stall_seconds: float = STALL_SECONDS) -> None:
        """`url` is http or https, with an optional path. Raises UsageError."""
        self._connections = ConnectionPool(url, token, stall_seconds)
        self.url = self._connections.url

    def match(self, tag: ModelTag, addresses: Sequence[Digest]) -> int:
        matched = 0
        for first in range(0, len(addresses), MATCH_ADDRESSES):
            part = addresses[first : first + MATCH_ADDRESSES]
            found = self._match_once(tag, part)
            matched += found
            if found < len(part):
                break
        return matched

    def _match_once(self, tag: ModelTag, addresses: Sequence[Digest]) -> int:
        body = json.dumps({"addresses": [str(address) for address in addresses], "model": str(tag)}).encode("ascii")
        with Exchange(self._connections, "POST", "/v1/match", body=body) as exchange:
            if exchange.status in (404, 405, 501):
                # Not an edge but a plain web server or CDN: ask for the blocks themselves.
                return probe_lead([block_key(tag, address) for address in addresses], self._exists)
            exchange.require(200, "match")
            reply = exchange.read_all(MATCH_REPLY_BYTES)
        try:
            matched = json.loads(reply)["matched"]
        except (ValueError, KeyError, TypeError):
            matched = None
        if not isinstance(matched, int) or isinstance(matched, bool) or not 0 <= matched <= len(addresses):
            raise UnavailableError(f"{self.url} answers a match with something that is not a count of blocks")
        return matched

    def _exists(self, key: str) -> bool:
        with Exchange(self._connections, "HEAD", f"/{key}") as exchange:
            if exchange.status == 404:  # noqa: PLR2004 - HTTP's own number
                return False
            exchange.require(200, key)
            return True

    def open(self, key: str, *, ranged: bool) -> ObjectReader:
        if ranged:
            return _RangedReader(lambda start, length: self._read_range(key, start, length), key)
        return _StreamReader(Exchange(self._connections, "GET", f"/{key}"), key)

    def read(self, key: str, limit: int) -> bytes:
        with Exchange(self._connections, "GET", f"/{key}") as exchange:
            exchange.require(200, key)
            return exchange.read_all(limit)

    def _read_range(self, key: str, start: int, length: int) -> bytes:
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        with Exchange(self._connections, "GET", f"/{key}", headers=headers) as exchange:
            if exchange.status == 416:  # noqa: PLR2004 - HTTP's own number
                return b""
            exchange.require(206, key)
            expected = f"bytes {start}-"
            if not exchange.header("Content-Range").startswith(expected):
                raise CorruptError(f"{self.url} answers a range of {key} that begins elsewhere than asked")
            return exchange.read_all(length)

    def link(self) -> LinkEstimate:
        return self._connections.link.estimate()

    def close(self) -> None:
        self._connections.close()


class _StreamReader:
    """One GET of a whole object; bytes are received into a buffer that is used again for every piece."""

    def __init__(self, exchange: Exchange, key: str) -> None:
        self._exchange = exchange
        self._key = key
        self._buffer = bytearray()
        self._checked = False
        self._closed = False

    def read_exact(self, count: int, ahead: int = RANGE_BYTES) -> memoryview:  # noqa: ARG002 - all of it is on its way
        if not self._checked:
            self._exchange.require(200, self._key)
            self._checked = True
        if len(self._buffer) < count:
            self._buffer = bytearray(count)
        view = memoryview(self._buffer)[:count]
        if self._exchange.read_into(view) < count:
            raise UnavailableError(f"{self._key} ended early: the edge or the link broke off")
        return view

    def skip(self, count: int) -> int:
        for done in range(0, count, RANGE_BYTES):
            self.read_exact(min(count - done, RANGE_BYTES))
        return count

    def at_end(self) -> bool:
        return self._exchange.body_left == 0

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._exchange.close()


class _RangedReader:
    """An object read in ranges of RANGE_BYTES or what is wanted; what was read too far is kept for the next call."""

    def __init__(self, read: Any, key: str) -> None:
        self._read = read
        self._key = key
        self._buffer = memoryview(b"")
        self._position = 0

    def read_exact(self, count: int, ahead: int = RANGE_BYTES) -> memoryview:
        missing = count - len(self._buffer)
        if missing > 0:
            piece = self._read(self._position, max(missing, min(ahead - len(self._buffer), RANGE_BYTES)))
            self._position += len(piece)
            self._buffer = memoryview(b"".join((self._buffer, piece)))
            if len(self._buffer) < count:
                raise CorruptError(f"{self._key} is truncated: it ends before its header says")
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def skip(self, count: int) -> int:
        received = min(count, len(self._buffer))
        self._buffer, self._position = self._buffer[received:], self._position + count - received
        return received

    def at_end(self) -> bool:
        return not self._buffer

    def close(self) -> None:
        self._buffer = memoryview(b"")
