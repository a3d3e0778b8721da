"""A shaper: a TCP proxy on this machine whose replies leave at a given rate, as a process of its own. For benchmarks.

All connections share one rate, as streams share a link. The latency is added once to every piece that a client sends, so
that each request costs a round trip of so much more. Run as a program it reads its settings from the command line, prints
its port, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvcdn.errors import UnavailableError

HOST = "127.0.0.1"

BURST_SECONDS = 0.002
"""How much a sleep that was too long may be made up for: at a gigabit 250 kB, at a megabit 250 bytes."""

PIECE_SECONDS = 0.004
"""A piece takes about so long to leave, within the limits below: shorter ones are mostly sleeps, longer ones bursts."""

LEAST_PIECE = 1448
MOST_PIECE = 256 * 1024
"""A packet's payload; what a socket takes at once."""


class Bucket:
    """Lets bytes pass at a rate. Thread-safe."""

    def __init__(
        self, bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free = -1e18

    @property
    def piece(self) -> int:
        """Bytes that are best taken at once."""
        return max(LEAST_PIECE, min(int(self._bytes_per_s * PIECE_SECONDS), MOST_PIECE))

    def take(self, count: int) -> None:
        """Returns when `count` bytes, and all taken before, have had the time to leave."""
        with self._lock:
            now = self._clock()
            self._free = max(self._free, now - BURST_SECONDS) + count / self._bytes_per_s
            wait = self._free - now
        if wait > 0:
            self._sleep(wait)


@dataclass(frozen=True)
class ShapedLink:
    """A running shaper before one port."""

    url: str
    process: subprocess.Popen[str]


@contextlib.contextmanager
def shaped_link(port: int, mbit: float, latency_s: float = 0.0) -> Iterator[ShapedLink]:
    """A link of `mbit` megabits a second to `port` of this machine, while the context lasts. Raises UnavailableError."""
    command = [sys.executable, "-P", "-m", "kvcdn.cli.bench.shaper", str(port), str(mbit * 1e6 / 8), str(latency_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise UnavailableError("the shaper did not start")
            yield ShapedLink(f"http://{HOST}:{json.loads(line)['port']}", process)
        finally:
            process.kill()


def serve(port: int, bytes_per_s: float, latency_s: float) -> None:
    """Runs a shaper before `port` until standard input ends."""
    bucket = Bucket(bytes_per_s)
    with socket.create_server((HOST, 0)) as listener:
        sys.stdout.write(json.dumps({"port": listener.getsockname()[1]}) + "\n")
        sys.stdout.flush()
        threading.Thread(target=_accept, args=(listener, port, bucket, latency_s), daemon=True).start()
        sys.stdin.read()


def _accept(listener: socket.socket, port: int, bucket: Bucket, latency_s: float) -> None:
    while True:
        client, _ = listener.accept()
        try:
            server = socket.create_connection((HOST, port))
        except OSError:
            client.close()
            continue
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_requests, args=(client, server, latency_s), daemon=True).start()
        threading.Thread(target=_replies, args=(server, client, bucket), daemon=True).start()


def _requests(client: socket.socket, server: socket.socket, latency_s: float) -> None:
    with contextlib.suppress(OSError):
        while data := client.recv(MOST_PIECE):
            if latency_s:
                time.sleep(latency_s)
            server.sendall(data)
    _end(server)


def _replies(server: socket.socket, client: socket.socket, bucket: Bucket) -> None:
    with contextlib.suppress(OSError):
        while data := server.recv(bucket.piece):
            bucket.take(len(data))
            client.sendall(data)
    _end(client)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
