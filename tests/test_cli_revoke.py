"""`kvcdn revoke` as a user runs it, in a home where nothing is yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcdn.digest import Digest
from kvcdn.keyring import load_revocations
from kvcdn.paths import data_dir
from kvcdn.signing import PublicKey, SigningKey
from support.command import kvcdn


def test_a_list_grows_and_shrinks() -> None:
    """In the user's own folder, which is made: addresses of what is gone, keys; undone one by one; renewed as it is."""
    signer = kvcdn("keygen", "--json").json["public_key"]
    other, address = SigningKey.generate().public.text, str(Digest(bytes(32)))
    assert not data_dir().exists()
    first = kvcdn("revoke", address, "--publisher", other, "--json").json
    assert (signer, 1, [address], [other.removeprefix("ed25519:")], []) == tuple(
        first[name] for name in ("signer", "version", "addresses", "publishers", "models")
    )
    assert kvcdn("revoke", address, "--undo").code == 0
    renewed = kvcdn("revoke", "--renew", "--days", "3", "--json").json
    assert (3, [], 3 * 86400) == (renewed["version"], renewed["addresses"], renewed["expires"] - renewed["created"])
    assert 3 == load_revocations().version(PublicKey.from_text(signer))
    assert (data_dir() / "origin" / "v1" / "revocations").is_dir()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [((), 2), (("--renew", "ab"), 2), (("--publisher", "x"), 2), (("ab",), 3), (("--model", "nobody"), 3), (("xyz",), 2)],
)
def test_what_cannot_be_revoked_is_one_clear_line(arguments, code) -> None:
    """Nothing named, nothing found, or no name at all."""
    kvcdn("keygen")
    ran = kvcdn("revoke", *arguments)
    assert code == ran.code
    assert len(ran.complaint.splitlines()) <= 2
    assert [] == [path for path in Path(data_dir()).rglob("*") if path.is_file()]


def test_without_a_key_there_is_no_list() -> None:
    """Nobody would be trusted for it."""
    assert 3 == kvcdn("revoke", "--renew").code
