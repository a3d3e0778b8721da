"""Encryption of segments: one AES-256-GCM key per object, committed to, bound to address and descriptor (FORMAT.md 4.2)."""

from __future__ import annotations

import hmac
import struct

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvcdn.digest import Buffer, Digest, Secret, derive
from kvcdn.errors import CorruptError

TAG_BYTES = 16


class ObjectKeys:
    """The keys of one stored object: from the prefix's content key and the object's salt."""

    def __init__(self, content_key: Secret, salt: Digest) -> None:
        material = content_key + salt
        self.commitment = Digest(derive("kvcdn v1 commitment", material))
        self._raw_key = derive("kvcdn v1 raw digest", material)
        self._cipher = AESGCM(derive("kvcdn v1 object key", material))

    def check_commitment(self, commitment: Digest, what: str) -> None:
        """Raises CorruptError where the object was sealed with another key than ours."""
        if not hmac.compare_digest(self.commitment, commitment):
            raise CorruptError(f"{what}: key commitment does not match, the block was sealed for another text or namespace")

    def seal_into(self, index: int, associated: bytes, encoded: Buffer, out: memoryview) -> None:
        """Fills `out`, 16 bytes longer than `encoded`, with ciphertext and tag of segment `index`."""
        self._cipher.encrypt_into(_nonce(index), encoded, associated, out)

    def open_into(self, index: int, associated: bytes, stored: Buffer, out: Buffer, what: str) -> None:
        """Decrypts segment `index` into `out`, of exactly the stored length less 16. Raises CorruptError."""
        try:
            self._cipher.decrypt_into(_nonce(index), stored, associated, out)
        except (InvalidTag, ValueError):
            raise CorruptError(f"{what}: authentication failed, the bytes are not what the publisher sealed") from None

    def raw_digest(self, *raw: Buffer) -> Digest:
        """Keyed digest of a segment's raw tensor bytes: equal to the header's if and only if the tensors are as published."""
        hasher = blake3(key=self._raw_key)
        for piece in raw:
            hasher.update(piece)
        return Digest(hasher.digest())


def segment_associated_data(address: Digest, descriptor: bytes) -> bytes:
    """What a segment is bound to: the object's address and its own canonical descriptor."""
    return b"kvcdn v1 segment\x00" + address + descriptor


def _nonce(index: int) -> bytes:
    return struct.pack("<I", index) + bytes(8)
