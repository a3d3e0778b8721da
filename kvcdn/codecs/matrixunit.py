"""The matrix unit: products of bytes, as recent Xeons have them (AMX), which neither numba nor its compiler finds by itself.

A unit of 16 rows times 64 bytes by 64 bytes times 16 columns takes as long as 16 instructions of `tiles.py`, and is 32 times as
much. Symbols are two bytes: the lower one, without a sign, and the upper one, which has the sign, have a product each.

What `tiles.py` has for other processors stands here under the same names.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcdn.codecs.compiled import Instructions
from kvcdn.codecs.numbers import Floats
from kvcdn.codecs.symbols import Symbols
from kvcdn.codecs.tiles import CHUNK, LINES, TILE, Ints, make_aligned

Planes = NDArray[np.uint8]
"""Lines of symbols: first the lower bytes of all, then the upper ones."""

_SIDE = 16
"""Rows of a unit, and its columns of 32 bits."""

_DEPTH = 64
"""Bytes of a unit's row."""

_ENTRY = 4
"""Bytes of an entry of a table: four integers of the basis."""

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: a process asks once for the unit's registers, which make each thread's state 8 KB larger."""


@functools.cache
def has_matrix_unit() -> bool:
    """Whether this process may use one, and numba compiles for this processor; asks the system for it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    if os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES"):
        return False
    try:
        return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA) == 0)
    except (OSError, AttributeError):
        return False


def whole(columns: int) -> int:
    """`columns`, rounded up to what a product takes at a time."""
    return (columns + _DEPTH - 1) // _DEPTH * _DEPTH


def make_lines(columns: int) -> Planes:
    """Lines of so many columns of symbols, all zero."""
    padded = whole(columns)
    return make_aligned(2 * LINES * padded).reshape(2 * LINES, padded)


def make_table(columns: int, width: int) -> Ints:
    """A table of the integers that so many columns of symbols are multiplied with, `width` for each, all zero."""
    entries, padded = columns // _ENTRY, (width + TILE - 1) // TILE * TILE
    return make_aligned(entries * padded * _ENTRY).view(np.int32).reshape(entries, padded)


def make_sums() -> Ints:
    """A tile of sums for every line: those of lower bytes, then those of upper ones."""
    return make_aligned(2 * LINES * TILE * 4).view(np.int32).reshape(2 * LINES, TILE)


def fill_table(table: Ints, begin: int, matrix: NDArray[np.int8], order: NDArray[np.int64], used: int) -> None:
    """Puts rows of `matrix`, as the first `used` of `order` have them, where the columns of symbols from `begin` on are."""
    for number in range(used):
        row, target, shift = matrix[order[number]], table[(begin + number) // _ENTRY], 8 * (number % _ENTRY)
        for column in range(len(row)):
            target[column] |= (np.int32(row[column]) & 0xFF) << shift


def clear(lines: Planes, line: int, place: int, size: int) -> None:
    """Makes `size` symbols zero."""
    lines[line, place : place + size] = 0
    lines[line + LINES, place : place + size] = 0


def clear_from(lines: Planes, line: int) -> None:
    """Makes all lines from `line` on zero."""
    lines[line:LINES] = 0
    lines[LINES + line :] = 0


def scale(sums: Ints, line: int, factor: np.float32, means: Floats, rows: Floats, place: int) -> None:
    """Writes the numbers of a line of `sums` into `rows`, from `place` on."""
    above = line + LINES
    for column in range(TILE):
        there = np.uintp(place + column)
        rows[line, there] = np.float32(sums[line, column] + (sums[above, column] << 8)) * factor + means[there]


def multiply(  # noqa: PLR0913, PLR0917 - a piece of one loop, over arrays
    lines: Planes,
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
    for tile in range(0, table.shape[1], TILE):
        multiply_bytes(lines, begin, (end - begin) // _DEPTH, table, tile, sums)
        for line in range(count):
            scale(sums, line, factors[line], means, rows, place + tile)


def _copy_chunk(symbols: Symbols, source: int, lines: Planes, line: int, place: int) -> None:
    """Copies a chunk of `symbols` from `source` on into the two rows of `lines` of `line`, from `place` on."""
    chunk = symbols[source : source + CHUNK]
    lines[line, place : place + CHUNK] = chunk & 0xFF
    lines[line + LINES, place : place + CHUNK] = (chunk >> 8) & 0xFF


def _build_copy() -> Any:
    """`_copy_chunk` for numba."""
    from llvmlite import ir  # noqa: PLC0415 - as in kvcdn.codecs.compiled
    from numba import types  # noqa: PLC0415
    from numba.core import cgutils  # noqa: PLC0415
    from numba.extending import intrinsic  # noqa: PLC0415

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        symbols, lines = (context.make_array(signature.args[place])(context, builder, arguments[place]) for place in (0, 2))
        _, source, _, line, place = arguments
        size, step = source.type, cgutils.unpack_tuple(builder, lines.strides)[0]
        wide, narrow = ir.VectorType(ir.IntType(16), CHUNK), ir.VectorType(ir.IntType(8), CHUNK)
        here = builder.add(builder.ptrtoint(symbols.data, size), builder.mul(source, size(2)))
        chunk = builder.load(builder.inttoptr(here, wide.as_pointer()), align=2)
        there = builder.add(builder.ptrtoint(lines.data, size), builder.add(builder.mul(line, step), place))
        above = builder.add(there, builder.mul(step, size(LINES)))
        upper = builder.lshr(chunk, ir.Constant(wide, [8] * CHUNK))
        for address, half in ((there, chunk), (above, upper)):
            builder.store(builder.trunc(half, narrow), builder.inttoptr(address, narrow.as_pointer()), align=1)
        return context.get_dummy_value()

    def copy(_: Any, symbols: Any, source: Any, lines: Any, line: Any, place: Any) -> Any:
        return types.void(symbols, source, lines, line, place), generate

    return intrinsic(copy)


copy_chunk = Instructions(_copy_chunk, _build_copy)


def _multiply_bytes(lines: Planes, begin: int, units: int, table: Ints, tile: int, sums: Ints) -> None:
    """The products of `units` x 64 columns of `lines`, from `begin` on, with the tile of `table` at column `tile`.

    First those of all lower bytes, then those of upper ones.
    """
    columns, entries = slice(begin, begin + _DEPTH * units), slice(begin // _ENTRY, (begin + _DEPTH * units) // _ENTRY)
    right = np.ascontiguousarray(table[entries, tile : tile + TILE]).view(np.int8).reshape(-1, TILE, _ENTRY)
    square = right.transpose(0, 2, 1).reshape(-1, TILE).astype(np.int32)
    sums[:LINES] = lines[:LINES, columns].astype(np.int32) @ square
    sums[LINES:] = lines[LINES:, columns].view(np.int8).astype(np.int32) @ square


def _build() -> Any:
    """`_multiply_bytes` for numba. Raises RuntimeError, when it is compiled, for a processor without a matrix unit."""
    from numba import types  # noqa: PLC0415 - as in kvcdn.codecs.compiled
    from numba.extending import intrinsic  # noqa: PLC0415

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not {"+amx-tile", "+amx-int8"} <= set(context.codegen().magic_tuple()[2].split(",")):
            raise RuntimeError("this processor has no matrix unit that this code knows of")
        arrays = [context.make_array(signature.args[place])(context, builder, arguments[place]) for place in (0, 3, 5)]
        _Unit(builder, arguments[1].type).emit(arrays, *(arguments[place] for place in (1, 2, 4)))
        return context.get_dummy_value()

    def multiply(_: Any, lines: Any, begin: Any, units: Any, table: Any, tile: Any, sums: Any) -> Any:
        return types.void(lines, begin, units, table, tile, sums), generate

    return intrinsic(multiply)


_CONFIGURATION = bytes([1, *[0] * 15, *[_DEPTH, 0] * 8, *[0] * 16, *[_SIDE] * 8, *[0] * 8])
"""All eight registers whole: the palette, then bytes of a row of each, then rows of each."""

_LOWER = LINES // _SIDE
"""Units of lower bytes; there are as many of upper ones."""

_BASIS, _LEFT = 4, 5
"""Registers: 0 to 3 are sums, this one a unit of the basis, and those from the second on units of symbols, in turn."""


class _Unit:
    """Emits the instructions."""

    def __init__(self, builder: Any, size: Any) -> None:
        from llvmlite import ir  # noqa: PLC0415

        self._ir, self._builder, self._size = ir, builder, size
        self._byte = ir.IntType(8)

    def emit(self, arrays: list[Any], begin: Any, units: Any, tile: Any) -> None:
        """A loop over units of the tile's columns, and in it one over the units that add up."""
        from numba.core import cgutils  # noqa: PLC0415

        builder, size = self._builder, self._size
        steps = [cgutils.unpack_tuple(builder, array.strides)[0] for array in arrays]
        first = [builder.ptrtoint(array.data, size) for array in arrays]
        # Rows of the table have an entry for each four columns of symbols.
        left = builder.add(first[0], begin)
        right = builder.add(first[1], builder.mul(builder.udiv(begin, size(_ENTRY)), steps[1]))
        right = builder.add(right, builder.mul(tile, size(_ENTRY)))
        lower = [builder.add(left, builder.mul(steps[0], size(_SIDE * row))) for row in range(4)]
        self.call("ldtilecfg", [], [self.configuration()])
        with cgutils.for_range(builder, size(TILE // _SIDE)) as part:
            for own in range(4):
                self.call("tilezero", [own])
            place = builder.mul(part.index, size(_DEPTH))
            with cgutils.for_range(builder, units) as unit:
                skipped = builder.mul(unit.index, builder.mul(steps[1], size(_SIDE)))
                self.move("tileloadd64", _BASIS, builder.add(builder.add(right, place), skipped), steps[1])
                for own in range(4):
                    register = _LEFT + own % 3
                    self.move("tileloadd64", register, builder.add(lower[own], builder.mul(unit.index, size(_DEPTH))), steps[0])
                    # Lower bytes have no sign, upper ones and the basis have.
                    self.call("tdpbusd" if own < _LOWER else "tdpbssd", [own, register, _BASIS])
            target = builder.add(first[2], place)
            for own in range(4):
                self.move("tilestored64", own, builder.add(target, builder.mul(steps[2], size(_SIDE * own))), steps[2])
        self.call("tilerelease", [])

    def configuration(self) -> Any:
        ir, module = self._ir, self._builder.module
        kind = ir.ArrayType(self._byte, len(_CONFIGURATION))
        name = "kvcdn.tiles"
        known = module.globals.get(name)
        if known is None:
            known = ir.GlobalVariable(module, kind, name)
            known.linkage, known.global_constant, known.align = "internal", True, 64
            known.initializer = ir.Constant(kind, bytearray(_CONFIGURATION))
        return self._builder.bitcast(known, self._byte.as_pointer())

    def move(self, name: str, register: int, address: Any, step: Any) -> None:
        self.call(name, [register], [self._builder.inttoptr(address, self._byte.as_pointer()), step])

    def call(self, name: str, registers: list[int], operands: list[Any] | None = None) -> None:
        ir, module, name = self._ir, self._builder.module, f"llvm.x86.{name}"
        values = [*(ir.Constant(self._byte, register) for register in registers), *(operands or [])]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        self._builder.call(module.globals.get(name) or ir.Function(module, kind, name), values)


multiply_bytes = Instructions(_multiply_bytes, _build, (_Unit.emit, _Unit.configuration, _Unit.move, _Unit.call))
