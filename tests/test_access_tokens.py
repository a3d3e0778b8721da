"""Tokens and links: what was permitted is read back, and nothing else is."""

from __future__ import annotations

import base64
import contextlib
import json
import string

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcdn.access.grant import Grant, Scope
from kvcdn.access.links import MAX_LINK_SECONDS, sign_link, verify_link
from kvcdn.access.tokens import LEEWAY_SECONDS, TokenVerifier, issue_token
from kvcdn.digest import ModelTag
from kvcdn.errors import UntrustedError, UsageError
from kvcdn.signing import SigningKey, TrustList

KEY, OTHER = SigningKey.generate(), SigningKey.generate()

ISSUERS = TrustList.of(KEY.public)

NOW = 1_800_000_000.0

READER = Grant("acme", frozenset((Scope.READ,)))

PATH = "/v1/" + "0" * 32 + "/manifests/" + "ab" * 32


def verifier(now: float = NOW, audience: str = "kvcdn") -> TokenVerifier:
    return TokenVerifier(ISSUERS, audience, lambda: now)


patterns = st.lists(st.from_regex(r"[a-z0-9*?.-]{1,20}", fullmatch=True), min_size=1, max_size=4).map(tuple)

grants = st.builds(
    Grant,
    tenant=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True),
    scopes=st.frozensets(st.sampled_from(list(Scope)), min_size=1),
    models=patterns,
    namespaces=patterns,
    bytes_per_day=st.none() | st.integers(1, 1 << 50),
)


@given(grants)
def test_a_grant_survives_its_token(grant: Grant) -> None:
    """Every field is read back as it was given."""
    assert grant == verifier().verify(issue_token(KEY, grant, seconds=60, now=NOW))


def _raw(claims: dict[str, object], key: SigningKey = KEY, **header: object) -> str:
    return jwt.encode(claims, key.private, algorithm="EdDSA", headers={"kid": str(KEY.public), **header})


GOOD = {"aud": "kvcdn", "exp": int(NOW + 60), "sub": "acme", "scope": "read"}


def _unsigned(header: dict[str, object], claims: dict[str, object], signature: bytes = b"") -> str:
    parts = (json.dumps(header).encode(), json.dumps(claims).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


_KID = {"kid": str(KEY.public), "typ": "JWT"}

REFUSED = {
    "no token": "",
    "not a token": "x.y.z",
    "another issuer": _raw(GOOD, OTHER, kid=str(OTHER.public)),
    "another's signature under a known issuer": _raw(GOOD, OTHER),
    "no issuer": jwt.encode(GOOD, KEY.private, algorithm="EdDSA"),
    "no algorithm": _unsigned({"alg": "none", **_KID}, GOOD),
    "a shared secret that is the public key": jwt.encode(GOOD, bytes(KEY.public), algorithm="HS256", headers=_KID),
    "no signature": _unsigned({"alg": "EdDSA", **_KID}, GOOD),
    "expired": _raw({**GOOD, "exp": int(NOW - LEEWAY_SECONDS - 1)}),
    "never expires": _raw({name: value for name, value in GOOD.items() if name != "exp"}),
    "expires in words": _raw({**GOOD, "exp": "tomorrow"}),
    "expires at infinity": _raw({**GOOD, "exp": 1e300}),
    "not yet": _raw({**GOOD, "nbf": int(NOW + LEEWAY_SECONDS + 1)}),
    "another audience": _raw({**GOOD, "aud": "elsewhere"}),
    "no audience": _raw({name: value for name, value in GOOD.items() if name != "aud"}),
    "no tenant": _raw({name: value for name, value in GOOD.items() if name != "sub"}),
    "an empty tenant": _raw({**GOOD, "sub": ""}),
    "a tenant with a line break": _raw({**GOOD, "sub": "acme\nx"}),
    "a tenant that is a path": _raw({**GOOD, "sub": "../etc"}),
    "no scope": _raw({name: value for name, value in GOOD.items() if name != "scope"}),
    "a scope that is a list": _raw({**GOOD, "scope": ["read"]}),
    "models in words": _raw({**GOOD, "models": "*"}),
    "models of numbers": _raw({**GOOD, "models": [1]}),
    "too many models": _raw({**GOOD, "models": ["a"] * 65}),
    "a model pattern with brackets": _raw({**GOOD, "models": ["[a-z]"]}),
    "a quota of nothing": _raw({**GOOD, "bytes_per_day": 0}),
    "a quota below nothing": _raw({**GOOD, "bytes_per_day": -1}),
    "a quota that is true": _raw({**GOOD, "bytes_per_day": True}),
    "too long": _raw({**GOOD, "note": "x" * 5000}),
    "a critical extension": _raw(GOOD, crit=["x"], x=1),
}


@pytest.mark.parametrize("token", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_token_of_ours_is_refused(token: str) -> None:
    """With one error that shows nothing of the token, at the first try and the second."""
    checked = verifier()
    for _ in range(2):
        with pytest.raises(UntrustedError) as caught:
            checked.verify(token)
        assert not token or token not in str(caught.value)


def test_the_good_token_of_that_table_is_good() -> None:
    """Each entry above has one fault."""
    assert READER == verifier().verify(_raw(GOOD))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_refused(position: int, change: int) -> None:
    """No byte of a token can be another one: base64url has one text form here but for its last digits, which sign nothing."""
    token = bytearray(issue_token(KEY, READER, seconds=60, now=NOW).encode())
    position %= len(token) - 1
    token[position] ^= change
    with pytest.raises(UntrustedError):
        verifier().verify(token.decode("latin-1"))


def test_a_remembered_token_expires_all_the_same() -> None:
    """The memory of checked signatures knows when each ends."""
    now = [NOW]
    checked = TokenVerifier(ISSUERS, clock=lambda: now[0])
    token = issue_token(KEY, READER, seconds=60, now=NOW)
    assert READER == checked.verify(token)
    now[0] += 60 + LEEWAY_SECONDS + 1
    with pytest.raises(UntrustedError, match="expired"):
        checked.verify(token)


def test_unknown_scopes_mean_nothing() -> None:
    """A later version's scope is no reason to refuse, and permits nothing."""
    assert READER == verifier().verify(_raw({**GOOD, "scope": "read fly"}))


def test_models_are_covered_by_tag_and_by_name() -> None:
    """Patterns are of whole names, and know * and ?."""
    tag = ModelTag(bytes(range(16)))
    grant = Grant("acme", frozenset(), models=("qwen3-*", str(tag)[:30] + "??"))
    assert grant.covers_model(tag)
    assert grant.covers_model(ModelTag(bytes(16)), "llama", "qwen3-4b")
    assert not grant.covers_model(ModelTag(bytes(16)), "my-qwen3-4b")
    assert grant.covers_namespace("public")
    assert not Grant("acme", frozenset(), namespaces=("team-*",)).covers_namespace("public")


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True), st.integers(1, MAX_LINK_SECONDS))
def test_a_link_permits_to_read_its_object(tenant: str, seconds: int) -> None:
    """On the account of whom it was made for, until it ends."""
    query = sign_link(KEY, PATH, tenant=tenant, seconds=seconds, now=NOW)
    assert Grant(tenant, frozenset((Scope.READ,))) == verify_link(PATH, query, ISSUERS, NOW + seconds - 1)
    with pytest.raises(UntrustedError, match="expired"):
        verify_link(PATH, query, ISSUERS, NOW + seconds + 1)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_link_is_refused(position: int, change: int) -> None:
    """Whatever byte of it is another."""
    query = bytearray(sign_link(KEY, PATH, tenant="acme", seconds=60, now=NOW).encode())
    position %= len(query)
    query[position] ^= change
    with pytest.raises(UntrustedError):
        verify_link(PATH, query.decode("latin-1"), ISSUERS, NOW)


def test_a_link_has_one_text_form() -> None:
    """What its last character has beyond the signature is no room for others."""
    query = sign_link(KEY, PATH, tenant="acme", seconds=60, now=NOW)
    alphabet = string.ascii_letters + string.digits + "-_"
    passed = []
    for last in alphabet:
        with contextlib.suppress(UntrustedError):
            verify_link(PATH, query[:-1] + last, ISSUERS, NOW)
            passed.append(last)
    assert [query[-1]] == passed


def test_a_link_is_for_one_path_and_by_a_known_issuer() -> None:
    """Another object, an unknown key, and more than was signed are refused."""
    query = sign_link(KEY, PATH, tenant="acme", seconds=60, now=NOW)
    for path, given_query, issuers in (
        (PATH[:-1] + "0", query, ISSUERS),
        (PATH, query, TrustList.of(OTHER.public)),
        (PATH, query + "&more=1", ISSUERS),
        (PATH, "x=1&" + query, ISSUERS),
    ):
        with pytest.raises(UntrustedError):
            verify_link(path, given_query, issuers, NOW)


@pytest.mark.parametrize("seconds", [0, -1, MAX_LINK_SECONDS + 1])
def test_a_link_does_not_last_for_ever(seconds: int) -> None:
    """It cannot be called back."""
    with pytest.raises(UsageError):
        sign_link(KEY, PATH, tenant="acme", seconds=seconds, now=NOW)
    query = f"expires={int(NOW) + 10 * MAX_LINK_SECONDS}&issuer={KEY.public}&tenant=acme"
    signature = base64.urlsafe_b64encode(KEY.private.sign(b"kvcdn v1 link\x00" + f"{PATH}?{query}".encode())).decode()
    with pytest.raises(UntrustedError, match="too long"):
        verify_link(PATH, f"{query}&signature={signature.rstrip('=')}", ISSUERS, NOW)
