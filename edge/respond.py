"""Responses: headers of our own and bodies by sendfile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from typing import Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from kvcdn.edge.outcome import BrokenFillError, CacheOutcome, Refusal, cache_status
from kvcdn.edge.sendfile import Sender

SERVER = "kvcdn"

PIECE_BYTES = 4 << 20
"""Sent between two looks at the clock; a power of two well above what a socket buffers."""

COPIED_BYTES = 256 << 10
"""Encrypted between two turns of the loop: some 0.1 ms."""

STALL_SECONDS = 60.0
"""A client that does not take a piece within this is cut off: 70 kB/s, below any link that a cache pays on."""

IMMUTABLE = "public, max-age=31536000, immutable"
"""Objects never change under their name (RFC 8246)."""

NO_STORE = "no-store"
"""What is missing or broken now may be there in a moment."""


@dataclass(frozen=True)
class Note:
    """What the log and the metrics say of a request."""

    route: str
    subject: str = ""
    cache: CacheOutcome = CacheOutcome.NONE
    key: str = ""
    """Of the object that was found, or of the last block of a prefix that was looked up."""
    tokens_per_byte: float = 0.0
    """Tokens that need no prefill for each body byte sent."""
    blocks: int = 0
    """Of the prefix."""
    tokens: int = 0
    """Of the block that is sent."""
    evicted: bool = False
    """Whether the object, or the first block that is missing, had been here and had to leave."""
    asked: int = 0
    """Addresses that were looked up."""
    reason: str = ""
    """Of a refusal."""


RETRY_SECONDS = 1

JSON_HEADERS = {"Content-Type": "application/json", "Cache-Control": NO_STORE}


class PlainResponse(web.Response):
    """A response whose body is at hand."""

    def __init__(self, note: Note, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        super().__init__(status=status, headers={"Server": SERVER, **headers}, body=body)
        self.note = note
        self.sent = len(body)

    @classmethod
    def line(cls, note: Note, status: int, message: str, headers: Mapping[str, str]) -> PlainResponse:
        """One line for people."""
        text = " ".join(message.split()) + "\n"
        headers = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": NO_STORE, **headers}
        return cls(note, status, headers, text.encode("utf-8", "replace"))

    @classmethod
    def refusal(cls, note: Note, refusal: Refusal) -> PlainResponse:
        """Why there is no object."""
        headers = {"Cache-Status": cache_status(note.cache, refusal.reason)}
        if refusal.status in (503, 504):
            headers["Retry-After"] = str(RETRY_SECONDS)
        return cls.line(note, refusal.status, refusal.message, headers)


class HeadResponse(web.StreamResponse):
    """The headers of a response to GET, for HEAD."""

    def __init__(self, note: Note, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(status=status, headers={"Server": SERVER, **headers})
        self.note = note
        self.sent = 0


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


class FileResponse(web.StreamResponse):
    """Part of a file, from the page cache to the socket without passing through this process. Closes the file."""

    active = 0
    """Those that are sent just now."""

    def __init__(
        self,
        note: Note,
        status: int,
        headers: Mapping[str, str],
        source: FileSlice,
        on_short: Callable[[], None],
    ) -> None:
        """`on_short` is called where the file does not hold what it should."""
        super().__init__(status=status, headers={"Server": SERVER, **headers})
        self.note = note
        self.sent = 0
        self._source, self._on_short = source, on_short
        self._transport: asyncio.Transport | None = None
        self._cut = False

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

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Sends headers and body. Raises ConnectionError where the client left, stalled, or must be cut off."""
        FileResponse.active += 1
        try:
            writer = await super().prepare(request)
            transport = request.transport
            if transport is None or writer is None:
                raise ConnectionResetError("the client left")
            self._transport = transport
            try:
                await self._send(transport, writer)
            except BaseException:
                # The length is announced: only a broken connection tells the client that the body is not complete.
                transport.abort()
                raise
            return writer
        finally:
            FileResponse.active -= 1
            self._transport = None
            self._source.file.close()

    async def _send(self, transport: asyncio.Transport, writer: AbstractStreamWriter) -> None:
        # Encrypted bytes have to come by here; others go from the page cache to the socket.
        if transport.get_extra_info("sslcontext") is not None:
            await self._send_by(self._copy)
            return
        # A limit of nothing makes `drain` wait until all of the headers are sent: nothing may come between them and the body.
        transport.set_write_buffer_limits(high=0)
        await writer.drain()
        sender = Sender(transport)
        try:
            await self._send_by(lambda count: self._sendfile(sender, count))
        finally:
            sender.close()
            transport.set_write_buffer_limits()

    async def _send_by(self, way: Callable[[int], Awaitable[int]]) -> None:
        source = self._source
        while self.sent < source.length:
            try:
                count = await source.ready(self.sent)
                if self._cut:
                    raise ConnectionResetError("what is sent was revoked")
                async with asyncio.timeout(STALL_SECONDS):
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
            self.sent += sent
            if not sent:
                self._on_short()
                raise ConnectionResetError("the file ended early")

    async def _sendfile(self, sender: Sender, count: int) -> int:
        source = self._source
        return await sender.send(source.file.fileno(), source.start + self.sent, min(count, PIECE_BYTES))

    async def _copy(self, count: int) -> int:
        file, position = self._source.file.fileno(), self._source.start + self.sent
        piece = await asyncio.to_thread(os.pread, file, min(count, COPIED_BYTES), position)
        await self.write(piece)
        return len(piece)
