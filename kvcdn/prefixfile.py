"""Prefix files: decoded KV as a reader keeps it, ready to be mapped (FORMAT.md section 10). Bytes in, values out."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvcdn import canonical
from kvcdn.block import BlockHeader, open_header
from kvcdn.digest import Digest, ModelTag
from kvcdn.envelope import MAX_ENVELOPE_BYTES, MAX_HEADER_BYTES, MIN_HEADER_BYTES, PREAMBLE_BYTES
from kvcdn.errors import CorruptError
from kvcdn.fields import Fields
from kvcdn.keys import MAX_PREFIX_TOKENS, BlockName, ModelIdentity
from kvcdn.layout import MAX_BLOCK_TOKENS, MAX_LAYERS, Layout, TensorSpec
from kvcdn.manifest import MAX_BLOCKS
from kvcdn.producer import MAX_TEXT
from kvcdn.seal import ObjectKeys
from kvcdn.signing import TrustList

PREFIX_MAGIC = b"KVCDNP1\n"

ALIGNMENT_BYTES = 4096
"""Places of tensors begin here: a page that a process changes for itself then belongs to one tensor only."""

ROOM_TOKENS = 2048
"""Room for a question and its answer behind a mapped prefix. It is a hole in the file: it costs addresses, no disk."""

PLACES_NOTED = 64
"""A file system notes some 300 stretches of a file in a page; a place may lie in a few of them."""

MAX_HEAD_BYTES = PREAMBLE_BYTES + MAX_HEADER_BYTES
"""Magic, length and header; envelopes and tensors follow."""

MAX_CAPACITY = 2 * MAX_PREFIX_TOKENS

KINDS = frozenset({"kv", "window", "indexed", "none"})
"""The kinds of layers that a prefix file holds: those whose tensors have one row a token."""


@dataclass(frozen=True)
class HeldBlock:
    """One block of the prefix: its address, its tokens, and the bytes of its envelope, 0 where none of its rows are here."""

    address: Digest
    tokens: int
    envelope: int


@dataclass(frozen=True)
class Place:
    """Where one tensor lies: [rows, heads, dim] from byte `offset` on, the first row being token `first`."""

    tensor: TensorSpec
    offset: int
    first: int
    rows: int

    def span(self, start: int, end: int) -> slice:
        """The bytes of tokens `start` to `end`."""
        row = self.tensor.bytes_per_token
        return slice(self.offset + (start - self.first) * row, self.offset + (end - self.first) * row)


@dataclass(frozen=True)
class PrefixFile:
    """A prefix file's header."""

    model: ModelTag
    model_name: str
    tokens: int
    capacity: int
    first: tuple[int, ...]
    blocks: tuple[HeldBlock, ...]

    @cached_property
    def encoded(self) -> bytes:
        """Magic, length and header: the file's first bytes. Raises ValueError where the header would be too long."""
        header: dict[str, Any] = {
            "type": "prefix",
            "v": 1,
            "model": str(self.model),
            "model_name": self.model_name,
            "tokens": self.tokens,
            "capacity": self.capacity,
            "first": list(self.first),
            "blocks": [{"address": str(b.address), "envelope": b.envelope, "tokens": b.tokens} for b in self.blocks],
        }
        encoded = canonical.encode(header)
        if len(encoded) > MAX_HEADER_BYTES:
            raise ValueError(f"header of {len(encoded)} bytes exceeds {MAX_HEADER_BYTES}")
        return PREFIX_MAGIC + struct.pack("<I", len(encoded)) + encoded

    def places(self, layout: Layout) -> list[list[Place]]:
        """The places of each layer's tensors. Raises CorruptError for a layout with another number of layers."""
        if len(self.first) != len(layout.layers):
            raise CorruptError(f"the prefix file has {len(self.first)} layers, the model has {len(layout.layers)}")
        offset = _aligned(len(self.encoded) + sum(block.envelope for block in self.blocks))
        places = []
        for spec, first in zip(layout.layers, self.first, strict=True):
            rows, of_layer = self.capacity - first, []
            for tensor in spec.tensors:
                of_layer.append(Place(tensor, offset, first, rows))
                offset = _aligned(offset + rows * tensor.bytes_per_token)
            places.append(of_layer)
        return places

    def size(self, layout: Layout) -> int:
        """The file's exact size in bytes, holes included."""
        ends = [place.span(0, self.capacity).stop for layer in self.places(layout) for place in layer]
        return _aligned(max(ends))

    def disk_bytes(self, layout: Layout) -> int:
        """Bytes on a disk that keeps holes as holes, in whole pages; those in which it notes where they are included."""
        places = [place for layer in self.places(layout) for place in layer]
        rows = sum(_aligned((self.tokens - place.first) * place.tensor.bytes_per_token) for place in places)
        return places[0].offset + rows + ALIGNMENT_BYTES * (1 + len(places) // PLACES_NOTED)

    def envelope(self, index: int) -> slice:
        """Where the envelope of block `index` lies."""
        start = len(self.encoded) + sum(block.envelope for block in self.blocks[:index])
        return slice(start, start + self.blocks[index].envelope)

    def leading(self, address: Digest) -> int:
        """How many blocks lead up to and include `address`. Raises CorruptError where it is none of them."""
        for count, block in enumerate(self.blocks, 1):
            if block.address == address:
                return count
        raise CorruptError(f"the prefix file does not hold block {address}")

    def reaches(self, layout: Layout, length: int) -> bool:
        """Whether it has every row that a model needs behind `length` tokens."""
        return all(
            not spec.tensors or first <= spec.first_needed(length)
            for spec, first in zip(layout.layers, self.first, strict=True)
        )

    def reaches_as_far(self, other: PrefixFile) -> bool:
        """Whether no layer of `other` begins before ours."""
        return len(self.first) == len(other.first) and all(map(int.__le__, self.first, other.first))

    def covers(self, other: PrefixFile) -> bool:
        """Whether whatever `other` serves, this serves too."""
        ours, theirs = ([block.address for block in file.blocks] for file in (self, other))
        return ours[: len(theirs)] == theirs and self.reaches_as_far(other)


def open_prefix_file(data: memoryview, what: str) -> PrefixFile:
    """Parses the header at the start of `data`. Raises CorruptError."""
    if len(data) < PREAMBLE_BYTES or bytes(data[:8]) != PREFIX_MAGIC:
        raise CorruptError(f"{what}: this is not a prefix file")
    (length,) = struct.unpack_from("<I", data, 8)
    if not MIN_HEADER_BYTES <= length <= MAX_HEADER_BYTES or len(data) < PREAMBLE_BYTES + length:
        raise CorruptError(f"{what}: header length {length} is impossible")
    fields = Fields(canonical.decode(bytes(data[PREAMBLE_BYTES : PREAMBLE_BYTES + length]), f"{what}: header"), what)
    fields.choice("type", ("prefix",))
    fields.integer("v", 1, 1)
    tokens = fields.integer("tokens", 1, MAX_PREFIX_TOKENS)
    file = PrefixFile(
        model=fields.fixed("model", ModelTag),
        model_name=fields.string("model_name", MAX_TEXT),
        tokens=tokens,
        capacity=fields.integer("capacity", tokens, MAX_CAPACITY),
        first=tuple(Fields.integers(fields.array("first", 1, MAX_LAYERS), f"{what}: first", 0, tokens)),
        blocks=tuple(_read_blocks(fields.array("blocks", 1, MAX_BLOCKS), what)),
    )
    fields.done()
    if sum(block.tokens for block in file.blocks) != tokens:
        raise CorruptError(f"{what}: its blocks do not add up to {tokens} tokens")
    return file


def _read_blocks(values: Sequence[Any], what: str) -> Iterator[HeldBlock]:
    for index, value in enumerate(values):
        fields = Fields(value, f"{what}: block {index}")
        yield HeldBlock(
            address=fields.fixed("address", Digest),
            tokens=fields.integer("tokens", 1, MAX_BLOCK_TOKENS),
            envelope=fields.integer("envelope", 0, MAX_ENVELOPE_BYTES),
        )
        fields.done()


class PrefixVerifier:
    """Checks the blocks of a whole prefix file in memory against what their publishers signed."""

    def __init__(self, file: PrefixFile, data: memoryview, model: ModelIdentity, what: str) -> None:
        """Raises CorruptError where the file's form or size is not what its header and the model's layout say."""
        self._file = file
        self._data = data
        self._model = model
        self._what = what
        self._places = file.places(model.layout)
        if file.model != model.tag:
            raise CorruptError(f"{what}: it is of model {file.model}")
        if len(data) != file.size(model.layout):
            raise CorruptError(f"{what}: {len(data)} bytes, {file.size(model.layout)} belong: it was not written to its end")
        for spec, first in zip(model.layout.layers, file.first, strict=True):
            if first % model.layout.block_tokens or (first and not spec.tensors):
                raise CorruptError(f"{what}: a layer begins at token {first}, where no block does")

    def check_block(self, name: BlockName, trust: TrustList) -> BlockHeader | None:
        """Checks one block's envelope and rows; returns its header, or None for a block of which nothing is here.

        Raises CorruptError or UntrustedError.
        """
        what, held = f"{self._what}: block {name.address}", self._file.blocks[name.index]
        if (held.address, held.tokens) != (name.address, name.tokens):
            raise CorruptError(f"{what}: in its place is block {held.address}")
        if not any(place.first <= name.start for places in self._places for place in places):
            return None
        header = self._header(name.index, what)
        trust.require(header.publisher, what)
        header.require(self._model, name, what)
        keys = ObjectKeys(name.content_key, header.salt)
        keys.check_commitment(header.commitment, what)
        for segment, places in zip(header.segments, self._places, strict=True):
            rows = [self._data[place.span(name.start, name.end)] for place in places if place.first <= name.start]
            if len(rows) == len(places) and keys.raw_digest(*rows) != segment.raw_digest:
                raise CorruptError(f"{what}, layer {segment.layer}: the rows are not those that were published")
        return header

    def _header(self, index: int, what: str) -> BlockHeader:
        envelope = self._data[self._file.envelope(index)]
        header = open_header(envelope, what)
        if header.envelope_bytes != len(envelope):
            raise CorruptError(f"{what}: its envelope has another length than the file says")
        return header


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
