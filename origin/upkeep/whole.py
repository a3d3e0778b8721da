"""Whole objects: reading a stored block from its first byte to its last, with every hash checked, no keys needed."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from kvcdn.block import BlockHeader, SegmentVerifier, open_header
from kvcdn.digest import Digest
from kvcdn.envelope import BLOCK_MAGIC, MAX_ENVELOPE_BYTES, PREAMBLE_BYTES, envelope_size
from kvcdn.errors import CorruptError
from kvcdn.keys import block_key
from kvcdn.manifest import BlockEntry, Manifest
from kvcdn.seal import TAG_BYTES
from kvcdn.store import BlobStore

_FIRST_BYTES = 64 * 1024
"""Holds the envelope of a block of a hundred layers: one request instead of two."""


@dataclass(frozen=True)
class BlockState:
    """What a manifest and a block both say of the block."""

    size: int
    etag: Digest
    layout: Digest
    precision: str
    start: int
    tokens: int

    @classmethod
    def of(cls, header: BlockHeader) -> BlockState:
        return cls(header.size, header.etag, header.layout, header.precision, header.start, header.tokens)

    @classmethod
    def expected(cls, manifest: Manifest, index: int) -> BlockState:
        """As `manifest` has its block `index`."""
        block = manifest.blocks[index]
        start = index * manifest.layout.block_tokens
        return cls(block.size, block.etag, manifest.layout.digest, manifest.precision, start, block.tokens)


def read_header(store: BlobStore, key: str) -> BlockHeader:
    """A block's header, in one or two requests. Raises NotFoundError, and CorruptError where it is not `key`'s."""
    return _checked(open_header(read_envelope(store, key), key), key)


def read_envelope(store: BlobStore, key: str) -> bytes:
    """What a block begins with, not checked, in one or two requests. Raises NotFoundError, CorruptError."""
    data = store.read(key, 0, _FIRST_BYTES)
    size = envelope_size(data, BLOCK_MAGIC, key)
    if size > len(data) == _FIRST_BYTES:
        data += store.read(key, _FIRST_BYTES, size - _FIRST_BYTES)
    return data[:size]


def verify_block(store: BlobStore, key: str) -> BlockHeader:
    """Reads a block in pieces and checks it as an edge does. Raises NotFoundError and CorruptError."""
    pieces = store.stream(key)
    try:
        begun = bytearray()
        while len(begun) < PREAMBLE_BYTES or len(begun) < envelope_size(bytes(begun[:PREAMBLE_BYTES]), BLOCK_MAGIC, key):
            piece = next(pieces, b"")
            if not piece:
                raise CorruptError(f"{key}: truncated, {len(begun)} bytes are too few for its envelope")
            begun += piece
        header = _checked(open_header(bytes(begun[:MAX_ENVELOPE_BYTES]), key), key)
        verifier = SegmentVerifier(header)
        verifier.update(begun)
        for piece in pieces:
            verifier.update(piece)
        verifier.finish()
        return header
    finally:
        if isinstance(pieces, Generator):
            pieces.close()


def read_block(store: BlobStore, key: str, manifest: Manifest, index: int) -> bytes:
    """The whole block `index` of `manifest`, verified, as the manifest has it. Raises NotFoundError and CorruptError."""
    entry = manifest.blocks[index]
    if entry.size > largest_block(manifest, entry):
        raise CorruptError(f"{key}: {entry.size:,} bytes are more than {entry.tokens} tokens of this layout can take")
    data = store.read(key, 0, entry.size + 1)
    header = _checked(open_header(data[:MAX_ENVELOPE_BYTES], key), key)
    verifier = SegmentVerifier(header)
    verifier.update(data)
    verifier.finish()
    if BlockState.of(header) != BlockState.expected(manifest, index):
        raise CorruptError(f"{key}: not the block that the manifest {manifest.address} names")
    return data


def largest_block(manifest: Manifest, entry: BlockEntry) -> int:
    """Most bytes that a block can have (FORMAT.md 3, 4.1): an envelope, and for each part its raw size, 64 bytes and a tag."""
    parts = sum(len(layer.tensors) + len(layer.states) for layer in manifest.layout.layers)
    raw = entry.tokens * manifest.layout.bytes_per_token + manifest.layout.state_bytes
    return MAX_ENVELOPE_BYTES + raw + parts * (64 + TAG_BYTES)


def _checked(header: BlockHeader, key: str) -> BlockHeader:
    if block_key(header.model, header.address) != key:
        raise CorruptError(f"{key}: another block lies under this name")
    return header
