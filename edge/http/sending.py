"""Sending: part of a file on its way to one client, by sendfile where nothing is encrypted, as far as the file has come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from io import FileIO
from typing import Protocol

from kvcdn.edge.http.outcome import BrokenFillError
from kvcdn.edge.http.sendfile import STALL_SECONDS, Sender

COPIED_BYTES = 256 << 10
"""Encrypted between two turns of the loop: some 0.1 ms."""


class Progress(Protocol):
    """What a file that is still being written holds already."""

    async def reach(self, position: int) -> int:
        """Waits until bytes behind `position` may be sent; up to where. Raises BrokenFillError."""


@dataclass(frozen=True)
class FileSlice:
    """`length` bytes of an open file from `start`."""

    file: FileIO
    start: int
    length: int
    progress: Progress | None = None
    """Of a file that grows; None where all is there."""

    async def read(self) -> bytes:
        """The bytes, fewer where the file ends early; closes the file. Raises BrokenFillError."""
        with self.file:
            stop = self.start + self.length
            if self.progress is not None:
                await self.progress.reach(stop - 1)
            return os.pread(self.file.fileno(), self.length, self.start)

    async def ready(self, done: int) -> int:
        """How many bytes behind the first `done` may be sent now, 1 or more. Raises BrokenFillError."""
        if self.progress is None:
            return self.length - done
        return min(await self.progress.reach(self.start + done) - self.start, self.length) - done


class FileBody:
    """Part of a file, from the page cache to the socket without passing through this process. Closes the file."""

    active = 0
    """Those that are sent just now."""

    def __init__(self, source: FileSlice, on_short: Callable[[], None]) -> None:
        """`on_short` is called where the file does not hold what it should."""
        self._source, self._on_short = source, on_short
        self._transport: asyncio.Transport | None = None
        self._sender: Sender | None = None
        self._sent = 0
        self._cut = False

    @property
    def sent(self) -> int:
        """Bytes that are on their way, so far."""
        return self._sent if self._sender is None else self._sender.sent

    def cut(self) -> None:
        """Ends the response where it is, as what it sends must not be served any more."""
        self._cut = True
        if self._transport is not None:
            connection: socket.socket | None = self._transport.get_extra_info("socket")
            if connection is not None:
                # Whoever waits for the client to take more is woken: the sender watches a descriptor of its own.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._transport.abort()

    def begins(self, length: int) -> bytes:
        """The first `length` bytes of the file that it sends, or fewer."""
        return b"" if self._source.file.closed else os.pread(self._source.file.fileno(), length, 0)

    def close(self) -> None:
        """Lets go of the file."""
        if self._sender is not None:
            self._sent = self._sender.sent
            self._sender.close()
            self._sender = None
        self._source.file.close()

    def begin(self, transport: asyncio.Transport) -> bool:
        """Sends what the client takes at once, behind what is with the kernel already; whether that is all.

        For what is all here. What fails is left to `send`, which has to follow unless this was all.
        """
        source = self._source
        with contextlib.suppress(OSError):
            self._sender = Sender(transport, source.file.fileno(), source.start)
            self._sender.begin(source.length)
        return self.sent == source.length

    async def send(self, transport: asyncio.Transport, write: Callable[[bytes], Awaitable[None]] | None) -> None:
        """Sends it all behind what is with the kernel already; by `write` where a connection is encrypted.

        Raises ConnectionError where the client left, stalled, or must be cut off: then the connection is broken.
        """
        FileBody.active += 1
        self._transport = transport
        try:
            if write is not None:
                await self._send_by(lambda count: self._copy(write, count))
            else:
                await self._send_file(transport)
        except BaseException:
            # The length is announced: only a broken connection tells the client that the body is not complete.
            transport.abort()
            raise
        finally:
            FileBody.active -= 1
            self._transport = None
            self.close()

    async def _send_file(self, transport: asyncio.Transport) -> None:
        source = self._source
        sender = self._sender = self._sender or Sender(transport, source.file.fileno(), source.start)
        await self._send_by(sender.send)

    async def _send_by(self, way: Callable[[int], Awaitable[int]]) -> None:
        source = self._source
        while (done := self.sent) < source.length:
            try:
                count = await source.ready(done)
                if self._cut:
                    raise ConnectionResetError("what is sent was revoked")
                sent = await way(count)
            except BrokenFillError as error:
                raise ConnectionResetError(str(error)) from error
            except TimeoutError:
                raise ConnectionResetError("the client stopped reading") from None
            except ConnectionError:
                raise
            except OSError as error:
                self._on_short()
                raise ConnectionResetError(f"reading the file failed: {error.strerror}") from None
            if not sent:
                self._on_short()
                raise ConnectionResetError("the file ended early")

    async def _copy(self, write: Callable[[bytes], Awaitable[None]], count: int) -> int:
        file, position = self._source.file.fileno(), self._source.start + self._sent
        async with asyncio.timeout(STALL_SECONDS):
            piece = await asyncio.to_thread(os.pread, file, min(count, COPIED_BYTES), position)
            await write(piece)
        self._sent += len(piece)
        return len(piece)
