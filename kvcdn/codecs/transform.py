"""The transform codec: rope undone, components of a basis, one step for all, finer where rows matter (FORMAT.md 4.5).

What a tensor has in bits is spent where it counts: the basis scales components so that equal errors do equal harm, and every
token has an exponent, larger where its row is read less. Symbols are entropy-coded in classes of like size, which follow from
a level for each component and the exponent of the token.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcdn.codec import Encoded, Rows
from kvcdn.codecs.basis import TensorBasis
from kvcdn.codecs.classes import (
    LEAST_CLASS,
    LEAST_LEVEL,
    MOST_CLASS,
    MOST_LEVEL,
    in_range,
    rectangles,
)
from kvcdn.codecs.numbers import NATIVE_DTYPES, Floats, to_float32, write_rounded
from kvcdn.codecs.symbols import Symbols, pack_symbols, read_streams
from kvcdn.codecs.synthesis import restoring
from kvcdn.digest import Buffer
from kvcdn.errors import CorruptError

_HEADER = struct.Struct("<HHf")
"""Exact rows in front, classes, step."""

_LENGTH = struct.Struct("<I")

_NOTHING = np.empty(0, np.uint8)

_NO_ANGLES = np.empty(0, np.float32)
"""Of a tensor that does not turn."""

EXACT_SUM = 1 << 24
"""Single precision counts to here."""


def encode_transform(raw: Buffer, rows: Rows, exponents: NDArray[np.int16], step: float, *, lead: int) -> Encoded | None:
    """`raw` in components; `exponents` [tokens] are of the tokens' steps, as powers of two. None where it does not fit."""
    tokens, heads, dim = rows.shape
    basis: TensorBasis = rows.basis
    values = to_float32(raw, rows.dtype).reshape(tokens, heads, dim)
    if not np.isfinite(values).all():
        return None
    lead = min(lead, tokens)
    middle = np.ascontiguousarray(values[lead:])
    if basis.rope is not None:
        basis.rope.turn(middle, rows.start + lead, back=True)
    middle -= basis.mean
    groups, _, width = basis.matrices.shape
    parts = middle.reshape(len(middle), groups, width).transpose(1, 0, 2)
    components = np.matmul(parts, basis.analysis).transpose(1, 0, 2).reshape(len(middle), groups * width)
    exponents = exponents[lead:]
    unit = np.float32(step)
    symbols = np.rint(components / (unit * np.exp2(exponents.astype(np.float32)))[:, None])
    spread = np.sqrt(np.mean(np.square(components), 0)) if len(middle) else np.zeros(groups * width)
    levels = np.clip(np.rint(np.log2(np.maximum(spread / unit, 1e-9))), LEAST_LEVEL, MOST_LEVEL).astype(np.int16)
    if np.abs(symbols).max(initial=0) > np.iinfo(np.int16).max or _classes(levels, exponents).max(initial=0) > MOST_CLASS:
        return None
    if not _sums_exactly(np.abs(symbols), basis):
        return None
    streams = [pack_symbols(stream) for stream in (exponents, levels, *_split(symbols.astype(np.int16), levels, exponents))]
    row = len(raw) // tokens
    lengths = b"".join(_LENGTH.pack(len(stream)) for stream in streams)
    data = b"".join((_HEADER.pack(lead, len(streams) - 2, unit), raw[: lead * row], lengths, *streams))
    out = bytearray(len(raw))
    decode_transform(data, rows, memoryview(out), "own encoding")
    return Encoded("tc", data, out)


def decode_transform(encoded: Buffer, rows: Rows, out: memoryview, what: str) -> None:
    """Fills `out` with the rounded numbers. Raises CorruptError."""
    tokens, heads, dim = rows.shape
    payload, basis = _payload(encoded, rows, what), rows.basis
    out[: len(payload.exact)] = payload.exact
    middle = tokens - payload.lead
    target = out[len(payload.exact) :]
    if _restored(payload, rows, target):
        return
    found = payload.components(middle, heads * dim)
    numbers = _synthesise(found, basis)
    with np.errstate(over="ignore", invalid="ignore"):
        placed = np.empty((middle, heads, dim), np.float32)
        for group, scale in enumerate(basis.scales):
            numbers[group] *= (found.steps * scale)[:, None]
        placed[found.order] = numbers.transpose(1, 0, 2).reshape(middle, heads, dim)
        placed += basis.mean
        if basis.rope is not None:
            basis.rope.turn(placed, rows.start + payload.lead)
        write_rounded(placed, rows.dtype, target)


@dataclass(frozen=True)
class Components:
    """Symbols that were decoded: [tokens by exponent, components that are stored], and what they are multiplied with.

    `order` are the tokens, `steps` their float32 steps, `which` the components.
    """

    symbols: Symbols
    which: NDArray[np.intp]
    order: NDArray[np.intp]
    steps: Floats


def parse_transform(encoded: Buffer, rows: Rows, what: str) -> tuple[memoryview, Components]:
    """The exact rows in front, and the components of all others: what needs no arithmetic. Raises CorruptError."""
    payload, (tokens, heads, dim) = _payload(encoded, rows, what), rows.shape
    return payload.exact, payload.components(tokens - payload.lead, heads * dim)


def _payload(encoded: Buffer, rows: Rows, what: str) -> _Payload:
    tokens, heads, dim = rows.shape
    if not isinstance(rows.basis, TensorBasis) or rows.basis.mean.shape != (heads, dim):
        raise CorruptError(f"{what}: its basis is not the one that belongs to this tensor")
    return _Payload(encoded, tokens, heads * dim * rows.typesize, what)


def _restored(payload: _Payload, rows: Rows, target: memoryview) -> bool:
    """Fills `target` with the rounded numbers, in a compiled loop; False where there is none yet, or it says nothing."""
    restore = restoring(rows.dtype).native()
    if restore is None:
        return False
    basis, (tokens, heads, dim) = rows.basis, rows.shape
    middle = tokens - payload.lead
    cosines, sines = basis.rope.angles(rows.start + payload.lead, middle) if basis.rope else (_NO_ANGLES, _NO_ANGLES)
    pairs, done = cosines.size // max(middle, 1), np.zeros(1, np.uint8)
    restore(
        payload.stored,
        payload.lengths,
        basis.matrices,
        payload.step,
        basis.scales,
        basis.mean,
        cosines.reshape(middle, pairs),
        sines.reshape(middle, pairs),
        basis.rope is not None and basis.rope.interleaved,
        np.frombuffer(target, NATIVE_DTYPES[rows.dtype]).reshape(middle, heads * dim),
        done,
    )
    return bool(done[0])


class _Payload:
    """The bytes of a part, taken apart."""

    def __init__(self, encoded: Buffer, tokens: int, row: int, what: str) -> None:
        self._what = what
        if len(encoded) < _HEADER.size:
            raise CorruptError(f"{what}: {len(encoded)} bytes are too few for components")
        self.lead, count, self.step = _HEADER.unpack_from(encoded)
        start = _HEADER.size + self.lead * row
        lengths_end = start + _LENGTH.size * (count + 2)
        sound = self.lead <= tokens and count <= MOST_CLASS - LEAST_CLASS + 1 and lengths_end <= len(encoded)
        if not sound or not 0 < self.step < np.inf:
            raise CorruptError(f"{what}: the components' step, or their sizes, are not possible")
        view = memoryview(encoded)
        self.exact = view[_HEADER.size : start]
        self.lengths = np.frombuffer(encoded, "<u4", count + 2, start).astype(np.int64)
        if lengths_end + int(self.lengths.sum()) != len(encoded):
            raise CorruptError(f"{what}: the components' step, or their sizes, are not possible")
        self.stored = np.frombuffer(encoded, np.uint8, -1, lengths_end) if lengths_end < len(encoded) else _NOTHING

    def symbols(self, first: int, sizes: Sequence[int]) -> Symbols:
        """Those of streams from the `first` on, of so many each."""
        joined, lengths = np.empty(sum(sizes), np.int16), self.lengths.tolist()
        begin, mine = sum(lengths[:first]), lengths[first : first + len(sizes)]
        read_streams(self.stored[begin : begin + sum(mine)].data, mine, joined, sizes, self._what)
        return joined

    def classes(self, sizes: Sequence[int]) -> Symbols:
        """Those of all classes, of so many symbols each."""
        count = len(self.lengths) - 2
        if len(sizes) != count:
            raise CorruptError(f"{self._what}: {count} classes of symbols, {len(sizes)} belong")
        return self.symbols(2, sizes)

    def components(self, tokens: int, width: int) -> Components:
        """The symbols of so many tokens, of `width` components each."""
        sides = self.symbols(0, (tokens, width))
        exponents, levels = sides[:tokens], sides[tokens:]
        if not in_range(exponents, levels):
            raise CorruptError(f"{self._what}: a level or an exponent is out of range")
        order = np.argsort(exponents, kind="stable")
        with np.errstate(over="ignore"):
            steps = np.float32(self.step) * np.exp2(exponents[order].astype(np.float32))
        return Components(*_join(self, levels, exponents[order]), order, steps)


def _classes(levels: NDArray[np.int16], exponents: NDArray[np.int16]) -> NDArray[np.int16]:
    """The class of each distinct pair."""
    return np.unique(levels)[:, None] - np.unique(exponents)[None, :]


def _split(symbols: NDArray[np.int16], levels: NDArray[np.int16], exponents: NDArray[np.int16]) -> list[NDArray[np.int16]]:
    """The symbols of each class, joined."""
    rows, columns = np.argsort(exponents, kind="stable"), np.argsort(levels, kind="stable")
    ordered = symbols[rows][:, columns]
    found = rectangles(levels[columns], exponents[rows])
    return [np.concatenate([ordered[place].reshape(-1) for place in places]) for places in found.values()]


def _join(
    payload: _Payload, levels: NDArray[np.int16], sorted_exponents: NDArray[np.int16]
) -> tuple[Symbols, NDArray[np.intp]]:
    """Symbols [tokens by exponent, components by level] that are stored, and which components they are."""
    columns = np.argsort(levels, kind="stable")
    found = rectangles(levels[columns], sorted_exponents)
    sizes = [sum((rows.stop - rows.start) * (cols.stop - cols.start) for rows, cols in places) for places in found.values()]
    stored = payload.classes(sizes)
    used = min((place[1].start for places in found.values() for place in places), default=len(columns))
    symbols = np.zeros((len(sorted_exponents), len(columns) - used), np.int16)
    start = 0
    for rows, cols in (place for places in found.values() for place in places):
        target = symbols[rows, cols.start - used : cols.stop - used]
        target[...] = stored[start : start + target.size].reshape(target.shape)
        start += target.size
    return symbols, columns[used:]


def _synthesise(components: Components, basis: TensorBasis) -> Floats:
    """Sums of components by the integers of the basis, [groups, tokens, dims]: exact, whatever the order of summation."""
    symbols, which = components.symbols.astype(np.float32), components.which
    groups, _, width = basis.synthesis.shape
    sums = np.empty((groups, len(symbols), width), np.float32)
    if groups == 1:
        np.matmul(symbols, basis.synthesis[0][which], out=sums[0])
        return sums
    for group in range(groups):
        mine = np.flatnonzero(which // width == group)
        np.matmul(symbols[:, mine], basis.synthesis[group][which[mine] % width], out=sums[group])
    return sums


def _sums_exactly(symbols: Floats, basis: TensorBasis) -> bool:
    """Whether no sum of a token's components by the integers of the basis leaves what single precision counts exactly."""
    groups, _, width = basis.synthesis.shape
    parts = symbols.reshape(len(symbols), groups, width).transpose(1, 0, 2)
    return bool(np.matmul(parts, np.abs(basis.synthesis)).max(initial=0) < EXACT_SUM)
