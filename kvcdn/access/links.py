"""Links: URLs of single objects that carry their own permission for a while (FORMAT.md 9.2)."""

from __future__ import annotations

import base64
import re

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kvcdn.access.grant import Grant, Scope
from kvcdn.errors import UntrustedError, UsageError
from kvcdn.signing import PublicKey, SigningKey, TrustList

_CONTEXT = b"kvcdn v1 link\x00"

_QUERY = re.compile(
    r"(expires=([0-9]{1,12})&issuer=([0-9a-f]{64})&tenant=([A-Za-z0-9._@-]{1,64}))&signature=([A-Za-z0-9_-]{86})"
)

MAX_LINK_SECONDS = 7 * 24 * 3600
"""A link cannot be called back: it is for a download, not for good."""


def sign_link(key: SigningKey, path: str, *, tenant: str, seconds: int, now: float) -> str:
    """The query that makes `path` (`/v1/...`) a link, valid for `seconds` from `now` (Unix time). Raises UsageError."""
    Grant(tenant, frozenset((Scope.READ,)))
    if not 0 < seconds <= MAX_LINK_SECONDS:
        raise UsageError(f"a link lasts at most {MAX_LINK_SECONDS // 3600} hours", hint="give readers a token instead")
    signed = f"expires={int(now) + seconds}&issuer={key.public}&tenant={tenant}"
    return f"{signed}&signature={_text(key.private.sign(_signed_bytes(path, signed)))}"


def verify_link(path: str, query: str, issuers: TrustList, now: float) -> Grant:
    """The grant to read `path` that `query` carries. Raises UntrustedError."""
    match = _QUERY.fullmatch(query)
    if match is None:
        raise UntrustedError("the query is not that of a link")
    signed, expires, issuer, tenant, signature = match.groups()
    key = PublicKey.parse(issuer, "issuer")
    if key not in issuers.names:
        raise UntrustedError("the link's issuer is not known here")
    try:
        raw = base64.urlsafe_b64decode(signature + "==")
        if _text(raw) != signature:  # 86 characters hold four bits more than a signature has
            raise UntrustedError("the link's signature is not in its one text form")
        Ed25519PublicKey.from_public_bytes(key).verify(raw, _signed_bytes(path, signed))
    except (InvalidSignature, ValueError):
        raise UntrustedError("the link's signature does not match") from None
    if not now <= int(expires) <= now + MAX_LINK_SECONDS:
        raise UntrustedError("the link has expired, or would last too long")
    return Grant(tenant, frozenset((Scope.READ,)))


def _text(signature: bytes) -> str:
    return base64.urlsafe_b64encode(signature).decode("ascii").rstrip("=")


def _signed_bytes(path: str, query: str) -> bytes:
    return _CONTEXT + f"{path}?{query}".encode("utf-8", "surrogatepass")
