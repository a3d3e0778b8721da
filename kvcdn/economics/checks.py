"""Checks of what people enter: a number in its range, a name that is known. Both fail as one line that names the option."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from kvcdn.errors import UsageError

T = TypeVar("T")

LARGEST = 1e18
"""No real number of reads, tokens, bytes a second or dollars comes near; sums and products of such stay finite."""


SMALLEST = 1e-9
"""Least number where one above zero is meant: quotients stay finite too."""


def number(name: str, value: float, *, positive: bool = False, least: float = 0.0, most: float = LARGEST) -> float:
    """`value`, finite and from `least` (or, if `positive`, from SMALLEST) to `most`. Raises UsageError that names `name`."""
    low = "above 0" if positive else f"{least:g} or more"
    if not (math.isfinite(value) and (SMALLEST if positive else least) <= value <= most):
        limit = "" if most == LARGEST else f" and at most {most:g}"
        raise UsageError(f"{name} must be a number {low}{limit}, not {value:g}")
    return value


def whole(name: str, value: int, *, least: int, most: int) -> int:
    """`value`, an integer from `least` to `most`. Raises UsageError that names `name`."""
    if not least <= value <= most:
        raise UsageError(f"{name} must be a whole number from {least:,} to {most:,}, not {value:,}")
    return value


def known(what: str, name: str, among: Mapping[str, T]) -> T:
    """The entry called `name`. Raises UsageError that lists the names there are."""
    try:
        return among[name]
    except KeyError:
        raise UsageError(f"no {what} {name!r}", hint=f"known: {', '.join(sorted(among))}") from None
