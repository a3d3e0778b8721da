"""Chunks: 32 neighbouring numbers at a time, in vector instructions that numba does not find by itself.

What a decoder writes into is mostly far away, in pages that the processor has not looked up yet: it is asked for ahead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcdn.codecs.compiled import Instructions
from kvcdn.codecs.numbers import Bits, Floats, round_to_bfloat16

CHUNK = 32
"""Numbers: as bfloat16 a cache line."""

AHEAD_BYTES = 8192
"""How far ahead: two pages, so that a page's place is known when its first line is."""

Bytes = NDArray[np.uint8]
Patterns = NDArray[np.uint16]


class Vectors:
    """Emits loads and stores of vectors, which may begin anywhere, for the body of an intrinsic of numba's."""

    def __init__(self, context: Any, builder: Any, types: Any, arguments: Any) -> None:
        from llvmlite import ir  # noqa: PLC0415 - as in kvcdn.codecs.compiled

        self._ir, self._context, self._builder = ir, context, builder
        self._types, self._arguments = types, arguments

    def kind(self, bits: int, count: int = CHUNK) -> Any:
        """A vector of integers."""
        return self._ir.VectorType(self._ir.IntType(bits), count)

    def floats(self, count: int = CHUNK) -> Any:
        return self._ir.VectorType(self._ir.FloatType(), count)

    def all(self, kind: Any, value: int) -> Any:
        """A vector of one value."""
        return self._ir.Constant(kind, [value] * kind.count)

    def spread(self, kind: Any, value: Any) -> Any:
        """A vector of one value, an integer that may be wider."""
        undefined, zero = self._ir.Constant(kind, self._ir.Undefined), self._ir.IntType(32)(0)
        one = value if value.type == kind.element else self._builder.trunc(value, kind.element)
        first = self._builder.insert_element(undefined, one, zero)
        return self._builder.shuffle_vector(first, undefined, self.all(self._ir.VectorType(zero.type, kind.count), 0))

    def address(self, array: int, place: Any) -> Any:
        """Of the element `place` of the argument number `array`, a row-major array, as an integer."""
        kind, builder = self._types[array], self._builder
        data = self._context.make_array(kind)(self._context, builder, self._arguments[array]).data
        size = place.type(kind.dtype.bitwidth // 8)
        return builder.add(builder.ptrtoint(data, place.type), builder.mul(place, size))

    def load(self, kind: Any, array: int, place: Any) -> Any:
        return self._builder.load(self._builder.inttoptr(self.address(array, place), kind.as_pointer()), align=1)

    def store(self, value: Any, array: int, place: Any) -> None:
        pointer = self._builder.inttoptr(self.address(array, place), value.type.as_pointer())
        self._builder.store(value, pointer, align=1)

    def ask(self, array: int, place: Any, ahead: int = AHEAD_BYTES) -> None:
        """Has what is so many bytes behind a place brought near, to be written; nothing happens where there is no memory."""
        ir, builder = self._ir, self._builder
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind, name = ir.FunctionType(ir.VoidType(), [pointer, *[number] * 3]), "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        there = builder.add(self.address(array, place), place.type(ahead))
        # To be written; with the most reuse; data.
        builder.call(function, [builder.inttoptr(there, pointer), number(1), number(3), number(1)])

    def round(self, bits: Any) -> Any:
        """float32 numbers, as their bits, to bfloat16 (FORMAT.md 4.4)."""
        kind, builder = bits.type, self._builder
        upper = builder.lshr(builder.add(bits, self.all(kind, 0x8000)), self.all(kind, 16))
        return builder.trunc(upper, self.kind(16))


EMIT = (Vectors.address, Vectors.load, Vectors.store, Vectors.ask, Vectors.round, Vectors.all, Vectors.spread)


def _spread_chunk(  # noqa: PLR0913, PLR0917 - as the instructions have it
    coded: Bytes, source: int, shift: int, mask: int, steps: Floats, offsets: Floats, column: int, out: Patterns, place: int
) -> None:
    """Rounds code x step + offset to bfloat16 into `out`, a row-major array, from its number `place` on.

    Codes are in bytes of `coded` from `source` on, the bits of `mask` from bit `shift` on.
    """
    columns = slice(column, column + CHUNK)
    codes = (coded[source : source + CHUNK] >> shift) & mask
    numbers = codes.astype(np.float32) * steps[columns] + offsets[columns]
    round_to_bfloat16(numbers, numbers.view(np.uint32), out.reshape(1, -1)[:, place : place + CHUNK], 0)


def _build_spread() -> Any:
    """`_spread_chunk` for numba."""
    from numba import types  # noqa: PLC0415 - as in kvcdn.codecs.compiled
    from numba.extending import intrinsic  # noqa: PLC0415

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = Vectors(context, builder, signature.args, arguments)
        _, source, shift, mask, _, _, column, _, place = arguments
        vectors.ask(7, place)
        wide = vectors.kind(32)
        codes = builder.zext(vectors.load(vectors.kind(8), 0, source), wide)
        codes = builder.and_(builder.lshr(codes, vectors.spread(wide, shift)), vectors.spread(wide, mask))
        values = builder.uitofp(codes, vectors.floats())
        steps, offsets = (vectors.load(vectors.floats(), array, column) for array in (4, 5))
        numbers = builder.fadd(builder.fmul(values, steps), offsets)
        vectors.store(vectors.round(builder.bitcast(numbers, wide)), 7, place)
        return context.get_dummy_value()

    def spread(  # noqa: PLR0913, PLR0917 - numba takes no others
        _: Any, coded: Any, source: Any, shift: Any, mask: Any, steps: Any, offsets: Any, column: Any, out: Any, place: Any
    ) -> Any:
        return types.void(coded, source, shift, mask, steps, offsets, column, out, place), generate

    return intrinsic(spread)


spread_chunk = Instructions(_spread_chunk, _build_spread, EMIT)


def _round_chunk(bits: Bits, source: int, out: Patterns, place: int, following: int) -> None:  # noqa: ARG001 - a hint
    """Rounds float32 numbers to bfloat16 into `out`, a row-major array, from its number `place` on.

    `bits` are theirs, from the number `source` on. What is written from number `following` on comes soon.
    """
    numbers = bits.reshape(-1)[source : source + CHUNK]
    out.reshape(-1)[place : place + CHUNK] = (numbers + np.uint32(0x8000)) >> np.uint32(16)


def _build_round() -> Any:
    """`_round_chunk` for numba."""
    from numba import types  # noqa: PLC0415
    from numba.extending import intrinsic  # noqa: PLC0415

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = Vectors(context, builder, signature.args, arguments)
        _, source, _, place, following = arguments
        vectors.ask(2, following, 0)
        vectors.store(vectors.round(vectors.load(vectors.kind(32), 0, source)), 2, place)
        return context.get_dummy_value()

    def round_chunk(_: Any, bits: Any, source: Any, out: Any, place: Any, following: Any) -> Any:
        return types.void(bits, source, out, place, following), generate

    return intrinsic(round_chunk)


round_chunk = Instructions(_round_chunk, _build_round, EMIT)


def _ask_ahead(out: NDArray[Any], place: int) -> None:
    """Says that what is ahead of the number `place` of a row-major array is written soon."""


def _build_asking() -> Any:
    """`_ask_ahead` for numba."""
    from numba import types  # noqa: PLC0415
    from numba.extending import intrinsic  # noqa: PLC0415

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Vectors(context, builder, signature.args, arguments).ask(0, arguments[1])
        return context.get_dummy_value()

    def ask(_: Any, out: Any, place: Any) -> Any:
        return types.void(out, place), generate

    return intrinsic(ask)


ask_ahead = Instructions(_ask_ahead, _build_asking, EMIT)
