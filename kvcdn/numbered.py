"""Numbered objects: of 1, 2, 3 and so on without gaps, the last is found in a few questions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def find_last(ask: Callable[[int], T | None], known: int, most: int) -> tuple[int, T | None]:
    """The greatest number above `known` and up to `most` that is there, and what `ask` gave for it; else `known` and None.

    `ask` gives None for what is not there. Numbers are found in steps that double, and then halve.
    """
    there, step = known, 1
    found: T | None = None
    while there + step <= most and (answer := ask(there + step)) is not None:
        there, found, step = there + step, answer, 2 * step
    missing = min(there + step, most + 1)
    while missing - there > 1:
        middle = (there + missing) // 2
        answer = ask(middle)
        if answer is None:
            missing = middle
        else:
            there, found = middle, answer
    return there, found
