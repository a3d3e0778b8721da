"""The guard: who may ask, and for what. Tokens and links where issuers or a token are set; beyond this machine never without.

What a request may do is a `Grant`. Without token and issuers everyone who reaches the service, which then is this machine
alone, may do everything.
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from kvcdn.access.grant import EVERYTHING, Grant
from kvcdn.access.links import verify_link
from kvcdn.access.listening import ListenAddress
from kvcdn.access.settings import AccessSettings
from kvcdn.access.tokens import TokenVerifier
from kvcdn.errors import UntrustedError, UsageError
from kvcdn.signing import TrustList

MIN_TOKEN_CHARACTERS = 16
"""Shorter tokens can be guessed over the network."""

LOCAL = Grant("local", EVERYTHING)
"""Everyone, where nobody is asked."""

SHARED = Grant("token", EVERYTHING)
"""Whoever has the one token of the settings."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""RFC 6750 section 2.1: what a bearer token may consist of."""


class Guard:
    """Turns an Authorization header, or a link's query, into a grant. Never shows its token."""

    def __init__(
        self, token: str | None, issuers: TrustList | None, audience: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._token = None if token is None else token.encode("ascii")
        self._issuers = issuers
        self._verifier = None if issuers is None else TokenVerifier(issuers, audience, clock)
        self._clock = clock

    @classmethod
    def told(cls, settings: AccessSettings, env_prefix: str) -> Self:
        """The guard that `settings` ask for; the prefix is that of their variables. Raises UsageError."""
        token = settings.token.get_secret_value() if settings.token else None
        return cls(read_token(token, settings.token_file, env_prefix), _read_issuers(settings.issuers_file), settings.audience)

    def require_safe(self, name: str, listen: ListenAddress, *, tls: bool, insecure_http: bool) -> None:
        """Raises UsageError where a service that listens there, by the setting `name`, would be open to the network."""
        if listen.is_loopback:
            return
        if self.is_open:
            raise UsageError(
                f"{name} is more than loopback, and nobody would be asked who they are",
                hint="set issuers_file (kvcdn token makes tokens) or token_file; or listen on 127.0.0.1",
            )
        if not tls and not insecure_http:
            raise UsageError(
                f"{name} is more than loopback, and tokens would travel in plain HTTP",
                hint="set tls_cert and tls_key; or listen on 127.0.0.1 and put a proxy with TLS before it; or, on a network"
                " that you trust, set insecure_http = true",
            )

    @property
    def is_open(self) -> bool:
        """Whether nobody is asked who they are."""
        return self._token is None and self._verifier is None

    @property
    def takes_links(self) -> bool:
        return self._issuers is not None

    def admit(self, authorization: str | None) -> Grant:
        """The grant of a request with this Authorization header. Raises UntrustedError.

        Takes the same time for every token that is not the one of the settings.
        """
        if self.is_open:
            return LOCAL
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            raise UntrustedError("a bearer token is needed")
        token = given.strip()
        if self._token is not None and hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            return SHARED
        if self._verifier is None:
            raise UntrustedError("the token is not one that this service takes")
        return self._verifier.verify(token)

    def admit_link(self, path: str, query: str) -> Grant:
        """The grant of a request for `path` with the query of a link. Raises UntrustedError."""
        if self._issuers is None:
            raise UntrustedError("no issuer of links is known here")
        return verify_link(path, query, self._issuers, self._clock())


def read_token(token: str | None, token_file: Path | None, env_prefix: str) -> str | None:
    """The one token of a service's settings; None without. Raises UsageError."""
    if token is not None and token_file is not None:
        raise UsageError("token and token_file are both set", hint="keep one of them")
    if token is not None:
        source = f"the setting token or {env_prefix}TOKEN"
    elif token_file is not None:
        token, source = _read(token_file, "token file").strip(), str(token_file)
    else:
        return None
    if len(token) < MIN_TOKEN_CHARACTERS or not _TOKEN.fullmatch(token):
        raise UsageError(
            f"{source} does not hold a usable token: at least {MIN_TOKEN_CHARACTERS} of A-Z a-z 0-9 . _ ~ + / -",
            hint="make one with: openssl rand -hex 32",
        )
    return token


def _read_issuers(path: Path | None) -> TrustList | None:
    """Whose tokens and links are taken; None where a service was told of nobody. Raises UsageError."""
    if path is None:
        return None
    issuers = TrustList.from_text(_read(path, "issuers file"), str(path))
    if not issuers.names:
        raise UsageError(
            f"the issuers file {path} names nobody", hint="put the public key of an issuer on a line: kvcdn keygen"
        )
    return issuers


def _read(path: Path, what: str) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the {what} {path}: {error}") from None
