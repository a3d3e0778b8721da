"""A forward proxy: absolute-form requests for http, CONNECT for https, a password if it is told to ask for one."""

from __future__ import annotations

import base64
import contextlib
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from support.faults import HOST, PIECE_BYTES
from support.scripted import Scripted, scripted


@dataclass
class ForwardProxy:
    """A running proxy and what it was asked."""

    server: Scripted
    login: str | None = None
    """user:password that it asks for."""
    connect_answer: bytes | None = None
    """Sent in answer to CONNECT instead of making a tunnel."""
    targets: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url


@contextlib.contextmanager
def forward_proxy(hosts: dict[str, int]) -> Iterator[ForwardProxy]:
    """A proxy that finds the hosts of `hosts` at ports of this machine, until the block ends."""
    proxies: list[ForwardProxy] = []

    def answer(_: int, head: bytes, client: socket.socket) -> bool:
        proxy = proxies[0]
        method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
        proxy.targets.append(f"{method} {target}")
        if proxy.login is not None:
            expected = b"Proxy-Authorization: Basic " + base64.b64encode(proxy.login.encode())
            if expected not in head:
                client.sendall(b"HTTP/1.1 407 Login\r\nContent-Length: 0\r\n\r\n")
                return True
        if method == "CONNECT" and proxy.connect_answer is not None:
            client.sendall(proxy.connect_answer)
            return False
        host = re.sub(r"^https?://", "", target).split("/")[0].split(":")[0]
        with socket.create_connection((HOST, hosts[host]), 30) as server:
            if method == "CONNECT":
                client.sendall(b"HTTP/1.1 200 Made\r\nVia: test\r\n\r\n")
                _tunnel(client, server)
                return False
            path = re.sub(r"^https?://[^/]*", "", target) or "/"
            without = re.sub(rb"Proxy-Authorization: [^\r]*\r\n", b"", head)
            server.sendall(
                without.replace(target.encode(), path.encode(), 1).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            )
            while data := server.recv(PIECE_BYTES):
                client.sendall(data)
        return False

    with scripted(answer) as server:
        proxies.append(ForwardProxy(server))
        yield proxies[0]


def _tunnel(client: socket.socket, server: socket.socket) -> None:
    import select

    pairs = {client: server, server: client}
    while True:
        for ready in select.select(list(pairs), [], [])[0]:
            data = ready.recv(PIECE_BYTES)
            if not data:
                return
            pairs[ready].sendall(data)
