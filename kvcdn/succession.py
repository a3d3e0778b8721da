"""Succession: the statement by which a publisher's old key names the new one, and the new one agrees (FORMAT.md section 13)."""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kvcdn.digest import FixedBytes
from kvcdn.envelope import SUCCESSION_MAGIC, open_envelope, seal_envelope
from kvcdn.errors import CorruptError, UsageError
from kvcdn.fields import Fields
from kvcdn.manifest import MAX_TIME
from kvcdn.signing import PublicKey, SigningKey

MAX_SUCCESSION_BYTES = 4096
"""A statement has some 500."""

MAX_STEPS = 16
"""Successors of successors that a reader follows at once."""

_CONTEXT = b"kvcdn v1 succession\x00"


class _Proof(FixedBytes):
    SIZE = 64


def succession_key(old: PublicKey) -> str:
    """The object key of the statement by `old`."""
    return f"v1/successions/{old}"


@dataclass(frozen=True)
class Succession:
    """What a statement says; `created` in Unix seconds."""

    old: PublicKey
    successor: PublicKey
    created: int


def seal_succession(old: SigningKey, successor: SigningKey, *, now: int) -> bytes:
    """The statement that `successor` comes after `old`, signed by both. Raises UsageError where they are one key."""
    if old.public == successor.public:
        raise UsageError("a key does not come after itself")
    header = {
        "type": "succession",
        "v": 1,
        "created": now,
        "successor": str(successor.public),
        "proof": successor.private.sign(_CONTEXT + old.public + successor.public).hex(),
    }
    return seal_envelope(SUCCESSION_MAGIC, header, old)


def open_succession(data: bytes, old: PublicKey, what: str) -> Succession:
    """Parses the statement by `old`, and checks both signatures. Raises CorruptError."""
    if len(data) > MAX_SUCCESSION_BYTES:
        raise CorruptError(f"{what}: longer than a statement of succession")
    envelope = open_envelope(data, SUCCESSION_MAGIC, what)
    if len(data) != envelope.size:
        raise CorruptError(f"{what}: {len(data) - envelope.size} trailing bytes")
    if envelope.publisher != old:
        raise CorruptError(f"{what}: it is by {envelope.publisher.text}, not by {old.text}")
    fields = Fields(envelope.header, f"{what}: header")
    fields.choice("type", ("succession",))
    fields.integer("v", 1, 1)
    created = fields.integer("created", 0, MAX_TIME)
    successor = fields.fixed("successor", PublicKey)
    proof = fields.fixed("proof", _Proof)
    fields.done()
    if successor == old:
        raise CorruptError(f"{what}: a key does not come after itself")
    try:
        Ed25519PublicKey.from_public_bytes(successor).verify(proof, _CONTEXT + old + successor)
    except (InvalidSignature, ValueError):
        raise CorruptError(f"{what}: its successor does not agree: the proof does not match") from None
    return Succession(old, successor, created)
