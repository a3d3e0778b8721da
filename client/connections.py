"""Connections to one HTTP server: a pool of them, and one request with its response on one of them."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urlsplit

from kvcdn.client.link import LinkMeter
from kvcdn.errors import CorruptError, NotFoundError, UnavailableError, UsageError

CONNECT_SECONDS = 5.0
STALL_SECONDS = 15.0
"""Longest silence of a peer before it counts as gone."""

PIECE_BYTES = 256 * 1024
"""A body is received in pieces of this size, each of which is told to the link's meter."""

_WAITED_SHARE = 0.2
"""An answer that had been waited for less than this part of the time since its request was there before anybody looked."""

_IDLE_CONNECTIONS = 32
"""Connections kept for the next prompt."""


class ConnectionPool:
    """Keep-alive connections to the server at `url`. Thread-safe; the token never shows in `url` or a repr."""

    def __init__(self, url: str, token: str | None, stall_seconds: float) -> None:
        """`url` is http or https, with an optional path. Raises UsageError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
            raise UsageError(f"{url} is not the URL of an edge", hint="it looks like http://127.0.0.1:8400")
        self.url = url.rstrip("/")
        self._parts = parts
        self._base = parts.path.rstrip("/")
        self._stall_seconds = stall_seconds
        self._headers = {"User-Agent": "kvcdn"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self.link = LinkMeter(self.url)

    def take(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before and may therefore have been closed by the peer."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        host, port = str(self._parts.hostname), self._parts.port
        if self._tls:
            return http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=self._tls), False
        return http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS), False

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """Keeps a connection whose last response was read to its end."""
        with self._lock:
            if len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()

    def send(self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, headers: Any) -> None:
        """Sends a request on a connection of ours, connecting first where it is new. Raises OSError or HTTPException."""
        if connection.sock is None:
            _connect(connection, self._stall_seconds)
        connection.request(method, self._base + path, body=body, headers={**self._headers, **(headers or {})})

    def close(self) -> None:
        """Closes what is idle, and remembers the link."""
        self.link.save(at_once=True)
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _connect(connection: http.client.HTTPConnection, stall_seconds: float) -> None:
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sock.settimeout(stall_seconds)


class Exchange:
    """One request, sent at once, and its response, awaited at first use.

    A context manager: leaving it returns the connection, if the response was read to its end, and closes it otherwise.
    """

    def __init__(self, pool: ConnectionPool, method: str, path: str, *, body: bytes | None = None, headers: Any = None) -> None:
        self._pool = pool
        self._request = (method, path, body, headers)
        self._sent = 0.0
        self._response: http.client.HTTPResponse | None = None
        self._connection, self._reused = pool.take()
        self._send()

    def _send(self) -> None:
        while True:
            try:
                self._pool.send(self._connection, *self._request)
                self._sent = time.monotonic()
                return
            except (OSError, http.client.HTTPException) as error:
                self._renew(error)

    def _renew(self, error: BaseException) -> None:
        """Another connection, where the one that failed was an old one. Raises UnavailableError otherwise."""
        self._connection.close()
        if not self._reused or isinstance(error, TimeoutError):
            reason = "no answer in time" if isinstance(error, TimeoutError) else (str(error) or type(error).__name__)
            raise UnavailableError(
                f"{self._pool.url} cannot be reached: {reason}", hint="is the edge running, and is its address right?"
            ) from None
        self._connection, self._reused = self._pool.take()

    def _answer(self) -> http.client.HTTPResponse:
        while self._response is None:
            asked = time.monotonic()
            try:
                self._response = self._connection.getresponse()
                now = time.monotonic()
                if now - asked > _WAITED_SHARE * (now - self._sent):
                    self._pool.link.answered(now - self._sent)
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
            raise NotFoundError(f"{self._pool.url} has no {what}")
        if self.status in (401, 403):
            raise UnavailableError(
                f"{self._pool.url} refuses us ({self.status})", hint="set a valid token: --token or KVCDN_TOKEN"
            )
        raise UnavailableError(f"{self._pool.url} answers {self.status} {self._answer().reason} for {what}")

    def read_into(self, view: memoryview) -> int:
        """Fills `view` from the body; the count is less only at the body's end."""
        response, done = self._answer(), 0
        try:
            while done < len(view):
                count = self._receive(response, view[done : done + PIECE_BYTES])
                if not count:
                    break
                done += count
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self._pool.url} broke off in mid-answer: {error or type(error).__name__}") from None
        return done

    def _receive(self, response: http.client.HTTPResponse, view: memoryview) -> int:
        link, count = self._pool.link, 0
        link.waiting()
        try:
            count = response.readinto(view)
        finally:
            link.received(count)
        return count

    def read_all(self, limit: int) -> bytes:
        """The whole body, of at most `limit` bytes. Raises CorruptError for a larger or shorter one than announced."""
        buffer = bytearray(min(limit + 1, self._length(limit)))
        with memoryview(buffer) as view:
            count = self.read_into(view)
        if count > limit:
            raise CorruptError(f"{self._pool.url} sends more than {limit} bytes for {self._request[1]}")
        if self.body_left:
            raise UnavailableError(f"{self._pool.url} ended its answer {self.body_left} bytes early")
        return bytes(buffer[:count])

    def _length(self, limit: int) -> int:
        length = self._answer().length
        return limit + 1 if length is None else length + 1

    def close(self) -> None:
        """Returns the connection if it can be used again."""
        response = self._response
        self._pool.link.save()
        if response is not None and response.isclosed() and not response.will_close:
            self._pool.give_back(self._connection)
        else:
            self._connection.close()
        if response is not None:
            with suppress(OSError, http.client.HTTPException):
                response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
