"""The basis of a transform codec: for each tensor of a model what makes its numbers independent, as integers (FORMAT.md 4.6).

A basis is made once for a model, from other text, and named by its digest. Synthesis is a matrix of 8-bit integers, so that
decoding is exact integer arithmetic in whatever unit a reader has; analysis is that very matrix's inverse, so that the
rounding of its entries costs no accuracy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvcdn import canonical
from kvcdn.basis import BasisName
from kvcdn.codecs.numbers import Floats
from kvcdn.codecs.rope import Rope
from kvcdn.digest import Buffer, Digest, hash_bytes
from kvcdn.errors import CorruptError
from kvcdn.fields import Fields
from kvcdn.layout import MAX_DIM, MAX_LAYERS, Layout, TensorSpec

MAX_GROUP_DIMS = 1024
"""Dimensions of a group: 127 x 127 x 1,024 stays below 2^24, where single precision counts exactly."""

_LENGTH = struct.Struct("<I")

_MAX_DESCRIPTION_BYTES = 1 << 20

_MAX_ROPES = 64


@dataclass(frozen=True)
class TensorBasis:
    """The basis of one tensor: numbers = mean + scale x (components @ matrix), for each group of neighbouring heads.

    `mean` is [heads, dim], `scales` [groups], `matrices` [groups, components, dims].
    """

    mean: Floats
    scales: Floats
    matrices: NDArray[np.int8]
    rope: Rope | None

    @cached_property
    def synthesis(self) -> Floats:
        """The integers as float32, for matrix products that are exact below 2^24."""
        return self.matrices.astype(np.float32)

    @cached_property
    def analysis(self) -> Floats:
        """The inverse of scale x matrix of each group, [groups, dims, components]."""
        return np.linalg.inv(self.matrices * self.scales[:, None, None].astype(np.float64)).astype(np.float32)


@dataclass(frozen=True)
class Basis:
    """All tensors' bases, by layer and in the layout's order; `body` are the bytes that `name` names."""

    body: bytes
    tensors: tuple[tuple[TensorBasis, ...], ...]

    @cached_property
    def name(self) -> BasisName:
        return BasisName(hash_bytes(self.body), len(self.body))

    @classmethod
    def build(cls, layout: Layout, tensors: Sequence[Sequence[TensorBasis]]) -> Basis:
        """Writes the body of these tensors' bases."""
        ropes = list(dict.fromkeys(one.rope for layer in tensors for one in layer if one.rope is not None))
        entries = [
            {"groups": len(one.scales), "rope": None if one.rope is None else ropes.index(one.rope)}
            for layer in tensors
            for one in layer
        ]
        kinds = [{"interleaved": rope.interleaved, "pairs": rope.pairs} for rope in ropes]
        description = canonical.encode({"layout": str(layout.digest), "ropes": kinds, "tensors": entries, "v": 1})
        pieces = [_LENGTH.pack(len(description)), description, *(rope.frequencies for rope in ropes)]
        for layer in tensors:
            for one in layer:
                pieces += [one.mean.astype("<f4").tobytes(), one.scales.astype("<f4").tobytes(), one.matrices.tobytes()]
        return cls(b"".join(pieces), tuple(tuple(layer) for layer in tensors))

    @classmethod
    def parse(cls, body: bytes, layout: Layout, what: str) -> Basis:
        """Reads a body for models of `layout`. Raises CorruptError."""
        reader = _Reader(body, what)
        (length,) = _LENGTH.unpack(reader.take(_LENGTH.size))
        if length > _MAX_DESCRIPTION_BYTES:
            raise CorruptError(f"{what}: a description of {length} bytes is too long")
        fields = Fields(canonical.decode(bytes(reader.take(length)), what), what)
        fields.integer("v", 1, 1)
        if fields.fixed("layout", Digest) != layout.digest:
            raise CorruptError(f"{what}: it is for another layout")
        ropes = [_read_rope(item, reader, what) for item in fields.array("ropes", 0, _MAX_ROPES)]
        specs = [list(layer.tensors) for layer in layout.layers]
        entries = fields.array("tensors", sum(map(len, specs)), 3 * MAX_LAYERS)
        fields.done()
        if len(entries) != sum(map(len, specs)):
            raise CorruptError(f"{what}: {len(entries)} tensors, the layout has others")
        items: Iterator[object] = iter(entries)
        tensors = tuple(tuple(_read_tensor(next(items), spec, ropes, reader, what) for spec in layer) for layer in specs)
        reader.done()
        return cls(body, tensors)


class _Reader:
    """Bytes, front to back."""

    def __init__(self, data: Buffer, what: str) -> None:
        self._left, self._what = memoryview(data), what

    def take(self, count: int) -> memoryview:
        if count > len(self._left):
            raise CorruptError(f"{self._what}: truncated")
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def floats(self, count: int) -> Floats:
        """Finite numbers."""
        values = np.frombuffer(self.take(4 * count), "<f4")
        if not np.isfinite(values).all():
            raise CorruptError(f"{self._what}: a number is not finite")
        return values

    def done(self) -> None:
        if len(self._left):
            raise CorruptError(f"{self._what}: {len(self._left)} trailing bytes")


def _read_rope(value: object, reader: _Reader, what: str) -> Rope:
    fields = Fields(value, f"{what}: rope")
    pairs = fields.integer("pairs", 1, MAX_DIM // 2)
    interleaved = fields.any("interleaved")
    fields.done()
    if not isinstance(interleaved, bool):
        raise CorruptError(f"{what}: rope: field 'interleaved' must be true or false")
    frequencies = bytes(reader.take(8 * pairs))
    if not np.isfinite(np.frombuffer(frequencies, "<f8")).all():
        raise CorruptError(f"{what}: a frequency is not finite")
    return Rope(frequencies, interleaved)


def _read_tensor(value: object, spec: TensorSpec, ropes: Sequence[Rope], reader: _Reader, what: str) -> TensorBasis:
    fields = Fields(value, f"{what}: tensor")
    groups = fields.integer("groups", 1, spec.heads)
    index = fields.optional_integer("rope", 0, len(ropes) - 1)
    fields.done()
    rope = None if index is None else ropes[index]
    dims = spec.heads * spec.dim // groups
    if spec.heads % groups or dims > MAX_GROUP_DIMS or (rope is not None and 2 * rope.pairs > spec.dim):
        raise CorruptError(f"{what}: its groups or rope do not fit {spec.heads} heads of {spec.dim}")
    mean = reader.floats(spec.heads * spec.dim).reshape(spec.heads, spec.dim)
    scales = reader.floats(groups)
    matrices = np.frombuffer(reader.take(groups * dims * dims), np.int8).reshape(groups, dims, dims)
    if (matrices == np.int8(-128)).any():
        raise CorruptError(f"{what}: entries of a matrix are -127 to 127")
    return TensorBasis(mean, scales, matrices, rope)
