"""Proxies: whether the environment wants one before a server (HTTP_PROXY, HTTPS_PROXY, NO_PROXY), and how it is spoken to."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from kvcdn.errors import UsageError
from kvcdn.stores.http import is_loopback

PROXY_HINT = "see the variables HTTP_PROXY, HTTPS_PROXY and NO_PROXY"

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy. Its credentials never show."""

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)
    """Value of the header Proxy-Authorization (RFC 7617)."""

    @property
    def name(self) -> str:
        """For errors."""
        return f"the proxy {self.host}:{self.port}"


def proxy_for(server: SplitResult) -> Proxy | None:
    """The environment's proxy for the `server` of a URL; never one for this machine itself. Raises UsageError."""
    host = server.hostname or ""
    address = f"{host}:{server.port or DEFAULT_PORTS[server.scheme]}"
    named = getproxies().get(server.scheme)
    if not named or is_loopback(host) or proxy_bypass(address):
        return None
    try:
        parts = urlsplit(named if "://" in named else f"http://{named}")
        proxy_host, port = parts.hostname, parts.port or DEFAULT_PORTS["http"]
    except ValueError:
        proxy_host = None
    if not proxy_host or parts.scheme != "http":
        raise UsageError(f"the environment's proxy for {server.scheme}:// is not an http:// URL", hint=PROXY_HINT)
    if parts.username is None:
        return Proxy(proxy_host, port)
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return Proxy(proxy_host, port, f"Basic {base64.b64encode(login).decode('ascii')}")
