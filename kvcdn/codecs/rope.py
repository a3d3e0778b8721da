"""Rotary embedding, undone and done again: K varies less between tokens before it than after (FORMAT.md 4.5)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvcdn.codecs.numbers import Floats


@dataclass(frozen=True)
class Rope:
    """Pairs of a head's first dimensions that turn with the position: (i, i + n) of n pairs, or (2i, 2i + 1) if interleaved.

    `frequencies` are radians per token, as the bytes of little-endian doubles.
    """

    frequencies: bytes
    interleaved: bool

    @property
    def pairs(self) -> int:
        return len(self.frequencies) // 8

    def turn(self, rows: Floats, start: int, *, back: bool = False) -> None:
        """Turns `rows`, [tokens, heads, dim], in place: token t by the angles of position `start` + t, or `back` by them."""
        count = self.pairs
        first, second = (
            (rows[..., : 2 * count : 2], rows[..., 1 : 2 * count : 2])
            if self.interleaved
            else (rows[..., :count], rows[..., count : 2 * count])
        )
        cosine, sine = self.angles(start, len(rows))
        if back:
            sine = -sine
        left = first * cosine
        left -= second * sine
        right = second * cosine
        right += first * sine
        first[...] = left
        second[...] = right

    def angles(self, start: int, tokens: int) -> tuple[Floats, Floats]:
        """Cosines and sines, [tokens, 1, pairs], of positions from `start` on."""
        return _angles(self.frequencies, start, tokens)


@lru_cache(maxsize=64)
def _angles(frequencies: bytes, start: int, tokens: int) -> tuple[Floats, Floats]:
    """Cosines and sines [tokens, 1, pairs], computed in double precision and rounded to single."""
    positions: NDArray[np.float64] = np.arange(start, start + tokens, dtype=np.float64)
    angles = positions[:, None, None] * np.frombuffer(frequencies, "<f8")
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
