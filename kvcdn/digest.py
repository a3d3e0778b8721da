"""Digests and model tags: byte strings of fixed length with one canonical text form."""

from __future__ import annotations

from typing import ClassVar, Self

from blake3 import blake3

from kvcdn.errors import CorruptError

Buffer = bytes | bytearray | memoryview

PARALLEL_FROM_BYTES = 1 << 20
"""From here on BLAKE3 uses every core; below it, starting threads costs more than it saves."""


class FixedBytes(bytes):
    """Exactly `SIZE` bytes; `str()` is lowercase hexadecimal, the only text form."""

    SIZE: ClassVar[int]

    def __new__(cls, value: bytes) -> Self:
        if len(value) != cls.SIZE:
            raise CorruptError(f"a {cls.__name__} has {cls.SIZE} bytes, not {len(value)}")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: object, what: str) -> Self:
        """Reads the text form; `what` names the field. Raises CorruptError for any other form."""
        value = cls.read(text)
        if value is None:
            raise CorruptError(f"{what}: expected {2 * cls.SIZE} lowercase hexadecimal digits")
        return value

    @classmethod
    def read(cls, text: object) -> Self | None:
        """As `parse`, but None for any other form."""
        if not isinstance(text, str) or len(text) != 2 * cls.SIZE:
            return None
        try:
            value = bytes.fromhex(text)
        except ValueError:
            return None
        # fromhex takes capitals and white space as well; there is one text form.
        return cls(value) if value.hex() == text else None

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.hex()})"


class Digest(FixedBytes):
    """32 bytes that name something public."""

    SIZE = 32


class ModelTag(FixedBytes):
    """16 bytes that name a model in object keys (FORMAT.md 2.1)."""

    SIZE = 16


class Secret(FixedBytes):
    """32 bytes that open something: they never show in a repr or a log."""

    SIZE = 32

    def __str__(self) -> str:
        return "<secret>"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<secret>)"


def hash_bytes(data: Buffer, *, parallel: bool = False) -> Digest:
    """Plain BLAKE3 of `data`; `parallel` uses all cores where the data is large enough to pay."""
    threads = blake3.AUTO if parallel and len(data) >= PARALLEL_FROM_BYTES else 1
    return Digest(blake3(data, max_threads=threads).digest())


def derive(context: str, material: bytes) -> bytes:
    """BLAKE3 key derivation (FORMAT.md section 1): 32 bytes, separated by `context`."""
    return blake3(material, derive_key_context=context).digest()
