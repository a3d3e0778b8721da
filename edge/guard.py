"""The guard: who may ask. A bearer token where one is set, and no plain HTTP beyond this machine without one."""

from __future__ import annotations

import hmac
import re

from kvcdn.edge.settings import ENV_PREFIX, EdgeSettings
from kvcdn.errors import UsageError

MIN_TOKEN_CHARACTERS = 16
"""Shorter tokens can be guessed over the network."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""RFC 6750 section 2.1: what a bearer token may consist of."""


class Guard:
    """Decides by the Authorization header. Never shows its token."""

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else token.encode("ascii")

    @classmethod
    def of(cls, settings: EdgeSettings) -> Guard:
        """The guard `settings` ask for. Raises UsageError where they would leave the edge open to the network."""
        token = _token(settings)
        if not settings.address.is_loopback and not (settings.insecure_http and token):
            raise UsageError(
                f"{settings.listen} is more than loopback, and this version speaks plain HTTP only",
                hint="listen on 127.0.0.1 and put a proxy with TLS before it; or, on a network that you trust, set "
                "insecure_http = true and a token",
            )
        return cls(token)

    def allows(self, authorization: str | None) -> bool:
        """Whether a request with this header may pass; takes the same time for every wrong token."""
        if self._expected is None:
            return True
        scheme, _, token = (authorization or "").partition(" ")
        given = token.strip().encode("utf-8", "replace")
        return hmac.compare_digest(given, self._expected) and scheme.lower() == "bearer"


def _token(settings: EdgeSettings) -> str | None:
    if settings.token is not None and settings.token_file is not None:
        raise UsageError("token and token_file are both set", hint="keep one of them")
    if settings.token is not None:
        token, source = settings.token.get_secret_value(), f"the setting token or {ENV_PREFIX}TOKEN"
    elif settings.token_file is not None:
        path = settings.token_file.expanduser()
        try:
            token, source = path.read_text(encoding="utf-8").strip(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the token file {path}: {error}") from None
    else:
        return None
    if len(token) < MIN_TOKEN_CHARACTERS or not _TOKEN.fullmatch(token):
        raise UsageError(
            f"{source} does not hold a usable token: at least {MIN_TOKEN_CHARACTERS} of A-Z a-z 0-9 . _ ~ + / -",
            hint="make one with: openssl rand -hex 32",
        )
    return token
