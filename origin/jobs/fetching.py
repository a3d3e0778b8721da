"""Fetching: documents from URLs that strangers name, which must not lead into the service's own network.

A name is resolved once, every address that it has must be a public one, and the connection goes to the very address that was
looked at; each redirect is looked at anew. Size and time are bounded, whatever the server does: at the deadline the connection
is shut down from beside, since a server may send a byte now and then for ever, of a handshake, a head or a body.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from urllib.parse import quote, urljoin, urlsplit

import urllib3
import urllib3.connection

from kvcdn.errors import NotFoundError, UnavailableError, UsageError
from kvcdn.origin.publishing.sources import MAX_DOCUMENT_BYTES, Document, decode_document

MAX_REDIRECTS = 5

FETCH_SECONDS = 120.0
"""Of one document, redirects and all."""

_CONNECT_SECONDS = 10.0
_READ_SECONDS = 30.0
_PIECE_BYTES = 1 << 16

_PLAIN = "%/:=&?~#+!$,;'@()*[]"
"""What a URL's path and query may have as it is, besides letters, digits and `-._`."""

MAX_VALIDATOR = 1024
"""Characters of an ETag or a date that are remembered and sent back."""

_REDIRECTS = frozenset((301, 302, 303, 307, 308))

_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))

_TRANSLATED = ipaddress.ip_network("::ffff:0:0:0/96")
"""An IPv4 address as translators write it (RFC 2765)."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Validators:
    """What a server tells a version of a document by: ETag and Last-Modified, as it wrote them; empty where it tells none."""

    etag: str = ""
    modified: str = ""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Validators:
        """Those of an answer; what is too long or not plain text is none."""
        found = (headers.get("ETag", ""), headers.get("Last-Modified", ""))
        return cls(*(text if len(text) <= MAX_VALIDATOR and text.isascii() and text.isprintable() else "" for text in found))

    def conditions(self) -> dict[str, str]:
        """Request headers that ask for anything but this version."""
        told = {"If-None-Match": self.etag, "If-Modified-Since": "" if self.etag else self.modified}
        return {name: text for name, text in told.items() if text}


NO_VALIDATORS = Validators()


@dataclass(frozen=True)
class Fetched:
    """A body, and how to ask whether it is another by now; `unchanged` has no body."""

    data: bytes = field(repr=False)
    validators: Validators
    unchanged: bool = False


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet: not of this machine, this link, this network, nor one that leads to such."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            return is_public(inner)
        # What is translated or tunnelled ends who knows where.
        if address.teredo is not None or any(address in network for network in _NAT64) or int(address) >> 32 == 0:
            return False
        if address.is_site_local or address in _TRANSLATED:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def resolve_public(host: str, port: int) -> str:
    """The address to connect to. Raises UsageError where the name leads, or may lead, to an internal one; UnavailableError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UnavailableError(f"the name {host[:253]!r} cannot be resolved") from None
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    if not addresses:
        raise UnavailableError(f"the name {host[:253]!r} has no address")
    if not all(is_public(address) for address in addresses):
        raise UsageError(f"{host[:253]} has an internal address, from which nothing is fetched")
    return str(addresses[0])


def fetch_document(
    url: str,
    *,
    resolve: Callable[[str, int], str] = resolve_public,
    limit: int = MAX_DOCUMENT_BYTES,
    seconds: float = FETCH_SECONDS,
) -> Document:
    """The text at `url`, of at most `limit` bytes. Raises UsageError, NotFoundError, UnavailableError."""
    return decode_document(url, fetch_bytes(url, resolve=resolve, limit=limit, seconds=seconds).data)


def fetch_bytes(
    url: str,
    *,
    resolve: Callable[[str, int], str] = resolve_public,
    limit: int = MAX_DOCUMENT_BYTES,
    seconds: float = FETCH_SECONDS,
    known: Validators = NO_VALIDATORS,
) -> Fetched:
    """What is at `url`, of at most `limit` bytes; without its bytes where it still is what `known` was told with.

    Raises UsageError, NotFoundError, UnavailableError.
    """
    deadline = time.monotonic() + seconds
    target = url
    for _ in range(MAX_REDIRECTS + 1):
        found = _get(target, resolve, limit, deadline, known)
        if isinstance(found, Fetched):
            return found
        try:
            target = urljoin(target, found)
        except ValueError:
            raise UsageError(f"{target} redirects to {found[:200]!r}, which is not a URL") from None
    raise UsageError(f"{url} redirects more than {MAX_REDIRECTS} times")


def _get(url: str, resolve: Callable[[str, int], str], limit: int, deadline: float, known: Validators) -> Fetched | str:
    """A body, or where to go on."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        path = quote(parts.path or "/", _PLAIN) + (f"?{quote(parts.query, _PLAIN)}" if parts.query else "")
    except ValueError:
        raise UsageError(f"{url[:200]!r} is not a URL") from None
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"{url[:200]!r} is not an http or https URL")
    if parts.username is not None or parts.password is not None:
        raise UsageError("a URL with a password in it is not fetched")
    host = _in_ascii(host, url)
    connection = _Connection(resolve(host, port), port, host if parts.scheme == "https" else None)
    headers = {"Host": (f"[{host}]" if ":" in host else host) + (f":{parts.port}" if parts.port else ""), **known.conditions()}
    watch = threading.Timer(max(deadline - time.monotonic(), 0), connection.break_off)
    watch.daemon = True
    watch.start()
    try:
        connection.request("GET", path, headers=headers, preload_content=False)
        with connection.getresponse() as response:
            found = _answered(response, url, limit, known)
    except (urllib3.exceptions.HTTPError, HTTPException, OSError) as error:
        if not connection.broken_off:
            raise UnavailableError(f"cannot download {url}: {type(error).__name__}") from None
    finally:
        watch.cancel()
        connection.end()
    if connection.broken_off:  # also where that looked like the end of a body
        raise UnavailableError(f"{url} does not come to an end in time")
    return found


def _answered(response: urllib3.BaseHTTPResponse, url: str, limit: int, known: Validators) -> Fetched | str:
    """The body of an answer, or where to go on."""
    if response.status in _REDIRECTS and response.headers.get("Location"):
        return str(response.headers["Location"])
    if response.status == 304 and known.conditions():  # noqa: PLR2004 - HTTP's own number
        return Fetched(b"", known, unchanged=True)
    if response.status in (404, 410):
        raise NotFoundError(f"{url} answers {response.status}: there is no such document")
    if response.status != 200:  # noqa: PLR2004 - HTTP's own number
        raise UnavailableError(f"{url} answers {response.status}")
    pieces, size = [], 0
    for piece in response.stream(_PIECE_BYTES):
        size += len(piece)
        if size > limit:
            raise UsageError(f"{url} is larger than {limit:,} bytes")
        pieces.append(piece)
    return Fetched(b"".join(pieces), Validators.of(response.headers))


class _Connection(urllib3.connection.HTTPConnection):
    """A connection to an address, under TLS where it is to be `name`. Another thread may break it off."""

    def __init__(self, address: str, port: int, name: str | None) -> None:
        super().__init__(address, port, timeout=_READ_SECONDS)
        self._name = name
        self._handle: socket.socket | None = None
        self.broken_off = False

    def connect(self) -> None:
        sock = socket.create_connection((self.host, self.port), _CONNECT_SECONDS)
        try:
            self._handle = sock.dup()  # TLS takes the other one over, for the time of its handshake
            if self.broken_off:
                raise TimeoutError
            if self._name is not None:
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=self._name)
        except BaseException:
            sock.close()
            raise
        self.sock = sock

    def break_off(self) -> None:
        """Whoever waits for it meets its end."""
        self.broken_off = True
        if self._handle is not None:
            with contextlib.suppress(OSError):
                self._handle.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Closes all of it. `close` is called as soon as a body is known to end with the connection."""
        self.close()
        if self._handle is not None:
            self._handle.close()


def _in_ascii(host: str, url: str) -> str:
    """A name as DNS, certificates and headers have it (RFC 3490)."""
    try:
        return host if host.isascii() else host.encode("idna").decode("ascii")
    except UnicodeError:
        raise UsageError(f"{url[:200]!r} is not a URL: there can be no such host") from None
