"""Bodies: what comes with a request, bounded in size and time, and read strictly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from kvcdn.edge.http.connections import Connection
from kvcdn.edge.http.respond import Note, PlainResponse
from kvcdn.errors import CorruptError
from kvcdn.fields import Fields

MAX_BODY_BYTES = 320 * 1024
"""4,096 addresses of 67 bytes with quotes and comma, the model, and room for white space."""

BODY_SECONDS = 10.0
"""What a client may take to send a body."""


async def read_body(request: web.BaseRequest, note: Note) -> bytes | PlainResponse:
    """The request's body; or, where it is too large or too slow, the answer, after which the connection ends."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _read(request)
    except TimeoutError:
        return _close(PlainResponse.line(note, 408, f"the body did not come within {BODY_SECONDS:.0f} s", {}))
    except ConnectionError:
        # Nobody is left to read this; it is the log's.
        return _close(PlainResponse.line(note, 400, "the body broke off", {}))
    if isinstance(request.protocol, Connection) and request.protocol.broken is request.content:
        return _close(PlainResponse.line(note, 400, "the body is not framed as HTTP demands", {}))
    if body is None:
        return _close(PlainResponse.line(note, 413, f"a body has at most {MAX_BODY_BYTES} bytes", {}))
    return body


def read_fields(body: bytes, what: str) -> Fields:
    """The JSON object that `body` is. Raises CorruptError for anything else."""
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise CorruptError(f"{what}: the body is not JSON") from None
    return Fields(value, what)


async def _read(request: web.BaseRequest) -> bytes | None:
    if (request.content_length or 0) > MAX_BODY_BYTES:
        return None
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    body = bytearray()
    while piece := await request.content.readany():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is given twice")
    return value


def _close(response: PlainResponse) -> PlainResponse:
    """After `response` the connection ends: the rest of the request is not worth reading."""
    response.force_close()
    return response
