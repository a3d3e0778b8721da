"""Listening: where a service is reached, whether only this machine reaches it, and what HTTPS needs."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from kvcdn.errors import UsageError

_LISTEN = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9.-]{1,253})):([0-9]{1,5})")

MAX_PORT = 65535

_UNIX = "unix:"

MAX_SOCKET_PATH_BYTES = 107
"""Linux's own limit."""


@dataclass(frozen=True)
class ListenAddress:
    """Where a service listens."""

    host: str
    port: int
    socket: Path | None = None
    """Of a Unix socket, which has neither host nor port."""

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Reads `127.0.0.1:8400`, `[::1]:8400`, `localhost:8400` or `unix:/run/kvcdn.sock`. Raises ValueError."""
        if text.startswith(_UNIX):
            path = Path(text.removeprefix(_UNIX))
            if not path.is_absolute() or len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
                raise ValueError(f"{text[:80]!r} is not unix: and an absolute path of at most {MAX_SOCKET_PATH_BYTES} bytes")
            return cls("", 0, path)
        match = _LISTEN.fullmatch(text)
        if match is None or int(match.group(3)) > MAX_PORT:
            raise ValueError(f"{text[:80]!r} is not HOST:PORT or unix:/PATH")
        return cls(match.group(1) or match.group(2), int(match.group(3)))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it. A name other than `localhost` may resolve to anything: it counts as outside."""
        if self.host == "localhost" or self.socket is not None:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.socket is not None:
            return f"{_UNIX}{self.socket}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def url(self, port: int, scheme: str = "http") -> str:
        """The base URL when bound to `port`; `unix:/path` for a Unix socket."""
        if self.socket is not None:
            return str(self)
        return f"{scheme}://[{self.host}]:{port}" if ":" in self.host else f"{scheme}://{self.host}:{port}"


def tls_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """What HTTPS needs; None where there is no certificate. Raises UsageError."""
    if cert is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert.expanduser(), key.expanduser(), password=_no_password)
    except (OSError, ValueError) as error:
        # ssl.SSLError is an OSError whose strerror says nothing of use.
        reason = error.reason if isinstance(error, ssl.SSLError) else str(error)
        raise UsageError(
            f"cannot use the certificate {cert} with the key {key}: {reason}",
            hint="both are PEM; the key belongs to the certificate and has no passphrase",
        ) from None
    return context


def _no_password() -> str:
    raise ValueError("the key has a passphrase")
