"""Compiled loops: the same bits as numpy's, and nothing lost where there are none."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import astuple

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.codec import Rows, decode_part
from kvcdn.codecs.compiled import Array, Loop, wait_until_compiled
from kvcdn.codecs.grids import HEADER, SPREAD, spread
from kvcdn.codecs.numbers import NATIVE_DTYPES, ROUNDERS, write_rounded
from kvcdn.codecs.quant import Grid
from support.waiting import PROCESS_SECONDS

DTYPES = sorted(NATIVE_DTYPES)

FINITE = np.array([bits for bits in range(1 << 16) if bits & 0x7F80 != 0x7F80], "<u2")


GRIDS = st.builds(
    Grid,
    st.sampled_from([4, 8]),
    st.integers(1, 50),
    st.sampled_from([1, 2, 3, 6]),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 3),
)


def double(values: np.ndarray, out: np.ndarray) -> None:
    for place in range(len(values)):
        out[place] = values[place] + values[place]


def doubling() -> Loop:
    """A loop of its own each time."""
    return Loop(double, (Array("int64"), Array("int64", written=True)))


def native(loop: Loop):
    """Its machine code."""
    loop.native()
    wait_until_compiled()
    found = loop.native()
    assert found is not None
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(DTYPES),
    GRIDS,
    st.integers(6, 40),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_grids_have_the_same_bits(dtype, grid, tokens, odd, seed) -> None:
    """Compiled and not: of every dtype, of numbers from all over, up to those that overflow, at any address."""
    rng = np.random.default_rng(seed)
    bits, group, width, centred, lead, trail = astuple(grid)
    middle, size = tokens - lead - trail, 2 if NATIVE_DTYPES[dtype] == "uint16" else 4
    parameters = rng.choice(FINITE, (1 if centred else 2, -(-middle // group), 2, 6 // width))
    parameters[-1] &= 0x7FFF
    row = 12 * size
    parts = [HEADER.pack(bits, centred, lead, trail, group, width), rng.bytes((lead + trail) * row), parameters.tobytes()]
    payload = b"".join((*parts, rng.bytes(-(-middle * 12 * bits // 8))))
    found = []
    loop = SPREAD[dtype]
    compiled = native(loop)
    for way in (compiled, None):
        memory = bytearray(tokens * row + odd)
        loop.native = lambda way=way: way  # type: ignore[method-assign]
        try:
            decode_part("quant", payload, Rows(dtype, (tokens, 2, 6)), memoryview(memory)[odd:], "part")
        finally:
            del loop.native
        found.append(bytes(memory))
    assert found[1] == found[0]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.integers(1, 20),
    st.sampled_from([(1, 32), (3, 30), (2, 64), (1, 33)]),
    st.integers(6, 30),
    st.integers(0, 2**32 - 1),
)
def test_chunks_have_the_same_bits(bits, group, sides, tokens, seed) -> None:
    """Whole chunks, and a last one that overlaps; rows whose codes are in both halves of bytes: plain, compiled, numpy."""
    rng = np.random.default_rng(seed)
    columns, middle = sides[0] * sides[1], tokens - 3
    parameters = rng.choice(FINITE, (2, -(-middle // group), columns))
    parameters[-1] &= 0x7FFF
    parts = [HEADER.pack(bits, 0, 2, 1, group, 1), rng.bytes(3 * 2 * columns), parameters.tobytes()]
    payload = b"".join((*parts, rng.bytes(-(-middle * columns * bits // 8))))
    found = []
    loop = SPREAD["bfloat16"]
    with np.errstate(all="ignore"):
        for way in (native(loop), spread, None):
            memory = bytearray(tokens * columns * 2)
            loop.native = lambda way=way: way  # type: ignore[method-assign]
            try:
                decode_part("quant", payload, Rows("bfloat16", (tokens, *sides)), memoryview(memory), "part")
            finally:
                del loop.native
            found.append(bytes(memory))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_rounded_alike(dtype) -> None:
    """A compiled rounder and numpy's, over all signs and exponents and the mantissas that decide a tie."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xEFFF, 0xF000, 0xFFFF], np.uint32)
    values = (upper | lower).reshape(1, -1).view(np.float32)
    found = np.zeros(values.shape, NATIVE_DTYPES[dtype])
    numba.njit(ROUNDERS[dtype])(values[0], values[0].view(np.uint32), found, 0)
    expected = bytearray(found.nbytes)
    write_rounded(values.copy(), dtype, memoryview(expected))
    assert bytes(expected) == found.tobytes()


def test_what_was_read_only_or_unaligned_fits() -> None:
    """Bytes of a network are both."""
    values = np.frombuffer(bytes(1) + np.arange(5).tobytes(), np.int64, offset=1)
    out = np.zeros(5, np.int64)
    native(doubling())(values, out)
    assert [0, 2, 4, 6, 8] == out.tolist()


@pytest.mark.parametrize("trouble", ["missing", "failing", "told-not-to"])
def test_without_numba_there_is_the_other_way(trouble, monkeypatch) -> None:
    """A loop that cannot be compiled is never ready; nobody hears of it."""
    if trouble == "missing":
        monkeypatch.setitem(sys.modules, "numba", None)
    elif trouble == "failing":
        monkeypatch.setattr(numba, "njit", lambda *_, **__: 1 / 0)
    else:
        monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    loop = doubling()
    assert loop.native() is None
    wait_until_compiled()
    assert loop.native() is None


def test_without_a_place_for_its_files_it_is_compiled_all_the_same(monkeypatch) -> None:
    """As in a container whose user has no home."""
    plain = numba.njit
    tried = []

    def njit(*given, cache=False, **options):
        tried.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return plain(*given, **options)

    monkeypatch.setattr(numba, "njit", njit)
    out = np.zeros(2, np.int64)
    native(doubling())(np.array([3, 4]), out)
    assert [6, 8] == out.tolist()
    assert [True, False] == tried


def test_a_changed_function_is_another() -> None:
    """Its files are not taken for those of what it was."""
    program = "def double(values, out):\n    for place in range(len(values)):\n        out[place] = values[place] * %d\n"
    names = []
    for factor in (2, 3):
        scope: dict = {}
        exec(program % factor, scope)
        names.append(Loop(scope["double"], (Array("int64"), Array("int64", written=True))).name)
    assert names[0] != names[1]


def test_a_child_of_a_compiling_process_does_without() -> None:
    """It waits for nobody, keeps what is ready, and the parent goes on."""
    ready, begun = doubling(), doubling()
    native(ready)
    begun.native()
    child = os.fork()
    if not child:
        wait_until_compiled()
        late = doubling()
        late.native()
        wait_until_compiled()
        os._exit((ready.native() is None) + 2 * (begun.native() is not None) + 4 * (late.native() is not None))
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    native(begun)


def test_a_process_that_ends_while_it_compiles_ends_well() -> None:
    """At once where compiling has not begun, else when the loop at hand is ready."""
    asked = "from kvcdn.codecs import compiled, quant; [loop.native() for loop in quant.SPREAD.values()]"
    for program in (asked, f"{asked}; compiled._COMPILER._hurried = True; import numba"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, timeout=PROCESS_SECONDS
        )
        assert (0, "") == (done.returncode, done.stderr)
