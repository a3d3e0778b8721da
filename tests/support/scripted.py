"""A server that answers with bytes, as told: every request of every connection goes to one function of the test's."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from support.faults import HOST, _Sockets

Answer = Callable[[int, bytes, socket.socket], bool]
"""Request number from 0, its head, and the connection to write to. True keeps the connection for another request."""


@dataclass
class Scripted:
    """A running server and what it was asked."""

    port: int
    requests: list[bytes] = field(default_factory=list)
    """Heads, in the order of their arrival."""
    connections: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def ranges(self) -> list[str]:
        """The Range of every request, empty where it had none."""
        found = [re.search(rb"Range: bytes=(\S*)", head) for head in self.requests]
        return [one[1].decode() if one else "" for one in found]


@contextlib.contextmanager
def scripted(answer: Answer) -> Iterator[Scripted]:
    """A server on a free port, until the block ends."""
    with socket.create_server((HOST, 0)) as listener, _Sockets() as sockets:
        server = Scripted(listener.getsockname()[1])
        accepting = threading.Thread(target=_accept, args=(server, listener, answer, sockets), daemon=True)
        accepting.start()
        try:
            yield server
        finally:
            sockets.closing = True
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _accept(server: Scripted, listener: socket.socket, answer: Answer, sockets: _Sockets) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        server.connections += 1
        sockets.add(client)
        sockets.start(_serve, server, client, answer)


def _serve(server: Scripted, client: socket.socket, answer: Answer) -> None:
    with contextlib.suppress(OSError):
        while head := _head(client):
            with server.lock:
                number = len(server.requests)
                server.requests.append(head)
            if not answer(number, head, client):
                break
        client.shutdown(socket.SHUT_RDWR)


def _head(client: socket.socket) -> bytes:
    """A request's head, and its body behind it where it has one; empty where the client has left."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(65536)
        if not piece:
            return b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"Content-Length: (\d+)", head)
    while found and len(body) < int(found[1]):
        body += client.recv(65536)
    return head + b"\r\n\r\n" + body


def asked_range(head: bytes, size: int) -> tuple[int, int]:
    """Start and stop of what a request asks for, of an object of `size` bytes."""
    found = re.search(rb"Range: bytes=(\d+)-(\d*)", head)
    return (int(found[1]), min(int(found[2]) + 1, size) if found[2] else size) if found else (0, size)


def right_answer(head: bytes, data: bytes, etag: str = '"tag"', **fields: str) -> bytes:
    """What a good server sends for a request: 200 or 206, entity tag, and `fields` besides or instead ("" for none of it)."""
    start, stop = asked_range(head, len(data))
    status = "206 Partial Content" if b"Range: " in head else "200 OK"
    lines = {"ETag": etag, "Content-Length": str(stop - start)}
    if b"Range: " in head:
        lines["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
    lines |= {name.replace("_", "-"): value for name, value in fields.items()}
    shown = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"HTTP/1.1 {status}\r\n{shown}\r\n".encode() + data[start:stop]
