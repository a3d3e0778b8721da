"""Signatures and trust lists: keys travel as text, verify what they signed, and nothing else."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa, x25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.errors import CorruptError, UntrustedError, UsageError
from kvcdn.signing import PublicKey, SigningKey, TrustList, verify_signature

KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))

OTHER = SigningKey.generate()


def pem(key: object, password: bytes | None = None) -> bytes:
    """PKCS #8 PEM of any private key."""
    locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)  # type: ignore[attr-defined]


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_signature_fits_its_bytes_only(signed: bytes, other: bytes) -> None:
    """A signature verifies for the bytes and the key it was made with, and for no others."""
    signature = KEY.sign(signed)
    verify_signature(KEY.public, signature, signed, "object")
    with pytest.raises(CorruptError, match="object: the signature"):
        verify_signature(OTHER.public, signature, signed, "object")
    if other != signed:
        with pytest.raises(CorruptError, match="object: the signature"):
            verify_signature(KEY.public, signature, other, "object")


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.binary(max_size=70))
def test_any_key_and_signature_end_in_one_error(key: bytes, signature: bytes) -> None:
    """Random keys, on the curve or not, and signatures of any length are refused, never a crash."""
    with pytest.raises(CorruptError):
        verify_signature(PublicKey(key), signature, b"signed", "object")


def test_signature_is_bound_to_its_use() -> None:
    """Somebody who makes a publisher sign other data with the same key gains nothing: the context differs."""
    with pytest.raises(CorruptError):
        verify_signature(KEY.public, KEY._key.sign(b"signed"), b"signed", "object")


def test_pem_round_trip() -> None:
    """A key file holds the key, and reads back as the same publisher."""
    assert KEY.public == SigningKey.from_pem(KEY.to_pem(), "file").public


WRONG_PEMS = {
    "nothing": b"",
    "text": b"no key in here",
    "public": KEY._key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
    "x25519": pem(x25519.X25519PrivateKey.generate()),
    "ed448": pem(ed448.Ed448PrivateKey.generate()),
    "p-256": pem(ec.generate_private_key(ec.SECP256R1())),
    "rsa": pem(rsa.generate_private_key(65_537, 2048)),
    "cut": KEY.to_pem()[:60],
    "unknown algorithm": KEY.to_pem().replace(b"MC4CAQAwBQYDK2Vw", b"MC4CAQAwBQYDK2V/"),
}


@pytest.mark.parametrize("data", WRONG_PEMS.values(), ids=WRONG_PEMS.keys())
def test_other_files_are_no_key(data: bytes) -> None:
    """Every other file is a misuse that names the file and says how to make a key."""
    with pytest.raises(UsageError, match=r"publisher\.pem does not hold") as caught:
        SigningKey.from_pem(data, "publisher.pem")
    assert "kvcdn keygen" in caught.value.hint


@pytest.mark.parametrize("form", ["{}", "ed25519:{}", "  ed25519:{}\n"])
def test_public_key_text(form: str) -> None:
    """The text form reads back, with or without prefix and white space around it."""
    assert KEY.public == PublicKey.from_text(form.format(KEY.public))
    assert f"ed25519:{KEY.public.hex()}" == KEY.public.text


@pytest.mark.parametrize("text", ["", "ed25519:", "x" * 64, "ab" * 31, "AB" * 32, "rsa:" + "ab" * 32, "ed25519: " + "ab" * 32])
def test_other_text_is_no_public_key(text: str) -> None:
    """Every other text is refused by quoting it."""
    with pytest.raises(UsageError, match="is not a public key"):
        PublicKey.from_text(text)


def test_trust_list_reads_names_and_comments() -> None:
    """A trust file holds a key a line, a name behind it, comments and blank lines."""
    text = f"# ours\n\n{KEY.public.text} the docs team # since May\n  {OTHER.public}\n"
    trust = TrustList.from_text(text, "trusted.txt")
    assert {KEY.public: "the docs team", OTHER.public: ""} == dict(trust.names)


@pytest.mark.parametrize("line", ["nonsense", "ed25519:00 short", f"name {'ab' * 32}"])
def test_trust_list_names_the_bad_line(line: str) -> None:
    """A file that cannot be read is refused whole, with the line's number: a skipped line would be a silent distrust."""
    with pytest.raises(UsageError, match=r"trusted\.txt, line 2: "):
        TrustList.from_text(f"{KEY.public}\n{line}\n", "trusted.txt")


def test_trust_list_admits_its_keys_only() -> None:
    """Who is not on the list is refused by name of the key, with the command that would change it."""
    trust = TrustList.of(KEY.public)
    trust.require(KEY.public, "object")
    with pytest.raises(UntrustedError, match=OTHER.public.text) as caught:
        trust.require(OTHER.public, "object")
    assert OTHER.public.text in caught.value.hint


def test_empty_trust_list_trusts_nobody() -> None:
    """No list is not every list."""
    with pytest.raises(UntrustedError):
        TrustList.of().require(KEY.public, "object")
