"""Numbers: the dtypes of tensors as float32 arrays, and back (FORMAT.md 4.4, rounding)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcdn.codec import Buffer

_BITS_CUT = np.uint32(16)
"""A bfloat16 is the upper half of a float32."""

Floats = NDArray[np.float32]

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
