"""Synthesis: a tensor's streams to its rounded numbers, as a compiled loop that passes over memory once (FORMAT.md 4.5).

Streams that are not usual, or not sound, are left to who else decodes them, or says what is wrong with them.

Tokens are taken by ascending exponent, some at a time. Their symbols are put on lines, a token's components by ascending level;
these are multiplied with the integers of the basis, two components and a tile of dimensions at a time, where not all are zero;
and what comes of them is scaled, turned and rounded while it is near.

Exponents and levels are counted from the least that the format has: they are places in arrays. Small functions take whole
arrays and places in them: a slice for each line takes as long as what is done there. A place that is not a loop's own number is
made unsigned, so that it cannot be one that is counted from the end: such loops are done many numbers at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcdn.codecs import matrixunit, tiles
from kvcdn.codecs.chunks import CHUNK as WIDE_CHUNK
from kvcdn.codecs.chunks import round_chunk
from kvcdn.codecs.classes import EXPONENTS, LEAST_APART, LEAST_LEVEL, LEVELS, MOST_EXPONENT
from kvcdn.codecs.compiled import Array, Loop, Uses
from kvcdn.codecs.numbers import NATIVE_DTYPES, ROUNDERS, Floats
from kvcdn.codecs.pages import USES, Bytes, Places, decode_streams, pad
from kvcdn.codecs.symbols import Symbols
from kvcdn.codecs.tiles import (
    CHUNK,
    LINES,
    TILE,
    Ints,
    clear,
    clear_from,
    copy_chunk,
    fill_table,
    make_lines,
    make_sums,
    make_table,
    multiply,
    whole,
)

_POWERS = np.exp2(np.arange(-MOST_EXPONENT, MOST_EXPONENT + 1, dtype=np.float32))
"""Of two, for each exponent."""


def _count(values: Symbols, least: int, counts: Places) -> bool:
    """Adds to `counts` how often each value occurs, from `least` on; False where one has no place there."""
    for number in range(len(values)):
        place = values[number] - least
        if not 0 <= place < len(counts):
            return False
        counts[place] += 1
    return True


def _measure(many: Places, wide: Places) -> Places:
    """How many symbols each class has, of those that have any, for so `many` tokens and `wide` components of each."""
    sizes, found = np.zeros(LEVELS - LEAST_APART, np.int64), 0
    for apart in range(LEAST_APART, LEVELS):
        for exponent in range(min(EXPONENTS, LEVELS - apart)):
            sizes[found] += many[exponent] * wide[exponent + apart]
        found += sizes[found] > 0
    return sizes[:found]


def _find_starts(many: Places, wide: Places) -> Places:
    """Where the symbols of each exponent and level begin, for so `many` tokens and `wide` components of each."""
    starts = np.zeros((EXPONENTS, LEVELS), np.int64)
    place = 0
    for apart in range(LEAST_APART, LEVELS):
        for exponent in range(min(EXPONENTS, LEVELS - apart)):
            starts[exponent, exponent + apart] = place
            place += many[exponent] * wide[exponent + apart]
    return starts


def _sort_tokens(exponents: Symbols, many: Places) -> tuple[Places, Places]:
    """The tokens by ascending exponent, and where each exponent's begin."""
    first = np.zeros(EXPONENTS, np.int64)
    for exponent in range(1, EXPONENTS):
        first[exponent] = first[exponent - 1] + many[exponent - 1]
    order, following = np.empty(len(exponents), np.int64), first.copy()
    for token in range(len(exponents)):
        exponent = exponents[token] + MOST_EXPONENT
        order[following[exponent]] = token
        following[exponent] += 1
    return order, first


def _arrange(levels: Symbols, matrices: NDArray[np.int8], many: Places) -> tuple[Places, Places, Ints]:
    """What stands where on a line, group after group, and the integers it is multiplied with.

    Runs of neighbouring components of one group and level: the level, how many components of that level other groups have
    before them, where they stand, how many they are. Then where each group's columns begin, and the end of the last.
    """
    groups, width, _ = matrices.shape
    least = LEAST_APART
    for exponent in range(EXPONENTS):
        if many[exponent]:
            least += exponent
            break
    runs = np.empty((groups * width, 4), np.int64)
    ends = np.zeros(groups + 1, np.int64)
    table = make_table(groups * whole(width), width)
    before, own = np.zeros(LEVELS, np.int64), np.empty(LEVELS, np.int64)
    order = np.empty(width, np.int64)
    run = 0
    for group in range(groups):
        mine = levels[group * width : (group + 1) * width]
        own[:] = 0
        for column in range(width):
            own[mine[column] - LEAST_LEVEL] += 1
        used = 0
        for level in range(least, LEVELS):
            size = own[level]
            own[level] = used
            if size:
                runs[run, 0], runs[run, 1], runs[run, 2], runs[run, 3] = level, before[level], ends[group] + used, size
                before[level] += size
                used += size
                run += 1
        for column in range(width):
            level = mine[column] - LEAST_LEVEL
            if level >= least:
                order[own[level]] = column
                own[level] += 1
        fill_table(table, ends[group], matrices[group], order, used)
        ends[group + 1] = ends[group] + whole(used)
    return runs[:run], ends, table


def _fill_lines(  # noqa: PLR0913, PLR0917 - a piece of one loop, over arrays
    symbols: Symbols, runs: Places, starts: Places, wide: Places, exponent: int, lines: Any, low: int, high: int
) -> None:
    """Puts the symbols of neighbouring tokens of one exponent on lines; of each level the first token's begin at `starts`.

    Whole chunks are copied: what they spill over is what follows on the line, and is written after them, or is where the table
    has zeros.
    """
    for run in range(len(runs)):
        level, before, place, size = runs[run]
        if level - exponent < LEAST_APART:
            for line in range(low, high):
                clear(lines, line, place, size)
            continue
        for chunk in range(0, size, CHUNK):
            source = starts[level] + before + chunk
            for line in range(low, high):
                copy_chunk(symbols, source, lines, line, place + chunk)
                source += wide[level]


def _turn(rows: Floats, line: int, columns: int, dim: int, cosines: Floats, sines: Floats, token: int) -> None:
    """Rotary embedding of one token, as `kvcdn.codecs.rope` has it for all."""
    count = cosines.shape[1]
    for head in range(0, columns, dim):
        for pair in range(count):
            first, second = np.uintp(head + pair), np.uintp(head + count + pair)
            left, right = rows[line, first], rows[line, second]
            rows[line, first] = left * cosines[token, pair] - right * sines[token, pair]
            rows[line, second] = right * cosines[token, pair] + left * sines[token, pair]


def _turn_interleaved(rows: Floats, line: int, columns: int, dim: int, cosines: Floats, sines: Floats, token: int) -> None:
    """That, of pairs of neighbours."""
    for head in range(0, columns, dim):
        for pair in range(cosines.shape[1]):
            first, second = np.uintp(head + 2 * pair), np.uintp(head + 2 * pair + 1)
            left, right = rows[line, first], rows[line, second]
            rows[line, first] = left * cosines[token, pair] - right * sines[token, pair]
            rows[line, second] = right * cosines[token, pair] + left * sines[token, pair]


def _write_rows(rows: Floats, count: int, order: Places, begin: int, out: NDArray[Any]) -> None:
    """Rounds the first `count` of `rows` into those of `out` that stand in `order` from `begin` on."""
    columns, bits = out.shape[1], rows.view(np.uint32)
    for line in range(count):
        _round_row(rows[line][:columns], bits[line][:columns], out, order[begin + line])


_round_row = ROUNDERS["bfloat16"]
"""In each loop, the one of its dtype."""


def _write_rows_in_chunks(rows: Floats, count: int, order: Places, begin: int, out: NDArray[Any]) -> None:
    """`_write_rows` of bfloat16. The last chunk of a row may overlap the one before it."""
    columns, wide, bits = out.shape[1], rows.shape[1], rows.view(np.uint32)
    if columns < WIDE_CHUNK:
        _write_rows(rows, count, order, begin, out)
        return
    for line in range(count):
        place, following = order[begin + line] * columns, order[min(begin + LINES + line, len(order) - 1)] * columns
        for chunk in range(0, columns, WIDE_CHUNK):
            column = min(chunk, columns - WIDE_CHUNK)
            round_chunk(bits, line * wide + column, out, place + column, following + column)


def _restore(  # noqa: C901, PLR0913, PLR0917 - one loop, over arrays
    stored: Bytes,
    lengths: Places,
    matrices: NDArray[np.int8],
    step: float,
    scales: Floats,
    mean: Floats,
    cosines: Floats,
    sines: Floats,
    interleaved: int,
    out: NDArray[Any],
    done: Bytes,
) -> None:
    """Rounds the numbers of the streams, of so many bytes each, into `out` [tokens, heads x dim].

    `done` is 0 before, and where a stream is not usual or not sound: `out` is then as it was. Rows are multiples of
    `step` x 2^E of their exponents; `mean` is [heads, dim]; `cosines` and `sines` are [tokens, pairs], of no pairs where
    nothing turns.
    """
    groups, width, _ = matrices.shape
    tokens, columns = out.shape
    data, sound, sides = pad(stored), np.zeros(len(lengths), np.uint8), np.empty(tokens + columns, np.int16)
    decode_streams(data, 0, lengths[:2], np.array([tokens, columns]), sides, sound)
    if not sound[0] or not sound[1]:
        return
    exponents, levels = sides[:tokens], sides[tokens:]
    many, wide = np.zeros(EXPONENTS, np.int64), np.zeros(LEVELS, np.int64)
    if not _count(exponents, -MOST_EXPONENT, many) or not _count(levels, LEAST_LEVEL, wide):
        return
    sizes = _measure(many, wide)
    if len(sizes) != len(lengths) - 2:
        return
    total = sizes.sum()
    symbols = np.empty(total + CHUNK, np.int16)
    symbols[total:] = 0
    decode_streams(data, lengths[0] + lengths[1], lengths[2:], sizes, symbols, sound[2:])
    for stream in range(len(lengths)):
        if not sound[stream]:
            return
    done[0] = 1
    factors = np.float32(step) * _POWERS
    starts = _find_starts(many, wide)
    order, first = _sort_tokens(exponents, many)
    runs, ends, table = _arrange(levels, matrices, many)
    lines, sums = make_lines(int(ends[groups]) + CHUNK), make_sums()
    # With room for a tile behind a group: what is written there is the next group's, or nothing.
    rows, scaled = np.empty((LINES, columns + TILE), np.float32), np.empty(LINES, np.float32)
    means = np.zeros(columns + TILE, np.float32)
    means[:columns] = mean.reshape(columns)
    for begin in range(0, tokens, LINES):
        count = min(LINES, tokens - begin)
        low = 0
        while low < count:
            exponent = exponents[order[begin + low]] + MOST_EXPONENT
            number = begin + low - first[exponent]
            high = min(low + many[exponent] - number, count)
            _fill_lines(symbols, runs, starts[exponent] + number * wide, wide, exponent, lines, low, high)
            low = high
        clear_from(lines, count)
        for group in range(groups):
            for line in range(count):
                scaled[line] = factors[exponents[order[begin + line]] + MOST_EXPONENT] * scales[group]
            multiply(lines, count, ends[group], ends[group + 1], table, sums, scaled, means, rows, group * width)
        for line in range(count):
            token = order[begin + line]
            if interleaved:
                _turn_interleaved(rows, line, columns, mean.shape[1], cosines, sines, token)
            else:
                _turn(rows, line, columns, mean.shape[1], cosines, sines, token)
        write_rows(rows, count, order, begin, out)


write_rows = _write_rows_in_chunks
"""In each loop, the one of its dtype."""


_IN_CHUNKS: Uses = {"round_chunk": round_chunk, "write_rows": _write_rows_in_chunks}


def _restore_loop(dtype: str, product: Mapping[str, Any]) -> Loop[Any]:
    angles = Array("float32", 2)
    target = Array(NATIVE_DTYPES[dtype], 2, written=True)
    return Loop(
        _restore,
        (
            *(Array("uint8"), Array("int64"), Array("int8", 3), "float32", Array("float32"), Array("float32", 2)),
            *(angles, angles, "int64", target, Array("uint8", written=True)),
        ),
        {
            **product,
            **USES,
            "_count": _count,
            "_measure": _measure,
            "_find_starts": _find_starts,
            "_sort_tokens": _sort_tokens,
            "_arrange": _arrange,
            "_fill_lines": _fill_lines,
            "_turn": _turn,
            "_turn_interleaved": _turn_interleaved,
            "_round_row": ROUNDERS[dtype],
            "_write_rows": _write_rows,
            **(_IN_CHUNKS if dtype == "bfloat16" else {"write_rows": _write_rows}),
        },
    )


_COMMON = ("make_aligned", "whole", "make_lines", "make_table", "make_sums", "fill_table", "clear", "clear_from", "copy_chunk")
"""What both ways to multiply have."""

_BY_PAIRS = {name: getattr(tiles, name) for name in (*_COMMON, "list_pairs", "multiply_tile", "scale", "multiply")}
_BY_BYTES = {name: getattr(matrixunit, name) for name in (*_COMMON, "multiply_bytes", "scale", "multiply")}

RESTORE = {dtype: _restore_loop(dtype, _BY_PAIRS) for dtype in ROUNDERS}

RESTORE_BY_BYTES = {dtype: _restore_loop(dtype, _BY_BYTES) for dtype in ROUNDERS}
"""The same, with a matrix unit."""


def restoring(dtype: str) -> Loop[Any]:
    """The one for this processor."""
    return (RESTORE_BY_BYTES if matrixunit.has_matrix_unit() else RESTORE)[dtype]
