"""Responses: headers of our own and bodies by sendfile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from kvcdn.edge.http.outcome import CacheOutcome, Refusal, cache_status
from kvcdn.edge.http.sending import FileBody

SERVER = "kvcdn"

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


class FileResponse(web.StreamResponse):
    """Headers, and part of a file behind them."""

    def __init__(self, note: Note, status: int, headers: Mapping[str, str], body: FileBody) -> None:
        super().__init__(status=status, headers={"Server": SERVER, **headers})
        self.note = note
        self._file = body

    @property
    def sent(self) -> int:
        """Body bytes, so far."""
        return self._file.sent

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Sends headers and body. Raises ConnectionError where the client left, stalled, or must be cut off."""
        try:
            writer = await super().prepare(request)
            transport = request.transport
            if transport is None or writer is None:
                raise ConnectionResetError("the client left")
            # Encrypted bytes have to come by here; others go from the page cache to the socket.
            if transport.get_extra_info("sslcontext") is not None:
                await self._file.send(transport, self.write)
            else:
                await self._send(transport, writer)
            return writer
        finally:
            self._file.close()

    async def _send(self, transport: asyncio.Transport, writer: AbstractStreamWriter) -> None:
        # A limit of nothing makes `drain` wait until all of the headers are sent: nothing may come between them and the body.
        transport.set_write_buffer_limits(high=0)
        try:
            await writer.drain()
        except BaseException:
            transport.abort()
            raise
        await self._file.send(transport, None)
        transport.set_write_buffer_limits()
