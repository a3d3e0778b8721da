"""Plain chunks without blosc2 around zstd: the same bytes, and whatever is unusual is blosc2's."""

from __future__ import annotations

import struct
import threading
import tracemalloc
from contextlib import suppress

import blosc2
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn import codec
from kvcdn.codec import PLAIN_CHUNK
from kvcdn.codecs.zstd import decode_blocks, encode_blocks
from kvcdn.errors import CorruptError

RNG = np.random.default_rng(3)


def codes(size: int) -> bytes:
    """Bytes of few values, as the codec `exponents` has them."""
    return np.clip(RNG.normal(7, 2, size), 0, 15).astype(np.uint8).tobytes()


RAW_BYTES = 150_000
SOUND = PLAIN_CHUNK.encode(codes(RAW_BYTES), 1)
"""Three blocks."""


def by_blosc2(raw: bytes) -> bytes:
    """As the library itself writes it."""
    return bytes(blosc2.compress2(raw, typesize=1, codec=blosc2.Codec.ZSTD, clevel=1, filters=[], nthreads=1))


def decoded(chunk: bytes, size: int, *, direct: bool) -> bytes | None:
    """By zstd itself, or by blosc2; None where it is refused, and never a byte beside the place."""
    memory = bytearray(b"\xa5" * (size + 128))
    with memoryview(memory) as view, view[64 : 64 + size] as out, pytest.MonkeyPatch.context() as patch:
        if not direct:
            patch.setattr(codec, "_blocks_decoder", lambda: lambda *_: False)
        try:
            PLAIN_CHUNK.decode_into(chunk, 1, out, "chunk")
        except CorruptError:
            return None
        finally:
            assert bytes(memory[:64] + memory[64 + size :]) == b"\xa5" * 128
    return bytes(memory[64 : 64 + size])


@pytest.mark.parametrize("size", [32, 1000, 32_768, 49_152, 300_000])
def test_chunks_of_every_size(size: int) -> None:
    """Of one block and of several, with a last one that is shorter; the larger ones do not need blosc2."""
    raw = codes(size)
    chunk = PLAIN_CHUNK.encode(raw, 1)
    assert raw == decoded(chunk, size, direct=True) == decoded(chunk, size, direct=False)
    assert decode_blocks(chunk, memoryview(bytearray(size))) is (size >= 1000)


@pytest.mark.parametrize("raw", [bytes(5000), b"\x07" * 5000, RNG.bytes(5000), bytes(40_000) + codes(40_000)])
def test_what_is_unusual_is_left_to_blosc2(raw: bytes) -> None:
    """Runs, and bytes as they are."""
    chunk = by_blosc2(raw)
    assert not decode_blocks(chunk, memoryview(bytearray(len(raw))))
    assert raw == decoded(chunk, len(raw), direct=True)
    assert raw == decoded(PLAIN_CHUNK.encode(raw, 1), len(raw), direct=False)


def test_what_zstd_writes_is_blosc2s() -> None:
    """Of the same format, and about as large; where a block does not shrink, blosc2 stores it."""
    raw = codes(RAW_BYTES)
    chunk = encode_blocks(raw)
    assert chunk is not None
    assert len(chunk) < 1.01 * len(by_blosc2(raw))
    assert blosc2.decompress2(chunk) == decoded(chunk, RAW_BYTES, direct=True) == raw
    assert encode_blocks(raw + RNG.bytes(1 << 16)) is None


def test_split_blocks_are_left_to_blosc2() -> None:
    """Several streams a block, as blosc2 makes of wider types."""
    raw = codes(65_536)
    chunk = bytes(
        blosc2.compress2(
            raw, typesize=4, codec=blosc2.Codec.ZSTD, clevel=1, filters=[], splitmode=blosc2.SplitMode.ALWAYS_SPLIT
        )
    )
    assert not decode_blocks(chunk, memoryview(bytearray(len(raw))))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 1) | st.integers(0, 60), st.integers(0, 255)), min_size=1, max_size=4))
def test_damage_is_refused_alike(changes: list[tuple[int, int]]) -> None:
    """Other bytes or the one error, the same as by blosc2."""
    changed = bytearray(SOUND)
    for place, value in changes:
        changed[place] = value
    assert decoded(bytes(changed), RAW_BYTES, direct=False) == decoded(bytes(changed), RAW_BYTES, direct=True)


@pytest.mark.parametrize("start", [0, 31, 39, 43, len(SOUND) - 3, len(SOUND), 2**31, 2**32 - 1])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_blocks_that_begin_elsewhere(block: int, start: int) -> None:
    """Where no block can be: nothing is read there."""
    changed = bytearray(SOUND)
    struct.pack_into("<I", changed, 32 + 4 * block, start)
    assert not decode_blocks(bytes(changed), memoryview(bytearray(RAW_BYTES)))
    assert decoded(bytes(changed), RAW_BYTES, direct=True) is None


@pytest.mark.parametrize("size", [-(2**31), -1, 0, len(SOUND), 2**31 - 1])
def test_blocks_of_other_sizes(size: int) -> None:
    """Runs are blosc2's; what is longer than the chunk is nobody's."""
    changed = bytearray(SOUND)
    (start,) = struct.unpack_from("<I", changed, 32)
    struct.pack_into("<i", changed, start, size)
    assert not decode_blocks(bytes(changed), memoryview(bytearray(RAW_BYTES)))
    with suppress(CorruptError):
        decoded(bytes(changed), RAW_BYTES, direct=True)


def test_each_thread_has_a_context_of_its_own() -> None:
    """Many at once decode the same; a thread's context goes with it."""
    raw = codes(200_000)
    chunk, found = PLAIN_CHUNK.encode(raw, 1), []

    def work() -> None:
        found.extend(decoded(chunk, len(raw), direct=True) == raw for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


def test_a_frame_that_promises_more_takes_no_memory() -> None:
    """A block whose frame says it holds a gigabyte is not begun."""
    (start,) = struct.unpack_from("<I", SOUND, 32)
    changed = bytearray(SOUND)
    # RFC 8878, 3.1.1: the magic number, a descriptor (one segment, four bytes of size), the size.
    struct.pack_into("<IBI", changed, start + 4, 0xFD2FB528, 0b1010_0000, 1 << 30)
    assert zstandard.frame_content_size(changed[start + 4 :]) == 1 << 30
    tracemalloc.start()
    assert not decode_blocks(bytes(changed), memoryview(bytearray(RAW_BYTES)))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert decoded(bytes(changed), RAW_BYTES, direct=True) is None
