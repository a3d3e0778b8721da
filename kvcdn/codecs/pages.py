"""Pages: pcodec's streams of 16-bit integers, as a compiled loop that decodes two at once (FORMAT.md 4.5).

What a symbol's bits are hangs on the symbols before it, so that a processor that decodes one stream waits most of the time.
Streams that are usual and end as they should are decoded here; of all others nothing is said: pcodec itself decodes them, or
says what is wrong with them.

Nothing is read farther behind the data than `MARGIN_BYTES`: where a stream stands is looked at after every batch.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcdn.codecs.chunks import EMIT, Vectors
from kvcdn.codecs.compiled import Array, Instructions, Loop, Uses

BYTE_BITS = 8

VERSION, VERSION_BYTES = 0x0104, 2
"""What a stream begins with, its least byte first. One byte behind it says that numbers are as they are."""

BATCH = 256
"""Symbols of which first all bins are stored, then all offsets."""

_MOST_LOG = 12
"""Of the states of a table; pcodec has at most 14, and needs no more than this for such alphabets."""

_MOST_OFFSET = 16

MARGIN_BYTES = BATCH * (_MOST_LOG + _MOST_OFFSET) // 8 + 16
"""A batch, and what is read at once."""

_WHICH, _LEFT, _TARGET, _PLACE, _END, _STATES = range(6)
"""Of a lane: its stream or -1, symbols left, where they go, where it stands in bits, its end, and the first of four states."""

_ONE, _TWO, _THREE, _BITS, _NEXT = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(0xFF), np.uint64(48)
_SEVEN, _EIGHT = np.uint64(7), np.uint64(8)

_LOGARITHMS = np.array([max(number, 1).bit_length() - 1 for number in range(2 << _MOST_LOG)], np.uint8)
"""Of two, rounded down."""

_BATCH, _TABLE = np.uint64(BATCH), np.uint64(1 << _MOST_LOG)

Bytes = NDArray[np.uint8]
Nodes = NDArray[np.uint64]
Numbers = NDArray[np.int16]
Places = NDArray[np.int64]


def _read_word(data: Bytes, place: int) -> np.uint64:
    """Eight bytes, at any address, as a number: the least first."""
    return np.uint64(data[int(place) : int(place) + 8].view("<u8")[0])


def _build() -> Any:
    """`_read_word` for numba. Raises RuntimeError, when it is compiled, where numbers begin with their largest byte."""
    from llvmlite import ir  # noqa: PLC0415 - as in kvcdn.codecs.compiled
    from numba import types  # noqa: PLC0415
    from numba.extending import intrinsic  # noqa: PLC0415

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if sys.byteorder != "little":
            raise RuntimeError("this processor's numbers begin with their largest byte")
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.add(builder.ptrtoint(data, arguments[1].type), arguments[1])
        return builder.load(builder.inttoptr(place, ir.IntType(64).as_pointer()), align=1)

    def read(_: Any, data: Any, place: Any) -> Any:
        return types.uint64(data, place), generate

    return intrinsic(read)


read_word = Instructions(_read_word, _build)


def _take_bits(data: Bytes, place: Any, count: Any) -> Any:
    """The `count` bits, at most 57, from bit `place` on."""
    return np.int64((read_word(data, place >> 3) >> np.uint64(place & 7)) & ((_ONE << np.uint64(count)) - _ONE))


def _fill_table(data: Bytes, place: int, log: int, bins: int, nodes: Nodes) -> bool:
    """Makes the table of 2^`log` states from the `bins` that begin at bit `place`; False for impossible ones.

    A node has the state that follows but for the bits that are read, a bin's lower bound, the offset's bits, and how many bits
    are read: from bits 48, 16, 8 and 0 on.
    """
    size = 1 << log
    owners, owned = np.empty(size, np.int16), np.empty(bins, np.int64)
    following = np.empty(bins, np.int64)
    stride = (3 * size // 5) | 1
    state = total = 0
    for number in range(bins):
        weight = _take_bits(data, place, log) + 1
        lower = _take_bits(data, place + log, 16) ^ 0x8000
        offset = _take_bits(data, place + log + 16, 5)
        place += log + 21
        total += weight
        if total > size or offset > _MOST_OFFSET:
            return False
        owned[number] = (lower << 16) | (offset << 8)
        following[number] = weight
        for _ in range(weight):
            owners[np.uintp(state)] = number
            state = (state + stride) & (size - 1)
    if total != size:
        return False
    for number in range(size):
        owner = np.uintp(owners[number])
        count = following[owner]
        bits = log - np.int64(_LOGARITHMS[np.uintp(count)])
        nodes[number] = owned[owner] | ((count << bits) - size) << 48 | bits
        following[owner] = count + 1
    return True


def _open_stream(data: Bytes, begin: int, end: int, lane: Places, nodes: Nodes) -> bool:
    """Makes a lane ready for a stream; False for one that is not usual."""
    if end - begin < VERSION_BYTES + 1 or _take_bits(data, BYTE_BITS * begin, BYTE_BITS * (VERSION_BYTES + 1)) != VERSION:
        return False
    place = 8 * (begin + VERSION_BYTES + 1)
    log, bins = _take_bits(data, place, 4), _take_bits(data, place + 4, 15)
    if log > _MOST_LOG or not 0 < bins <= 1 << log or (bins == 1 and log):
        return False
    states = place + 19 + bins * (log + 21)
    page = (states + 7) // 8 * 8
    behind = (page + 4 * log + 7) // 8 * 8
    if behind > 8 * end or _take_bits(data, states, page - states):
        return False
    if _take_bits(data, page + 4 * log, behind - page - 4 * log):
        return False
    lane[_PLACE], lane[_END] = behind, 8 * end
    for number in range(4):
        lane[_STATES + number] = _take_bits(data, page + number * log, log)
    return _fill_table(data, place + 19, log, bins, nodes)


def _take(node: np.uint64, word: np.uint64) -> np.uint64:
    """The state that follows a node, as what is read says."""
    return (node >> _NEXT) + (word & ((_ONE << (node & _BITS)) - _ONE))


def _read_both(data: Bytes, lanes: Places, nodes: Nodes, found: Nodes) -> None:
    """The nodes of a batch of each of the two lanes."""
    one, two = lanes[0], lanes[1]
    place, beside = np.uint64(one[_PLACE]), np.uint64(two[_PLACE])
    states = lanes[:, _STATES:].astype(np.uint64)
    a, b, c, d = states[0, 0], states[0, 1], states[0, 2], states[0, 3]
    e, f, g, h = states[1, 0], states[1, 1], states[1, 2], states[1, 3]
    for number in range(0, BATCH, 4):
        at = np.uint64(number)
        word = read_word(data, place >> _THREE) >> (place & _SEVEN)
        first, second, third, fourth = nodes[a], nodes[b], nodes[c], nodes[d]
        a = _take(first, word)
        word >>= first & _BITS
        b = _take(second, word)
        word >>= second & _BITS
        c = _take(third, word)
        word >>= third & _BITS
        d = _take(fourth, word)
        word >>= fourth & _BITS
        place += (first + second + third + fourth) & _BITS
        found[at], found[at + _ONE], found[at + _TWO], found[at + _THREE] = first, second, third, fourth
        twin = read_word(data, beside >> _THREE) >> (beside & _SEVEN)
        first, second, third, fourth = nodes[e + _TABLE], nodes[f + _TABLE], nodes[g + _TABLE], nodes[h + _TABLE]
        e = _take(first, twin)
        twin >>= first & _BITS
        f = _take(second, twin)
        twin >>= second & _BITS
        g = _take(third, twin)
        twin >>= third & _BITS
        h = _take(fourth, twin)
        twin >>= fourth & _BITS
        beside += (first + second + third + fourth) & _BITS
        at += _BATCH
        found[at], found[at + _ONE], found[at + _TWO], found[at + _THREE] = first, second, third, fourth
    one[_PLACE], two[_PLACE] = place, beside
    one[_STATES], one[_STATES + 1], one[_STATES + 2], one[_STATES + 3] = a, b, c, d
    two[_STATES], two[_STATES + 1], two[_STATES + 2], two[_STATES + 3] = e, f, g, h


def _read_one(data: Bytes, lane: Places, nodes: Nodes, found: Nodes, count: int) -> None:
    """The nodes of a batch of `count` of one lane: of fewer than a whole one only at the end of a stream."""
    place = lane[_PLACE]
    states = lane[_STATES:].astype(np.uint64)
    a, b, c, d = states[0], states[1], states[2], states[3]
    for number in range(count):
        node = nodes[a]
        a, b, c, d = b, c, d, _take(node, read_word(data, place >> 3) >> np.uint64(place & 7))
        found[np.uint64(number)] = node
        place += np.int64(node & _BITS)
    lane[_PLACE] = place
    lane[_STATES], lane[_STATES + 1], lane[_STATES + 2], lane[_STATES + 3] = a, b, c, d


_ABREAST = 8
"""Symbols whose offsets are added at once."""

_MOST_BITS = 57
"""In eight bytes, wherever among the bits of the first they begin."""


def _add_offsets(nodes: Nodes, number: int, word: np.uint64, symbols: Numbers, target: int) -> int:
    """The symbols of `_ABREAST` nodes from `number` on, whose offsets follow each other in `word`; how many bits these take.

    Of more than a word has, symbols are anything.
    """
    total = 0
    for place in range(_ABREAST):
        node = int(nodes[number + place])
        width = (node >> 8) & 0xFF
        value = (node >> 16) + ((int(word) >> total) & ((1 << width) - 1))
        symbols[target + place] = np.uint16(value & 0xFFFF).view(np.int16)
        total += width
    return total


def _build_adding() -> Any:
    """`_add_offsets` for numba."""
    from llvmlite import ir  # noqa: PLC0415 - as in kvcdn.codecs.compiled
    from numba import types  # noqa: PLC0415
    from numba.extending import intrinsic  # noqa: PLC0415

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors, wide = Vectors(context, builder, signature.args, arguments), ir.VectorType(ir.IntType(64), _ABREAST)
        _, number, word, _, target = arguments
        nodes = vectors.load(wide, 0, number)
        widths = builder.and_(builder.lshr(nodes, vectors.all(wide, 8)), vectors.all(wide, 0xFF))
        ends = widths
        for step in (1, 2, 4):
            zeros = vectors.all(wide, 0)
            # Places below `step` take a zero, others what is `step` places before them.
            places = [_ABREAST if place < step else place - step for place in range(_ABREAST)]
            ends = builder.add(
                ends, builder.shuffle_vector(ends, zeros, ir.Constant(ir.VectorType(ir.IntType(32), _ABREAST), places))
            )
        masks = builder.sub(builder.shl(vectors.all(wide, 1), widths), vectors.all(wide, 1))
        bits = builder.lshr(vectors.spread(wide, word), builder.sub(ends, widths))
        values = builder.add(builder.lshr(nodes, vectors.all(wide, 16)), builder.and_(bits, masks))
        vectors.store(builder.trunc(values, vectors.kind(16, _ABREAST)), 3, target)
        return builder.extract_element(ends, ir.IntType(32)(_ABREAST - 1))

    def add(_: Any, nodes: Any, number: Any, word: Any, symbols: Any, target: Any) -> Any:
        return types.int64(nodes, number, word, symbols, target), generate

    return intrinsic(add)


add_offsets = Instructions(_add_offsets, _build_adding, EMIT)


def _complete(data: Bytes, lane: Places, nodes: Nodes, first: int, symbols: Numbers, count: int) -> bool:
    """Adds to the bounds of the next `count` symbols' bins, `nodes` from the `first` on, what they are above them.

    False where the stream has ended before.
    """
    place, target, number, lowers = lane[_PLACE], lane[_TARGET], 0, nodes.view(np.int16)
    while number < count:
        if count - number >= _ABREAST:
            word = read_word(data, place >> 3) >> np.uint64(place & 7)
            total = add_offsets(nodes, first + number, word, symbols, target + number)
            if total <= _MOST_BITS:
                place += total
                number += _ABREAST
                continue
        behind = min(number + _ABREAST, count)
        for one in range(number, behind):
            node = nodes[np.uintp(first + one)]
            size = np.int64((node >> _EIGHT) & _BITS)
            symbols[np.uintp(target + one)] = lowers[np.uintp(4 * (first + one) + 1)] + _take_bits(data, place, size)
            place += size
        number = behind
    lane[_PLACE] = place
    lane[_LEFT] -= count
    lane[_TARGET] += count
    return bool(place <= lane[_END])


def _close_stream(data: Bytes, lane: Places, sound: Bytes) -> None:
    """Says of a stream that is read whether it ends within its last byte, and with zeros."""
    place, left = lane[_PLACE], lane[_END] - lane[_PLACE]
    sound[lane[_WHICH]] = lane[_LEFT] == 0 and 0 <= left < BYTE_BITS and _take_bits(data, place, left) == 0
    lane[_WHICH] = -1


def _choose(counts: Places, taken: Bytes) -> int:
    """The longest stream that is not taken yet, -1 for none; it is taken then."""
    best = -1
    for stream in range(len(counts)):
        if not taken[stream] and (best < 0 or counts[stream] > counts[best]):
            best = stream
    if best >= 0:
        taken[best] = 1
    return best


def _find_work(data: Bytes, start: int, lengths: Places, counts: Places, lane: Places, nodes: Nodes, taken: Bytes) -> None:
    """Makes an idle lane ready for the next stream that is usual, if there is one."""
    while lane[_WHICH] < 0:
        stream = _choose(counts, taken)
        if stream < 0 or not counts[stream]:
            return
        begin, end = start + lengths[:stream].sum(), start + lengths[: stream + 1].sum()
        if _open_stream(data, begin, end, lane, nodes):
            lane[_WHICH], lane[_LEFT], lane[_TARGET] = stream, counts[stream], counts[:stream].sum()


def pad(stored: Bytes) -> Bytes:
    """Streams, with room behind them in which nothing is that is not zero."""
    data = np.empty(len(stored) + MARGIN_BYTES, np.uint8)
    data[: len(stored)], data[len(stored) :] = stored, 0
    return data


def decode_streams(data: Bytes, start: int, lengths: Places, counts: Places, symbols: Numbers, sound: Bytes) -> None:
    """Decodes streams that follow each other from `start` on, each of so many bytes and symbols, in what `pad` has made.

    `sound`, 0 before, tells which are done. Streams of no symbols are not looked at.
    """
    lanes, nodes = np.zeros((2, _STATES + 4), np.int64), np.empty(2 << _MOST_LOG, np.uint64)
    found, taken = np.empty(2 * BATCH, np.uint64), np.zeros(len(counts), np.uint8)
    lanes[:, _WHICH] = -1
    while True:
        for side in range(2):
            _find_work(data, start, lengths, counts, lanes[side], nodes[side << _MOST_LOG :], taken)
        near, far = lanes[0, _WHICH] >= 0, lanes[1, _WHICH] >= 0
        if not near and not far:
            return
        both = going = near and far
        while going and min(lanes[0, _LEFT], lanes[1, _LEFT]) >= BATCH:
            _read_both(data, lanes, nodes, found)
            for side in range(2):
                going &= _complete(data, lanes[side], found, BATCH * side, symbols, BATCH)
        for side in range(2):
            lane = lanes[side]
            if lane[_WHICH] < 0 or (both and going and lane[_LEFT] >= BATCH):
                continue
            going = lane[_PLACE] <= lane[_END]
            while going and lane[_LEFT]:
                count = min(lane[_LEFT], BATCH)
                _read_one(data, lane, nodes[side << _MOST_LOG :], found, count)
                going = _complete(data, lane, found, 0, symbols, count)
            _close_stream(data, lane, sound)


def _decode(stored: Bytes, lengths: Places, counts: Places, symbols: Numbers, sound: Bytes) -> None:
    """`decode_streams` from the first byte on."""
    decode_streams(pad(stored), 0, lengths, counts, symbols, sound)


USES: Uses = {
    "read_word": read_word,
    "_take_bits": _take_bits,
    "_fill_table": _fill_table,
    "_open_stream": _open_stream,
    "_take": _take,
    "_read_both": _read_both,
    "_read_one": _read_one,
    "add_offsets": add_offsets,
    "_complete": _complete,
    "_close_stream": _close_stream,
    "_choose": _choose,
    "_find_work": _find_work,
    "pad": pad,
    "decode_streams": decode_streams,
}
"""What a loop that decodes streams calls; each may call those before it."""

DECODE = Loop(
    _decode,
    (Array("uint8"), Array("int64"), Array("int64"), Array("int16", written=True), Array("uint8", written=True)),
    USES,
)
"""Which streams are done, and their symbols."""
