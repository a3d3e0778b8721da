"""A TLS front before a plain server, for tests."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from support.faults import HOST, PIECE_BYTES
from support.waiting import WAIT_SECONDS


@dataclass
class Front:
    """A running TLS front."""

    port: int
    handshakes: int = 0
    """Begun, well ended or not."""


@contextlib.contextmanager
def tls_front(target_port: int, context: ssl.SSLContext) -> Iterator[Front]:
    """TLS on a free port; what comes out of it goes to `target_port` of this machine."""
    with socket.create_server((HOST, 0)) as listener:
        front = Front(listener.getsockname()[1])
        threads: list[threading.Thread] = []

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=_front, args=(front, client, target_port, context), daemon=True))
                threads[-1].start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield front
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join(5)


def _front(front: Front, client: socket.socket, target_port: int, context: ssl.SSLContext) -> None:
    """One connection: a request, its answer, and so on, as HTTP has it; so one thread is enough."""
    client.settimeout(WAIT_SECONDS)
    with client, contextlib.suppress(OSError):
        front.handshakes += 1
        secured = context.wrap_socket(client, server_side=True)
        with secured, socket.create_connection((HOST, target_port), WAIT_SECONDS) as server:
            answers = threading.Thread(target=_copy, args=(server, secured), daemon=True)
            answers.start()
            _copy(secured, server)
            answers.join(5)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(PIECE_BYTES):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
