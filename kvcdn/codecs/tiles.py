"""Tiles: small products of matrices of 16-bit integers, in vector instructions that numba does not find by itself.

x86 multiplies 16-bit integers in pairs, adding each two products: twice as many as it does in single precision, and exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcdn.codecs.compiled import Instructions
from kvcdn.codecs.numbers import Floats
from kvcdn.codecs.symbols import Symbols

LINES = 32
"""Tokens at a time: a tile of the basis, and all that is at hand of these, stay in the first cache."""

ABREAST = 4
"""Rows of a tile: with as many columns as below, its sums fill half of the registers."""

TILE = 64
"""Columns of a tile."""

CACHE_LINE = 64
"""Bytes."""

Ints = NDArray[np.int32]


def whole(columns: int) -> int:
    """`columns`, rounded up to what a product takes at a time: pairs."""
    return (columns + 1) // 2 * 2


def make_aligned(size: int) -> NDArray[np.uint8]:
    """So many zeros, from the beginning of a cache line on: registers as wide as one take twice as long across two."""
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    skipped = -memory.ctypes.data % CACHE_LINE
    return memory[skipped : skipped + size]


def make_lines(columns: int) -> Symbols:
    """Lines of so many columns of symbols, all zero."""
    return np.zeros((LINES, columns), np.int16)


def make_table(columns: int, width: int) -> Ints:
    """A table of the integers that so many columns of symbols are multiplied with, `width` for each, all zero."""
    padded = (width + TILE - 1) // TILE * TILE
    return make_aligned(columns // 2 * padded * 4).view(np.int32).reshape(columns // 2, padded)


def make_sums() -> Ints:
    """A tile of sums for every line."""
    return np.zeros((LINES, TILE), np.int32)


def fill_table(table: Ints, begin: int, matrix: NDArray[np.int8], order: NDArray[np.int64], used: int) -> None:
    """Puts rows of `matrix`, as the first `used` of `order` have them, where the columns of symbols from `begin` on are."""
    for number in range(0, used, 2):
        target, left = table[(begin + number) // 2], matrix[order[number]]
        right = matrix[order[min(number + 1, used - 1)]]
        upper = np.int32(0xFFFF if number + 1 < used else 0)
        for column in range(len(left)):
            target[column] = (np.int32(left[column]) & 0xFFFF) | ((np.int32(right[column]) & upper) << 16)


def clear(lines: Symbols, line: int, place: int, size: int) -> None:
    """Makes `size` symbols zero."""
    lines[line, place : place + size] = 0


def clear_from(lines: Symbols, line: int) -> None:
    """Makes all lines from `line` on zero."""
    lines[line:] = 0


def list_pairs(pairs: Ints, line: int, begin: int, end: int, which: Ints) -> int:
    """Lists which pairs from `begin` to `end` are not zero on all four lines from `line` on; returns how many those are."""
    found = 0
    for number in range(end - begin):
        pair = np.uintp(begin + number)
        which[line, np.uintp(found)] = begin + number
        if pairs[line, pair] | pairs[line + 1, pair] | pairs[line + 2, pair] | pairs[line + 3, pair]:
            found += 1
    return found


def scale(sums: Ints, line: int, factor: np.float32, means: Floats, rows: Floats, place: int) -> None:
    """Writes the numbers of a line of `sums` into `rows`, from `place` on."""
    for column in range(TILE):
        there = np.uintp(place + column)
        rows[line, there] = np.float32(sums[line, column]) * factor + means[there]


def multiply(  # noqa: PLR0913, PLR0917 - a piece of one loop, over arrays
    lines: Symbols,
    count: int,
    begin: int,
    end: int,
    table: Ints,
    sums: Ints,
    factors: Floats,
    means: Floats,
    rows: Floats,
    place: int,
) -> None:
    """The products of columns `begin` to `end` of the first `count` lines with `table`, times each line's factor, plus `means`.

    They go into `rows`, and `sums` is room for them; of means and rows the group's columns begin at `place`. Whole tiles are
    written, the last one as well.
    """
    pairs = lines.view(np.int32)
    which, found = np.empty((LINES, (end - begin) // 2 + 1), np.int32), np.empty(LINES, np.int64)
    for line in range(0, count, ABREAST):
        found[line] = list_pairs(pairs, line, begin // 2, end // 2, which)
    for tile in range(0, table.shape[1], TILE):
        for line in range(0, count, ABREAST):
            if found[line]:
                multiply_tile(which, found[line], pairs, line, table, tile, sums)
            else:
                sums[line : line + ABREAST] = 0
        for line in range(count):
            scale(sums, line, factors[line], means, rows, place + tile)


def _multiply_tile(which: Ints, count: int, pairs: Ints, line: int, table: Ints, tile: int, sums: Ints) -> None:
    """The rows of `sums` from `line` on: `pairs` from that row on, times the tile of `table` at column `tile`.

    Every entry of `pairs` and `table` is two integers of 16 bits; sums are over the first `count`, at least one, of the inner
    indices in the row `line` of `which`.
    """
    inner = which[line, :count]
    left = np.ascontiguousarray(pairs[line : line + ABREAST, inner]).view(np.int16)
    right = np.ascontiguousarray(table[inner, tile : tile + TILE]).view(np.int16).reshape(count, TILE, 2)
    sums[line : line + ABREAST] = left.astype(np.int32) @ right.transpose(0, 2, 1).reshape(2 * count, TILE)


def _build() -> Any:
    """`_multiply_tile` for numba. Raises RuntimeError, when it is compiled, for a processor without AVX2."""
    from numba import types  # noqa: PLC0415 - as in kvcdn.codecs.compiled
    from numba.core import cgutils  # noqa: PLC0415
    from numba.extending import intrinsic  # noqa: PLC0415

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        which, pairs, table, sums = (
            context.make_array(signature.args[place])(context, builder, arguments[place]) for place in (0, 2, 4, 6)
        )
        count, line, tile = (arguments[place] for place in (1, 3, 5))
        steps = [cgutils.unpack_tuple(builder, array.strides)[0] for array in (pairs, table, sums, which)]
        addresses = [builder.ptrtoint(array.data, count.type) for array in (which, pairs, table, sums)]
        addresses[0] = builder.add(addresses[0], builder.mul(line, steps[3]))
        addresses[1] = builder.add(addresses[1], builder.mul(line, steps[0]))
        addresses[2] = builder.add(addresses[2], builder.mul(tile, count.type(_ENTRY)))
        addresses[3] = builder.add(addresses[3], builder.mul(line, steps[2]))
        lanes, instruction = _vectors(context.codegen().magic_tuple()[2])
        # Half of the registers at most: an AVX2 processor has 16, an AVX-512 one 32.
        for first in range(0, TILE, lanes * lanes // 4):
            _emit(builder, (lanes, instruction, first), count, addresses, steps)
        return context.get_dummy_value()

    def multiply(_: Any, which: Any, count: Any, pairs: Any, line: Any, table: Any, tile: Any, sums: Any) -> Any:
        return types.void(which, count, pairs, line, table, tile, sums), generate

    return intrinsic(multiply)


_ENTRY = 4
"""Bytes of an entry."""


def _vectors(features: str) -> tuple[int, str]:
    """Integers of 32 bits in a register, and the instruction that multiplies and adds pairs."""
    known = features.split(",")
    if "+avx512bw" in known:
        return 16, "llvm.x86.avx512.pmaddw.d.512"
    if "+avx2" in known:
        return 8, "llvm.x86.avx2.pmadd.wd"
    raise RuntimeError("this processor multiplies no pairs of 16-bit integers that this code knows of")


def _emit(builder: Any, kind: tuple[int, str, int], count: Any, addresses: list[Any], steps: list[Any]) -> None:
    """Some columns of a tile, from `first` on: a loop over the inner indices, with all sums in registers."""
    from llvmlite import ir  # noqa: PLC0415

    lanes, name, first = kind
    single, sums, halves = ir.IntType(32), ir.VectorType(ir.IntType(32), lanes), ir.VectorType(ir.IntType(16), 2 * lanes)
    across, size = lanes // 4, count.type
    instruction = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(sums, [halves, halves]), name)
    which, pairs, table, out = addresses

    def at(base: Any, offset: Any, kind: Any) -> Any:
        return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

    before, loop, after = builder.block, builder.append_basic_block("inner"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    number = builder.phi(size)
    number.add_incoming(size(0), before)
    old = [[builder.phi(sums) for _ in range(across)] for _ in range(ABREAST)]
    inner = builder.sext(builder.load(at(which, builder.mul(number, size(_ENTRY)), single)), size)
    row = builder.add(table, builder.mul(inner, steps[1]))
    right = [builder.load(at(row, size(_ENTRY * (first + lanes * one)), halves), align=_ENTRY) for one in range(across)]
    column = builder.add(pairs, builder.mul(inner, size(_ENTRY)))
    new = []
    for own in range(ABREAST):
        entry = builder.load(at(column, builder.mul(steps[0], size(own)), single), align=_ENTRY)
        vector = builder.insert_element(ir.Constant(sums, ir.Undefined), entry, single(0))
        vector = builder.shuffle_vector(vector, ir.Constant(sums, ir.Undefined), ir.Constant(sums, None))
        left = builder.bitcast(vector, halves)
        new.append([builder.add(old[own][one], builder.call(instruction, [left, right[one]])) for one in range(across)])
    for own in range(ABREAST):
        for one in range(across):
            old[own][one].add_incoming(ir.Constant(sums, None), before)
            old[own][one].add_incoming(new[own][one], loop)
    following = builder.add(number, size(1))
    number.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    for own in range(ABREAST):
        for one in range(across):
            offset = builder.add(builder.mul(steps[2], size(own)), size(_ENTRY * (first + lanes * one)))
            builder.store(new[own][one], at(out, offset, sums), align=_ENTRY)


multiply_tile = Instructions(_multiply_tile, _build, (_vectors, _emit))


CHUNK = 16
"""Symbols that are copied at once."""


def _copy_chunk(symbols: Symbols, source: int, lines: Symbols, line: int, place: int) -> None:
    """Copies a chunk of `symbols` from `source` on into the row `line` of `lines`, from `place` on."""
    lines[line, place : place + CHUNK] = symbols[source : source + CHUNK]


def _build_copy() -> Any:
    """`_copy_chunk` for numba, which computes the ends of slices over and over."""
    from llvmlite import ir  # noqa: PLC0415 - as in kvcdn.codecs.compiled
    from numba import types  # noqa: PLC0415
    from numba.core import cgutils  # noqa: PLC0415
    from numba.extending import intrinsic  # noqa: PLC0415

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        symbols, lines = (context.make_array(signature.args[place])(context, builder, arguments[place]) for place in (0, 2))
        _, source, _, line, place = arguments
        kind, size = ir.VectorType(ir.IntType(16), CHUNK).as_pointer(), source.type
        row = builder.mul(line, cgutils.unpack_tuple(builder, lines.strides)[0])
        there = builder.add(builder.ptrtoint(lines.data, size), builder.add(row, builder.mul(place, size(_SYMBOL))))
        here = builder.add(builder.ptrtoint(symbols.data, size), builder.mul(source, size(_SYMBOL)))
        chunk = builder.load(builder.inttoptr(here, kind), align=_SYMBOL)
        builder.store(chunk, builder.inttoptr(there, kind), align=_SYMBOL)
        return context.get_dummy_value()

    def copy(_: Any, symbols: Any, source: Any, lines: Any, line: Any, place: Any) -> Any:
        return types.void(symbols, source, lines, line, place), generate

    return intrinsic(copy)


_SYMBOL = 2
"""Bytes of a symbol."""

copy_chunk = Instructions(_copy_chunk, _build_copy)
