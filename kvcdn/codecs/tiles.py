"""Tiles: small products of matrices of 16-bit integers, in vector instructions that numba does not find by itself.

x86 multiplies 16-bit integers in pairs, adding each two products: twice as many as it does in single precision, and exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcdn.codecs.compiled import Instructions
from kvcdn.codecs.symbols import Symbols

ABREAST = 4
"""Rows of a tile: with as many columns as below, its sums fill half of the registers."""

TILE = 64
"""Columns of a tile."""

Ints = NDArray[np.int32]


def _multiply_tile(which: Ints, count: int, pairs: Ints, line: int, table: Ints, tile: int, sums: Ints) -> None:
    """The tile of `sums` at row `line` and column `tile`: of `pairs` at that row, times `table` at that column.

    Every entry of `pairs` and `table` is two integers of 16 bits; sums are over the first `count`, at least one, of the inner
    indices in the row `line` of `which`.
    """
    inner = which[line, :count]
    left = np.ascontiguousarray(pairs[line : line + ABREAST, inner]).view(np.int16)
    right = np.ascontiguousarray(table[inner, tile : tile + TILE]).view(np.int16).reshape(count, TILE, 2)
    sums[line : line + ABREAST, tile : tile + TILE] = left.astype(np.int32) @ right.transpose(0, 2, 1).reshape(2 * count, TILE)


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
        addresses[3] = builder.add(
            addresses[3], builder.add(builder.mul(line, steps[2]), builder.mul(tile, count.type(_ENTRY)))
        )
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


multiply_tile = Instructions(_multiply_tile, _build)


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
