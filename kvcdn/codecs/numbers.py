"""Numbers: the dtypes of tensors as float32 arrays, and back (FORMAT.md 4.4, rounding)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcdn.digest import Buffer

_BITS_CUT = np.uint32(16)
"""A bfloat16 is the upper half of a float32."""

Floats = NDArray[np.float32]
Bits = NDArray[np.uint32]

_HALF_OF_BFLOAT16 = np.uint32(0x8000)
"""Half of a bfloat16's last place, as bits of a float32."""


def to_float32(raw: Buffer, dtype: str) -> Floats:
    """The numbers of `raw`, exactly."""
    if dtype == "bfloat16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << _BITS_CUT).view(np.float32)
    return np.frombuffer(raw, "<f2" if dtype == "float16" else "<f4").astype(np.float32)


def write_rounded(values: Floats, dtype: str, out: memoryview) -> None:
    """Rounds `values`, which are used up, to `dtype` into `out`, of their size. For bfloat16 ties go away from zero."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        np.add(bits, _HALF_OF_BFLOAT16, out=bits)
        np.right_shift(bits, _BITS_CUT, out=bits)
        np.copyto(np.frombuffer(out, np.uint16).reshape(values.shape), bits, casting="unsafe")
        return
    with np.errstate(over="ignore"):
        np.frombuffer(out, "<f2" if dtype == "float16" else "<f4").reshape(values.shape)[...] = values


NATIVE_DTYPES = {"bfloat16": "uint16", "float16": "uint16", "float32": "float32"}
"""Of the arrays into which compiled loops round: numpy has no bfloat16, and numba no float16."""


def round_to_bfloat16(_: Floats, bits: Bits, out: NDArray[np.uint16], row: int) -> None:
    """Ties go away from zero."""
    for column in range(len(bits)):
        out[row, column] = np.uint32(bits[column] + np.uint32(0x8000)) >> np.uint32(16)


def _round_to_float16(values: Floats, bits: Bits, out: NDArray[np.uint16], row: int) -> None:
    """To nearest, ties to even."""
    for column in range(len(bits)):
        size = bits[column] & np.uint32(0x7FFFFFFF)
        if size > np.uint32(0x7F800000):
            # No number: what of it fits, but never nothing, which would be infinity.
            rounded = np.uint32(0x7C00) | max((size >> np.uint32(13)) & np.uint32(0x3FF), np.uint32(1))
        elif size >= np.uint32(0x477FF000):
            rounded = np.uint32(0x7C00)
        elif size < np.uint32(0x38800000):
            # A multiple of 2^-24, and exact until it is rounded.
            rounded = np.uint32(np.rint(np.abs(values[column]) * np.float32(1 << 24)))
        else:
            odd = (size >> np.uint32(13)) & np.uint32(1)
            rounded = np.uint32(size - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
        out[row, column] = rounded | ((bits[column] >> np.uint32(16)) & np.uint32(0x8000))


def _keep_float32(values: Floats, _: Bits, out: Floats, row: int) -> None:
    for column in range(len(values)):
        out[row, column] = values[column]


ROUNDERS: Mapping[str, Callable[[Floats, Bits, NDArray[Any], int], None]] = {
    "bfloat16": round_to_bfloat16,
    "float16": _round_to_float16,
    "float32": _keep_float32,
}
"""What `write_rounded` does, for compiled loops: a row of float32, and its bits, into a row of an array of `NATIVE_DTYPES`."""
