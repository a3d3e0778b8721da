"""Damaged parts of every codec, compiled and not: the same tensor or the same error, in place, and in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from attacks.payloads import COMPONENT_ROWS, RAW, sound_components, sound_grid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcdn.codec import CODECS, decode_part
from kvcdn.codecs import exponents, pages, rest, synthesis
from kvcdn.codecs.compiled import Loop, wait_until_compiled
from kvcdn.codecs.exponents import encode_exponents
from kvcdn.codecs.grids import SPREAD
from kvcdn.codecs.quant import Grid
from kvcdn.codecs.rest import encode_rest
from kvcdn.errors import CorruptError

MARGIN = 256

MOST_MEMORY = 4 << 20
"""Nothing that a part of some kilobytes says makes a reader take more."""


@dataclass(frozen=True)
class Part:
    """An honest part, and the loops that decode it."""

    codec: str
    data: bytes
    loops: tuple[Loop, ...] = ()


def made(data: bytes | None) -> bytes:
    assert data is not None
    return data


def parts() -> dict[str, Part]:
    rest_of = encode_rest(RAW, COMPONENT_ROWS)
    assert rest_of is not None
    grids = {
        "int4": Grid(4, 8, 1, centred=False, lead=3),
        "int8": Grid(8, 7, 1, centred=False),
        "centred": Grid(8, 1, 16, centred=True),
    }
    spread = (SPREAD["bfloat16"],)
    return {
        "blosc2": Part("blosc2", CODECS["blosc2"].encode(RAW, 2)),
        "exponents": Part("exponents", made(encode_exponents(RAW, COMPONENT_ROWS)), (exponents._JOIN,)),
        **{name: Part("quant", sound_grid(grid), spread) for name, grid in grids.items()},
        "tc": Part("tc", sound_components(), (pages.DECODE, synthesis.restoring("bfloat16"))),
        "rest": Part("rest", rest_of.data, (pages.DECODE, rest._COUNT, rest._REFINE)),
    }


PARTS = parts()


@contextmanager
def compiled(part: Part) -> Iterator[None]:
    """With machine code; on a processor without AVX2 one loop has none, and others do the work."""
    for loop in part.loops:
        loop.native()
    wait_until_compiled()
    if "avx2" in Path("/proc/cpuinfo").read_text("ascii", "replace"):
        assert all(loop.native() for loop in part.loops)
    yield


@contextmanager
def by_numpy(_: Part) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "native", lambda _: None)
        yield


WAYS: tuple[Callable, ...] = (compiled, by_numpy)


def outcome(part: Part, data: bytes) -> bytes | str:
    """The tensor, or what the one error says. Anything else fails the test, and so does a byte beside the place."""
    memory = bytearray(b"\xa5" * (len(RAW) + 2 * MARGIN))
    with memoryview(memory) as view, view[MARGIN : MARGIN + len(RAW)] as out:
        try:
            decode_part(part.codec, data, COMPONENT_ROWS, out, "part")
            found: bytes | str = bytes(out)
        except CorruptError as error:
            found = str(error)
            assert found.startswith("part: ")
    assert bytes(memory[:MARGIN] + memory[-MARGIN:]) == b"\xa5" * (2 * MARGIN)
    return found


@st.composite
def damaged(draw: st.DrawFn, sound: bytes) -> bytes:
    """`sound` with bits flipped, numbers overwritten, pieces cut, doubled and added."""
    data = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, min(63, len(data))) | st.integers(0, len(data)))
        kind = draw(st.sampled_from(["flip", "byte", "number", "cut", "double", "add", "end"]))
        if kind == "flip" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "byte" and place < len(data):
            data[place] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
        elif kind == "number":
            number = draw(st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1]))
            data[place : place + 4] = struct.pack("<I", number)
        elif kind == "cut":
            del data[place : place + draw(st.integers(1, 40))]
        elif kind == "double":
            data[place:place] = data[place : place + draw(st.integers(1, 100))]
        elif kind == "add":
            data[place:place] = draw(st.binary(max_size=12))
        elif kind == "end":
            del data[place:]
    return bytes(data)


@pytest.mark.parametrize("name", PARTS)
def test_honest_parts_are_the_same_by_both(name: str) -> None:
    """What all of this is about is decoded at all."""
    found = []
    for way in WAYS:
        with way(PARTS[name]):
            found.append(outcome(PARTS[name], PARTS[name].data))
    assert found[0] == found[1]
    assert len(found[0]) == len(RAW)


@pytest.mark.parametrize("name", PARTS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_parts_end_alike(name: str, data: st.DataObject) -> None:
    """The same by both ways; sums that leave what is exact are the publisher's fault, and may differ."""
    part = PARTS[name]
    changed = data.draw(damaged(part.data) | st.binary(max_size=200))
    found = []
    for way in WAYS:
        with way(part):
            found.append(outcome(part, changed))
    if name == "tc" and all(isinstance(one, bytes) for one in found):
        return
    assert found[0] == found[1]


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_parts_take_little_memory(name: str, way: Callable, data: st.DataObject) -> None:
    """Whatever a part claims to hold."""
    part = PARTS[name]
    changed = data.draw(damaged(part.data))
    with way(part):
        tracemalloc.start()
        try:
            outcome(part, changed)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < MOST_MEMORY
