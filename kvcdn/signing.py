"""Publishers' signatures and the list of whom to trust (FORMAT.md section 3, Ed25519)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvcdn.digest import FixedBytes
from kvcdn.errors import CorruptError, RevokedError, UntrustedError, UsageError
from kvcdn.keyfile import read_key, write_key

SIGNATURE_BYTES = 64

_CONTEXT = b"kvcdn v1 signature\x00"

_TEXT_PREFIX = "ed25519:"


class PublicKey(FixedBytes):
    """A publisher's raw Ed25519 public key."""

    SIZE = 32

    @property
    def text(self) -> str:
        """The form people pass around: `ed25519:` and 64 hexadecimal digits."""
        return _TEXT_PREFIX + str(self)

    @classmethod
    def from_text(cls, text: str) -> PublicKey:
        """Reads `text`'s form, with or without the prefix. Raises UsageError."""
        try:
            return cls.parse(text.strip().removeprefix(_TEXT_PREFIX), "public key")
        except CorruptError as error:
            raise UsageError(f"{text.strip()[:80]!r} is not a public key ({error})", hint="kvcdn keygen prints one") from None


class SigningKey:
    """A publisher's private key. It never shows in a repr."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.public = PublicKey(raw)

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: bytes, source: str, passphrase: bytes | None = None) -> SigningKey:
        """Reads a key file (`kvcdn.keyfile`); `source` names it in errors. Raises UsageError."""
        return cls(read_key(pem, source, passphrase))

    def to_pem(self, passphrase: bytes | None = None) -> bytes:
        """A key file, encrypted where a passphrase is given. Raises UsageError for a passphrase that is too short."""
        return write_key(self._key, passphrase)

    @property
    def private(self) -> Ed25519PrivateKey:
        """The key itself, for tokens and links (FORMAT.md 9), whose signed bytes begin unlike an envelope's."""
        return self._key

    def sign(self, signed: bytes) -> bytes:
        """The 64 bytes that vouch for an envelope's first 12 + H bytes."""
        return self._key.sign(_CONTEXT + signed)

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public.text})"


def verify_signature(key: PublicKey, signature: bytes, signed: bytes, what: str) -> None:
    """Raises CorruptError unless `signature` is `key`'s over `signed`."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _CONTEXT + signed)
    except (InvalidSignature, ValueError):
        raise CorruptError(f"{what}: the signature does not match") from None


@dataclass(frozen=True)
class TrustList:
    """Publishers' keys that a reader accepts, each with the name its owner gave it; those `refused` or `revoked` not."""

    names: Mapping[PublicKey, str]
    refused: Mapping[PublicKey, str] = field(default_factory=dict)
    revoked: Mapping[PublicKey, str] = field(default_factory=dict)

    @classmethod
    def of(cls, *keys: PublicKey) -> TrustList:
        return cls(dict.fromkeys(keys, ""))

    @classmethod
    def from_text(cls, text: str, source: str) -> TrustList:
        """Reads a trust file: a key a line, a name behind it, `#` comments. Raises UsageError that names the line."""
        return cls(dict(_read_lines(text, source)))

    def without(self, refused: Mapping[PublicKey, str]) -> TrustList:
        """This list, less those `refused`, each for the reason given."""
        return TrustList(self.names, {**self.refused, **refused}, self.revoked)

    def revoking(self, revoked: Mapping[PublicKey, str]) -> TrustList:
        """This list, less those whose keys are `revoked`, each as told."""
        return TrustList(self.names, self.refused, {**self.revoked, **revoked})

    def require(self, key: PublicKey, what: str) -> None:
        """Raises UntrustedError unless `key` is on the list and not refused, RevokedError where it is revoked."""
        if key in self.revoked:
            raise RevokedError(f"{what}: published by {key.text}, whose key was {self.revoked[key]}")
        if key in self.refused:
            raise UntrustedError(
                f"{what}: published by {key.text}, who is no longer trusted: {self.refused[key]}",
                hint=f"if that was a mistake: kvcdn trust forgive {key.text}",
            )
        if key not in self.names:
            raise UntrustedError(
                f"{what}: published by {key.text}, who is not on the trust list",
                hint=f"if you know this publisher: kvcdn keygen --trust {key.text}",
            )


def _read_lines(text: str, source: str) -> Iterator[tuple[PublicKey, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        content = line.split("#", 1)[0].split(maxsplit=1)
        if content:
            try:
                yield PublicKey.from_text(content[0]), content[1].strip() if len(content) > 1 else ""
            except UsageError as error:
                raise UsageError(f"{source}, line {number}: {error}", hint=error.hint) from None
