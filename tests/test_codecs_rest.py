"""The rest: what a coarse tensor lacks of the exact one, to the bit; hostile parts end in CorruptError."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from kvcdn.codec import Rows, decode_part
from kvcdn.codecs.rest import CLASSES, encode_rest
from kvcdn.errors import CorruptError

SHAPE = (37, 2, 16)


def as_bytes(values, dtype):
    """Numbers as a tensor has them."""
    if dtype == "bfloat16":
        return (np.asarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return np.asarray(values, "<f2").tobytes()


def make_pair(dtype, error=0.05):
    """A tensor and a coarse one that is `error` of a deviation off."""
    rng = np.random.default_rng(5)
    values = rng.normal(size=SHAPE)
    return as_bytes(values, dtype), as_bytes(values + error * rng.normal(size=SHAPE), dtype)


def decode(encoded, rows):
    out = bytearray(2 * 37 * 2 * 16)
    decode_part("rest", encoded, rows, memoryview(out), "part")
    return bytes(out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_coarse_and_rest_are_exact(dtype):
    """To the bit, in fewer bytes than the tensor has; also where the coarse numbers lie where the exact ones are to go."""
    raw, coarse = make_pair(dtype)
    encoded = encode_rest(raw, Rows(dtype, SHAPE, coarse=coarse))
    assert len(encoded.data) < len(raw)
    assert raw == encoded.decoded == decode(encoded.data, Rows(dtype, SHAPE, coarse=coarse))
    out = bytearray(coarse)
    decode_part("rest", encoded.data, Rows(dtype, SHAPE, coarse=memoryview(out)), memoryview(out), "part")
    assert raw == out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_any_bits_are_kept(dtype):
    """Infinities, numbers that are none, both zeros, and coarse ones that have nothing to do with them."""
    rng = random.Random(2)
    raw, coarse = rng.randbytes(2 * 37 * 2 * 16), rng.randbytes(2 * 37 * 2 * 16)
    rows = Rows(dtype, SHAPE, coarse=coarse)
    assert raw == decode(encode_rest(raw, rows).data, rows)
    same = Rows(dtype, SHAPE, coarse=raw)
    assert raw == decode(encode_rest(raw, same).data, same)


def test_a_nearer_coarse_tensor_leaves_less():
    """Otherwise something is coded that is known."""
    sizes = []
    for error in (0.5, 0.05, 0.005, 0.0):
        raw, coarse = make_pair("bfloat16", error)
        sizes.append(len(encode_rest(raw, Rows("bfloat16", SHAPE, coarse=coarse)).data))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 2


def test_there_is_none_of_wider_numbers():
    """float32 is stored losslessly."""
    assert encode_rest(bytes(4 * 37 * 2 * 16), Rows("float32", SHAPE, coarse=bytes(4 * 37 * 2 * 16))) is None


def test_without_its_coarse_tensor_it_is_worth_nothing():
    """A reader who has none, or one of another size, is told so."""
    raw, coarse = make_pair("bfloat16")
    encoded = encode_rest(raw, Rows("bfloat16", SHAPE, coarse=coarse)).data
    for rows in (Rows("bfloat16", SHAPE), Rows("bfloat16", SHAPE, coarse=coarse[:-2]), Rows("float32", SHAPE, coarse=coarse)):
        with pytest.raises(CorruptError):
            decode(encoded, rows)


def test_hostile_parts_are_refused():
    """Cut, longer, streams of another length: CorruptError each, and damage anywhere never ends in another error."""
    raw, coarse = make_pair("bfloat16")
    rows = Rows("bfloat16", SHAPE, coarse=coarse)
    encoded = encode_rest(raw, rows).data
    lengths = struct.unpack_from(f"<{CLASSES}I", encoded)
    first, second = lengths[:2]
    swapped = struct.pack(f"<{CLASSES}I", second, first, *lengths[2:]) + encoded[4 * CLASSES :]
    huge = struct.pack("<I", 0xFFFFFFFF) + encoded[4:]
    for bad in (b"", encoded[:-1], encoded[: 4 * CLASSES - 1], encoded + b"\0", swapped, huge):
        with pytest.raises(CorruptError):
            decode(bad, rows)
    rng = random.Random(9)
    for _ in range(400):
        damaged = bytearray(encoded)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            decode(bytes(damaged), rows)
        except CorruptError:
            continue
