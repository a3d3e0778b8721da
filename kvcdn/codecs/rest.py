"""The rest: what a coarse tensor lacks of the exact one, to the bit (FORMAT.md 4.7).

Numbers of 16 bits are taken in the order of their size, so that a small error is a small difference. How large it may be hangs
on the coarse number's exponent, so that there is a stream for each of the largest exponents.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcdn.codec import Encoded, Rows
from kvcdn.codecs.compiled import Array, Loop
from kvcdn.codecs.symbols import pack_symbols, read_streams
from kvcdn.digest import Buffer
from kvcdn.errors import CorruptError

CLASSES = 12
"""Exponents with a stream of their own, from the largest on; the last has all smaller ones."""

_LENGTHS = struct.Struct(f"<{CLASSES}I")

_EXPONENTS = {"bfloat16": (7, 0xFF), "float16": (10, 0x1F)}
"""How many places the exponent is from the right, and its mask."""

_SIGN = np.uint16(0x8000)

Patterns = NDArray[np.uint16]


def encode_rest(raw: Buffer, rows: Rows) -> Encoded | None:
    """What `rows.coarse` lacks of `raw`; None for a dtype of more than 16 bits."""
    if rows.dtype not in _EXPONENTS or rows.coarse is None:
        return None
    coarse = np.frombuffer(rows.coarse, "<u2")
    places, counts = _by_class(coarse, rows.dtype)
    rest = (_ordered(np.frombuffer(raw, "<u2")) - _ordered(coarse)).view(np.int16)[places]
    streams = [pack_symbols(stream) for stream in np.split(rest, np.cumsum(counts)[:-1])]
    return Encoded("rest", b"".join((_LENGTHS.pack(*map(len, streams)), *streams)), raw)


def decode_rest(encoded: Buffer, rows: Rows, out: memoryview, what: str) -> None:
    """Fills `out`, which may be `rows.coarse` itself, with the exact numbers. Raises CorruptError."""
    if rows.dtype not in _EXPONENTS or rows.coarse is None or len(rows.coarse) != len(out):
        raise CorruptError(f"{what}: there is nothing that could be refined")
    if len(encoded) < _LENGTHS.size:
        raise CorruptError(f"{what}: {len(encoded)} bytes are too few to refine with")
    lengths = _LENGTHS.unpack_from(encoded)
    if _LENGTHS.size + sum(lengths) != len(encoded):
        raise CorruptError(f"{what}: a refinement of {len(encoded)} bytes, {_LENGTHS.size + sum(lengths)} belong")
    coarse, exact = np.frombuffer(rows.coarse, "<u2"), np.frombuffer(out, np.uint16)
    stored, rest = memoryview(encoded)[_LENGTHS.size :], np.empty(len(coarse), np.int16)
    count, refine = _COUNT.native(), _REFINE.native()
    if count is not None and refine is not None:
        counts = np.zeros(CLASSES, np.int64)
        count(coarse, *_EXPONENTS[rows.dtype], counts)
        read_streams(stored, lengths, rest, counts.tolist(), what)
        refine(coarse, rest, counts, *_EXPONENTS[rows.dtype], exact)
        return
    places, sizes = _by_class(coarse, rows.dtype)
    read_streams(stored, lengths, rest, sizes.tolist(), what)
    ordered = _ordered(coarse)
    ordered[places] += rest.view(np.uint16)
    exact[:] = np.where(ordered & _SIGN, ordered ^ _SIGN, ~ordered)


def _count(coarse: Patterns, shift: int, mask: int, counts: NDArray[np.int64]) -> None:
    """How many numbers there are of each class; `counts` are zero before."""
    found = np.zeros(mask + 1, np.int64)
    for number in range(len(coarse)):
        found[np.uintp((coarse[number] >> shift) & mask)] += 1
    place = -1
    for exponent in range(mask, -1, -1):
        if place >= 0 or found[exponent]:
            place += 1
            counts[min(place, CLASSES - 1)] += found[exponent]


def _refine(
    coarse: Patterns, rest: NDArray[np.int16], counts: NDArray[np.int64], shift: int, mask: int, exact: Patterns
) -> None:
    """Adds to each number what it lacks; `exact` may be `coarse` itself."""
    top = 0
    for number in range(len(coarse)):
        top = max(top, (coarse[number] >> shift) & mask)
    following = np.cumsum(counts) - counts
    for number in range(len(coarse)):
        bits = np.int64(coarse[number])
        below: Any = min(top - ((bits >> shift) & mask), CLASSES - 1)
        place = following[np.uintp(below)]
        following[np.uintp(below)] = place + 1
        ordered = (0xFFFF - bits if bits & 0x8000 else bits + 0x8000) + rest[np.uintp(place)]
        exact[number] = ordered & 0x7FFF if ordered & 0x8000 else 0xFFFF - (ordered & 0xFFFF)


_COUNT = Loop(_count, (Array("uint16"), "int64", "int64", Array("int64", written=True)))

_REFINE = Loop(_refine, (Array("uint16"), Array("int16"), Array("int64"), "int64", "int64", Array("uint16", written=True)))


def _ordered(patterns: Patterns) -> Patterns:
    """16-bit floating-point numbers as integers in the same order, below zero included."""
    return np.where(patterns & _SIGN, ~patterns, patterns | _SIGN)


def _by_class(coarse: Patterns, dtype: str) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where the numbers of each class are, class after class, and how many there are of each."""
    shift, mask = _EXPONENTS[dtype]
    exponents = (coarse >> np.uint16(shift)) & np.uint16(mask)
    classes = np.minimum(exponents.max(initial=0) - exponents, CLASSES - 1).astype(np.uint8)
    return np.argsort(classes, kind="stable"), np.bincount(classes, minlength=CLASSES)
