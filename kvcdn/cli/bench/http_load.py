"""A load generator as a process of its own: GETs over keep-alive connections, in one thread, as fast as the server lets it.

Reads one `Load` as JSON from its first argument and writes one `Loaded` as JSON. Bodies are received into one buffer and
counted; with `hashed` each is hashed, and the distinct hashes are told.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from blake3 import blake3

from kvcdn.errors import UnavailableError

BUFFER_BYTES = 1 << 18

SPAN_SECONDS = 600.0
"""Longest run of all, which ends where a server hangs."""


@dataclass(frozen=True)
class Load:
    """What to ask for."""

    host: str
    port: int
    paths: list[str]
    """Asked for in turn."""
    connections: int
    seconds: float
    """No request begins after this; 0 for one request a connection."""
    hashed: bool = False


@dataclass
class Loaded:
    """What came."""

    requests: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failures: int = 0
    ttfb_ms: list[float] = field(default_factory=list)
    """From a request to the first byte of its answer, in ascending order."""
    hashes: list[str] = field(default_factory=list)

    def ttfb(self, share: float) -> float:
        """The time to the first byte within which `share` of the answers began, in milliseconds."""
        return self.ttfb_ms[min(int(share * len(self.ttfb_ms)), len(self.ttfb_ms) - 1)]


def run_load(load: Load) -> Loaded:
    """Runs `load` in a process of its own."""
    command = [sys.executable, "-P", "-m", "kvcdn.cli.bench.http_load", json.dumps(asdict(load))]
    done = subprocess.run(command, capture_output=True, check=False, timeout=SPAN_SECONDS + 60)  # noqa: S603 - our own module
    if done.returncode:
        raise UnavailableError(f"the load generator failed: {done.stderr.decode(errors='replace')[-500:]}")
    return Loaded(**json.loads(done.stdout))


def run_load_here(load: Load) -> Loaded:
    """Runs `load` in this process: for single requests, which a process that has just begun asks with cold caches."""
    return _Generator(load).run()


class _Connection:
    def __init__(self, load: Load) -> None:
        self.socket = socket.create_connection((load.host, load.port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.left = 0
        self.head = b""
        self.asked = 0.0
        self.hash: Any = None

    def ask(self, path: str, *, hashed: bool) -> None:
        self.head, self.left = b"", -1
        self.hash = blake3() if hashed else None
        # Before the send: where another process runs next, the answer may be here when it returns.
        self.asked = time.perf_counter()
        self.socket.send(f"GET {path} HTTP/1.1\r\nHost: load\r\n\r\n".encode("ascii"))


class _Generator:
    def __init__(self, load: Load) -> None:
        self._load, self._done = load, Loaded()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._number = 0
        self._selector = selectors.DefaultSelector()

    def run(self) -> Loaded:
        load = self._load
        connections = [_Connection(load) for _ in range(load.connections)]
        self._began = time.perf_counter()
        for connection in connections:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
            self._ask(connection)
        while self._selector.get_map() and time.perf_counter() - self._began < SPAN_SECONDS:
            for event, _ in self._selector.select(1.0):
                self._receive(event.data)
        self._done.seconds = time.perf_counter() - self._began
        self._done.ttfb_ms.sort()
        self._done.hashes = sorted(set(self._done.hashes))
        return self._done

    def _ask(self, connection: _Connection) -> None:
        connection.ask(self._load.paths[self._number % len(self._load.paths)], hashed=self._load.hashed)
        self._number += 1

    def _receive(self, connection: _Connection) -> None:
        try:
            count = connection.socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._end(connection, failed=True)
            return
        body = self._buffer[:count]
        if connection.left < 0:
            if not connection.head:
                self._done.ttfb_ms.append(1000 * (time.perf_counter() - connection.asked))
            before = len(connection.head)
            connection.head += bytes(body)
            head, mark, _ = connection.head.partition(b"\r\n\r\n")
            if not mark:
                return
            body = body[len(head) + len(mark) - before :]
            connection.left = _length(head)
        connection.left -= len(body)
        self._done.bytes += len(body)
        if connection.hash is not None:
            connection.hash.update(body)
        if connection.left == 0:
            self._finish(connection)

    def _finish(self, connection: _Connection) -> None:
        self._done.requests += 1
        if connection.hash is not None:
            self._done.hashes.append(connection.hash.hexdigest())
        if time.perf_counter() - self._began < self._load.seconds:
            self._ask(connection)
        else:
            self._end(connection, failed=False)

    def _end(self, connection: _Connection, *, failed: bool) -> None:
        self._done.failures += failed
        self._selector.unregister(connection.socket)
        connection.socket.close()


def _length(head: bytes) -> int:
    """The length of a 200's body. Raises ValueError for any other answer."""
    if not head.startswith(b"HTTP/1.1 200"):
        raise ValueError(f"unexpected answer: {head[:200]!r}")
    return next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))


if __name__ == "__main__":
    os.write(1, json.dumps(asdict(_Generator(Load(**json.loads(sys.argv[1]))).run())).encode("ascii"))
