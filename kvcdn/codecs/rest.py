"""The rest: what a coarse tensor lacks of the exact one, to the bit (FORMAT.md 4.7).

Numbers of 16 bits are taken in the order of their size, so that a small error is a small difference. How large it may be hangs
on the coarse number's exponent, so that there is a stream for each of the largest exponents.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from kvcdn.codec import Buffer, Encoded, Rows
from kvcdn.codecs.symbols import pack_symbols, read_streams
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
    coarse = np.frombuffer(rows.coarse, "<u2")
    places, counts = _by_class(coarse, rows.dtype)
    ordered, rest = _ordered(coarse), np.empty(len(coarse), np.int16)
    read_streams(memoryview(encoded)[_LENGTHS.size :], lengths, rest, counts.tolist(), what)
    ordered[places] += rest.view(np.uint16)
    np.frombuffer(out, np.uint16)[:] = np.where(ordered & _SIGN, ordered ^ _SIGN, ~ordered)


def _ordered(patterns: Patterns) -> Patterns:
    """16-bit floating-point numbers as integers in the same order, below zero included."""
    return np.where(patterns & _SIGN, ~patterns, patterns | _SIGN)


def _by_class(coarse: Patterns, dtype: str) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where the numbers of each class are, class after class, and how many there are of each."""
    shift, mask = _EXPONENTS[dtype]
    exponents = (coarse >> np.uint16(shift)) & np.uint16(mask)
    classes = np.minimum(exponents.max(initial=0) - exponents, CLASSES - 1).astype(np.uint8)
    return np.argsort(classes, kind="stable"), np.bincount(classes, minlength=CLASSES)
