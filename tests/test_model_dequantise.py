"""Dequantising beside the tensors: the same bits as the host's decoders give, and the same error, for whatever is decoded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attacks.payloads import COMPONENT_ROWS, RAW, ROWS, payloads, sound_components, sound_grid
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.codec import Rows, decode_part, encode_smallest
from kvcdn.codecs.numbers import write_rounded
from kvcdn.codecs.quant import Grid, encode_grid
from kvcdn.codecs.rope import Rope
from kvcdn.codecs.transform import EXACT_SUM, encode_transform, parse_transform
from kvcdn.errors import CorruptError
from kvcdn.layout import Layout
from kvcdn.model.dequantise import decode_to
from kvcdn.model.layers import TORCH_DTYPES
from kvcdn.model.prefill import tensor_bytes
from kvcdn.model.staging import Staging, Uploads
from support.blocks import make_basis
from support.grids import GRIDS

DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")),
]

BASIS = make_basis(Layout.uniform_kv(2, 4, 8, "float32"))


def beside(codec: str, data: bytes, rows: Rows, device: str = "cpu") -> bytes | None:
    """What the arithmetic on `device` makes of a part; None for the one error. Rows around its place are as they were."""
    whole = torch.full((rows.shape[0] + 2, *rows.shape[1:]), 7.0, dtype=TORCH_DTYPES[rows.dtype], device=device)
    place, uploads, staging = whole[1:-1], Uploads([whole]), Staging()
    staging.begin()
    try:
        with uploads.lane(place.device):
            decode_to(place, codec, data, rows, staging, uploads, "part")
    except CorruptError:
        return None
    staging.end(uploads.mark(0, place.device))
    uploads.join_layer(0, place.device)
    found = whole.cpu()
    assert bool((found[0] == 7).all() and (found[-1] == 7).all())
    return bytes(tensor_bytes(found[1:-1].contiguous()))


def here(codec: str, data: bytes, rows: Rows) -> bytes | None:
    """What the host's decoder makes of it."""
    out = bytearray(rows.typesize * int(np.prod(rows.shape)))
    try:
        decode_part(codec, data, rows, memoryview(out), "part")
    except CorruptError:
        return None
    return bytes(out)


def raw_of(values: np.ndarray, dtype: str) -> bytes:
    raw = bytearray(values.size * (4 if dtype == "float32" else 2))
    write_rounded(values.astype(np.float32), dtype, memoryview(raw))
    return bytes(raw)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=150, deadline=None)
@given(
    GRIDS,
    st.integers(1, 60),
    DTYPES,
    st.sampled_from([1e-38, 1e-5, 1.0, 3e3]),
    st.integers(0, 2**32 - 1),
)
def test_grids_are_the_same_to_the_bit(device, grid, tokens, dtype, size, seed) -> None:
    """Of every shape of groups, of both widths, with exact rows at either end, denormal numbers included."""
    rng = np.random.default_rng(seed)
    values = np.clip(size * rng.normal(size=(tokens, 2, 8)) * np.exp(rng.normal(size=(1, 2, 8))), -6e4, 6e4)
    rows = Rows(dtype, values.shape)
    encoded = encode_grid(raw_of(values, dtype), rows, grid)
    assert encoded is not None
    assert here("quant", encoded.data, rows) == bytes(encoded.decoded) == beside("quant", encoded.data, rows, device)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(1, 70),
    DTYPES,
    st.integers(0, 5),
    st.floats(0.02, 2.0),
    st.integers(0, 2**32 - 1),
)
def test_components_are_the_same_to_the_bit(device, place, tokens, dtype, lead, step, seed) -> None:
    """Of every tensor of a basis with rope and without, steps by token, and positions far from the first."""
    rng = np.random.default_rng(seed)
    rows = Rows(dtype, (tokens, 4, 8), (0, 1000, 1 << 20)[seed % 3], BASIS.tensors[place // 2][place % 2])
    raw = raw_of(3 * rng.normal(size=rows.shape), dtype)
    encoded = encode_transform(raw, rows, rng.integers(-3, 4, tokens, np.int16), step, lead=lead)
    assert encoded is not None
    assert here("tc", encoded.data, rows) == bytes(encoded.decoded) == beside("tc", encoded.data, rows, device)


def test_both_kinds_of_pairs_turn() -> None:
    """A rope of halves, and one of neighbours, of fewer pairs than there are."""
    for interleaved in (False, True):
        rope = Rope(np.array([1.0, 0.3, 0.01], "<f8").tobytes(), interleaved)
        rows = Rows("float32", (9, 4, 8), 77, replace(BASIS.tensors[0][0], rope=rope))
        raw = raw_of(np.random.default_rng(3).normal(size=rows.shape), "float32")
        encoded = encode_transform(raw, rows, np.zeros(9, np.int16), 0.05, lead=2)
        assert encoded is not None
        assert bytes(encoded.decoded) == beside("tc", encoded.data, rows)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_lossless_is_decoded_on_the_host_and_copied(device) -> None:
    codec, data = encode_smallest(RAW, ROWS)
    assert beside(codec, data, ROWS, device) == RAW
    assert beside("raw", RAW, ROWS, device) == RAW


@pytest.mark.parametrize("payload", payloads(), ids=lambda payload: payload.name)
def test_hostile_payloads_are_refused(payload) -> None:
    """Before anything of them is computed with."""
    assert beside(payload.codec, payload.data, COMPONENT_ROWS if payload.codec in ("tc", "rest") else ROWS) is None


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["quant", "tc"]),
    st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), max_size=6),
    st.integers(0, 64),
)
def test_any_damage_is_the_same_error_or_the_same_numbers(codec, changes, cut) -> None:
    """Where numbers come of it. Sums that the format does not allow (4.5) may be anything, what is no number any of them."""
    rows = COMPONENT_ROWS if codec == "tc" else ROWS
    changed = bytearray(sound_components() if codec == "tc" else sound_grid(Grid(8, 7, 1, centred=True)))
    for place, value in changes:
        changed[place % len(changed)] = value
    data = bytes(changed[: len(changed) - max(cut - 32, 0)])
    ours, theirs = beside(codec, data, rows), here(codec, data, rows)
    assert (ours is None) == (theirs is None)
    if ours is None or theirs is None or (codec == "tc" and not sums_are_allowed(data, rows)):
        return
    one, other = (torch.frombuffer(bytearray(side), dtype=TORCH_DTYPES[rows.dtype]) for side in (ours, theirs))
    same = one.view(torch.uint8).view(len(one), -1) == other.view(torch.uint8).view(len(one), -1)
    assert bool((same.all(1) | (one.isnan() & other.isnan())).all())


def sums_are_allowed(data: bytes, rows: Rows) -> bool:
    found, matrices = parse_transform(data, rows, "part")[1], np.abs(rows.basis.matrices.astype(np.int64))
    groups, width, _ = matrices.shape
    whole = np.zeros((len(found.order), groups * width), np.int64)
    whole[:, found.which] = np.abs(found.symbols.astype(np.int64))
    sums = np.matmul(whole.reshape(-1, groups, width).transpose(1, 0, 2), matrices)
    return bool(sums.max(initial=0) < EXACT_SUM)


def test_buffers_are_used_again_and_grow() -> None:
    """What was taken since `begin` is apart from all else of the same layer, however much it is."""
    staging = Staging()
    for _ in range(5):
        staging.begin()
        made = [staging.upload(np.full(size, size, np.int64), torch.device("cpu")) for size in (3, 1000, 7, 70_000, 1)]
        assert [[size] for size in (3, 1000, 7, 70_000, 1)] == [one.unique().tolist() for one in made]
        rooms = [staging.room(torch.empty(size, dtype=torch.bfloat16)) for size in (5, 4000, 9)]
        for number, room in enumerate(rooms):
            room.fill_(number)
        assert [[0.0], [1.0], [2.0]] == [room.unique().tolist() for room in rooms]
        staging.end(None)
