"""Codecs: every bit pattern survives, nothing grows, and decoders fit exactly or refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.codec import CODECS, LOSSLESS_CODECS, MAX_EXPANSION_BYTES, Rows, decode_part, encode_smallest
from kvcdn.codecs import exponents
from kvcdn.codecs.compiled import Loop, wait_until_compiled
from kvcdn.codecs.exponents import encode_exponents
from kvcdn.errors import CorruptError

RNG = np.random.default_rng(1)

EVERY_16_BIT_PATTERN = np.arange(1 << 16, dtype="<u2")
"""As bfloat16 and as float16: each NaN payload, infinity, denormal and both zeros."""

FLOAT32_PATTERNS = (np.arange(1 << 16, dtype="<u4")[:, None] << 16 | np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF], "<u4")).ravel()
"""Each sign, exponent and upper mantissa with the lower mantissa's extremes."""

TENSORS = {
    "16-bit-in-order": (EVERY_16_BIT_PATTERN.tobytes(), 2),
    "16-bit-shuffled": (RNG.permutation(EVERY_16_BIT_PATTERN).tobytes(), 2),
    "16-bit-repeated": (np.repeat(EVERY_16_BIT_PATTERN, 3).tobytes(), 2),
    "32-bit-in-order": (FLOAT32_PATTERNS.tobytes(), 4),
    "32-bit-shuffled": (RNG.permutation(FLOAT32_PATTERNS).tobytes(), 4),
    "all-zeros": (bytes(1 << 16), 2),
    "all-minus-zeros": (b"\x00\x80" * 4096, 2),
    "all-nan": (np.full(4096, np.nan, "<f4").tobytes(), 4),
    "all-signalling-nan": (b"\x01\x00\x80\x7f" * 4096, 4),
    "random": (RNG.bytes(1 << 18), 2),
    "normal-floats": (RNG.normal(size=1 << 16).astype("<f4").tobytes(), 4),
    "one-bfloat16": (b"\xc0\x7f", 2),
    "one-float32": (b"\x01\x00\xc0\xff", 4),
}

DTYPES = {2: ("bfloat16", "float16"), 4: ("float32",)}

SMALL = st.binary(min_size=4, max_size=600).map(lambda data: data[: len(data) // 4 * 4])


def table(raw: bytes, dtype: str, width: int = 1) -> Rows:
    """`raw` as rows of `width` numbers."""
    size = 4 if dtype == "float32" else 2
    return Rows(dtype, (len(raw) // size // width, width))


def encoded(codec: str, raw: bytes, rows: Rows) -> bytes | None:
    """By one codec, if it can."""
    return encode_exponents(raw, rows) if codec == "exponents" else CODECS[codec].encode(raw, rows.typesize)


def decoded(codec: str, data: bytes, rows: Rows, size: int) -> bytes:
    """What `codec` makes of `data`, with sentinels around the place it may write to."""
    memory = bytearray(b"\xa5" * (size + 64))
    with memoryview(memory) as view, view[32 : 32 + size] as out:
        decode_part(codec, data, rows, out, "part")
    assert bytes(memory[:32] + memory[32 + size :]) == b"\xa5" * 64
    return bytes(memory[32 : 32 + size])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("raw", "typesize"), TENSORS.values(), ids=TENSORS.keys())
def test_every_pattern_survives(codec: str, raw: bytes, typesize: int) -> None:
    """Bits in, the same bits out; and no more than 64 bytes over the raw size."""
    rows = table(raw, DTYPES[typesize][0])
    data = encoded(codec, raw, rows)
    assert data is not None
    assert len(data) <= len(raw) + MAX_EXPANSION_BYTES
    if codec == "raw" or len(data) < len(raw):
        assert raw == decoded(codec, data, rows, len(raw))


@pytest.mark.parametrize("span", [1, 5, 8])
@pytest.mark.parametrize("first", [0, 1, 100, 239, 240])
def test_exponents_of_every_sign_and_mantissa_survive(first: int, span: int) -> None:
    """With a few beside them that are none of theirs: zeros, infinities and what is no number."""
    exponents = (first + np.arange(256 * 40) % span) % 256
    bits = (np.resize(EVERY_16_BIT_PATTERN, 256 * 40) & 0x807F) | (exponents << 7).astype("<u2")
    bits[5::1031] = np.resize(np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFF81, 0x0001], "<u2"), len(bits[5::1031]))
    raw = bits.tobytes()
    for width in (1, 8, 40):
        rows = table(raw, "bfloat16", width)
        data = encode_exponents(raw, rows)
        assert data is not None
        assert raw == decoded("exponents", data, rows, len(raw))


@pytest.mark.parametrize("raw", [bytes(1 << 16), b"\x00\x80" * 4096, b"\x80\x7f" * 4096, b"\xc1\xff" * 4096])
def test_constants_survive(raw: bytes) -> None:
    """Zeros, infinities and what is no number, alone."""
    rows = table(raw, "bfloat16", 64)
    data = encode_exponents(raw, rows)
    assert data is not None
    assert raw == decoded("exponents", data, rows, len(raw))


def test_scattered_exponents_are_left_to_others() -> None:
    """Five bytes an exception would save nothing."""
    assert encode_exponents(EVERY_16_BIT_PATTERN.tobytes(), table(EVERY_16_BIT_PATTERN.tobytes(), "bfloat16", 64)) is None


@pytest.mark.parametrize("count", [1, 2, 3, 1023])
def test_exponents_compiled_and_by_numpy_are_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes stored, and the same bits read, of an odd and of an even number of rows."""
    for loop in (exponents._SURVEY, exponents._TAKE_APART, exponents._JOIN):
        loop.native()
    wait_until_compiled()
    assert exponents._JOIN.native()
    # Some of the columns are constant, some are all over.
    values = (RNG.normal(size=(count, 70)) * np.exp2(RNG.normal(size=(count, 70)) * np.arange(70) / 40)).astype("<f4")
    raw = (values.view("<u4") >> 16).astype("<u2").tobytes()
    rows = table(raw, "bfloat16", 70)
    stored = encode_exponents(raw, rows)
    assert stored is not None
    assert raw == decoded("exponents", stored, rows, len(raw))
    monkeypatch.setattr(Loop, "native", lambda self: None)
    assert stored == encode_exponents(raw, rows)
    assert raw == decoded("exponents", stored, rows, len(raw))


@settings(max_examples=200, deadline=None)
@given(SMALL, st.integers(1, 200), st.sampled_from(["bfloat16", "float16", "float32"]), st.sampled_from([1, 2, 3]))
def test_smallest_encoding_never_grows(unit: bytes, times: int, dtype: str, width: int) -> None:
    """What the writer stores is at most the raw size, and reads back, for random and for repetitive data."""
    raw = unit * times * width
    rows = table(raw, dtype, width)
    codec, data = encode_smallest(raw, rows)
    assert len(data) <= len(raw)
    assert len(CODECS["blosc2"].encode(raw, rows.typesize)) <= len(raw) + MAX_EXPANSION_BYTES
    assert raw == decoded(codec, data, rows, len(raw))


def test_real_looking_kv_shrinks() -> None:
    """bfloat16 activations are taken apart, well under their raw size; blosc2 has other dtypes and what repeats itself."""
    floats = RNG.normal(size=(1 << 11, 64)).astype("<f4")
    raw = (floats.view("<u4") >> 16).astype("<u2").tobytes()
    codec, data = encode_smallest(raw, table(raw, "bfloat16", 64))
    assert codec == "exponents"
    assert len(data) < 0.67 * len(raw)
    assert encode_smallest(floats.astype("<f2").tobytes(), table(raw, "float16", 64))[0] == "blosc2"
    assert encode_smallest(raw[:128] * 2048, table(raw, "bfloat16", 64))[0] == "blosc2"
    assert encode_smallest(RNG.bytes(1000), table(bytes(1000), "bfloat16"))[0] == "raw"


@pytest.mark.parametrize("codec", LOSSLESS_CODECS)
@pytest.mark.parametrize("change", [-2, 2])
def test_wrong_room_is_refused(codec: str, change: int) -> None:
    """A tensor that does not fit its place exactly is refused before a byte is written beside it."""
    raw = b"\x01\x02" * 2048
    data = encoded(codec, raw, table(raw, "bfloat16"))
    assert data is not None
    size = len(raw) + change
    with pytest.raises(CorruptError, match=r"^part: "):
        decoded(codec, data, table(bytes(size), "bfloat16"), size)
