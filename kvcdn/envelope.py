"""The envelope that opens every object: magic, length, canonical header, signature (FORMAT.md section 3)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcdn import canonical
from kvcdn.digest import Digest, hash_bytes
from kvcdn.errors import CorruptError
from kvcdn.signing import SIGNATURE_BYTES, PublicKey, SigningKey, verify_signature

BLOCK_MAGIC = b"KVCDNB1\n"
MANIFEST_MAGIC = b"KVCDNM1\n"
REVOCATIONS_MAGIC = b"KVCDNR1\n"
JOURNAL_MAGIC = b"KVCDNJ1\n"
SUCCESSION_MAGIC = b"KVCDNS1\n"

_KINDS = {
    BLOCK_MAGIC: "block",
    MANIFEST_MAGIC: "manifest",
    REVOCATIONS_MAGIC: "list of revocations",
    JOURNAL_MAGIC: "entry of a journal",
    SUCCESSION_MAGIC: "statement of succession",
}

PREAMBLE_BYTES = 12
"""Magic and header length."""

MIN_HEADER_BYTES = 2
"""An empty JSON object."""

MAX_HEADER_BYTES = 1 << 20
"""A block of 1,024 layers needs some 400 KiB, a manifest of 4,000 blocks 900 KiB."""

MAX_ENVELOPE_BYTES = PREAMBLE_BYTES + MAX_HEADER_BYTES + SIGNATURE_BYTES


@dataclass(frozen=True)
class Envelope:
    """A parsed envelope whose signature holds. Whether its publisher is trusted is the caller's question."""

    header: Mapping[str, Any]
    publisher: PublicKey
    size: int
    etag: Digest


def seal_envelope(magic: bytes, header: Mapping[str, Any], key: SigningKey) -> bytes:
    """Envelope bytes of `header`, to which the publisher's key is added. Raises ValueError for an oversized header."""
    encoded = canonical.encode({**header, "publisher": str(key.public)})
    if len(encoded) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(encoded)} bytes exceeds {MAX_HEADER_BYTES}")
    signed = magic + struct.pack("<I", len(encoded)) + encoded
    return signed + key.sign(signed)


def reseal_envelope(data: bytes, magic: bytes, key: SigningKey, what: str) -> bytes:
    """The envelope at the start of `data`, checked, by another publisher: as long, and says the same. Raises CorruptError."""
    return seal_envelope(magic, open_envelope(data, magic, what).header, key)


def envelope_size(preamble: bytes | memoryview, magic: bytes, what: str) -> int:
    """Size of the whole envelope, from its first 12 bytes. Raises CorruptError for another magic or a bad length."""
    if len(preamble) < PREAMBLE_BYTES:
        raise CorruptError(f"{what}: truncated, {len(preamble)} bytes are too few for an envelope")
    if bytes(preamble[:8]) != magic:
        raise CorruptError(f"{what}: wrong magic, this is not a kvcdn {_KINDS[magic]}")
    (length,) = struct.unpack_from("<I", preamble, 8)
    if not MIN_HEADER_BYTES <= length <= MAX_HEADER_BYTES:
        raise CorruptError(f"{what}: header length {length} is not between {MIN_HEADER_BYTES} and {MAX_HEADER_BYTES}")
    return PREAMBLE_BYTES + int(length) + SIGNATURE_BYTES


def open_envelope(data: bytes | memoryview, magic: bytes, what: str) -> Envelope:
    """Parses the envelope at the start of `data` and checks its signature. Raises CorruptError."""
    size = envelope_size(data, magic, what)
    if len(data) < size:
        raise CorruptError(f"{what}: truncated, the envelope has {size} bytes and {len(data)} are here")
    signed = bytes(data[: size - SIGNATURE_BYTES])
    signature = bytes(data[size - SIGNATURE_BYTES : size])
    header = canonical.decode(signed[PREAMBLE_BYTES:], f"{what}: header")
    if not isinstance(header, dict):
        raise CorruptError(f"{what}: the header is not an object")
    publisher = PublicKey.parse(header.pop("publisher", None), f"{what}: field 'publisher'")
    verify_signature(publisher, signature, signed, what)
    return Envelope(header, publisher, size, hash_bytes(signed + signature))
