"""Numbers on grids: 2 to 8 bits a value, with a step, and perhaps an offset, for every group (FORMAT.md 4.4)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcdn.codec import Buffer, Encoded, Rows, pack, unpack
from kvcdn.codecs.numbers import Floats, to_float32, write_rounded
from kvcdn.errors import CorruptError

_HEADER = struct.Struct("<BBBBHHII")
"""Bits, centred, exact rows in front, exact rows at the end, tokens and values of a group, bytes of parameters and of codes."""

MIN_BITS = 2
MAX_BITS = 8
"""A code is a byte before entropy coding."""

MAX_EXACT_ROWS = 255

_PIECE_VALUES = 24 * 1024
"""Values decoded at a time: as float32 they stay in a core's caches, and their memory is reused without page faults."""

_INFINITE = 0x7F80
"""The exponent of bfloat16 infinities and NaN."""

_SIGN = 0x8000


@dataclass(frozen=True)
class Grid:
    """How a tensor [S, heads, dim] is put on grids.

    A group is `tokens` tokens by `values` neighbouring values of one head. `centred` groups have a step alone, and are
    symmetric about zero; others have an offset as well. `lead` and `trail` rows at the ends are kept exactly.
    """

    bits: int
    tokens: int
    values: int
    centred: bool
    lead: int = 0
    trail: int = 0


def encode_grid(raw: Buffer, rows: Rows, grid: Grid) -> Encoded | None:
    """`raw` on `grid`, or None where it holds numbers that are not finite: those are not for a lossy codec."""
    tokens, heads, dim = rows.shape
    values = to_float32(raw, rows.dtype).reshape(tokens, heads, dim // grid.values, grid.values)
    if not np.isfinite(values).all():
        return None
    lead, trail = min(grid.lead, tokens), min(grid.trail, max(tokens - grid.lead, 0))
    middle = values[lead : tokens - trail]
    codes = np.empty(middle.shape, np.uint8)
    offsets, steps = [], []
    for begin in range(0, len(middle), grid.tokens):
        chosen = slice(begin, begin + grid.tokens)
        offset, step = _fit(middle[chosen], grid)
        if not (np.isfinite(offset).all() and np.isfinite(step).all()):
            return None
        offsets.append(offset)
        steps.append(step)
        safe = np.where(step > 0, step, np.float32(1))
        codes[chosen] = np.clip(np.rint((middle[chosen] - offset) / safe), 0, (1 << grid.bits) - 1)
    parameters = [] if grid.centred else [_upper(np.stack(offsets))] if offsets else []
    parameters += [_upper(np.stack(steps))] if steps else []
    row = len(bytes(raw)) // tokens
    packed, coded = pack(b"".join(parameters), 2), pack(codes.tobytes(), 1)
    header = _HEADER.pack(grid.bits, grid.centred, lead, trail, grid.tokens, grid.values, len(packed), len(coded))
    data = b"".join((header, raw[: lead * row], raw[(tokens - trail) * row :], packed, coded))
    out = bytearray(len(raw))
    decode_grid(data, rows, memoryview(out), "own encoding")
    return Encoded("quant", data, out)


def _fit(group: Floats, grid: Grid) -> tuple[Floats, Floats]:
    """Offset and step, bfloat16 numbers both, of every group in `group` [tokens, heads, groups, values]: nothing is clipped."""
    top = np.float32((1 << grid.bits) - 1)
    if grid.centred:
        half = np.float32(1 << (grid.bits - 1))
        step = _bfloat16(np.abs(group).max((0, 3), keepdims=True) / (half - 1), up=True)
        return -half * step, step
    low = group.min((0, 3), keepdims=True)
    offset = -_bfloat16(-low, up=True)
    return offset, _bfloat16((group.max((0, 3), keepdims=True) - offset) / top, up=True)


def _bfloat16(values: Floats, *, up: bool) -> Floats:
    """`values` as bfloat16 numbers, rounded towards plus infinity with `up`, else cut."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    cut = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    if not up:
        return cut
    next_up = ((bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    return np.where(cut < values, next_up, cut)


def _upper(values: Floats) -> bytes:
    """The upper halves of float32 numbers: they are bfloat16 already."""
    return (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()


def decode_grid(encoded: Buffer, rows: Rows, out: memoryview, what: str) -> None:
    """Fills `out` with the rounded numbers. Raises CorruptError."""
    tokens, heads, dim = rows.shape
    if len(encoded) < _HEADER.size:
        raise CorruptError(f"{what}: {len(encoded)} bytes are too few for numbers on grids")
    bits, centred, lead, trail, group_tokens, group_values, packed, coded = _HEADER.unpack_from(encoded)
    sound = MIN_BITS <= bits <= MAX_BITS and centred <= 1 and group_tokens > 0 and 0 < group_values <= dim
    row = len(out) // tokens
    exact = (lead + trail) * row
    if not sound or dim % group_values or lead + trail > tokens or _HEADER.size + exact + packed + coded != len(encoded):
        raise CorruptError(f"{what}: the numbers' grid, or its sizes, are not possible")
    place = memoryview(encoded)[_HEADER.size :]
    out[: lead * row] = place[: lead * row]
    out[(tokens - trail) * row :] = place[lead * row : exact]
    middle = tokens - lead - trail
    groups = -(-middle // group_tokens)
    planes = 1 if centred else 2
    shape = (planes, groups, heads, dim // group_values, 1)
    stored = np.empty(shape, "<u2")
    unpack(place[exact : exact + packed], 2, _bytes_of(stored), what)
    codes = np.empty((middle, heads, dim // group_values, group_values), np.uint8)
    unpack(place[exact + packed :], 1, _bytes_of(codes), what)
    if not middle:
        return
    parameters = _checked(stored, what)
    steps = parameters[-1]
    offsets = np.float32(-(1 << (bits - 1))) * steps if centred else parameters[0]
    stride = max(_PIECE_VALUES // (heads * dim), 1)
    with np.errstate(over="ignore", invalid="ignore"):
        for begin, end in _pieces(middle, group_tokens, stride):
            group = slice(begin, end) if group_tokens == 1 else begin // group_tokens
            values = codes[begin:end].astype(np.float32)
            np.multiply(values, steps[group], out=values)
            np.add(values, offsets[group], out=values)
            write_rounded(values, rows.dtype, out[(lead + begin) * row : (lead + end) * row])


def _pieces(tokens: int, group: int, stride: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `stride` tokens, none across the border of two groups of more than a token."""
    step = tokens if group == 1 else group
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        for begin in range(first, last, stride):
            yield begin, min(begin + stride, last)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    """The memory of `array`, which may be empty."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type] # numpy's arrays are buffers


def _checked(stored: NDArray[np.uint16], what: str) -> Floats:
    """The parameters as float32. Raises CorruptError for one that is not finite, and for a negative step."""
    if ((stored & _INFINITE) == _INFINITE).any() or (stored[-1] & _SIGN).any():
        raise CorruptError(f"{what}: a step or an offset is not a number that belongs there")
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
