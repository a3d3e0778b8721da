"""Sockets: where an edge accepts connections, and how they are told to send."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from kvcdn.access.listening import ListenAddress
from kvcdn.errors import UnavailableError

BACKLOG = 1024

SOCKET_MODE = 0o660
"""Who may reach a Unix socket: the edge's user and group, such as a proxy's."""

LOOPBACK_CONGESTION_CONTROL = b"reno"
"""On loopback there is no link to be gentle to. BBR, where it is the system's choice, paces bytes there too, with a timer for
every packet or two: two thirds of what a body costs server and reader together. Reno is always there and free to choose."""

_NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""What a system without IPv6 says to `::1`, which `localhost` may stand for as well."""


@contextlib.asynccontextmanager
async def listening(
    address: ListenAddress, server: web.Server, tls: ssl.SSLContext | None, patience: float
) -> AsyncIterator[str]:
    """Answers at `address` while it lasts; its URL. Running responses have `patience` seconds to finish before the end.

    Raises UnavailableError.
    """
    runner = web.ServerRunner(server, shutdown_timeout=patience)
    await runner.setup()
    try:
        yield await _listen(address, runner, tls)
    finally:
        await runner.cleanup()
        if address.socket is not None:
            address.socket.unlink(missing_ok=True)


async def _listen(address: ListenAddress, runner: web.ServerRunner, tls: ssl.SSLContext | None) -> str:
    try:
        if address.socket is not None:
            await _listen_locally(address.socket, runner, tls)
            return str(address)
        for listener in await bind(address):
            await web.SockSite(runner, listener, backlog=BACKLOG, ssl_context=tls).start()
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {address}: {error.strerror}", hint="name a free port with listen, or 0 for any"
        ) from None
    return address.url(runner.addresses[0][1], "http" if tls is None else "https")


async def bind(address: ListenAddress) -> list[socket.socket]:
    """Sockets at all that the host of `address` stands for. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    failure: OSError | None = None
    with contextlib.ExitStack() as bound:
        listeners = []
        for family, _, _, _, place in dict.fromkeys(found):
            try:
                listener = bound.enter_context(socket.create_server(place[:2], family=family, backlog=BACKLOG))
            except OSError as error:
                if error.errno not in _NO_SUCH_FAMILY:
                    raise
                failure = error
                continue
            if address.is_loopback:
                # Connections take it over.
                with contextlib.suppress(OSError):
                    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, LOOPBACK_CONGESTION_CONTROL)
            listeners.append(listener)
        if failure is not None and not listeners:
            raise failure
        bound.pop_all()
        return listeners


async def _listen_locally(path: Path, runner: web.ServerRunner, tls: ssl.SSLContext | None) -> None:
    """Raises OSError where somebody answers at `path` already; what a dead edge left there is replaced."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe,
        contextlib.suppress(FileNotFoundError, ConnectionRefusedError),
    ):
        probe.connect(str(path))
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    await web.UnixSite(runner, path, backlog=BACKLOG, ssl_context=tls).start()
    path.chmod(SOCKET_MODE)  # noqa: ASYNC240 - once, before anybody waits
