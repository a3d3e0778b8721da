"""Where an edge listens: what its sockets are like."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

import pytest

from kvcdn.access.listening import ListenAddress
from kvcdn.edge.http.sockets import LOOPBACK_CONGESTION_CONTROL, bind


def _bind(text: str) -> list[socket.socket]:
    return asyncio.run(bind(ListenAddress.parse(text)))


def _congestion_control(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize(("listen", "ours"), [("127.0.0.1:0", True), ("0.0.0.0:0", False)])
def test_connections_on_loopback_are_not_paced(listen: str, *, ours: bool) -> None:
    """Accepted ones have what the socket that listens was given; beyond loopback it is the system's."""
    with contextlib.ExitStack() as closing:
        (listener,) = (closing.enter_context(one) for one in _bind(listen))
        client = closing.enter_context(socket.create_connection(("127.0.0.1", listener.getsockname()[1])))
        accepted = closing.enter_context(listener.accept()[0])
        system = _congestion_control(client)
        assert (LOOPBACK_CONGESTION_CONTROL if ours else system) == _congestion_control(accepted)


def test_a_name_is_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` may be ::1 as well, which counts only where the system has it."""

    def addresses(*given: object, **more: object) -> list[tuple[object, ...]]:
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    listeners = _bind("localhost:0")
    for listener in listeners:
        listener.close()
    assert [socket.AF_INET] == [listener.family for listener in listeners]


def test_an_address_of_others_is_refused() -> None:
    """And nothing is left open."""
    with pytest.raises(OSError, match=r"[Cc]annot assign") as caught:
        _bind("192.0.2.77:0")
    assert errno.EADDRNOTAVAIL == caught.value.errno
