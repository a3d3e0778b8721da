"""Tokens: grants as EdDSA JSON web tokens (FORMAT.md 9.1; RFC 7519, RFC 8037)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jwt
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kvcdn.access.grant import Grant, Scope
from kvcdn.errors import KvcdnError, UntrustedError, UsageError
from kvcdn.signing import PublicKey, SigningKey, TrustList

AUDIENCE = "kvcdn"
"""The `aud` of a token that names none of its own."""

MAX_TOKEN_CHARACTERS = 4096
"""Fits a header field of any server."""

LEEWAY_SECONDS = 30
"""By how much clocks may differ."""

_ALGORITHM = "EdDSA"

_REMEMBERED = 1024
"""Tokens whose signature need not be checked again: a check takes a tenth of a millisecond."""


def issue_token(key: SigningKey, grant: Grant, *, seconds: float, now: float, audience: str = AUDIENCE) -> str:
    """A token of `grant`, valid for `seconds` from `now` (Unix time). Raises UsageError where it would be too long."""
    claims: dict[str, Any] = {
        "aud": audience,
        "exp": int(now + seconds),
        "iat": int(now),
        "scope": " ".join(sorted(grant.scopes)),
        "sub": grant.tenant,
    }
    for name in ("models", "namespaces"):
        patterns: tuple[str, ...] = getattr(grant, name)
        if patterns != ("*",):
            claims[name] = list(patterns)
    if grant.bytes_per_day is not None:
        claims["bytes_per_day"] = grant.bytes_per_day
    token = jwt.encode(claims, key.private, algorithm=_ALGORITHM, headers={"kid": str(key.public)})
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise UsageError(f"the token would have {len(token)} characters, of {MAX_TOKEN_CHARACTERS}", hint="name fewer patterns")
    return token


class TokenVerifier:
    """Reads tokens by known issuers for one audience. Used by one thread."""

    def __init__(self, issuers: TrustList, audience: str = AUDIENCE, clock: Callable[[], float] = time.time) -> None:
        self._issuers = issuers
        self._audience = audience
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[float, Grant]] = OrderedDict()

    def verify(self, token: str) -> Grant:
        """The grant that `token` carries. Raises UntrustedError, which says nothing of the token's content."""
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise UntrustedError("the token is too long")
        name = blake3(token.encode("utf-8", "surrogatepass")).digest()
        known = self._known.get(name)
        if known is None:
            known = self._read(token)
            self._known[name] = known
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        expires, grant = known
        if self._clock() > expires + LEEWAY_SECONDS:
            raise UntrustedError("the token has expired")
        return grant

    def _read(self, token: str) -> tuple[float, Grant]:
        try:
            issuer = self._issuer(jwt.get_unverified_header(token))
            claims = jwt.decode(
                token,
                Ed25519PublicKey.from_public_bytes(issuer),
                algorithms=[_ALGORITHM],
                audience=self._audience,
                leeway=LEEWAY_SECONDS,
                # The times are compared here, by the clock that was given.
                options={
                    "require": ["exp", "sub", "aud", "scope"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
            self._require_begun(claims)
            return _number(claims, "exp"), _grant(claims)
        except UntrustedError:
            raise
        except (jwt.InvalidTokenError, KvcdnError, ValueError, TypeError, RecursionError):
            raise UntrustedError("the token is not one that this service takes") from None

    def _issuer(self, header: dict[str, Any]) -> PublicKey:
        issuer = PublicKey.from_text(str(header.get("kid", "")))
        if issuer not in self._issuers.names:
            raise UntrustedError("the token's issuer is not known here")
        return issuer

    def _require_begun(self, claims: dict[str, Any]) -> None:
        if "nbf" in claims and _number(claims, "nbf") > self._clock() + LEEWAY_SECONDS:
            raise UntrustedError("the token is not valid yet")


def _grant(claims: dict[str, Any]) -> Grant:
    quota = claims.get("bytes_per_day")
    return Grant(
        tenant=_word(claims["sub"]),
        scopes=frozenset(Scope(word) for word in _word(claims["scope"]).split() if word in set(Scope)),
        models=_patterns(claims, "models"),
        namespaces=_patterns(claims, "namespaces"),
        bytes_per_day=None if quota is None else int(_number(claims, "bytes_per_day")),
    )


def _patterns(claims: dict[str, Any], name: str) -> tuple[str, ...]:
    value = claims.get(name, ["*"])
    if not isinstance(value, list):
        raise UsageError(f"{name} is not a list")
    return tuple(_word(item) for item in value)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError("a claim is not a string")
    return value


def _number(claims: dict[str, Any], name: str) -> float:
    value = claims[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise UsageError(f"{name} is not a number")
    return value
