"""Well-formed: what HTTP demands of a request's head, and the framework lets pass (RFC 9110, RFC 9112).

What is read in two ways by two programs on a request's way is how requests are smuggled, and caches poisoned: so whatever has
no one meaning is refused, and the connection ends.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

if TYPE_CHECKING:
    from aiohttp.web_protocol import RequestHandler

_HOST = r"(?:\[[0-9A-Za-z:._~!$&'()*+,;=%-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(?::[0-9]*)?"
"""RFC 3986 section 3.2, without a user (RFC 9110 section 4.2.4)."""

HOST = re.compile(_HOST)

_TARGET = re.compile(rf"(?:https?://(?=[^/?:]){_HOST}(?=[/?]|$)|(?=[/*]))[^#]*", re.IGNORECASE)
"""RFC 9112 section 3.2, origin-form, absolute-form and asterisk-form: none has a fragment."""


class Fault(NamedTuple):
    """Why a request is refused."""

    status: int
    message: str


_SPOKEN = (HttpVersion10, HttpVersion11)

_UNSPOKEN = web.RequestKey("unspoken", bool)
"""Of a request in a version that we do not speak."""


def make_request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
) -> web.BaseRequest:
    """A request as the framework makes it, whose answer is in a version that we speak: it would repeat the request's."""
    spoken = message.version in _SPOKEN
    if not spoken:
        message = message._replace(version=HttpVersion11)
    request = web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop())
    request[_UNSPOKEN] = not spoken
    return request


def find_fault(request: web.BaseRequest) -> Fault | None:
    """What of a request's head is not as it should be."""
    if request.get(_UNSPOKEN):
        return Fault(505, "this server speaks HTTP/1.1")
    if request.method != "CONNECT" and not _TARGET.fullmatch(request.raw_path):
        return Fault(400, "the request's target is none that HTTP knows: it has a user, a fragment, or no path")
    host = request.headers.get("Host")
    if host is not None and not HOST.fullmatch(host):
        return Fault(400, "the Host field holds no host")
    if len(request.headers.getall("Authorization", ())) > 1:
        # RFC 9110 section 5.3: it is no list, and whoever came before us may have looked at the other.
        return Fault(400, "there is more than one Authorization field")
    return _coding_fault(request)


def _coding_fault(request: web.BaseRequest) -> Fault | None:
    coding = ",".join(request.headers.getall("Transfer-Encoding", ()))
    if coding and request.version == HttpVersion10:
        # RFC 9112 section 6.1: whoever came before us may have taken what is in chunks for the next request.
        return Fault(400, "HTTP/1.0 has no transfer codings")
    if coding and coding.strip().lower() != "chunked":
        return Fault(501, "no transfer coding but chunked is known here")
    return None
