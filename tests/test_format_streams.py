"""What libraries wrote, read from FORMAT.md without them: pcodec's streams and C-Blosc2's chunks, byte by byte."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.codec import CODECS, PLAIN_CHUNK, Buffer, Codec
from kvcdn.codecs.symbols import pack_symbols


class Bits:
    """Bits of bytes, the least of each byte first."""

    def __init__(self, data: bytes) -> None:
        self._number, self._place, self._end = int.from_bytes(data, "little"), 0, 8 * len(data)

    def take(self, count: int) -> int:
        assert self._place + count <= self._end, "a stream ends before its integers do"
        self._place += count
        return self._number >> (self._place - count) & ((1 << count) - 1)

    def fill(self) -> None:
        assert self.take(-self._place % 8) == 0

    @property
    def left(self) -> int:
        return self._end - self._place


def read_stream(data: bytes, count: int) -> list[int]:
    """FORMAT.md 4.5: a stream of `count` integers."""
    if count == 0:
        assert data == b""
        return []
    bits = Bits(data)
    assert bits.take(24) == int.from_bytes(b"\4\1\0", "little")
    log = bits.take(4)
    bins = [(bits.take(log) + 1, bits.take(16), bits.take(5)) for _ in range(bits.take(15))]
    bits.fill()
    states = [bits.take(log) for _ in range(4)]
    bits.fill()
    size, owned = 1 << log, [weight for weight, _, _ in bins]
    assert sum(owned) == size
    owners = [0] * size
    order = [own for own, weight in enumerate(owned) for _ in range(weight)]
    for number, own in enumerate(order):
        owners[number * (3 * size // 5 | 1) % size] = own
    places = []
    for own in owners:
        follows, owned[own] = owned[own], owned[own] + 1
        read = next(read for read in range(log + 1) if follows << read >= size)
        places.append((own, read, (follows << read) - size))
    found: list[int] = []
    for begin in range(0, count, 256):
        chosen = []
        for number in range(min(256, count - begin)):
            own, read, base = places[states[number % 4]]
            states[number % 4] = base + bits.take(read)
            chosen.append(bins[own])
        found += [(lower + bits.take(wide)) % (1 << 16) - (1 << 15) for _, lower, wide in chosen]
    bits.fill()
    assert bits.left == 0, "bytes behind a stream"
    return found


def read_chunk(data: bytes, size: int, element: int, *, shuffled: bool) -> bytes:
    """FORMAT.md 4.3: a chunk of `size` bytes, whose numbers have `element`."""
    flags, block_size = data[2], struct.unpack_from("<I", data, 8)[0]
    if data[31]:
        return bytes(size)
    if flags & 0x02:
        return data[32 : 32 + size]
    starts = struct.unpack_from(f"<{-(-size // block_size)}I", data, 32)
    return b"".join(
        read_block(data, start, min(block_size, size - number * block_size), flags, block_size, element, shuffled=shuffled)
        for number, start in enumerate(starts)
    )


def read_block(data: bytes, start: int, room: int, flags: int, block_size: int, element: int, *, shuffled: bool) -> bytes:
    """One block of a chunk."""
    streams = 1 if flags & 0x10 or room < block_size else element
    block = b""
    for _ in range(streams):
        (length,) = struct.unpack_from("<i", data, start)
        start += 4
        if length <= 0:
            # A run: of zeros, or of a byte that the length's lowest byte has, negated; a byte of flags follows that.
            block += bytes([-length & 0xFF]) * (room // streams)
            start += length < 0
            continue
        stream = data[start : start + length]
        start += length
        block += stream if length == room // streams else zstandard.ZstdDecompressor().decompress(stream)
    assert len(block) == room
    if not shuffled:
        return block
    whole = room // element * element
    planes = np.frombuffer(block, np.uint8, whole).reshape(element, -1)
    return planes.T.tobytes() + block[whole:]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1500), st.sampled_from([0.0, 0.3, 2.0, 60.0, 9000.0]), st.integers(0, 2**32 - 1))
def test_streams(count: int, spread: float, seed: int) -> None:
    """Few and many integers, constant ones and wide ones."""
    symbols = np.clip(np.rint(np.random.default_rng(seed).normal(0, spread, count)), -32_768, 32_767).astype(np.int16)
    assert symbols.tolist() == read_stream(pack_symbols(symbols), count)


def test_extremes() -> None:
    """The least and the largest."""
    symbols = np.array([-32_768, 32_767, 0, -1] * 70, np.int16)
    assert symbols.tolist() == read_stream(pack_symbols(symbols), len(symbols))


def made(kind: str, size: int, rng: np.random.Generator) -> bytes:
    """Bytes of a kind: chance, few values, one value, zeros, numbers that change slowly."""
    some = {
        "chance": rng.integers(0, 256, size, np.uint8),
        "few": rng.integers(0, 5, size, np.uint8),
        "one": np.full(size, 7, np.uint8),
        "zeros": np.zeros(size, np.uint8),
        "slow": np.cumsum(rng.integers(0, 2, size // 2 + 1)).astype("<u2").view(np.uint8)[:size],
        "halves": np.concatenate((np.zeros(size // 2, np.uint8), rng.integers(0, 256, size - size // 2, np.uint8))),
    }
    return some[kind].tobytes()


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("kind", ["chance", "few", "one", "zeros", "slow", "halves"])
@pytest.mark.parametrize("size", [64, 1000, 49_152, 196_608, 300_000])
def test_chunks(shuffled: bool, kind: str, size: int) -> None:
    """What shrinks and what does not, in one block and in several, of bytes and of numbers."""
    codec: Codec = CODECS["blosc2"] if shuffled else PLAIN_CHUNK
    for element in (2, 4) if shuffled else (1,):
        raw: Buffer = made(kind, size, np.random.default_rng(3))
        assert raw == read_chunk(codec.encode(raw, element), size, element, shuffled=shuffled)
