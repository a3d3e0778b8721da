"""An HTTP store: objects read from an edge, or from any web server or CDN that serves object keys as paths (FORMAT.md 7)."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from ipaddress import ip_address
from typing import NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import HTTPError, LocationParseError, ProxyError, SSLError

from kvcdn import __version__, trail
from kvcdn.digest import Buffer
from kvcdn.errors import NotFoundError, UnavailableError, UsageError
from kvcdn.store import BlobInfo, check_key
from kvcdn.stores.body import Body, BrokenBodyError, body_extent, pause, resumed
from kvcdn.stores.heads import bound_heads
from kvcdn.stores.span import Pieces, Span, nothing

CONNECT_SECONDS = 5.0
"""A host that does not answer in this time is down or behind a firewall."""

STALL_SECONDS = 30.0
"""Longest silence while an answer is awaited or read."""

ATTEMPTS = 3
RETRY_BUDGET_SECONDS = 10.0
"""A request is tried ATTEMPTS times and within this time; who waits longer would rather prefill."""

DISMISSED_BYTES = 16 * 1024
"""The body of an error is read up to here to keep its connection; a new one is cheaper than more."""

CONNECTIONS = 32
"""Idle connections kept: as many as threads that fetch at once."""

_RETRIED = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
_MISSING = (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
"""RFC 6750 section 2.1."""

_EDGE = re.compile(r"(?:^|,) *kvcdn *(?:;|,|$)")
"""An edge's member, with those of other caches around it (RFC 9211 section 2)."""


@dataclass(frozen=True)
class Patience:
    """How long a server is waited for, and how often it is asked."""

    connect_seconds: float
    stall_seconds: float
    attempts: int


def _nothing_more() -> Mapping[str, str]:
    return {}


class HttpStore:
    """A read-only BlobStore."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        patience: Patience | None = None,
        headers: Callable[[], Mapping[str, str]] = _nothing_more,
    ) -> None:
        """Connects to nothing yet. `headers` are asked for before each request.

        Raises UsageError for a URL with a user, query or fragment, and for a malformed token.
        """
        self._patience, self._more_headers = patience or Patience(CONNECT_SECONDS, STALL_SECONDS, ATTEMPTS), headers
        self._base = _checked_base(base_url)
        self._headers = {"Accept-Encoding": "identity", "User-Agent": f"kvcdn/{__version__}"}
        self._has_token = token is not None
        if token is not None:
            if not _TOKEN.fullmatch(token):
                raise UsageError(f"the token for {self._base} holds characters that no bearer token has")
            self._headers["Authorization"] = f"Bearer {token}"
        self._pool, self._target = _pool(self._base, self._patience)
        self.is_edge = False
        """Whether an edge has answered, by its Cache-Status (FORMAT.md section 7)."""

    @property
    def url(self) -> str:
        return self._base

    def __repr__(self) -> str:
        return f"HttpStore({self._base})"

    def stat(self, key: str) -> BlobInfo | None:
        response = self._ask("HEAD", check_key(key), {})
        _dismiss(response)
        if response.status in _MISSING:
            return None
        if response.status != HTTPStatus.OK:
            raise self._unexpected(response, key)
        size, _ = body_extent(response.status, response.headers, Span(0, None), self._at(key))
        return BlobInfo(key, size, _modified(response.headers.get("Last-Modified")))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return b"".join(self.stream(key, start, length))

    def stream(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        span = Span.of(start, length)
        body = None if span.empty else self._open(check_key(key), span)
        if body is None:
            self._check_end(key, span)
            return nothing()
        return Pieces(self._pieces(key, body, span), body.size)

    def create(self, key: str, pieces: Sequence[Buffer]) -> bool:  # noqa: ARG002 - the protocol's
        self._refuse(f"{check_key(key)} cannot be created")

    def list(self, prefix: str, after: str = "") -> Iterator[BlobInfo]:
        self._refuse(f"{prefix or 'everything'} cannot be listed" + (f" behind {after}" if after else ""))

    def delete(self, key: str) -> None:
        self._refuse(f"{check_key(key)} cannot be deleted")

    def _pieces(self, key: str, body: Body, span: Span) -> Generator[bytes, None, None]:
        def reopen(rest: Span) -> Body:
            again = self._open(key, rest)
            if again is None:
                raise UnavailableError(f"{self._at(key)}: the object changed while it was read")
            return again

        return resumed(body, span, reopen, self._at(key))

    def _open(self, key: str, span: Span) -> Body | None:
        """An answer that holds `span`, or None where the server says that the object ends before it."""
        response = self._ask("GET", key, {} if span == Span(0, None) else {"Range": span.header})
        try:
            extent = self._extent(response, key, span)
        except BaseException:
            _dismiss(response)
            raise
        if extent is None:
            _dismiss(response)
            return None
        return Body(_reader(response), response.close, span.start, extent[0], response.headers.get("ETag", ""), extent[1])

    def _extent(self, response: urllib3.BaseHTTPResponse, key: str, span: Span) -> tuple[int, int] | None:
        """As `body_extent`, or None for a range that cannot be satisfied."""
        if response.status in _MISSING:
            raise NotFoundError(f"{self._base} has no object {key}")
        if response.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return None
        if response.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            raise self._unexpected(response, key)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnavailableError(f"{self._at(key)}: the server sent an encoding that was not asked for")
        return body_extent(response.status, response.headers, span, self._at(key))

    def _check_end(self, key: str, span: Span) -> None:
        """Whether it is true that nothing of `span` exists (RFC 9110 section 15.5.17 allows 416 for other reasons too)."""
        info = self.stat(key)
        if info is None:
            raise NotFoundError(f"{self._base} has no object {key}")
        if not span.empty and info.size > span.start:
            raise UnavailableError(f"{self._at(key)}: refused the range {span.header} of an object of {info.size:,} bytes")

    def _ask(self, method: str, key: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        """The answer to one request, tried again while that may help. Its body is not read yet."""
        began = time.monotonic()
        for attempt in range(1, self._patience.attempts + 1):
            last = attempt == self._patience.attempts
            wait = 0.0
            try:
                response = self._pool.request(
                    method,
                    f"{self._target}/{key}",
                    headers={**self._headers, **trail.headers(), **self._more_headers(), **headers},
                    preload_content=False,
                    decode_content=False,
                    redirect=False,
                    retries=False,
                )
                self.is_edge |= bool(_EDGE.search(response.headers.get("Cache-Status", "")))
                if last or response.status not in _RETRIED:
                    return response
                wait = retry_after(response.headers.get("Retry-After"))
                if time.monotonic() - began + wait > RETRY_BUDGET_SECONDS:
                    return response
                _dismiss(response)
            except HTTPError as error:
                if last or time.monotonic() - began > RETRY_BUDGET_SECONDS or isinstance(error, SSLError):
                    raise self._unreachable(error) from error
            time.sleep(wait)
            pause(attempt)
        raise AssertionError("the last attempt returns or raises")

    def _unexpected(self, response: urllib3.BaseHTTPResponse, key: str) -> UnavailableError:
        status = response.status
        if status in _REFUSED:
            what = "the token was refused" if self._has_token else "it asks for a token, and none was given"
            return UnavailableError(
                f"{self._base} refused to serve {key} ({status}): {what}",
                hint="ask whoever runs it for a token that is valid now",
            )
        if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
            return UnavailableError(
                f"{self._at(key)}: answered with a redirect ({status}), which is not followed", hint="name the URL it leads to"
            )
        return UnavailableError(f"{self._at(key)}: answered {status}", hint="try again later, or see that server's log")

    def _unreachable(self, error: HTTPError) -> UnavailableError:
        if isinstance(error, SSLError):
            return UnavailableError(
                f"{self._base}: no trusted TLS connection ({error})", hint="check its certificate and the clock"
            )
        if isinstance(error, ProxyError):
            return UnavailableError(
                f"{self._base} cannot be reached through the proxy", hint="see the variables HTTPS_PROXY, HTTP_PROXY, NO_PROXY"
            )
        return UnavailableError(
            f"{self._base} cannot be reached ({_reason(error)})", hint="check that it runs, and its host name and port"
        )

    def _at(self, key: str) -> str:
        return f"{self._base}/{key}"

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what}: {self._base} can only be read, as every http(s):// store",
            hint="name the origin itself (a folder or s3://bucket/prefix)",
        )


def _checked_base(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError("not a URL that can be read", hint="write https://host:port/prefix") from None
    if parts.scheme.lower() not in ("http", "https") or not parts.hostname or port == 0:
        raise UsageError(f"{url[:200]!r} is not an http(s) URL", hint="write https://host:port/prefix")
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"the URL of {parts.hostname} holds a user name or password", hint="give a token instead")
    if parts.query or parts.fragment or re.search(r"[\s\\\x00-\x1f\x7f]", url):
        raise UsageError(f"{url[:200]!r} cannot be the start of object URLs", hint="write https://host:port/prefix")
    return url.rstrip("/")


def _pool(base: str, patience: Patience) -> tuple[urllib3.PoolManager | urllib3.HTTPConnectionPool, str]:
    """Connections to `base`, and what begins the targets of requests over them.

    They lead through the environment's proxy unless that is for others or `base` is this machine.
    """
    parts = urlsplit(base)
    host = parts.hostname or ""
    timeout = urllib3.Timeout(connect=patience.connect_seconds, read=patience.stall_seconds)
    proxy = getproxies().get(parts.scheme.lower())
    if proxy is None or is_loopback(host) or proxy_bypass(host):
        # The one host's pool itself: to be told anew with each request which it is costs as much as to send the request.
        pools = urllib3.PoolManager(maxsize=CONNECTIONS, timeout=timeout)
        bound_heads(pools)
        return pools.connection_from_url(base), (urllib3.util.parse_url(base).path or "").rstrip("/")
    try:
        user = urlsplit(proxy)
        login = f"{user.username}:{user.password or ''}" if user.username else None
        headers = urllib3.make_headers(proxy_basic_auth=login)
        proxies = urllib3.ProxyManager(proxy, maxsize=CONNECTIONS, timeout=timeout, proxy_headers=headers)
    except (ValueError, LocationParseError):
        raise UsageError("the proxy that the environment names is not a URL", hint="see HTTPS_PROXY and HTTP_PROXY") from None
    bound_heads(proxies)
    return proxies, base


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine, by name or number: traffic to it never takes a proxy."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _dismiss(response: urllib3.BaseHTTPResponse) -> None:
    """Leaves an answer whose body is of no interest: its connection is kept if one read finds the end of it."""
    with contextlib.suppress(HTTPError, OSError):
        response.read1(DISMISSED_BYTES)
    response.close()


def _reader(response: urllib3.BaseHTTPResponse) -> Callable[[int], bytes]:
    def read(size: int) -> bytes:
        try:
            return response.read1(size)
        except (HTTPError, OSError) as error:
            raise BrokenBodyError(_reason(error)) from error

    return read


def _reason(error: BaseException) -> str:
    """The innermost cause in words: urllib3 wraps each error in the next, with object addresses in between."""
    text = str(error).rpartition(">: ")[2] or type(error).__name__
    return text[:200]


def _modified(header: str | None) -> float:
    """Last-Modified as Unix time; now where a server does not say, so that nobody takes the object for an old one."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if header:
            return parsedate_to_datetime(header).timestamp()
    return time.time()


def retry_after(header: str | None) -> float:
    """Seconds to wait, from either form of Retry-After (RFC 9110 section 10.2.3); 0 where there is none."""
    if header is None:
        return 0.0
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        if header.strip().isdecimal():
            return float(header)
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return 0.0
