"""The transform codec: near what went in, nearer where rows matter, the same bits for all, and one error for the rest."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from attacks.payloads import COMPONENT_ROWS, EXPONENTS, RAW, sound_components
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.basis import BasisName
from kvcdn.block import open_header
from kvcdn.codec import Rows, decode_part
from kvcdn.codecs.basis import Basis
from kvcdn.codecs.carrier import carry, uncarry
from kvcdn.codecs.choice import row_exponents, row_weights
from kvcdn.codecs.numbers import to_float32, write_rounded
from kvcdn.codecs.rope import Rope
from kvcdn.codecs.symbols import pack_symbols, read_symbols
from kvcdn.codecs.transform import encode_transform
from kvcdn.errors import CorruptError
from kvcdn.keys import Namespace, PrefixNames
from kvcdn.layout import Layout
from support.blocks import make_basis, make_lossy_document, make_model

LAYOUT = Layout.uniform_kv(2, 4, 8, "float32")

BASIS = make_basis(LAYOUT)


def decoded(data: bytes, rows: Rows, size: int) -> bytes:
    memory = bytearray(b"\xa5" * (size + 64))
    with memoryview(memory) as view, view[32 : 32 + size] as out:
        decode_part("tc", data, rows, out, "part")
    assert bytes(memory[:32] + memory[32 + size :]) == b"\xa5" * 64
    return bytes(memory[32 : 32 + size])


def rows_of(layer: int, tensor: int, tokens: int, dtype: str = "float32", start: int = 0) -> Rows:
    return Rows(dtype, (tokens, 4, 8), start, BASIS.tensors[layer][tensor])


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(1, 70),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.integers(0, 5),
    st.floats(0.02, 2.0),
    st.integers(0, 2**32 - 1),
)
def test_numbers_come_back_within_their_steps(place: int, tokens: int, dtype: str, lead: int, step: float, seed: int) -> None:
    """An orthogonal basis keeps lengths: a row is as near as its components' half steps, and rows in front are exact."""
    rng = np.random.default_rng(seed)
    values = (3 * rng.normal(size=(tokens, 4, 8))).astype(np.float32)
    raw = bytearray(values.size * (4 if dtype == "float32" else 2))
    write_rounded(values.copy(), dtype, memoryview(raw))
    exponents = rng.integers(-3, 4, tokens, np.int16)
    rows = rows_of(place // 2, place % 2, tokens, dtype, start=1000)
    encoded = encode_transform(bytes(raw), rows, exponents, step, lead=lead)
    assert encoded is not None
    found = decoded(encoded.data, rows, len(raw))
    assert bytes(encoded.decoded) == found
    exact = min(lead, tokens) * len(raw) // tokens
    assert bytes(raw[:exact]) == found[:exact]
    before, after = (to_float32(data, dtype).reshape(tokens, -1) for data in (bytes(raw), found))
    error = np.linalg.norm(after - before, axis=1)
    # Components of small classes are left out whole: their deviation is below a sixth of the largest step that they have.
    assert (error <= np.sqrt(32) * step * np.exp2(exponents.astype(float)) * 6 + 0.03 * np.linalg.norm(before, axis=1)).all()


def test_smaller_steps_are_nearer_and_longer() -> None:
    """One number trades bytes for accuracy."""
    encoded = [encode_transform(RAW, COMPONENT_ROWS, EXPONENTS, step, lead=0) for step in (0.01, 0.1, 1.0)]
    sizes = [len(one.data) for one in encoded if one]
    errors = [float(np.abs(to_float32(one.decoded, "bfloat16") - to_float32(RAW, "bfloat16")).mean()) for one in encoded if one]
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)
    assert len(set(sizes)) == len(set(errors)) == 3


def test_rows_with_larger_exponents_are_farther_off() -> None:
    """The exponent of a token is the size of its error."""
    exponents = np.repeat(np.array([-3, 3], np.int16), 20)
    encoded = encode_transform(RAW, COMPONENT_ROWS, exponents, 0.1, lead=0)
    assert encoded is not None
    error = np.abs(to_float32(encoded.decoded, "bfloat16") - to_float32(RAW, "bfloat16")).reshape(40, -1).mean(1)
    assert error[20:].mean() > 8 * error[:20].mean()


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_is_left_to_lossless_codecs(value: float) -> None:
    values = np.ones((5, 4, 8), "<f4")
    values[2, 1, 3] = value
    assert encode_transform(values.tobytes(), rows_of(0, 0, 5), np.zeros(5, np.int16), 0.1, lead=0) is None


def test_what_is_too_large_for_its_step_is_left_to_lossless_codecs() -> None:
    """Symbols have 16 bits, and sums are exact or not made."""
    values = np.random.default_rng(1).normal(size=(5, 4, 8)).astype("<f4")
    assert encode_transform(values.tobytes(), rows_of(0, 0, 5), np.zeros(5, np.int16), 1e-5, lead=0) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=6), st.integers(0, 64))
def test_any_damage_is_refused_or_decodes_in_place(changes: list[tuple[int, int]], cut: int) -> None:
    """Whatever is changed: other numbers, or the one error."""
    changed = bytearray(sound_components())
    for place, value in changes:
        changed[place % len(changed)] = value
    with suppress(CorruptError):
        decoded(bytes(changed[: len(changed) - max(cut - 32, 0)]), COMPONENT_ROWS, len(RAW))


@given(st.lists(st.integers(-32_768, 32_767), max_size=300))
def test_symbols_survive(values: list[int]) -> None:
    """Any integers of 16 bits, none included."""
    symbols = np.empty(len(values), np.int16)
    read_symbols(pack_symbols(np.array(values, np.int16)), symbols, "stream")
    assert values == symbols.tolist()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_undone(interleaved: bool) -> None:
    """There and back; the dimensions behind its pairs do not turn."""
    rope = Rope(np.array([1.0, 0.1], "<f8").tobytes(), interleaved)
    rows = np.random.default_rng(2).normal(size=(6, 2, 8)).astype(np.float32)
    turned = rows.copy()
    rope.turn(turned, 7)
    assert np.abs(turned - rows).max() > 0.5
    assert (turned[..., 4:] == rows[..., 4:]).all()
    pair = [0, 1] if interleaved else [0, 2]
    angle = 9.0
    expected = rows[2, 0, pair[0]] * np.cos(angle) - rows[2, 0, pair[1]] * np.sin(angle)
    assert abs(float(turned[2, 0, pair[0]]) - float(expected)) < 1e-5
    rope.turn(turned, 7, back=True)
    assert np.abs(turned - rows).max() < 1e-5


def test_exponents_follow_the_gradients() -> None:
    """Rows that are read more have smaller steps, and those of which nothing is known; without any gradient all are alike."""
    basis = BASIS.tensors[0][1]
    slopes = np.random.default_rng(3).normal(size=(400, 4, 8)).astype(np.float32)
    slopes[10:20] *= 30
    weights = row_weights(slopes.copy(), basis)
    ((exponents,),) = row_exponents([[weights]], 420)
    assert (420,) == exponents.shape
    assert exponents[10:20].max() < exponents[20:336].min()
    # What the last 64 of the probe have read counts as not read.
    assert {exponents[-1]} == set(exponents[336:].tolist())
    assert exponents[-1] < exponents[20:336].min()
    nothing = row_weights(np.zeros((9, 4, 8), np.float32), basis)
    assert [[[0] * 12]] == [[one.tolist() for one in layer] for layer in row_exponents([[nothing]], 12)]
    # Of two tensors the one that is read more has the smaller steps; the other way round it is the same.
    (most, least), (again,) = row_exponents([[weights * 64, weights], [weights * 64]], 420)
    assert most.tolist() == again.tolist()
    assert (most <= least).all()
    assert most[-1] < least[-1]


def test_basis_is_read_as_it_was_written() -> None:
    """The bytes name it."""
    found = Basis.parse(BASIS.body, LAYOUT, "basis")
    assert BASIS.name == found.name == BasisName(found.name.digest, len(BASIS.body))
    for ours, theirs in zip(sum(BASIS.tensors, ()), sum(found.tensors, ()), strict=True):
        assert (ours.mean == theirs.mean).all()
        assert (ours.matrices == theirs.matrices).all()
        assert (ours.scales == theirs.scales).all()
        assert ours.rope == theirs.rope


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 200))
def test_damaged_bases_are_refused_or_bases(changes: list[tuple[int, int]], cut: int) -> None:
    """Nothing but CorruptError comes of any bytes."""
    changed = bytearray(BASIS.body)
    for place, value in changes:
        changed[place % min(len(changed), 700)] = value
    with suppress(CorruptError):
        Basis.parse(bytes(changed[: len(changed) - max(cut - 150, 0)]), LAYOUT, "basis")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "truncated"),
        (b"\xff\xff\xff\xff", "description of 4294967295 bytes"),
        (BASIS.body[:-1], "truncated"),
        (BASIS.body + b"\0", "1 trailing bytes"),
        (BASIS.body[:-1] + b"\x80", "-127 to 127"),
    ],
)
def test_bases_that_are_none(body: bytes, says: str) -> None:
    with pytest.raises(CorruptError, match=says):
        Basis.parse(body, LAYOUT, "basis")


def test_basis_of_another_layout_is_refused() -> None:
    with pytest.raises(CorruptError, match="another layout"):
        Basis.parse(BASIS.body, Layout.uniform_kv(2, 4, 16, "float32"), "basis")


def test_basis_travels_as_a_document() -> None:
    """Cut into blocks and joined again; another digest is refused."""
    model = make_model()
    names = PrefixNames.of(BASIS.name.identity(model), Namespace.public(), BASIS.name.token_ids)
    pieces = [carry(BASIS, block)[0][0] for block in names.blocks]
    assert BASIS.body == uncarry(pieces, BASIS.name, LAYOUT, "basis").body
    with pytest.raises(CorruptError, match="not those of its name"):
        uncarry(pieces, BasisName(model.fingerprint, BASIS.name.size), LAYOUT, "basis")


def test_blocks_name_their_basis() -> None:
    """A part cannot be decoded with the basis of another tensor, or with none."""
    document = make_lossy_document("tc-medium")
    header = open_header(next(iter(document.blocks.values())), "block")
    assert header.basis == make_basis(document.model.layout).name
    for wrong in (None, make_basis(Layout.uniform_kv(1, 4, 32, "bfloat16")).tensors[0][0]):
        with pytest.raises(CorruptError, match="basis is not the one"):
            decoded(sound_components(), Rows("bfloat16", (40, 2, 16), 0, wrong), len(RAW))
