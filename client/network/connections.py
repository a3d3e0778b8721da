"""Connections to one HTTP server: a pool of them, made directly or through a proxy, with TLS or without."""

from __future__ import annotations

import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from kvcdn import __version__
from kvcdn.client.network.link import LinkMeter
from kvcdn.client.network.patience import Patience
from kvcdn.client.network.proxy import DEFAULT_PORTS, PROXY_HINT, Proxy, proxy_for
from kvcdn.client.network.wire import BrokenError, Wire
from kvcdn.errors import UnavailableError, UsageError

CONNECT_SECONDS = 5.0
"""To look a name up and make a connection, TLS and proxy included: who needs longer is down or behind a firewall."""

IDLE_CONNECTIONS = 32
"""Connections kept for the next prompt."""

MAX_TUNNEL_REPLY_BYTES = 16 * 1024
"""Of a proxy's answer to CONNECT."""

RESOLVE_STEP_SECONDS = 0.05
"""How often somebody who waits for a name looks whether he is still wanted."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
"""RFC 6750 section 2.1."""

_CONNECT_HINT = "is the edge running, and is its address right?"


class ConnectionPool:
    """Keep-alive connections to the server at `url`. Thread-safe; the token never shows in `url` or a repr."""

    def __init__(self, url: str, token: str | None, ca_file: str | None = None) -> None:
        """`url` is http or https, with an optional path; `ca_file` holds the only certificates to trust. Raises UsageError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), 0
        usable = parts.scheme in DEFAULT_PORTS and parts.hostname and port != 0 and re.fullmatch(r"[!-~]+", url)
        if not usable or parts.query or parts.fragment or parts.username is not None:
            raise UsageError(f"{_shown(url)} is not the URL of an edge", hint="it looks like http://127.0.0.1:8400")
        if token is not None and not _TOKEN.fullmatch(token):
            raise UsageError(f"the token for {url} holds characters that no bearer token has")
        self.url = url.rstrip("/")
        self.link = LinkMeter(self.url)
        self.meters = [self.link]
        """Told of every body: the server's own, and that of a group it belongs to."""
        self._host, self._port = str(parts.hostname), port or DEFAULT_PORTS[parts.scheme]
        self._tls = _context(ca_file) if parts.scheme == "https" else None
        self._proxy = proxy_for(parts)
        # To a proxy without TLS the whole URL is named (RFC 9112 section 3.2.2).
        self._base = self.url if self._proxy and not self._tls else parts.path.rstrip("/")
        self._headers = {"Host": parts.netloc, "User-Agent": f"kvcdn/{__version__}", "Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        if self._proxy and self._proxy.authorization and not self._tls:
            self._headers["Proxy-Authorization"] = self._proxy.authorization
        self._idle: list[Wire] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"ConnectionPool({self.url})"

    def take(self, patience: Patience, *, fresh: bool = False, within_s: float = CONNECT_SECONDS) -> Wire:
        """A connection for a prompt, new if `fresh`; a new one is made `within_s` seconds.

        Raises UnavailableError; BrokenError where another try may help.
        """
        while not fresh:
            with self._lock:
                wire = self._idle.pop() if self._idle else None
            if wire is None:
                break
            # What the peer has closed, or said without being asked, is of no use.
            if wire.has_come():
                wire.close()
                continue
            wire.lend(patience)
            return wire
        return self._connect(patience, within_s)

    def give_back(self, wire: Wire) -> None:
        """Keeps a connection whose last answer was read to its end."""
        wire.release()
        wire.used = True
        with self._lock:
            if len(self._idle) < IDLE_CONNECTIONS:
                self._idle.append(wire)
                return
        wire.close()

    def request(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        """A request as it goes over the wire."""
        length = {} if body is None else {"Content-Length": str(len(body)), "Content-Type": "application/json"}
        fields = {**self._headers, **headers, **length}
        lines = [f"{method} {self._base}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        return "\r\n".join(lines).encode("ascii") + (body or b"")

    def close(self) -> None:
        """Closes what is idle, and remembers the link."""
        self.link.save(at_once=True)
        with self._lock:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    # -- connecting -------------------------------------------------------------------------------------------------------

    def _connect(self, patience: Patience, within_s: float) -> Wire:
        due = patience.clock() + min(within_s, patience.silence())
        host, port = (self._proxy.host, self._proxy.port) if self._proxy else (self._host, self._port)
        name = self._proxy.name if self._proxy else self.url
        problem = "its name was not found in time"
        for family, address in _resolve(host, port, name, patience, due):
            wire = Wire(family, name, lambda: self.link.total_bytes)
            try:
                wire.lend(patience)
                wire.due = due
                wire.connect(address)
                self._secure(wire)
                return wire
            except ssl.SSLError as error:
                wire.close()
                raise self._distrusted(error) from None
            except (OSError, BrokenError) as error:
                wire.close()
                problem = str(error.strerror if isinstance(error, OSError) else error)
            except UnavailableError:
                wire.close()
                raise
        raise BrokenError(f"{name} cannot be reached: {problem}", hint=PROXY_HINT if self._proxy else _CONNECT_HINT)

    def _secure(self, wire: Wire) -> None:
        if self._tls is not None:
            if self._proxy is not None:
                self._tunnel(wire, self._proxy)
            wire.secure(self._tls, self._host)

    def _tunnel(self, wire: Wire, proxy: Proxy) -> None:
        """CONNECT (RFC 9110 section 9.3.6): from its answer on, the bytes are the server's."""
        target = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        login = f"Proxy-Authorization: {proxy.authorization}\r\n" if proxy.authorization else ""
        wire.write_all(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{login}\r\n".encode("ascii"))
        reply, byte = bytearray(), bytearray(1)
        # Byte by byte: nothing behind the answer's head may be taken away from TLS. It is once per connection.
        while not reply.endswith(b"\r\n\r\n") and len(reply) < MAX_TUNNEL_REPLY_BYTES and wire.readinto(byte):
            reply += byte
        found = re.match(rb"HTTP/1\.[01] (\d{3})", reply) if reply.endswith(b"\r\n\r\n") else None
        status = int(found[1]) if found else 0
        if not 200 <= status < 300:  # noqa: PLR2004 - HTTP's successes
            said = status or "something that is not HTTP"
            kind = BrokenError if status in (502, 503, 504) else UnavailableError
            raise kind(f"{proxy.name} answers {said} when asked for {target}", hint=PROXY_HINT)

    def _distrusted(self, error: ssl.SSLError) -> UnavailableError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return BrokenError(
                f"{self.url}: its certificate is not trusted: {error.verify_message}",
                hint="check the host name and the clock; for an authority of your own set SSL_CERT_FILE or ca_file",
                elsewhere=True,
            )
        said = error.reason or error.strerror or type(error).__name__
        return BrokenError(f"{self.url}: no TLS connection: {said}", hint="does it speak TLS on that port?", elsewhere=True)


def _context(ca_file: str | None) -> ssl.SSLContext:
    """TLS, trusting `ca_file` or else the system's authorities, which SSL_CERT_FILE and SSL_CERT_DIR can replace."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{ca_file} holds no certificates that can be read: {error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _resolve(host: str, port: int, name: str, patience: Patience, due: float) -> Iterator[tuple[int, Any]]:
    """Addresses of `host`. A resolver may think for a minute, and cannot be stopped: it does that in a thread of its own."""
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST):
            yield family, address
        return
    found: list[Any] = []

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            found.append(error)
        except UnicodeError:
            found.append(OSError(0, "its name is not a host name"))

    thread = threading.Thread(target=look_up, name="kvcdn-resolve", daemon=True)
    thread.start()
    while thread.is_alive() and patience.clock() < due:
        thread.join(RESOLVE_STEP_SECONDS)
        patience.check()
    if found and isinstance(found[0], OSError):
        raise BrokenError(f"{name} cannot be reached: {found[0].strerror}", hint=_CONNECT_HINT)
    for family, _, _, _, address in found[0] if found else ():
        yield family, address


def _shown(url: str) -> str:
    """`url` without what may be a password."""
    return re.sub(r"//[^/@]*@", "//", url)[:200]
