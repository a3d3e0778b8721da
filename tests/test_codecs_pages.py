"""Streams in a compiled loop: the symbols that pcodec reads, or nothing said; never what pcodec refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.codecs import pages, symbols
from kvcdn.codecs.compiled import wait_until_compiled
from kvcdn.codecs.pages import BATCH, DECODE
from kvcdn.codecs.symbols import Symbols, pack_symbols, read_streams, read_symbols
from kvcdn.errors import CorruptError

SHAPES = st.lists(
    st.tuples(st.integers(0, 1500) | st.sampled_from([BATCH, 2 * BATCH, 8000]), st.sampled_from([0.0, 0.4, 2.0, 40.0, 9000.0])),
    min_size=1,
    max_size=5,
)


def compiled() -> Any:
    """The machine code."""
    if DECODE.native() is None:
        wait_until_compiled()
    native = DECODE.native()
    assert native is not None
    return native


def drawn(rng: Any, count: int, spread: float) -> Symbols:
    return np.clip(np.rint(rng.normal(0, spread, count)), -32_768, 32_767).astype(np.int16)


def decoded(streams: list[bytes], counts: list[int], decode: Any) -> tuple[Symbols, list[int]]:
    """What a way decodes, and of which streams it says so; what it has not decoded is 77."""
    found, sound = np.full(sum(counts), 77, np.int16), np.zeros(len(counts), np.uint8)
    sizes = (np.array(each, np.int64) for each in (list(map(len, streams)), counts))
    decode(np.frombuffer(b"".join(streams), np.uint8), *sizes, found, sound)
    return found, sound.tolist()


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(0, 2**32 - 1))
def test_any_streams_are_read(shapes: list[tuple[int, float]], seed: int) -> None:
    """Several of any length and spread, constant ones and empty ones among them: what went in comes out."""
    rng = np.random.default_rng(seed)
    given_ = [drawn(rng, count, spread) for count, spread in shapes]
    streams, counts = [pack_symbols(one) for one in given_], [len(one) for one in given_]
    found, sound = decoded(streams, counts, compiled())
    assert np.concatenate(given_).tolist() == found.tolist()
    assert [int(count > 0) for count in counts] == sound


@pytest.mark.parametrize(
    "values", [np.arange(-32_768, 32_768), np.repeat(np.arange(-1000, 1000), 3), [-32_768] * 600, [32_767]]
)
def test_every_symbol_is_read(values: Any) -> None:
    """The least and the largest, wide offsets and none."""
    given_ = np.array(values, np.int16)
    found, sound = decoded([pack_symbols(given_)], [len(given_)], compiled())
    assert given_.tolist() == found.tolist()
    assert sound == [1]


def test_plain_loop_does_the_same() -> None:
    """The loop is plain functions: uncompiled, they read the same."""
    rng = np.random.default_rng(2)
    given_ = [drawn(rng, count, spread) for count, spread in ((BATCH + 5, 3.0), (2 * BATCH, 700.0), (0, 1.0), (3, 1.0))]
    streams, counts = [pack_symbols(one) for one in given_], [len(one) for one in given_]
    ways = [decoded(streams, counts, way) for way in (compiled(), pages._decode)]
    assert ways[0][0].tolist() == ways[1][0].tolist() == np.concatenate(given_).tolist()
    assert ways[0][1] == ways[1][1]


SPREADS = {700: 5.0, 300: 400.0, 600: 0.4}
SOUND = [pack_symbols(drawn(np.random.default_rng(4), count, spread)) for count, spread in SPREADS.items()]
COUNTS = list(SPREADS)
HEADS = st.integers(0, 30)


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0, 2),
    st.lists(st.tuples(HEADS | st.integers(0, 5000), st.integers(0, 255)), max_size=4),
    st.integers(-40, 40) | st.just(0),
    st.integers(-300, 300) | st.just(0),
)
def test_nothing_is_read_that_pcodec_refuses(which: int, changes: list[tuple[int, int]], longer: int, more: int) -> None:
    """Damaged, cut and longer streams, and other counts: what is called read is what pcodec reads; the others are untouched."""
    changed = bytearray(SOUND[which])
    for place, value in changes:
        changed[place % len(changed)] = value
    changed = changed[:longer] if longer < 0 else changed + bytes(longer)
    streams, counts = list(SOUND), list(COUNTS)
    streams[which], counts[which] = bytes(changed), max(counts[which] + more, 0)
    found, sound = decoded(streams, counts, compiled())
    ends = np.cumsum(counts)
    for stream, count, end, is_sound in zip(streams, counts, ends.tolist(), sound, strict=True):
        if is_sound:
            expected = np.empty(count, np.int16)
            read_symbols(stream, expected, "stream")
            assert expected.tolist() == found[end - count : end].tolist()
    assert sound[:which] + sound[which + 1 :] == [1, 1]


def with_description(log: int, bins: list[tuple[int, int, int]], page: bytes, count: int | None = None) -> bytes:
    """A stream with a table of these weights, bounds and widths, and a page behind it."""
    bits, place = log | (len(bins) if count is None else count) << 4, 19
    for weight, lower, width in bins:
        bits |= ((weight - 1) | lower << log | width << (log + 16)) << place
        place += log + 21
    return SOUND[0][:3] + bits.to_bytes(-(-place // 8), "little") + page


HOSTILE = {
    "no-bins": with_description(0, [], bytes(40)),
    "weights-too-small": with_description(4, [(3, 0, 0), (4, 1, 0)], bytes(400)),
    "weights-too-large": with_description(4, [(16, 0, 0), (16, 1, 0)], bytes(400)),
    "more-bins-than-states": with_description(1, [(1, 0, 0), (1, 1, 0), (1, 2, 0)], bytes(400)),
    "more-bins-than-bytes": with_description(12, [(1, 0, 0)], bytes(40), 4096),
    "most-bins": with_description(14, [(1, 0, 0)], bytes(40), 32_767),
    "one-bin-of-many-states": with_description(3, [(8, 0, 0)], bytes(400)),
    "tables-of-2^13": with_description(13, [(4096, 0, 0), (4096, 1, 0)], bytes(4000)),
    "tables-of-2^15": with_description(15, [(1 << 14, 0, 0), (1 << 14, 1, 0)], bytes(4000)),
    "offsets-of-17-bits": with_description(1, [(1, 0, 17), (1, 1, 0)], bytes(4000)),
    "offsets-of-31-bits": with_description(0, [(1, 0, 31)], bytes(4000)),
    "widest-offsets-that-are-not-there": with_description(0, [(1, 0, 16)], bytes(16)),
    "all-bits-set": SOUND[0][:3] + b"\xff" * 4000,
    "empty": b"",
    "version-alone": SOUND[0][:2],
    "description-cut": SOUND[0][:4],
    "states-cut": SOUND[0][:20],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_streams_are_left_to_pcodec(name: str) -> None:
    """Impossible tables and missing bytes: the loop says nothing of them, pcodec refuses them; those beside are read."""
    hostile = HOSTILE[name]
    streams, counts = [SOUND[0], hostile, SOUND[2]], [700, 1000, 600]
    for way in (compiled(), pages._decode):
        assert [1, 0, 1] == decoded(streams, counts, way)[1]
    place = np.empty(1000, np.int16)
    with pytest.raises(CorruptError, match="stream of symbols"):
        read_streams(hostile, [len(hostile)], place, [1000], "part")


def test_wide_tables_are_read_by_pcodec() -> None:
    """A table that the loop has no room for is no fault."""
    page = bytes(-(-4 * 13 // 8)) + bytes(-(-1000 * 2 // 8) + 100)
    stream = with_description(13, [(4096, 7, 0), (4096, 9, 0)], page)
    assert decoded([stream], [100], compiled())[1] == [0]


def test_streams_are_the_same_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of a stream of no symbols that has bytes, both say the same."""
    found = {}
    for native in (compiled(), None):
        monkeypatch.setattr(symbols.DECODE, "native", lambda native=native: native)
        read = np.empty(sum(COUNTS), np.int16)
        read_streams(b"".join(SOUND), list(map(len, SOUND)), read, COUNTS, "part")
        found[native] = read.tolist()
        with pytest.raises(CorruptError, match="stream of no symbols"):
            read_streams(b"\4\1", [2], np.empty(0, np.int16), [0], "part")
    assert len(found) == 2
    assert len({tuple(one) for one in found.values()}) == 1


def test_nothing_is_written_beside_the_symbols() -> None:
    """Of a stream with more symbols than it has bits, the loop stops at its end."""
    memory = np.full(5000, 77, np.int16)
    stream = with_description(0, [(1, 0, 16)], bytes(64))
    sound = np.zeros(1, np.uint8)
    compiled()(np.frombuffer(stream, np.uint8), np.array([len(stream)]), np.array([4000]), memory[500:4500], sound)
    assert sound[0] == 0
    assert set(memory[:500].tolist()) | set(memory[4500:].tolist()) == {77}
    # A batch at most was begun behind the end.
    assert memory[500 + 32 + 2 * BATCH : 4500].tolist() == [77] * (4000 - 32 - 2 * BATCH)
