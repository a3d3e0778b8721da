"""`kvcdn token` and `kvcdn edge --check-config`, as commands."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvcdn.access.grant import Grant, Scope
from kvcdn.access.links import verify_link
from kvcdn.access.tokens import TokenVerifier
from kvcdn.signing import PublicKey, TrustList
from support.command import kvcdn


@pytest.fixture
def issuers() -> TrustList:
    made = kvcdn("keygen", "--name", "issuer", "--json").json
    return TrustList.of(PublicKey.from_text(made["public_key"]))


def test_a_token_says_what_was_asked_for(issuers) -> None:
    """The verifier of an edge reads the grant; the expiry is as told."""
    arguments = ["--scope", "read", "--scope", "stats", "--model", "qwen3-*", "-n", "team-a", "--bytes-per-day", "1000"]
    made = kvcdn("token", "acme", *arguments, "--for", "12h", "--json").json
    expected = Grant("acme", frozenset((Scope.READ, Scope.STATS)), ("qwen3-*",), ("team-a",), 1000)
    assert expected == TokenVerifier(issuers).verify(made["token"])
    assert abs(made["expires"] - time.time() - 12 * 3600) < 60


def test_a_link_is_the_urls_own(issuers) -> None:
    """It is the URL with a query that permits that path."""
    url = "https://edge.example.org/v1/" + "0" * 32 + "/manifests/" + "ab" * 32
    made = kvcdn("token", "guest", "--link", url, "--for", "1h").out.strip()
    link, _, query = made.partition("?")
    assert url == link
    assert "guest" == verify_link(url.removeprefix("https://edge.example.org"), query, issuers, time.time()).tenant


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ac me"], "is not a tenant"),
        (["acme", "--for", "1 year"], "is not a duration"),
        (["acme", "--for", "0d"], "is not a duration"),
        (["acme", "--link", "https://e.example/v1/x?y=1"], "has a query already"),
        (["acme", "--link", "https://e.example/v1/x", "--model", "m"], "nothing else"),
        (["acme", "--link", "https://e.example/v1/x", "--for", "30d"], "at most 168 hours"),
        (["acme", "--model", "a b"], "is not a pattern"),
        (["acme", *["--model", "m" * 128] * 60], "characters"),
    ],
)
def test_what_cannot_be_permitted(arguments, words, issuers) -> None:
    """One line that says what, and the exit code of usage."""
    result = kvcdn("token", *arguments)
    assert (2, True) == (result.code, words in result.err), result.err


def test_no_issuer_yet() -> None:
    """The error says how to make one."""
    result = kvcdn("token", "acme")
    assert (3, True) == (result.code, "kvcdn keygen" in result.err)


def test_settings_are_checked_without_a_start(tmp_path: Path) -> None:
    """Good ones are shown; each kind of fault is one line; nothing is made."""
    config = tmp_path / "edge.toml"
    fixed = f'origin = "{tmp_path}/origin"\ncache_dir = "{tmp_path}/cache"\n'
    config.write_text(fixed, encoding="utf-8")
    result = kvcdn("edge", "--config", str(config), "--check-config")
    assert (0, True) == (result.code, "http://127.0.0.1:8400" in result.out)
    for fault, words in (
        ("nonsense = 1", "nonsense is no setting"),
        ('listen = "0.0.0.0:1"', "more than loopback"),
        ('issuers_file = "/none"', "cannot read the issuers file"),
        ('trust_file = "/none"', "cannot read the trust file"),
        ('tls_cert = "/none"\ntls_key = "/none"', "cannot use the certificate"),
        ("tenants = { acme = { speed = 1 } }", "tenants.acme.speed is no setting"),
        ('tenant_limits = { bytes_per_day = "0GB" }', "tenant_limits.bytes_per_day"),
        ('model_names = { qwen = "xyz" }', "model_names.qwen"),
    ):
        config.write_text(fixed + fault + "\n", encoding="utf-8")
        result = kvcdn("edge", "--config", str(config), "--check-config")
        assert (2, True) == (result.code, words in result.err), (fault, result.err)
    assert ["edge.toml"] == sorted(path.name for path in tmp_path.iterdir())
