"""Compiled synthesis: the same bits as numpy's way, whatever the shapes, and the same refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attacks.payloads import COMPONENT_ROWS, RAW, component_payloads, sound_components
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.codec import Rows
from kvcdn.codecs import matrixunit, synthesis, tiles, transform
from kvcdn.codecs.basis import TensorBasis
from kvcdn.codecs.compiled import wait_until_compiled
from kvcdn.codecs.rope import Rope
from kvcdn.codecs.symbols import pack_symbols
from kvcdn.codecs.tiles import ABREAST, CHUNK, LINES, TILE, _vectors, multiply_tile
from kvcdn.errors import CorruptError
from kvcdn.layout import DTYPE_BYTES

WAYS = {"pairs": synthesis.RESTORE, "bytes": synthesis.RESTORE_BY_BYTES}


def ways() -> list[str]:
    """The ways to multiply that this processor has."""
    if "avx2" not in Path("/proc/cpuinfo").read_text("ascii", "replace"):
        pytest.skip("the compiled loop needs AVX2, which this processor lacks: numpy decodes here, and is tested without this")
    return ["pairs", "bytes"] if matrixunit.has_matrix_unit() else ["pairs"]


def compiled(dtype: str) -> None:
    """Waits until the loops are machine code; skips where the processor has no instructions for them."""
    for loop in (WAYS[way][dtype] for way in ways()):
        if loop.native() is None:
            wait_until_compiled()
        assert loop.native() is not None


def random_rows(rng: Any, dtype: str, heads: int, dim: int, groups: int, tokens: int, turning: str) -> Rows:
    width = heads * dim // groups
    matrices = rng.integers(-127, 128, (groups, width, width), np.int8)
    rope = None
    if turning and dim > 1:
        frequencies = rng.random(rng.integers(1, dim // 2 + 1)).astype("<f8").tobytes()
        rope = Rope(frequencies, interleaved=turning == "interleaved")
    numbers = (rng.normal(size=size).astype("<f4") for size in ((heads, dim), groups))
    return Rows(dtype, (tokens, heads, dim), 1000, TensorBasis(*numbers, matrices, rope))


def random_part(rng: Any, rows: Rows, lead: int, levels: int, exponents: int) -> bytes:
    """A part of random levels and exponents, some of each, and of symbols of which no sum leaves what is exact."""
    tokens, heads, dim = rows.shape
    columns = heads * dim
    lead = min(lead, tokens)
    few = rng.integers(-3, 4, exponents).astype(np.int16)
    own = few[rng.integers(0, exponents, tokens - lead)]
    level = rng.integers(-9, -9 + levels, columns).astype(np.int16)
    kinds = sorted({int(v) - int(e) for v in level for e in own if v - e >= -2})
    most = (1 << 24) // (128 * columns)
    streams = [pack_symbols(own), pack_symbols(level)]
    for kind in kinds:
        count = sum(int((own == v - kind).sum()) for v in level)
        spread = rng.choice([0.3, 3.0, most / 4])
        symbols = np.clip(np.rint(rng.normal(0, spread, count)), -min(most, 32_767), min(most, 32_767))
        streams.append(pack_symbols(symbols.astype(np.int16)))
    exact = rng.bytes(lead * columns * DTYPE_BYTES[rows.dtype])
    lengths = b"".join(len(stream).to_bytes(4, "little") for stream in streams)
    header = lead.to_bytes(2, "little") + len(kinds).to_bytes(2, "little") + np.float32(rng.choice([1e-3, 0.5, 1e30])).tobytes()
    return header + exact + lengths + b"".join(streams)


def decode(part: bytes, rows: Rows) -> bytes:
    size = int(np.prod(rows.shape)) * DTYPE_BYTES[rows.dtype]
    memory = bytearray(b"\xa5" * (size + 128))
    with memoryview(memory) as view, view[64 : 64 + size] as out:
        transform.decode_transform(part, rows, out, "part")
    assert bytes(memory[:64] + memory[64 + size :]) == b"\xa5" * 128
    return bytes(memory[64 : 64 + size])


def by_each_way(part: bytes, rows: Rows) -> bytes:
    """What all ways to multiply decode it to."""
    found = set()
    for way in ways():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transform, "restoring", WAYS[way].__getitem__)
            found.add(decode(part, rows))
    (same,) = found
    return same


def by_numpy(part: bytes, rows: Rows) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform, "_restored", lambda *_: False)
        return decode(part, rows)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.integers(1, 4),
    st.integers(1, 40),
    st.booleans(),
    st.integers(1, 75),
    st.sampled_from(["", "halves", "interleaved"]),
    st.tuples(st.integers(0, 5), st.integers(1, 12), st.integers(1, 4)),
    st.integers(0, 2**32 - 1),
)
def test_compiled_and_not_are_the_same_to_the_bit(  # noqa: PLR0913, PLR0917
    dtype: str, heads: int, dim: int, whole: bool, tokens: int, turning: str, sizes: tuple[int, int, int], seed: int
) -> None:
    """Any number of heads, dimensions, groups, tokens, levels and exponents; odd ones, too."""
    compiled(dtype)
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, dtype, heads, dim, 1 if whole else heads, tokens, turning)
    part = random_part(rng, rows, *sizes)
    assert by_numpy(part, rows) == by_each_way(part, rows)


def test_wide_groups_and_long_blocks_are_the_same_to_the_bit() -> None:
    """More than one tile, and more than one batch of lines, of a real layout's shapes."""
    compiled("bfloat16")
    rng = np.random.default_rng(5)
    for heads, dim, groups in ((3, 64, 1), (8, 128, 4), (5, 80, 1)):
        rows = random_rows(rng, "bfloat16", heads, dim, groups, 300, "halves")
        part = random_part(rng, rows, 4, 12, 4)
        assert by_numpy(part, rows) == by_each_way(part, rows)


def test_hostile_parts_are_refused_alike() -> None:
    """The compiled way says what numpy's way says."""
    compiled("bfloat16")
    for payload in component_payloads():
        for way in (decode, by_numpy):
            with pytest.raises(CorruptError, match=payload.says):
                way(payload.data, COMPONENT_ROWS)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=4))
def test_damage_is_refused_alike_or_stays_in_place(changes: list[tuple[int, int]]) -> None:
    """Sums that leave what is exact are the publisher's fault, and may differ; nothing is written elsewhere."""
    compiled("bfloat16")
    changed = bytearray(sound_components())
    for place, value in changes:
        changed[place % len(changed)] = value
    said = []
    for way in (decode, by_numpy):
        try:
            said.append(str(len(way(bytes(changed), COMPONENT_ROWS))))
        except CorruptError as error:
            said.append(str(error))
    assert said[0] == said[1]
    assert said[0].startswith("part") or str(len(RAW)) == said[0]


def test_tile_is_a_product_of_matrices() -> None:
    """What the machine instructions do is what is written beside them: the plain loop uses that."""
    rng = np.random.default_rng(1)
    left, right = rng.integers(-300, 300, (8, 10), np.int16), rng.integers(-127, 128, (10, 2 * TILE), np.int16)
    table = np.ascontiguousarray(right.reshape(5, 2, -1).transpose(0, 2, 1)).view(np.int32)[..., 0]
    sums = np.zeros((8, TILE), np.int32)
    multiply_tile(np.full((8, 4), [0, 3, 4, 9], np.int32), 3, left.view(np.int32), 4, table, TILE, sums)
    used = [0, 1, 6, 7, 8, 9]
    product = left[4:, used].astype(np.int64) @ right[used, TILE:]
    assert product.tolist() == sums[4 : 4 + ABREAST].tolist()
    assert not sums[:4].any()


def test_unit_is_a_product_of_matrices() -> None:
    """Symbols of any size, in two bytes: what the instructions do is what is written beside them, which the plain loop uses."""
    rng = np.random.default_rng(1)
    symbols, matrix = rng.integers(-32_768, 32_768, (LINES, 128), np.int16), rng.integers(-127, 128, (64, 70), np.int8)
    lines, table, sums = matrixunit.make_lines(128), matrixunit.make_table(128, 70), matrixunit.make_sums()
    matrixunit.fill_table(table, 64, matrix, np.arange(64), 64)
    for line in range(LINES):
        for place in range(0, 128, CHUNK):
            matrixunit._copy_chunk(symbols.reshape(-1), 128 * line + place, lines, line, place)
    matrixunit.multiply_bytes(lines, 64, 1, table, TILE, sums)
    whole = sums[:LINES] + (sums[LINES:] << 8)
    assert (symbols[:, 64:].astype(np.int32) @ matrix[:, TILE:]).tolist() == whole[:, : 70 - TILE].tolist()
    assert not whole[:, 70 - TILE :].any()


def test_no_matrix_unit_where_another_processor_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system is not asked where numba compiles for another processor, or where there is no such system."""
    asked = matrixunit.has_matrix_unit.__wrapped__
    monkeypatch.setattr(matrixunit.ctypes, "CDLL", lambda _: pytest.fail("the system was asked"))
    with monkeypatch.context() as patch:
        patch.setenv("NUMBA_CPU_NAME", "haswell")
        assert not asked()
    monkeypatch.setattr(matrixunit.sys, "platform", "darwin")
    assert not asked()


def test_plain_loop_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops are plain functions: uncompiled, they do the same."""
    rng = np.random.default_rng(7)
    rows = random_rows(rng, "bfloat16", 2, 5, 2, 7, "halves")
    part = random_part(rng, rows, 1, 3, 2)
    expected = by_numpy(part, rows)
    for way, product in (("pairs", tiles), ("bytes", matrixunit)):
        with monkeypatch.context() as patch:
            patch.setattr(transform, "restoring", WAYS[way].__getitem__)
            patch.setattr(WAYS[way]["bfloat16"], "_native", synthesis._restore)
            for name in ("whole", "make_lines", "make_table", "make_sums", "fill_table", "clear", "clear_from", "copy_chunk"):
                patch.setattr(synthesis, name, getattr(product, name))
            patch.setattr(synthesis, "multiply", product.multiply)
            assert expected == decode(part, rows)


def test_processors_without_wide_registers_give_the_same_bits() -> None:
    """As on a processor that has AVX2 alone. One that has neither keeps to numpy."""
    compiled("bfloat16")
    features = "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.1,+sse4.2"
    environment = os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features}
    program = (
        "import test_codecs_synthesis as here\n"
        "from numba.core.registry import cpu_target\n"
        "assert here._vectors(cpu_target.target_context.codegen().magic_tuple()[2])[0] == 8\n"
        "here.test_wide_groups_and_long_blocks_are_the_same_to_the_bit()\n"
    )
    paths = os.pathsep.join((str(Path(__file__).parent), environment.get("PYTHONPATH", "")))
    subprocess.run([sys.executable, "-c", program], env=environment | {"PYTHONPATH": paths}, check=True)
    with pytest.raises(RuntimeError, match="no pairs"):
        _vectors("+sse2")
