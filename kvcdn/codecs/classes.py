"""Classes: symbols of like size, which are coded together: those of one difference of level and exponent (FORMAT.md 4.5)."""

from __future__ import annotations

import numpy as np

from kvcdn.codecs.symbols import Symbols

LEAST_CLASS = -2
"""Symbols of a smaller class are 0 and not stored: their deviation is below a sixth of a step."""

MOST_CLASS = 13
"""Symbols have 16 bits."""

LEAST_LEVEL, MOST_LEVEL = -64, 63
MOST_EXPONENT = 8

LEVELS, EXPONENTS = MOST_LEVEL - LEAST_LEVEL + 1, 2 * MOST_EXPONENT + 1
"""How many there are of each. Arrays have one place for each, from the least on."""

LEAST_APART = LEAST_CLASS - LEAST_LEVEL - MOST_EXPONENT
"""How far a level's place is at least behind an exponent's where symbols are stored."""

Rectangle = tuple[slice, slice]
"""Rows and columns, of tokens by exponent and components by level."""


def in_range(exponents: Symbols, levels: Symbols) -> bool:
    """Whether all of them are such as the format has."""
    return _within(exponents, -MOST_EXPONENT, MOST_EXPONENT) and _within(levels, LEAST_LEVEL, MOST_LEVEL)


def _within(values: Symbols, low: int, high: int) -> bool:
    return not values.size or bool(low <= values.min() and values.max() <= high)


def rectangles(levels: Symbols, exponents: Symbols) -> dict[int, list[Rectangle]]:
    """By class, ascending: where its symbols are, `levels` and `exponents` being sorted. Each class by ascending exponent."""
    found: dict[int, list[Rectangle]] = {}
    columns = _runs(levels)
    for exponent, place in _runs(exponents):
        for level, column in columns:
            if level - exponent >= LEAST_CLASS:
                found.setdefault(level - exponent, []).append((place, column))
    return dict(sorted(found.items()))


def _runs(values: Symbols) -> list[tuple[int, slice]]:
    """Each distinct value of a sorted array, with where it is."""
    distinct, starts = np.unique(values, return_index=True)
    ends = [*starts[1:], len(values)][: len(starts)]
    return [(int(value), slice(int(start), int(end))) for value, start, end in zip(distinct, starts, ends, strict=True)]
