"""Byte ranges: what part of an object a Range header asks for (RFC 9110 section 14)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

_SINGLE = re.compile(r"bytes=[ \t,]*(?:([0-9]+)-([0-9]*)|-([0-9]+))[ \t,]*", re.IGNORECASE)
"""Section 14.1.1: an int-range or a suffix-range. The list around it may have empty elements (section 5.6.1.2)."""

MAX_DIGITS = 18
"""No object has 10^18 bytes: a longer number means the same as the largest one, and costs nothing to read."""


class ByteRange(NamedTuple):
    """A part of an object that exists: `length` bytes, 1 or more, from `start`."""

    start: int
    length: int

    def content_range(self, size: int) -> str:
        """The Content-Range of this part of an object of `size` bytes (section 14.4)."""
        return f"bytes {self.start}-{self.start + self.length - 1}/{size}"


class RangeOutcome(Enum):
    """What a request gets that does not get a part."""

    WHOLE = "whole"
    UNSATISFIABLE = "unsatisfiable"


def select_range(values: Sequence[str], size: int) -> ByteRange | RangeOutcome:
    """The part of an object of `size` bytes, 1 or more, that the Range fields `values` select.

    WHOLE where there is no such field and where a server may ignore it (section 14.2): an unknown unit, a malformed or
    repeated field, several ranges, which no client of ours asks for. UNSATISFIABLE is a 416 (section 15.5.17).
    """
    match = _SINGLE.fullmatch(values[0]) if len(values) == 1 else None
    if match is None:
        return RangeOutcome.WHOLE
    first, last, suffix = match.groups()
    if suffix is not None:
        length = min(_number(suffix), size)
        return ByteRange(size - length, length) if length else RangeOutcome.UNSATISFIABLE
    start, end = _number(first), _number(last) if last else size - 1
    if end < start and last:
        return RangeOutcome.WHOLE
    if start >= size:
        return RangeOutcome.UNSATISFIABLE
    return ByteRange(start, min(end, size - 1) - start + 1)


def _number(digits: str) -> int:
    significant = digits.lstrip("0")
    return int(significant or "0") if len(significant) <= MAX_DIGITS else 10**MAX_DIGITS
