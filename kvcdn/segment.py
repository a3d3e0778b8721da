"""Segments: one layer's share of a block, as its header describes it (FORMAT.md 4.1)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

from kvcdn.codec import ALL_CODECS
from kvcdn.digest import Digest
from kvcdn.errors import CorruptError
from kvcdn.fields import Fields
from kvcdn.layout import DTYPE_BYTES, KINDS, MAX_STATE_DIMENSIONS, STATE_NAMES, TENSOR_NAMES
from kvcdn.seal import TAG_BYTES

MAX_SEGMENT_BYTES = (1 << 32) - 1
"""Stored length of one segment (FORMAT.md 4.1)."""

MAX_BLOCK_BYTES = 1 << 36
"""Sanity limit on a whole object, 64 GiB; real blocks have some 10 MB."""


_DIMENSIONS = {**dict.fromkeys(TENSOR_NAMES, (3, 3)), **dict.fromkeys(STATE_NAMES, (1, MAX_STATE_DIMENSIONS))}
"""The least and the most of what may be of each name."""

_PART_FIELDS = 5
_PART_VALUES = itemgetter("codec", "dtype", "length", "name", "shape")

_SEGMENT_FIELDS = 7
_SEGMENT_VALUES = itemgetter("blake3", "kind", "layer", "length", "offset", "parts", "raw_digest")


class Part(NamedTuple):
    """One encoded tensor inside a segment."""

    name: str
    codec: str
    dtype: str
    shape: tuple[int, ...]
    length: int

    @property
    def is_state(self) -> bool:
        return self.name in STATE_NAMES

    @property
    def raw_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        return {
            "codec": self.codec,
            "dtype": self.dtype,
            "length": self.length,
            "name": self.name,
            "shape": list(self.shape),
        }


@dataclass(frozen=True)
class Segment:
    """One layer's share of a block: where its stored bytes lie behind the envelope, and what they hold."""

    layer: int
    kind: str
    offset: int
    length: int
    blake3: Digest
    raw_digest: Digest
    parts: tuple[Part, ...]

    @cached_property
    def descriptor(self) -> bytes:
        """What encryption binds: the segment without what depends on the ciphertext or its place, in canonical JSON."""
        # By hand, since it is needed for every segment on the way to the first token; all strings in it are of our own lists.
        parts = ",".join(
            f'{{"codec":"{part.codec}","dtype":"{part.dtype}","length":{part.length},"name":"{part.name}",'
            f'"shape":[{",".join(map(str, part.shape))}]}}'
            for part in self.parts
        )
        return f'{{"kind":"{self.kind}","layer":{self.layer},"length":{self.length},"parts":[{parts}]}}'.encode("ascii")

    @cached_property
    def places(self) -> tuple[tuple[Part, slice], ...]:
        """Each part with the slice of the decrypted bytes that holds it."""
        ends = list(itertools.accumulate(part.length for part in self.parts))
        return tuple((part, slice(end - part.length, end)) for part, end in zip(self.parts, ends, strict=True))

    def to_json(self) -> dict[str, Any]:
        return {
            "blake3": str(self.blake3),
            "kind": self.kind,
            "layer": self.layer,
            "length": self.length,
            "offset": self.offset,
            "parts": [part.to_json() for part in self.parts],
            "raw_digest": str(self.raw_digest),
        }


def read_segments(values: Sequence[Any], what: str) -> tuple[Segment, ...]:
    """The segments of a header. Raises CorruptError."""
    return tuple(_read_segment(value, index, f"{what}: segment {index}") for index, value in enumerate(values))


def _read_segment(value: Any, index: int, what: str) -> Segment:
    return _plain_segment(value, index) or _careful_segment(value, index, what)


def _careful_segment(value: Any, index: int, what: str) -> Segment:
    fields = Fields(value, what)
    kind = fields.choice("kind", tuple(KINDS))
    count = len(KINDS[kind])
    segment = Segment(
        layer=fields.integer("layer", index, index),
        kind=kind,
        offset=fields.integer("offset", 0, MAX_BLOCK_BYTES),
        length=fields.integer("length", TAG_BYTES, MAX_SEGMENT_BYTES),
        blake3=fields.fixed("blake3", Digest),
        raw_digest=fields.fixed("raw_digest", Digest),
        parts=tuple(_read_part(part, what) for part in fields.array("parts", count, count + len(STATE_NAMES))),
    )
    fields.done()
    if [part.is_state for part in segment.parts] != [False] * count + [True] * (len(segment.parts) - count):
        raise CorruptError(f"{what}: its parts are not those of a {kind} layer and its states")
    return segment


def _plain_segment(value: Any, index: int) -> Segment | None:
    """The segment that `value` is; None where `_careful_segment` has to say what is wrong with it, or read states."""
    try:
        hashed, kind, layer, length, offset, values, raw_hashed = _SEGMENT_VALUES(value)
        known = len(value) == _SEGMENT_FIELDS and type(values) is list and len(values) == len(KINDS[kind])
        if not known or type(layer) is not int or type(length) is not int or type(offset) is not int:
            return None
        if layer != index or not TAG_BYTES <= length <= MAX_SEGMENT_BYTES or not 0 <= offset <= MAX_BLOCK_BYTES:
            return None
    except (KeyError, TypeError):
        return None
    blake3, raw_digest = Digest.read(hashed), Digest.read(raw_hashed)
    parts = [part for part in map(_plain_part, values) if part is not None and not part.is_state]
    if blake3 is None or raw_digest is None or len(parts) != len(values):
        return None
    return Segment(layer, kind, offset, length, blake3, raw_digest, tuple(parts))


def _read_part(value: Any, what: str) -> Part:
    return _plain_part(value) or _careful_part(value, what)


def _careful_part(value: Any, what: str) -> Part:
    fields = Fields(value, f"{what}: part")
    name = fields.choice("name", tuple(_DIMENSIONS))
    shape = Fields.integers(fields.array("shape", *_DIMENSIONS[name]), f"{what}: shape", 1, MAX_SEGMENT_BYTES)
    part = Part(
        name=name,
        codec=fields.choice("codec", ALL_CODECS),
        dtype=fields.choice("dtype", tuple(DTYPE_BYTES)),
        shape=tuple(shape),
        length=fields.integer("length", 0, MAX_SEGMENT_BYTES),
    )
    fields.done()
    return part


def _plain_part(value: Any) -> Part | None:
    """The part that `value` is; None where `_careful_part` has to say what is wrong with it.

    A header has dozens, on the way to the first byte and to the first token: with a reading of each field by `Fields` all its
    segments take a quarter longer.
    """
    try:
        codec, dtype, length, name, shape = _PART_VALUES(value)
        least, most = _DIMENSIONS[name]
        known = len(value) == _PART_FIELDS and codec in ALL_CODECS and dtype in DTYPE_BYTES
        if not known or type(length) is not int or not 0 <= length <= MAX_SEGMENT_BYTES:
            return None
        if type(shape) is not list or not least <= len(shape) <= most:
            return None
        for side in shape:
            if type(side) is not int or not 1 <= side <= MAX_SEGMENT_BYTES:
                return None
    except (KeyError, TypeError):
        return None
    return Part(name, codec, dtype, tuple(shape), length)
