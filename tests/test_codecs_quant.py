"""Numbers on grids: near what went in, the same bits for every reader, and nothing but CorruptError from anything else."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from attacks.payloads import COMPONENT_ROWS, RAW, ROWS, payloads, sound_grid
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcdn.codec import Rows, decode_part
from kvcdn.codecs.numbers import to_float32, write_rounded
from kvcdn.codecs.quant import Grid, encode_grid
from kvcdn.errors import CorruptError
from support.grids import GRIDS


def decoded(data: bytes, rows: Rows, size: int, codec: str = "quant") -> bytes:
    """What a reader makes of `data`, with sentinels around the place it may write to."""
    memory = bytearray(b"\xa5" * (size + 64))
    with memoryview(memory) as view, view[32 : 32 + size] as out:
        decode_part(codec, data, rows, out, "part")
    assert bytes(memory[:32] + memory[32 + size :]) == b"\xa5" * 64
    return bytes(memory[32 : 32 + size])


@settings(max_examples=150, deadline=None)
@given(GRIDS, st.integers(1, 60), st.sampled_from(["bfloat16", "float16", "float32"]), st.integers(0, 2**32 - 1))
def test_numbers_come_back_within_a_step(grid: Grid, tokens: int, dtype: str, seed: int) -> None:
    """Every number is at most half a step, and its own rounding, away; the rows at the ends are the same to the bit."""
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=(tokens, 2, 8)) * np.exp(3 * rng.normal(size=(1, 2, 8)))).astype(np.float32)
    # Beyond 65,504 a float16 is infinite, and nothing for a grid.
    values = np.clip(values, -6e4, 6e4)
    raw = bytearray(values.size * (4 if dtype == "float32" else 2))
    write_rounded(values.copy(), dtype, memoryview(raw))
    encoded = encode_grid(bytes(raw), Rows(dtype, values.shape), grid)
    assert encoded is not None
    found = decoded(encoded.data, Rows(dtype, values.shape), len(raw))
    assert bytes(encoded.decoded) == found
    lead, row = min(grid.lead, tokens), len(raw) // tokens
    assert bytes(raw[: lead * row]) == found[: lead * row]
    before, after = (to_float32(data, dtype).reshape(values.shape) for data in (bytes(raw), found))
    for start in range(lead, tokens, grid.tokens):
        group = before[start : start + grid.tokens]
        spread = 2 * np.abs(group).max((0, 2)) / ((1 << grid.bits) - 2)
        error = np.abs(after[start : start + grid.tokens] - group).max((0, 2))
        assert (error <= 0.51 * spread + np.abs(group).max((0, 2)) / 64).all()


@settings(max_examples=60, deadline=None)
@given(GRIDS, st.integers(1, 60), st.sampled_from(["bfloat16", "float32"]), st.integers(0, 2**32 - 1))
def test_worth_makes_the_weighted_error_no_larger(grid: Grid, tokens: int, dtype: str, seed: int) -> None:
    """Nowhere, whatever the weights; rows at the ends stay exact, and readers get what the encoder says."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_t(2, size=(tokens, 2, 8)) * np.exp(rng.normal(size=(1, 2, 8)))).astype(np.float32)
    raw, rows = bytearray(values.size * (4 if dtype == "float32" else 2)), Rows(dtype, values.shape)
    write_rounded(values.copy(), dtype, memoryview(raw))
    weights = np.exp(2 * rng.normal(size=tokens)).astype(np.float32)
    plain, weighted = encode_grid(bytes(raw), rows, grid), encode_grid(bytes(raw), rows, grid, weights)
    assert plain is not None
    assert weighted is not None
    assert len(plain.data) == len(weighted.data)
    assert bytes(weighted.decoded) == decoded(weighted.data, rows, len(raw))
    before, flat, near = (
        to_float32(data, dtype).reshape(values.shape) for data in (bytes(raw), plain.decoded, weighted.decoded)
    )
    lead, trail = min(grid.lead, tokens), min(grid.trail, max(tokens - grid.lead, 0))
    assert (before[:lead] == near[:lead]).all()
    assert (before[tokens - trail :] == near[tokens - trail :]).all()
    for start in range(lead, tokens - trail, grid.tokens):
        place = slice(start, min(start + grid.tokens, tokens - trail))
        shape = (-1, 2, 8 // grid.values, grid.values)
        worth = weights[place, None, None, None]
        rounding = (np.square(before[place] / 128).reshape(shape) * worth).sum((0, 3))
        losses = [(np.square(one[place] - before[place]).reshape(shape) * worth).sum((0, 3)) for one in (flat, near)]
        # Encoders count before what comes out is rounded to the dtype, half of 2^-8 of a bfloat16.
        assert (np.sqrt(losses[1]) <= 1.001 * np.sqrt(losses[0]) + 2 * np.sqrt(rounding) + 1e-6).all()


def test_what_is_worth_nothing_costs_the_others_no_steps() -> None:
    """One row far out, hardly read, is moved to the end of a grid that is finer for all others; a row that is read is not."""
    values = np.linspace(-1, 1, 64, dtype="<f4").reshape(64, 1, 1).repeat(4, 2)
    values[20] = 1.8
    rows, others = Rows("float32", values.shape), np.arange(64) != 20
    found = {}
    for worth in (1e-6, 1.0, 1e3):
        weights = np.where(others, 1, worth).astype(np.float32)
        encoded = encode_grid(values.tobytes(), rows, Grid(4, 64, 1, centred=False), weights)
        assert encoded is not None
        found[worth] = np.abs(np.frombuffer(encoded.decoded, "<f4").reshape(64, 4) - values[:, 0])
    assert found[1e-6][others].max() < found[1e3][others].max() * 0.8
    assert found[1e-6][20].min() > 0.5
    assert found[1e3][20].max() < 0.1


def test_weights_of_numbers_that_no_range_holds_are_no_grid() -> None:
    """Ranges that are infinite end as without weights: nothing is written."""
    values = np.full((4, 1, 4), np.finfo("<f4").max, "<f4")
    values[0] = -values[0]
    grid = Grid(4, 4, 1, centred=False)
    assert encode_grid(values.tobytes(), Rows("float32", (4, 1, 4)), grid, np.ones(4, np.float32)) is None


def test_finer_grids_are_nearer() -> None:
    """Four bits more are a sixteenth of the error, about, as far as the rounding of numbers lets it show."""
    errors = []
    for bits in (4, 8):
        encoded = encode_grid(RAW, ROWS, Grid(bits, 8, 1, centred=False))
        assert encoded is not None
        errors.append(float(np.abs(to_float32(encoded.decoded, "bfloat16") - to_float32(RAW, "bfloat16")).mean()))
    assert errors[1] < errors[0] / 8


@pytest.mark.parametrize(("tokens", "bits", "expected"), [(3, 4, b"\xf0\x01"), (4, 4, b"\x20\xf1"), (3, 8, b"\x00\x01\xff")])
def test_codes_of_4_bits_share_bytes(tokens: int, bits: int, expected: bytes) -> None:
    """The first half of them in the lower halves; nothing but codes is behind the parameters."""
    values = np.arange(tokens, dtype="<f4").reshape(tokens, 1, 1)
    values[-1] = (1 << bits) - 1
    raw = values.tobytes()
    encoded = encode_grid(raw, Rows("float32", values.shape), Grid(bits, tokens, 1, centred=False))
    assert encoded is not None
    assert expected == encoded.data[12:]
    assert raw == encoded.decoded


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_left_to_lossless_codecs(value: float) -> None:
    """No grid has a place for it."""
    values = np.ones((4, 1, 4), "<f4")
    values[2, 0, 1] = value
    assert encode_grid(values.tobytes(), Rows("float32", (4, 1, 4)), Grid(8, 2, 1, centred=False)) is None


def test_largest_numbers_have_no_grid_of_bfloat16_steps() -> None:
    """A step that would be infinite is not written."""
    values = np.full((4, 1, 4), np.finfo("<f4").max, "<f4")
    values[0] = -values[0]
    assert encode_grid(values.tobytes(), Rows("float32", (4, 1, 4)), Grid(8, 4, 1, centred=False)) is None


@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_blocks_of_exact_rows_only(tokens: int) -> None:
    """A document shorter than its exact rows is all exact."""
    raw = RAW[: tokens * 64]
    encoded = encode_grid(raw, Rows("bfloat16", (tokens, 2, 16)), Grid(4, 8, 1, centred=False, lead=4, trail=16))
    assert encoded is not None
    assert raw == encoded.decoded


@pytest.mark.parametrize("payload", payloads(), ids=lambda payload: payload.name)
def test_hostile_payloads_are_refused(payload) -> None:
    """The one error, from the check that was meant, and no byte beside the place."""
    with pytest.raises(CorruptError, match=payload.says):
        decoded(payload.data, COMPONENT_ROWS, len(RAW), payload.codec)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([sound_grid(Grid(4, 8, 1, centred=False, lead=3)), sound_grid(Grid(8, 1, 16, centred=True))]),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=6),
    st.integers(0, 4000),
)
@example(sound_grid(Grid(8, 1, 16, centred=True)), [(9, 124)], 1)
def test_any_damage_is_refused_or_decodes_in_place(data: bytes, changes: list[tuple[int, int]], cut: int) -> None:
    """Whatever is changed: other numbers, or the one error."""
    changed = bytearray(data)
    for place, value in changes:
        changed[place % len(changed)] = value
    with suppress(CorruptError):
        decoded(bytes(changed[: len(changed) - cut // 16 if cut % 16 == 0 else None]), ROWS, len(RAW))
