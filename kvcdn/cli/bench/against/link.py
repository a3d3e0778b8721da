"""A link that counts and cuts: a TCP proxy to one port of this machine, in threads of this process.

Bytes are counted in both directions, HTTP's own included. Times are not taken through it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

HOST = "127.0.0.1"

_PIECE_BYTES = 64 * 1024

_CONNECT_SECONDS = 10.0


@dataclass
class CountedLink:
    """A running proxy. After `cut_after` bytes of replies, of all connections together, the one that carried them ends.

    If it `dies` then, every connection ends and no other is served, as when the server dies.
    """

    port: int
    cut_after: int | None = None
    dies: bool = False
    bytes: int = 0
    cuts: int = 0
    _replied: int = 0
    _open: list[socket.socket] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def allowance(self, count: int) -> int:
        """How many of `count` bytes of a reply may pass; fewer than that end the connection."""
        with self._lock:
            if self.cut_after is None or (self.cuts and not self.dies):
                self._replied += count
                return count
            allowed = max(0, min(count, self.cut_after - self._replied))
            self._replied += allowed
            if allowed < count:
                self.cuts += 1
            return allowed

    @property
    def dead(self) -> bool:
        return self.dies and self.cuts > 0

    def count(self, count: int) -> None:
        with self._lock:
            self.bytes += count

    def end_all(self) -> None:
        """Ends every connection."""
        with self._lock:
            sockets = list(self._open)
        for one in sockets:
            _end(one)

    def join(self, client: socket.socket, server: socket.socket) -> None:
        """Carries bytes between two sockets until one of them ends."""
        with self._lock:
            self._open += [client, server]
        for source, sink, replies in ((client, server, False), (server, client, True)):
            thread = threading.Thread(target=_carry, args=(self, source, sink, replies), daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Ends every connection and waits until nothing is carried any more."""
        self.end_all()
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()


@contextlib.contextmanager
def counted_link(target_port: int, *, cut_after: int | None = None, dies: bool = False) -> Iterator[CountedLink]:
    """A proxy before `target_port`, until the block ends."""
    with socket.create_server((HOST, 0)) as listener:
        link = CountedLink(listener.getsockname()[1], cut_after, dies)
        accepting = threading.Thread(target=_accept, args=(link, listener, target_port), daemon=True)
        accepting.start()
        try:
            yield link
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            link.close()


def _accept(link: CountedLink, listener: socket.socket, target_port: int) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        if link.dead:
            client.close()
            continue
        try:
            server = socket.create_connection((HOST, target_port), _CONNECT_SECONDS)
        except OSError:
            client.close()
            continue
        server.settimeout(None)
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.join(client, server)


def _carry(link: CountedLink, source: socket.socket, sink: socket.socket, replies: bool) -> None:  # noqa: FBT001 - a thread's
    with contextlib.suppress(OSError):
        while data := source.recv(_PIECE_BYTES):
            allowed = link.allowance(len(data)) if replies else len(data)
            link.count(allowed)  # before whoever gets them can look
            sink.sendall(data[:allowed])
            if allowed < len(data):
                if link.dies:
                    link.end_all()
                break
    _end(source)
    _end(sink)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
