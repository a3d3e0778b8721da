"""Heads: the head of an answer has to be here within a time, however it comes.

A socket's limit is one of silence: a server that drips header fields, or says 100 (RFC 9110 section 15.2.1) again and again,
would hold its reader's thread as long as it likes. So another thread, which lives while answers are waited for, looks once a
second and ends the connection of what is late: its reader then sees what it sees of a server that hangs up.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

LOOK_SECONDS = 1.0

IDLE_LOOKS = 60
"""After so many looks at nothing the thread ends: to start it is felt by who waits for a first byte."""

_late = threading.Lock()
_waited: dict[int, tuple[float, socket.socket]] = {}
"""When which connection's head is late, on the monotonic clock."""

_looking: list[threading.Thread] = []


def bound_heads(pools: urllib3.PoolManager) -> None:
    """Has the connections of `pools` wait for a head no longer than for any of its bytes."""
    pools.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}


@contextlib.contextmanager
def _within(connection: HTTPConnection) -> Iterator[None]:
    sock, seconds = connection.sock, connection.timeout
    if not isinstance(sock, socket.socket) or not isinstance(seconds, int | float):
        yield
        return
    with _late:
        _waited[id(sock)] = time.monotonic() + seconds, sock
        if not _looking:
            _looking.append(threading.Thread(target=_look, name="kvcdn-heads", daemon=True))
            _looking[0].start()
    try:
        yield
    finally:
        with _late:
            _waited.pop(id(sock), None)


def _look() -> None:
    idle = 0
    while True:
        time.sleep(LOOK_SECONDS)
        with _late:
            now = time.monotonic()
            for deadline, sock in _waited.values():
                if now > deadline:
                    # The plain socket's: of an encrypted one its thread may be in the midst of a record.
                    with contextlib.suppress(OSError):
                        socket.socket.shutdown(sock, socket.SHUT_RDWR)
            idle = 0 if _waited else idle + 1
            if idle > IDLE_LOOKS:
                _looking.clear()
                return


class _Response(http.client.HTTPResponse):
    """An answer, behind whatever is said before it: the library passes over 100 alone (RFC 9110 section 15.2)."""

    def _read_status(self) -> tuple[str, int, str]:
        while True:
            found: tuple[str, int, str] = super()._read_status()  # type: ignore[misc] # its own
            status = found[1]
            if not HTTPStatus.PROCESSING <= status < HTTPStatus.OK:
                return found
            http.client.parse_headers(self.fp)


class _Connection(HTTPConnection):
    response_class = _Response

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override] # as urllib3 itself
        with _within(self):
            return super().getresponse()


class _SecureConnection(HTTPSConnection):
    response_class = _Response

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override] # as urllib3 itself
        with _within(self):
            return super().getresponse()


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection
