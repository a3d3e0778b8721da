"""Inspection: everything an edge can check of an object without keys (FORMAT.md section 6), as its bytes stream by."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from typing import Protocol

from kvcdn.block import SegmentVerifier, open_header
from kvcdn.digest import Digest, ModelTag, hash_bytes
from kvcdn.edge.http.target import Kind, ObjectName
from kvcdn.envelope import BLOCK_MAGIC, MANIFEST_MAGIC, MAX_ENVELOPE_BYTES, PREAMBLE_BYTES, envelope_size
from kvcdn.errors import CorruptError
from kvcdn.manifest import open_manifest
from kvcdn.signing import PublicKey, TrustList
from kvcdn.store import FIRST_BYTES


class BodyCheck(Protocol):
    """Takes all bytes of an object, from its first, in pieces of any size."""

    @property
    def verified(self) -> int:
        """How many bytes from the first are proven, of those taken: only these may be passed on."""

    def restart(self) -> None:
        """Forgets what it took behind `verified`: those bytes will come again."""

    def update(self, piece: bytes | memoryview) -> None:
        """Raises CorruptError as soon as something is wrong."""

    def finish(self) -> None:
        """Raises CorruptError where bytes are missing."""


@dataclass(frozen=True)
class ObjectHead:
    """What an object's envelope says, after its signature, publisher and name were checked."""

    size: int
    """Bytes of the whole object; the signature covers it."""
    etag: str
    body: BodyCheck
    publisher: PublicKey | None
    tokens: int = 0
    """Tokens whose KV it holds."""


class _ManifestBody:
    """A manifest is its envelope: only its length is left to check."""

    def __init__(self, size: int, what: str) -> None:
        self._size, self._left, self._what = size, size, what

    @property
    def verified(self) -> int:
        return 0 if self._left else self._size

    def restart(self) -> None:
        self._left = self._size

    def update(self, piece: bytes | memoryview) -> None:
        self._left -= len(piece)
        if self._left < 0:
            raise CorruptError(f"{self._what}: trailing bytes behind the envelope")

    def finish(self) -> None:
        if self._left:
            raise CorruptError(f"{self._what}: truncated, {self._left} bytes are missing")


def read_head(name: ObjectName, pieces: Iterator[bytes]) -> bytes:
    """Bytes from `pieces` until the envelope is complete; at most an envelope and one piece. Raises CorruptError.

    May return fewer where the object ends: `inspect_head` then says so.
    """
    head = bytearray()
    needed = PREAMBLE_BYTES
    for piece in pieces:
        head += piece
        if needed == PREAMBLE_BYTES and len(head) >= PREAMBLE_BYTES:
            needed = envelope_size(bytes(head[:PREAMBLE_BYTES]), _magic(name.kind), str(name))
        if len(head) >= needed:
            break
    return bytes(head)


def inspect_head(name: ObjectName, head: bytes, trust: TrustList | None) -> ObjectHead:
    """Checks the envelope at the start of `head`. Raises CorruptError, and UntrustedError where there is a list."""
    what = str(name)
    if name.kind is Kind.BLOCK:
        header = open_header(head, what)
        _check_names(name, header.address, header.model, header.publisher, trust)
        return ObjectHead(header.size, str(header.etag), SegmentVerifier(header), header.publisher, header.tokens)
    size = envelope_size(head, MANIFEST_MAGIC, what)
    manifest = open_manifest(head[:size], what)
    _check_names(name, manifest.address, manifest.tag, manifest.publisher, trust)
    return ObjectHead(size, str(hash_bytes(head[:size])), _ManifestBody(size, what), manifest.publisher)


def inspect_file(name: ObjectName, file: FileIO, size: int, trust: TrustList | None) -> ObjectHead:
    """As `inspect_head`, of a cached file, which is to have `size` bytes. Raises OSError, too."""
    starts = range(0, MAX_ENVELOPE_BYTES, FIRST_BYTES)
    head = inspect_head(name, read_head(name, (os.pread(file.fileno(), FIRST_BYTES, start) for start in starts)), trust)
    if head.size != size:
        raise CorruptError(f"{name}: the file has {size} bytes, its header says {head.size}")
    return head


def _magic(kind: Kind) -> bytes:
    return BLOCK_MAGIC if kind is Kind.BLOCK else MANIFEST_MAGIC


def _check_names(
    name: ObjectName, address: Digest, tag: ModelTag, publisher: PublicKey | None, trust: TrustList | None
) -> None:
    if trust is not None and publisher is not None:
        trust.require(publisher, str(name))
    if address != name.address or tag != name.tag:
        raise CorruptError(f"{name}: another object lies under this name, {address} of model {tag}")
