"""A faulty link: a TCP proxy to one port of this machine that cuts, stalls, refuses or answers by itself, as told."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from support.waiting import WAIT_SECONDS

HOST = "127.0.0.1"
PIECE_BYTES = 64 * 1024
CONNECT_SECONDS = WAIT_SECONDS
HEAD_BYTES = 4096


@dataclass(frozen=True)
class Fault:
    """What happens to a connection once it has carried a request that holds `when`."""

    when: bytes = b""
    """Bytes of the request, within one piece read from the socket; empty for any request."""
    pass_bytes: int | None = None
    """So many bytes of the reply pass; at the next one the connection ends. 0 loses the reply: the server has acted."""
    stall: bool = False
    """Silence where `pass_bytes` would end the connection."""
    reset: bool = False
    """The connection ends with a reset instead of an orderly close."""
    answer: bytes | None = None
    """Sent to the client in place of the request's way to the server; then the connection ends."""


@dataclass
class FaultyLink:
    """A running proxy. `inject` arms a fault for the next `times` requests that match it."""

    port: int
    refusing: bool = False
    """New connections are reset at once."""
    refusals: int = 0
    """So many more are, if `refusing` does not say so of all."""
    connections: int = 0
    bytes_passed: int = 0
    """Reply bytes of all connections so far."""
    heads: list[bytes] = field(default_factory=list)
    """The beginning of each piece that clients sent: heads of requests, and bodies' beginnings."""
    _fault: Fault | None = None
    _left: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def inject(self, fault: Fault, times: int = 1) -> None:
        with self._lock:
            self._fault, self._left = fault, times

    @property
    def pending(self) -> int:
        """Injected faults that have not struck yet."""
        return self._left

    def _struck(self, request: bytes) -> Fault | None:
        with self._lock:
            self.heads.append(request[:HEAD_BYTES])
            if self._left and self._fault is not None and self._fault.when in request:
                self._left -= 1
                return self._fault
        return None


@contextlib.contextmanager
def faulty_link(target_port: int) -> Iterator[FaultyLink]:
    """A proxy to `target_port`, until the block ends; transparent until told otherwise."""
    with socket.create_server((HOST, 0)) as listener, _Sockets() as sockets:
        link = FaultyLink(listener.getsockname()[1])
        accepting = threading.Thread(target=_accept, args=(link, listener, target_port, sockets), daemon=True)
        accepting.start()
        try:
            yield link
        finally:
            sockets.closing = True
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """A port whose connections are neither accepted nor refused: its queue is full."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        time.sleep(0.05)
        try:
            yield listener.getsockname()[1]
        finally:
            for one in waiting:
                one.close()


class _Sockets:
    """Every socket and thread of a link, ended with it."""

    def __init__(self) -> None:
        self.closing = False
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._open:
            _end(one)
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()

    def add(self, *sockets: socket.socket) -> None:
        self._open.extend(sockets)

    def start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()


class _Connection:
    """One client's connection and the fault that has struck it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.fault: Fault | None = None
        self.allowance = 0

    def end(self, *, reset: bool) -> None:
        if reset:
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                self.client.shutdown(socket.SHUT_RD)  # wakes the thread that reads it: the socket lives as long as it is used
            self.client.close()
            _end(self.server)
            return
        _end(self.server)
        _end(self.client)


def _accept(link: FaultyLink, listener: socket.socket, target_port: int, sockets: _Sockets) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        link.connections += 1
        if link.refusing or link.refusals or sockets.closing:
            link.refusals = max(link.refusals - 1, 0)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            continue
        connection = _Connection(client, socket.create_connection((HOST, target_port), CONNECT_SECONDS))
        connection.server.settimeout(None)
        sockets.add(connection.client, connection.server)
        sockets.start(_requests, link, connection)
        sockets.start(_replies, link, connection)


def _requests(link: FaultyLink, connection: _Connection) -> None:
    with contextlib.suppress(OSError):
        while data := connection.client.recv(PIECE_BYTES):
            struck = link._struck(data)
            if struck is not None and struck.answer is not None:
                connection.client.sendall(struck.answer)
                connection.end(reset=False)
                return
            if struck is not None:
                connection.allowance, connection.fault = struck.pass_bytes or 0, struck
            connection.server.sendall(data)
    _end(connection.server)


def _replies(link: FaultyLink, connection: _Connection) -> None:
    with contextlib.suppress(OSError):
        while data := connection.server.recv(PIECE_BYTES):
            fault = connection.fault
            if fault is not None and len(data) > connection.allowance:
                connection.client.sendall(data[: connection.allowance])
                link.bytes_passed += connection.allowance
                if not fault.stall:
                    connection.end(reset=fault.reset)
                return
            if fault is not None:
                connection.allowance -= len(data)
            connection.client.sendall(data)
            link.bytes_passed += len(data)
    _end(connection.client)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
