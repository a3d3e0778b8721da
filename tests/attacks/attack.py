"""Attack: hostile bytes, and which check of which reader must stop them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reader(Enum):
    """Who must refuse the bytes."""

    EVERYONE = "everyone"
    """A client and an edge: the header alone gives it away."""

    CLIENT = "client"
    """Only who holds the text's keys or asked for a certain model can see it."""

    EDGE = "edge"
    """Only who reads the object to its end can see it."""


@dataclass(frozen=True)
class Attack:
    """`says` is a part of the message that names the check, so that no attack passes because an earlier check stopped it."""

    name: str
    data: bytes
    says: str
    reader: Reader = Reader.EVERYONE
    untrusted: bool = False
    """UntrustedError is expected, not CorruptError."""
