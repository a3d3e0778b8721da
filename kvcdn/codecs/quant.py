"""Numbers on grids: 4 or 8 bits a value, with a step, and perhaps an offset, for every group (FORMAT.md 4.4).

Nothing is entropy-coded: that would save a few percent, and take more time than all else together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcdn.codec import Encoded, Rows
from kvcdn.codecs.grids import CODE_BITS, HEADER, INFINITE, MAX_BITS, SIGN, SPREAD
from kvcdn.codecs.numbers import NATIVE_DTYPES, Floats, to_float32, write_rounded
from kvcdn.digest import Buffer
from kvcdn.errors import CorruptError

_PIECE_VALUES = 96 * 1024
"""Values decoded at a time: as float32 they stay in a core's cache, and their memory is reused without page faults."""

_CUTS = (0.0, 0.06, 0.12, 0.18, 0.24)
"""How much of a group's range is tried to be cut from either end of its grid, where it is known what rows are worth."""

_LOW = np.uint8(0x0F)
_HALF_BYTE = np.uint8(4)


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


def encode_grid(raw: Buffer, rows: Rows, grid: Grid, weights: Floats | None = None) -> Encoded | None:
    """`raw` on `grid`, or None where it holds numbers that are not finite: those are not for a lossy codec.

    With `weights` [tokens], of what the square of an error in each row costs, groups with an offset are finer between the
    numbers that are worth much, and what lies beyond their grid is moved to its end.
    """
    tokens, heads, dim = rows.shape
    values = to_float32(raw, rows.dtype).reshape(tokens, heads, dim // grid.values, grid.values)
    if not np.isfinite(values).all():
        return None
    lead, trail = min(grid.lead, tokens), min(grid.trail, max(tokens - grid.lead, 0))
    middle = values[lead : tokens - trail]
    worth = None if weights is None or grid.centred else weights[lead : tokens - trail, None, None, None]
    codes = np.empty(middle.shape, np.uint8)
    offsets, steps = [], []
    for begin in range(0, len(middle), grid.tokens):
        chosen = slice(begin, begin + grid.tokens)
        offset, step = _fit(middle[chosen], grid) if worth is None else _fit_weighted(middle[chosen], worth[chosen], grid)
        if not (np.isfinite(offset).all() and np.isfinite(step).all()):
            return None
        offsets.append(offset)
        steps.append(step)
        codes[chosen] = _nearest(middle[chosen], offset, step, grid)
    parameters = [] if grid.centred else [_upper(np.stack(offsets))] if offsets else []
    parameters += [_upper(np.stack(steps))] if steps else []
    row = len(bytes(raw)) // tokens
    header = HEADER.pack(grid.bits, grid.centred, lead, trail, grid.tokens, grid.values)
    stored = (*parameters, _join(codes.reshape(-1), grid.bits))
    data = b"".join((header, raw[: lead * row], raw[(tokens - trail) * row :], *stored))
    out = bytearray(len(raw))
    decode_grid(data, rows, memoryview(out), "own encoding")
    return Encoded("quant", data, out)


def _fit(group: Floats, grid: Grid) -> tuple[Floats, Floats]:
    """Offset and step, bfloat16 numbers both, of every group in `group` [tokens, heads, groups, values]: nothing is clipped."""
    if grid.centred:
        half = np.float32(1 << (grid.bits - 1))
        step = _bfloat16(np.abs(group).max((0, 3), keepdims=True) / (half - 1), up=True)
        return -half * step, step
    return _between(group.min((0, 3), keepdims=True), group.max((0, 3), keepdims=True), grid)


def _fit_weighted(group: Floats, weights: Floats, grid: Grid) -> tuple[Floats, Floats]:
    """The same, with the ends where they make the weighted sum of squared errors least: the lower one first."""
    ends = [group.min((0, 3), keepdims=True), group.max((0, 3), keepdims=True)]
    # What is too large to have a range has no grid: its parameters are not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        inwards = (ends[1] - ends[0], ends[0] - ends[1])
        for which in range(2):
            tried = np.stack([ends[which] + np.float32(cut) * inwards[which] for cut in _CUTS])
            pairs = [(one, ends[1]) if which == 0 else (ends[0], one) for one in tried]
            errors = np.stack([_weighted_error(group, weights, *_between(*pair, grid), grid) for pair in pairs])
            ends[which] = np.take_along_axis(tried, errors.argmin(0)[None], 0)[0]
        return _between(ends[0], ends[1], grid)


def _between(low: Floats, high: Floats, grid: Grid) -> tuple[Floats, Floats]:
    """Offset and step of a grid that reaches from `low` to `high`."""
    offset = -_bfloat16(-low, up=True)
    return offset, _bfloat16((high - offset) / np.float32((1 << grid.bits) - 1), up=True)


def _weighted_error(group: Floats, weights: Floats, offset: Floats, step: Floats, grid: Grid) -> Floats:
    numbers = _nearest(group, offset, step, grid) * step + offset
    error: Floats = (np.square(numbers - group) * weights).sum((0, 3), keepdims=True)
    return error


def _nearest(group: Floats, offset: Floats, step: Floats, grid: Grid) -> Floats:
    """The nearest code of each number."""
    return np.clip(np.rint((group - offset) / np.where(step > 0, step, np.float32(1))), 0, (1 << grid.bits) - 1)


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


def _join(codes: NDArray[np.uint8], bits: int) -> bytes:
    """Codes as bytes; of 4 bits the first half of them in the lower halves of the bytes."""
    if bits == MAX_BITS:
        return codes.tobytes()
    half = -(-len(codes) // 2)
    joined = codes[:half].copy()
    joined[: len(codes) - half] |= codes[half:] << _HALF_BYTE
    return joined.tobytes()


def _split(stored: memoryview, count: int, bits: int) -> NDArray[np.uint8]:
    """The `count` codes of `_join`."""
    joined = np.frombuffer(stored, np.uint8)
    if bits == MAX_BITS:
        return joined
    codes = np.empty(count, np.uint8)
    np.bitwise_and(joined, _LOW, out=codes[: len(joined)])
    np.right_shift(joined[: count - len(joined)], _HALF_BYTE, out=codes[len(joined) :])
    return codes


@dataclass(frozen=True)
class GridPart:
    """A part taken apart: exact rows at both ends, codes of so many bits in groups of so many tokens, and their parameters.

    These are bits of bfloat16 numbers, [1 or 2, groups of tokens, heads, groups of values, 1], not looked at yet.
    """

    bits: int
    group_tokens: int
    group_values: int
    lead: memoryview
    trail: memoryview
    parameters: NDArray[np.uint16]
    codes: memoryview
    middle: int
    """Tokens that have codes."""

    def checked(self, what: str) -> Floats:
        """The parameters as float32. Raises CorruptError for one that is not finite, and for a negative step."""
        return _checked(self.parameters, what)


def parse_grid(encoded: Buffer, rows: Rows, what: str) -> GridPart:
    """Takes a part apart. Raises CorruptError where its sizes are not those that belong."""
    tokens, heads, dim = rows.shape
    if len(encoded) < HEADER.size:
        raise CorruptError(f"{what}: {len(encoded)} bytes are too few for numbers on grids")
    bits, centred, lead, trail, group_tokens, group_values = HEADER.unpack_from(encoded)
    sound = bits in CODE_BITS and centred <= 1 and group_tokens > 0 and 0 < group_values <= dim
    middle = tokens - lead - trail
    if not sound or dim % group_values or middle < 0:
        raise CorruptError(f"{what}: the numbers' grid is not possible")
    row = heads * dim * rows.typesize
    shape = (1 if centred else 2, -(-middle // group_tokens), heads, dim // group_values, 1)
    sizes = (lead * row, trail * row, 2 * math.prod(shape), -(-middle * heads * dim * bits // 8))
    if HEADER.size + sum(sizes) != len(encoded):
        raise CorruptError(f"{what}: numbers on grids of {len(encoded)} bytes, {HEADER.size + sum(sizes)} belong")
    first, last, stored, coded = _cut(memoryview(encoded)[HEADER.size :], sizes)
    parameters = np.frombuffer(stored, "<u2").reshape(shape)
    return GridPart(bits, group_tokens, group_values, first, last, parameters, coded, middle)


def decode_grid(encoded: Buffer, rows: Rows, out: memoryview, what: str) -> None:
    """Fills `out` with the rounded numbers. Raises CorruptError."""
    tokens, heads, dim = rows.shape
    spread = SPREAD[rows.dtype].native()
    if spread is not None:
        target = np.frombuffer(out, NATIVE_DTYPES[rows.dtype]).reshape(tokens, heads * dim)
        if spread(np.frombuffer(encoded, np.uint8), dim, target):
            return
    _decode_by_numpy(encoded, rows, out, what)


def _decode_by_numpy(encoded: Buffer, rows: Rows, out: memoryview, what: str) -> None:
    """The same, and says what is wrong."""
    part = parse_grid(encoded, rows, what)
    end = len(out) - len(part.trail)
    out[: len(part.lead)] = part.lead
    out[end:] = part.trail
    if part.middle:
        place = out[len(part.lead) : end]
        _spread_by_numpy(part.checked(what), part.codes, (part.bits, part.group_tokens), place, rows)


def _spread_by_numpy(parameters: Floats, coded: memoryview, form: tuple[int, int], place: memoryview, rows: Rows) -> None:
    """The numbers of codes of so many bits, in groups of so many tokens, rounded into `place`."""
    bits, group = form
    row = math.prod(rows.shape[1:]) * rows.typesize
    middle = len(place) // row
    steps = parameters[-1]
    # What is too large for the dtype is infinite, as wherever numbers are multiplied.
    with np.errstate(over="ignore", invalid="ignore"):
        offsets = np.float32(-(1 << (bits - 1))) * steps if len(parameters) == 1 else parameters[0]
        codes = _split(coded, middle * math.prod(rows.shape[1:]), bits)
        codes = codes.reshape(middle, *steps.shape[1:-1], -1)
        numbers = _Numbers(codes, offsets, steps, group)
        for begin, end in numbers.pieces():
            write_rounded(numbers.of(begin, end), rows.dtype, place[begin * row : end * row])


class _Numbers:
    """Numbers of codes [tokens, heads, groups, values], some tokens at a time in memory that is used again."""

    def __init__(self, codes: NDArray[np.uint8], offsets: Floats, steps: Floats, group: int) -> None:
        self._codes, self._offsets, self._steps = codes, offsets, steps
        self._group = min(group, len(codes))
        stride = max(_PIECE_VALUES // codes[0].size, 1)
        # Whole groups, or parts of one.
        self._stride = stride // self._group * self._group or stride
        self._memory = np.empty((min(self._stride, len(codes)), *codes.shape[1:]), np.float32)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Ranges of tokens that are whole groups, or lie within one."""
        tokens, group = len(self._codes), self._group
        whole = tokens // group * group
        span = whole if self._stride >= group else group
        for first, last in [*((start, start + span) for start in range(0, whole, span)), (whole, tokens)]:
            for begin in range(first, last, self._stride):
                yield begin, min(begin + self._stride, last)

    def of(self, begin: int, end: int) -> Floats:
        """The numbers of a piece, to be used before the next."""
        group = min(self._group, end - begin)
        shape = (-1, group, *self._codes.shape[1:])
        codes, values = self._codes[begin:end].reshape(shape), self._memory[: end - begin].reshape(shape)
        first = begin // self._group
        chosen = slice(first, first + len(codes))
        np.copyto(values, codes)
        np.multiply(values, self._steps[chosen, None], out=values)
        np.add(values, self._offsets[chosen, None], out=values)
        return self._memory[: end - begin]


def _cut(data: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    """Neighbouring pieces of `data`, of these sizes."""
    start = 0
    for size in sizes:
        yield data[start : start + size]
        start += size


def _checked(stored: NDArray[np.uint16], what: str) -> Floats:
    """The parameters as float32. Raises CorruptError for one that is not finite, and for a negative step."""
    if ((stored & INFINITE) == INFINITE).any() or (stored[-1] & SIGN).any():
        raise _not_a_number(what)
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _not_a_number(what: str) -> CorruptError:
    return CorruptError(f"{what}: a step or an offset is not a number that belongs there")
