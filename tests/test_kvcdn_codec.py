"""Codecs: every bit pattern survives, nothing grows, and decoders fit exactly or refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.codec import CODECS, MAX_EXPANSION_BYTES, encode_smallest
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

SMALL = st.binary(min_size=4, max_size=600).map(lambda data: data[: len(data) // 4 * 4])


def decoded(codec: str, encoded: bytes, typesize: int, size: int) -> bytes:
    """What `codec` makes of `encoded`, with sentinels around the place it may write to."""
    memory = bytearray(b"\xa5" * (size + 64))
    with memoryview(memory) as view, view[32 : 32 + size] as out:
        CODECS[codec].decode_into(encoded, typesize, out, "part")
    assert bytes(memory[:32] + memory[32 + size :]) == b"\xa5" * 64
    return bytes(memory[32 : 32 + size])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("raw", "typesize"), TENSORS.values(), ids=TENSORS.keys())
def test_every_pattern_survives(codec: str, raw: bytes, typesize: int) -> None:
    """Bits in, the same bits out; and no more than 64 bytes over the raw size."""
    encoded = CODECS[codec].encode(raw, typesize)
    assert len(encoded) <= len(raw) + MAX_EXPANSION_BYTES
    if codec == "raw" or len(encoded) < len(raw):
        assert raw == decoded(codec, encoded, typesize, len(raw))


@settings(max_examples=200, deadline=None)
@given(SMALL, st.integers(1, 200), st.sampled_from([2, 4]))
def test_smallest_encoding_never_grows(unit: bytes, times: int, typesize: int) -> None:
    """What the writer stores is at most the raw size, and reads back, for random and for repetitive data."""
    raw = unit * times
    codec, encoded = encode_smallest(raw, typesize)
    assert len(encoded) <= len(raw)
    assert len(CODECS["blosc2"].encode(raw, typesize)) <= len(raw) + MAX_EXPANSION_BYTES
    assert raw == decoded(codec, encoded, typesize, len(raw))


def test_real_looking_kv_shrinks() -> None:
    """bfloat16 activations are carried by blosc2, well under their raw size, and random bytes as they are."""
    floats = RNG.normal(size=1 << 17).astype("<f4").view("<u4") >> 16
    codec, encoded = encode_smallest(floats.astype("<u2").tobytes(), 2)
    assert codec == "blosc2"
    assert len(encoded) < 0.8 * (1 << 18)
    assert encode_smallest(RNG.bytes(1000), 2)[0] == "raw"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("change", [-2, 2])
def test_wrong_room_is_refused(codec: str, change: int) -> None:
    """A tensor that does not fit its place exactly is refused before a byte is written beside it."""
    raw = b"\x01\x02" * 2048
    encoded = CODECS[codec].encode(raw, 2)
    with pytest.raises(CorruptError, match=r"^part: "):
        decoded(codec, encoded, 2, len(raw) + change)
