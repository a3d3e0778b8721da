"""The compiled loop over numbers on grids (FORMAT.md 4.4), which `kvcdn.codecs.quant` otherwise decodes by numpy."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcdn.codecs.chunks import CHUNK, spread_chunk
from kvcdn.codecs.compiled import Array, Loop, Uses
from kvcdn.codecs.numbers import NATIVE_DTYPES, ROUNDERS, Floats

HEADER = struct.Struct("<BBBBHH")
"""Bits, centred, exact rows in front, exact rows at the end, tokens and values of a group."""

HEADER_BYTES = HEADER.size

CODE_BITS = (4, 8)
MAX_BITS = 8

INFINITE = 0x7F80
"""The exponent of bfloat16 infinities and NaN."""

SIGN = 0x8000

Codes = NDArray[np.uint8]


def _are_numbers(stored: NDArray[np.uint16]) -> bool:
    """Whether all parameters are finite, and no step is negative."""
    kinds, groups, columns = stored.shape
    wrong = False
    for kind in range(kinds):
        forbidden = SIGN if kind == kinds - 1 else 0
        for group in range(groups):
            for column in range(columns):
                one = stored[kind, group, column]
                wrong |= (one & INFINITE == INFINITE) | (one & forbidden != 0)
    return not wrong


def _spread_parameters(stored: NDArray[np.uint16], bits: int, group: int, width: int, steps: Floats, offsets: Floats) -> None:
    """The step and the offset of each column, for the tokens of a group."""
    step_bits, offset_bits = steps.view(np.uint32), offsets.view(np.uint32)
    last, column = len(stored) - 1, 0
    for place in range(stored.shape[2]):
        step, offset = np.uint32(stored[last, group, place]) << 16, np.uint32(stored[0, group, place]) << 16
        for _ in range(width):
            step_bits[column], offset_bits[column] = step, offset
            column += 1
    if not last:
        for column in range(len(steps)):
            offsets[column] = np.float32(-(1 << (bits - 1))) * steps[column]


def _spread_rows(  # noqa: PLR0913, PLR0917 - a piece of one loop, over arrays
    coded: Codes, source: int, shift: int, mask: int, steps: Floats, offsets: Floats, out: NDArray[Any], first: int, end: int
) -> None:
    """Rounds numbers into the rows `first` to `end`; their codes are in bytes from `source` on, as `spread_chunk` has them."""
    columns = len(steps)
    row = np.empty(columns, np.float32)
    bits = row.view(np.uint32)
    for token in range(first, end):
        begin = source + (token - first) * columns
        for column in range(columns):
            row[column] = np.float32(np.uint8((coded[begin + column] >> shift) & mask)) * steps[column] + offsets[column]
        round_row(row, bits, out, token)


round_row = ROUNDERS["bfloat16"]
"""In each loop, the one of its dtype."""


def _spread_rows_in_chunks(  # noqa: PLR0913, PLR0917 - as above
    coded: Codes, source: int, shift: int, mask: int, steps: Floats, offsets: Floats, out: NDArray[Any], first: int, end: int
) -> None:
    """`_spread_rows` of bfloat16. The last chunk of a row may overlap the one before it."""
    columns = len(steps)
    if columns < CHUNK:
        _spread_rows(coded, source, shift, mask, steps, offsets, out, first, end)
        return
    for token in range(first, end):
        begin = source + (token - first) * columns
        for chunk in range(0, columns, CHUNK):
            column = min(chunk, columns - CHUNK)
            spread_chunk(coded, begin + column, shift, mask, steps, offsets, column, out, token * columns + column)


def _spread_split_row(coded: Codes, first: int, steps: Floats, offsets: Floats, out: NDArray[Any], token: int) -> None:
    """The row, of 4 bits a code, whose numbers from `first` on are the last in lower halves and the first in upper ones."""
    row, half = np.empty(len(steps), np.float32), len(coded)
    for column in range(len(row)):
        number = first + column
        code = coded[number] & 15 if number < half else coded[number - half] >> 4
        row[column] = np.float32(np.uint8(code)) * steps[column] + offsets[column]
    round_row(row, row.view(np.uint32), out, token)


def spread(encoded: Codes, dim: int, out: NDArray[Any]) -> bool:
    """Rounds the numbers of a part into `out` [tokens, heads x dim]; False where it is not sound, with nothing written."""
    tokens, columns = out.shape
    if len(encoded) < HEADER_BYTES:
        return False
    bits, centred, lead, trail = np.int64(encoded[0]), np.int64(encoded[1]), np.int64(encoded[2]), np.int64(encoded[3])
    group, width = encoded[4] | np.int64(encoded[5]) << 8, encoded[6] | np.int64(encoded[7]) << 8
    middle = tokens - lead - trail
    if bits not in CODE_BITS or centred > 1 or not group or not width or dim % width or middle < 0:
        return False
    kinds, groups, each = 2 - centred, (middle + group - 1) // group, columns // width
    row_bytes = columns * out.itemsize
    last = HEADER_BYTES + lead * row_bytes
    stored = last + trail * row_bytes
    begin = stored + 2 * kinds * groups * each
    half = (middle * columns * bits + 7) // 8
    if begin + half != len(encoded):
        return False
    parameters, coded = encoded[stored:begin].view(np.uint16).reshape(kinds, groups, each), encoded[begin:]
    if not _are_numbers(parameters):
        return False
    places = out.reshape(out.size).view(np.uint8)
    places[: lead * row_bytes] = encoded[HEADER_BYTES:last]
    places[(tokens - trail) * row_bytes :] = encoded[last:stored]
    steps, offsets = np.empty(columns, np.float32), np.empty(columns, np.float32)
    # Rows whose codes are in lower halves of bytes, and the first of those whose codes are in upper ones.
    low, high = (middle, middle) if bits == MAX_BITS else (half // columns, (half + columns - 1) // columns)
    mask = 255 if bits == MAX_BITS else 15
    for number in range(groups):
        _spread_parameters(parameters, int(bits), number, int(width), steps, offsets)
        begin, end = number * group, min((number + 1) * group, middle)
        if begin < low:
            spread_rows(coded, begin * columns, 0, mask, steps, offsets, out, lead + begin, lead + min(end, low))
        if begin <= low < min(end, high):
            _spread_split_row(coded, low * columns, steps, offsets, out, lead + low)
        if end > high:
            begin = max(begin, high)
            spread_rows(coded, begin * columns - half, 4, mask, steps, offsets, out, lead + begin, lead + end)
    return True


spread_rows = _spread_rows_in_chunks
"""In each loop, the one of its dtype."""


def _spread_loop(dtype: str) -> Loop[Codes, int, NDArray[Any]]:
    helpers: Uses = {"round_row": ROUNDERS[dtype], "_spread_rows": _spread_rows}
    in_chunks: Uses = {"spread_chunk": spread_chunk, "spread_rows": _spread_rows_in_chunks}
    rows: Uses = in_chunks if dtype == "bfloat16" else {"spread_rows": _spread_rows}
    common: Uses = {
        "_are_numbers": _are_numbers,
        "_spread_parameters": _spread_parameters,
        "_spread_split_row": _spread_split_row,
    }
    return Loop(
        spread,
        (Array("uint8"), "int64", Array(NATIVE_DTYPES[dtype], 2, written=True)),
        {**helpers, **rows, **common},
    )


SPREAD = {dtype: _spread_loop(dtype) for dtype in ROUNDERS}
