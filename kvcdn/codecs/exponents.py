"""Exponents apart: a lossless codec of bfloat16 tensors, of which only the exponents have anything to save (FORMAT.md 4.3).

Signs and mantissas are chance, and kept as they are. A channel's exponents lie within a few of each other, channels far
apart: counted from a base of its own, nearly each fits 4 bits. Two to a byte, zstd finds no repetitions to chase in them, and
Huffman codes of pairs are a good fit.
"""

from __future__ import annotations

import math
import struct
import threading

import numpy as np
from numpy.typing import NDArray

from kvcdn.codec import PLAIN_CHUNK, Rows
from kvcdn.codecs.chunks import CHUNK, ask_ahead
from kvcdn.codecs.compiled import Array, Loop
from kvcdn.digest import Buffer
from kvcdn.errors import CorruptError

DTYPE = "bfloat16"

_COUNT = struct.Struct("<I")

_EXCEPTION_BYTES = 5
"""A place and an exponent."""

MOST_CODE = 15
MOST_BASE = 240

_ABOVE_MEAN = 4
"""How far above its mean exponent a channel's codes reach at most: single outliers are cheaper as exceptions."""

_ROWS_SUMMED = 256
"""Exponents of so many rows: 16 bits hold their sum."""

_PIECE_VALUES = 96 * 1024
"""Values joined at a time: their halves stay in a core's cache."""

_OWN = threading.local()

Bytes = NDArray[np.uint8]
Bits = NDArray[np.uint16]

_LOW = np.uint8(0x0F)
_HALF_BYTE = np.uint8(4)
_MANTISSA = np.uint16(0x007F)
_SIGN_OF_BYTE = np.uint16(0x0080)
_SIGN_AND_MANTISSA = np.uint16(0x807F)
_MANTISSA_BITS = np.uint16(7)
_BYTE_BITS = np.uint16(8)
_TWICE = np.uint16(0x0101)
"""A byte times this is the byte in both halves: a sign and a mantissa where each belongs, once the rest is masked."""


def encode_exponents(raw: Buffer, rows: Rows) -> bytes | None:
    """`raw`, taken apart; None where its exponents are too far apart for this to save anything."""
    count, width = _table(rows)
    bits = np.frombuffer(raw, "<u2").reshape(count, width)
    tops, part, sums = np.zeros(width, np.uint16), np.empty(width, np.uint16), np.zeros(width, np.uint32)
    (_SURVEY.native() or _survey_by_numpy)(bits, tops, part, sums)
    tops = np.minimum(tops, sums // np.uint32(count) + np.uint32(_ABOVE_MEAN))
    bases = (np.maximum(tops, np.uint32(MOST_CODE)) - np.uint32(MOST_CODE)).astype(np.uint16)
    most = len(raw) // 4 // _EXCEPTION_BYTES
    packed, kept, places, exponents = _room(count, width, most)
    found = np.zeros(1, np.uint32)
    (_TAKE_APART.native() or _take_apart_by_numpy)(bits, bases, packed, kept, places, exponents, found)
    strays = int(found[0])
    if _EXCEPTION_BYTES * strays >= len(raw) // 4:
        return None
    exceptions = (_COUNT.pack(strays), places[:strays].astype("<u4").data, exponents[:strays].data)
    chunk = PLAIN_CHUNK.encode(packed.reshape(-1).data, 1)
    return b"".join((*exceptions, bases.astype(np.uint8).data, kept.data, chunk))


def _room(count: int, width: int, most: int) -> tuple[Bytes, Bytes, NDArray[np.uint32], Bytes]:
    """The thread's own memory for codes, signs and mantissas, places and exponents, until a tensor of another shape comes."""
    shape = count, width
    if getattr(_OWN, "shape", None) != shape:
        _OWN.room = (
            np.empty((-(-count // 2), width), np.uint8),
            np.empty(shape, np.uint8),
            np.empty(most, np.uint32),
            np.empty(most, np.uint8),
        )
        _OWN.shape = shape
    room: tuple[Bytes, Bytes, NDArray[np.uint32], Bytes] = _OWN.room
    return room


def decode_exponents(encoded: Buffer, rows: Rows, out: memoryview, what: str) -> None:
    """Fills `out` with the tensor. Raises CorruptError."""
    if rows.dtype != DTYPE:
        raise CorruptError(f"{what}: exponents apart are of {DTYPE} tensors, not of {rows.dtype}")
    count, width = _table(rows)
    values = count * width
    if len(encoded) < _COUNT.size:
        raise CorruptError(f"{what}: {len(encoded)} bytes are too few for exponents apart")
    (strays,) = _COUNT.unpack_from(encoded)
    begin = _COUNT.size + _EXCEPTION_BYTES * strays
    if strays > values or begin + width + values > len(encoded):
        raise CorruptError(f"{what}: {len(encoded)} bytes are too few for exponents apart, {strays} of them exceptions")
    places = np.frombuffer(encoded, "<u4", strays, _COUNT.size)
    exponents = np.frombuffer(encoded, np.uint8, strays, begin - strays)
    bases = np.frombuffer(encoded, np.uint8, width, begin)
    kept = np.frombuffer(encoded, np.uint8, values, begin + width).reshape(count, width)
    packed = np.empty((-(-count // 2), width), np.uint8)
    with memoryview(encoded)[begin + width + values :] as chunk:
        PLAIN_CHUNK.decode_into(chunk, 1, packed.reshape(-1).data, what)
    target, sound = np.frombuffer(out, "<u2").reshape(count, width), np.zeros(1, np.uint8)
    (_JOIN.native() or _join_by_numpy)(packed, bases, kept, places, exponents, target, sound)
    if not sound[0]:
        raise CorruptError(f"{what}: a base, or the place of an exception, is out of range")


def _table(rows: Rows) -> tuple[int, int]:
    """A tensor as rows and columns: its first dimension, and all others."""
    return rows.shape[0], math.prod(rows.shape[1:])


def _exponents(bits: Bits) -> Bytes:
    return ((bits >> _MANTISSA_BITS) & np.uint16(0xFF)).astype(np.uint8)


def _survey(bits: Bits, tops: Bits, part: Bits, sums: NDArray[np.uint32]) -> None:
    """The largest exponent of each column, and their sum; both are zero before. `part` holds anything, and does after.

    In 16 bits as long as they hold a sum: four columns at once where there would be two.
    """
    count, width = bits.shape
    for begin in range(0, count, _ROWS_SUMMED):
        for column in range(width):
            part[column] = 0
        for row in range(begin, min(begin + _ROWS_SUMMED, count)):
            for column in range(width):
                exponent = np.uint16((bits[row, column] >> 7) & 0xFF)
                part[column] = np.uint16(part[column] + exponent)
                tops[column] = max(tops[column], exponent)
        for column in range(width):
            sums[column] += part[column]


def _survey_by_numpy(bits: Bits, tops: Bits, part: Bits, sums: NDArray[np.uint32]) -> None:  # noqa: ARG001 - the loop's
    exponents = _exponents(bits)
    tops[...] = exponents.max(0)
    exponents.sum(0, dtype=np.uint32, out=sums)


def _take_apart(
    bits: Bits,
    bases: Bits,
    packed: Bytes,
    kept: Bytes,
    places: NDArray[np.uint32],
    exponents: Bytes,
    found: NDArray[np.uint32],
) -> None:
    """Codes in pairs, signs and mantissas; where a code does not fit it is 0, and an exception.

    Exceptions are counted in `found`, zero before, and written as far as there is room for them. All is done in 16 bits,
    and pairs of rows are looked at again only where something strays.
    """
    count, width = bits.shape
    for pair in range(len(packed)):
        low, high = 2 * pair, min(2 * pair + 1, count - 1)
        stray = np.uint16(0)
        for column in range(width):
            first = np.uint16(((bits[low, column] >> 7) & 0xFF) - bases[column])
            second = np.uint16(((bits[high, column] >> 7) & 0xFF) - bases[column])
            stray |= np.uint16(first | second)
            packed[pair, column] = np.uint8((first & 15) | (second & 15) << 4)
        for column in range(width):
            kept[low, column] = np.uint8((bits[low, column] & 0x7F) | ((bits[low, column] >> 8) & 0x80))
        for column in range(width):
            kept[high, column] = np.uint8((bits[high, column] & 0x7F) | ((bits[high, column] >> 8) & 0x80))
        if stray > MOST_CODE:
            _note_strays(bits, bases, packed, pair, places, exponents, found)
    if count % 2:
        for column in range(width):
            packed[len(packed) - 1, column] &= 0x0F


def _note_strays(
    bits: Bits,
    bases: Bits,
    packed: Bytes,
    pair: int,
    places: NDArray[np.uint32],
    exponents: Bytes,
    found: NDArray[np.uint32],
) -> None:
    """What a pair of rows has that does not fit."""
    count, width = bits.shape
    for row in range(2 * pair, min(2 * pair + 2, count)):
        for column in range(width):
            exponent = np.uint8(bits[row, column] >> 7)
            if np.uint16(exponent - bases[column]) > MOST_CODE:
                packed[pair, column] &= 0x0F if row % 2 else 0xF0
                if found[0] < len(places):
                    places[found[0]] = row * width + column
                    exponents[found[0]] = exponent
                found[0] += 1


def _take_apart_by_numpy(
    bits: Bits,
    bases: Bits,
    packed: Bytes,
    kept: Bytes,
    places: NDArray[np.uint32],
    exponents: Bytes,
    found: NDArray[np.uint32],
) -> None:
    all_exponents = _exponents(bits)
    codes = all_exponents - bases.astype(np.uint8)
    stray = codes > MOST_CODE
    which = np.flatnonzero(stray)
    found[0] = len(which)
    which = which[: len(places)]
    places[: len(which)], exponents[: len(which)] = which, all_exponents.reshape(-1)[which]
    codes[stray] = 0
    packed[...] = codes[::2]
    packed[: len(bits) // 2] |= codes[1::2] << _HALF_BYTE
    kept[...] = (bits & _MANTISSA) | ((bits >> _BYTE_BITS) & _SIGN_OF_BYTE)


_SURVEY = Loop(
    _survey, (Array("uint16", 2), Array("uint16", written=True), Array("uint16", written=True), Array("uint32", written=True))
)

_TAKE_APART = Loop(
    _take_apart,
    (
        Array("uint16", 2),
        Array("uint16"),
        Array("uint8", 2, written=True),
        Array("uint8", 2, written=True),
        Array("uint32", written=True),
        Array("uint8", written=True),
        Array("uint32", written=True),
    ),
    {"_note_strays": _note_strays},
)


def _ask_for_pair(out: Bits, place: int, width: int) -> None:
    for ahead in range(place, place + 2 * width, CHUNK):
        ask_ahead(out, ahead)


def _join(
    packed: Bytes, bases: Bytes, kept: Bytes, places: NDArray[np.uint32], exponents: Bytes, out: Bits, sound: Bytes
) -> None:
    """Fills `out`, and then the `places` of exceptions; `sound` is 0 before, and where a base or a place is out of range."""
    count, width = kept.shape
    following = np.int64(0)
    for place in places:
        if not following <= place < count * width:
            return
        following = np.int64(place) + 1
    for base in bases:
        if base > MOST_BASE:
            return
    sound[0] = 1
    for pair in range(len(packed)):
        low, high = 2 * pair, 2 * pair + 1
        _ask_for_pair(out, low * width, width)
        for column in range(width):
            exponent = (packed[pair, column] & 15) + bases[column]
            out[low, column] = exponent << 7 | (kept[low, column] * 0x0101 & 0x807F)
        if high < count:
            for column in range(width):
                exponent = (packed[pair, column] >> 4) + bases[column]
                out[high, column] = exponent << 7 | (kept[high, column] * 0x0101 & 0x807F)
    numbers = out.reshape(count * width)
    for stray in range(len(places)):
        place = places[stray]
        numbers[place] = (numbers[place] & 0x807F) | exponents[stray] << 7


_JOIN = Loop(
    _join,
    (
        Array("uint8", 2),
        Array("uint8"),
        Array("uint8", 2),
        Array("uint32"),
        Array("uint8"),
        Array("uint16", 2, written=True),
        Array("uint8", written=True),
    ),
    {"ask_ahead": ask_ahead, "_ask_for_pair": _ask_for_pair},
)


def prepare() -> None:
    """Asks for the loops that coding needs, in the background."""
    for loop in (_JOIN, _SURVEY, _TAKE_APART):
        loop.native()


def _join_by_numpy(
    packed: Bytes, bases: Bytes, kept: Bytes, places: NDArray[np.uint32], strays: Bytes, out: Bits, sound: Bytes
) -> None:
    count, width = kept.shape
    ascending = not len(places) or bool(places[-1] < count * width and (places[1:] > places[:-1]).all())
    sound[0] = ascending and bases.max() <= MOST_BASE
    if not sound[0]:
        return
    stride = max(_PIECE_VALUES // width // 2 * 2, 2)
    for begin in range(0, count, stride):
        piece = out[begin : begin + stride]
        np.multiply(kept[begin : begin + stride], _TWICE, out=piece, dtype=np.uint16)
        piece &= _SIGN_AND_MANTISSA
        pairs = packed[begin // 2 : (begin + stride) // 2]
        for rows, codes in ((piece[::2], pairs & _LOW), (piece[1::2], pairs >> _HALF_BYTE)):
            exponents = (codes[: len(rows)] + bases).astype(np.uint16)
            exponents <<= _MANTISSA_BITS
            np.bitwise_or(rows, exponents, out=rows)
    flat = out.reshape(-1)
    flat[places] = (flat[places] & _SIGN_AND_MANTISSA) | (strays.astype(np.uint16) << _MANTISSA_BITS)
