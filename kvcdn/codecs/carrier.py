"""The carrier: a basis as the tensors of a document, and back (FORMAT.md 4.6)."""

from __future__ import annotations

from kvcdn.basis import BASIS_TOKEN_BYTES, BasisName
from kvcdn.codec import Encoded
from kvcdn.codecs.basis import Basis
from kvcdn.digest import Buffer, hash_bytes
from kvcdn.errors import CorruptError
from kvcdn.keys import BlockName
from kvcdn.layout import Layout

_VALUE_BYTES = 2
"""The one number of V that a token has besides: zero."""


def carry(basis: Basis, block: BlockName) -> list[list[Buffer | Encoded]]:
    """The raw tensors of `block` of the basis's document: its bytes as K, zeros behind them and as V."""
    piece = basis.body[block.start * BASIS_TOKEN_BYTES : block.end * BASIS_TOKEN_BYTES]
    return [[piece.ljust(block.tokens * BASIS_TOKEN_BYTES, b"\0"), bytes(_VALUE_BYTES * block.tokens)]]


def uncarry(pieces: list[Buffer], name: BasisName, layout: Layout, what: str) -> Basis:
    """The basis `name` for models of `layout`, from the K of its document's blocks. Raises CorruptError."""
    body = b"".join(pieces)[: name.size]
    if hash_bytes(body) != name.digest:
        raise CorruptError(f"{what}: the bytes of the basis are not those of its name")
    return Basis.parse(body, layout, what)
