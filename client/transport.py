"""Transport: objects from an edge over HTTP, or from a store directly, read front to back in exact pieces.

Over HTTP a block is one GET on a connection of its own, and bytes are received into place. Where a prefix has more
blocks than is fair to hold connections for, blocks are read in ranges instead, over as many connections as there are
threads.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, Self
from urllib.parse import SplitResult, urlsplit

from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import CorruptError, NotFoundError, UnavailableError, UsageError
from kvcdn.keys import block_key
from kvcdn.store import BlobStore

CONNECT_SECONDS = 5.0
STALL_SECONDS = 15.0
"""Longest silence of a peer before it counts as gone."""

RANGE_BYTES = 1 << 20
"""Piece of a block read in ranges: a request costs some 0.4 ms, so smaller pieces would be mostly requests."""

MATCH_ADDRESSES = 4096
"""Addresses an edge accepts in one match (FORMAT.md section 7)."""

MATCH_REPLY_BYTES = 1 << 20

_IDLE_CONNECTIONS = 32
"""Connections kept for the next prompt."""


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

    def close(self) -> None: ...


class StoreSource:
    """Objects straight from a BlobStore: a folder, a bucket."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store

    @property
    def url(self) -> str:
        return self._store.url

    def match(self, tag: ModelTag, addresses: Sequence[Digest]) -> int:
        return probe_lead([block_key(tag, address) for address in addresses], lambda key: self._store.stat(key) is not None)

    def open(self, key: str, *, ranged: bool) -> ObjectReader:  # noqa: ARG002 - a store read holds nothing in between
        return _RangedReader(lambda start, length: self._store.read(key, start, length), key)

    def read(self, key: str, limit: int) -> bytes:
        data = self._store.read(key, 0, limit + 1)
        if len(data) > limit:
            raise CorruptError(f"{key} is larger than {limit} bytes")
        return data

    def close(self) -> None:
        """A store holds nothing open."""


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
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
            raise UsageError(f"{url} is not the URL of an edge", hint="it looks like http://127.0.0.1:8400")
        self.url = url.rstrip("/")
        self._parts: SplitResult = parts
        self._base = parts.path.rstrip("/")
        self._stall_seconds = stall_seconds
        self._headers = {"User-Agent": "kvcdn"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

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
        with Exchange(self, "POST", "/v1/match", body=body) as exchange:
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
        with Exchange(self, "HEAD", f"/{key}") as exchange:
            if exchange.status == 404:  # noqa: PLR2004 - HTTP's own number
                return False
            exchange.require(200, key)
            return True

    def open(self, key: str, *, ranged: bool) -> ObjectReader:
        if ranged:
            return _RangedReader(lambda start, length: self._read_range(key, start, length), key)
        return _StreamReader(Exchange(self, "GET", f"/{key}"), key)

    def read(self, key: str, limit: int) -> bytes:
        with Exchange(self, "GET", f"/{key}") as exchange:
            exchange.require(200, key)
            return exchange.read_all(limit)

    def _read_range(self, key: str, start: int, length: int) -> bytes:
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        with Exchange(self, "GET", f"/{key}", headers=headers) as exchange:
            if exchange.status == 416:  # noqa: PLR2004 - HTTP's own number
                return b""
            exchange.require(206, key)
            expected = f"bytes {start}-"
            if not exchange.header("Content-Range").startswith(expected):
                raise CorruptError(f"{self.url} answers a range of {key} that begins elsewhere than asked")
            return exchange.read_all(length)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # -- connections, used by Exchange ------------------------------------------------------------------------------------

    def take_connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before and may therefore have been closed by the peer."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        host, port = str(self._parts.hostname), self._parts.port
        if self._tls:
            return http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=self._tls), False
        return http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS), False

    def return_connection(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()

    def send(self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, headers: Any) -> None:
        if connection.sock is None:
            _connect(connection, self._stall_seconds)
        connection.request(method, self._base + path, body=body, headers={**self._headers, **(headers or {})})


def _connect(connection: http.client.HTTPConnection, stall_seconds: float) -> None:
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sock.settimeout(stall_seconds)


class Exchange:
    """One request, sent at once, and its response, awaited at first use.

    A context manager: leaving it returns the connection, if the response was read to its end, and closes it otherwise.
    """

    def __init__(self, edge: EdgeSource, method: str, path: str, *, body: bytes | None = None, headers: Any = None) -> None:
        self._edge = edge
        self._request = (method, path, body, headers)
        self._response: http.client.HTTPResponse | None = None
        self._connection, self._reused = edge.take_connection()
        self._send()

    def _send(self) -> None:
        while True:
            try:
                self._edge.send(self._connection, *self._request)
                return
            except (OSError, http.client.HTTPException) as error:
                self._renew(error)

    def _renew(self, error: BaseException) -> None:
        """Another connection, where the one that failed was an old one. Raises UnavailableError otherwise."""
        self._connection.close()
        if not self._reused or isinstance(error, TimeoutError):
            reason = "no answer in time" if isinstance(error, TimeoutError) else (str(error) or type(error).__name__)
            raise UnavailableError(
                f"{self._edge.url} cannot be reached: {reason}", hint="is the edge running, and is its address right?"
            ) from None
        self._connection, self._reused = self._edge.take_connection()

    def _answer(self) -> http.client.HTTPResponse:
        while self._response is None:
            try:
                self._response = self._connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self._renew(error)
                self._send()
        return self._response

    @property
    def status(self) -> int:
        return self._answer().status

    def header(self, name: str) -> str:
        return self._answer().getheader(name, "")

    @property
    def body_left(self) -> int:
        """Bytes of the body that were announced and not read; 0 where the length was not announced."""
        return self._answer().length or 0

    def require(self, status: int, what: str) -> None:
        """Raises NotFoundError or UnavailableError unless the answer has `status`."""
        if self.status == status:
            return
        if self.status == 404:  # noqa: PLR2004 - HTTP's own number
            raise NotFoundError(f"{self._edge.url} has no {what}")
        if self.status in (401, 403):
            raise UnavailableError(
                f"{self._edge.url} refuses us ({self.status})", hint="set a valid token: --token or KVCDN_TOKEN"
            )
        raise UnavailableError(f"{self._edge.url} answers {self.status} {self._answer().reason} for {what}")

    def read_into(self, view: memoryview) -> int:
        """Fills `view` from the body; the count is less only at the body's end."""
        response, done = self._answer(), 0
        try:
            while done < len(view):
                count = response.readinto(view[done:])
                if not count:
                    break
                done += count
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self._edge.url} broke off in mid-answer: {error or type(error).__name__}") from None
        return done

    def read_all(self, limit: int) -> bytes:
        """The whole body, of at most `limit` bytes. Raises CorruptError for a larger or shorter one than announced."""
        buffer = bytearray(min(limit + 1, self._length(limit)))
        with memoryview(buffer) as view:
            count = self.read_into(view)
        if count > limit:
            raise CorruptError(f"{self._edge.url} sends more than {limit} bytes for {self._request[1]}")
        if self.body_left:
            raise UnavailableError(f"{self._edge.url} ended its answer {self.body_left} bytes early")
        return bytes(buffer[:count])

    def _length(self, limit: int) -> int:
        length = self._answer().length
        return limit + 1 if length is None else length + 1

    def close(self) -> None:
        """Returns the connection if it can be used again."""
        response = self._response
        if response is not None and response.isclosed() and not response.will_close:
            self._edge.return_connection(self._connection)
        else:
            self._connection.close()
        if response is not None:
            with suppress(OSError, http.client.HTTPException):
                response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
