"""Volatile text: what programs write into prompts and what is another on every day, call, machine or user.

Patterns find candidates; whether one really changes only a second prompt can tell. All patterns are bounded and linear.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvcdn.client.explaining.causes import Cause

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}"
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?: ?[AaPp][Mm])?(?: ?(?:Z|UTC|GMT)\b| ?[+-]\d{2}:?\d{2})?"

_PATTERNS: tuple[tuple[Cause, str], ...] = (
    (Cause.IDENTIFIER, r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"),
    (Cause.TIMESTAMP, rf"\b\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}(?:(?:T|,? ){_TIME})?"),
    (Cause.TIMESTAMP, rf"\b(?:{_DAY},? )?{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}\b(?:(?:,| at)? {_TIME})?"),
    (Cause.TIMESTAMP, rf"\b(?:{_DAY},? )?\d{{1,2}}(?:st|nd|rd|th)? {_MONTH}\.?,? \d{{4}}\b(?:(?:,| at)? {_TIME})?"),
    (Cause.TIMESTAMP, r"\b\d{1,2}[/.]\d{1,2}[/.]\d{4}\b"),
    (Cause.TIMESTAMP, rf"\b{_TIME}"),
    (Cause.TIMESTAMP, r"\b1[0-9]{9}(?:[0-9]{3}|[0-9]{6}|\.[0-9]{1,9})?\b"),
    (Cause.TIMESTAMP, rf"\b(?:{_DAY}day)\b"),
    (Cause.USER, r"\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,4}\b"),
    (Cause.PATH, r"(?:/home|/Users|/tmp|/var/folders|/root|/private/tmp|/run/user)(?:/[\w.@+-]{1,80}){1,16}"),
    (Cause.PATH, r"\b[A-Z]:\\(?:Users|Temp)(?:\\[\w.@+ -]{1,80}){1,16}"),
    (Cause.HOST, r"\b(?:\d{1,3}\.){3}\d{1,3}(?::\d{2,5})?\b"),
    (Cause.HOST, r"\b[a-z][a-z0-9]{0,40}(?:[.-][a-z0-9]{1,40}){0,10}\.(?:local|internal|lan|localdomain|corp)\b"),
    (Cause.HOST, r"\bip-\d{1,3}(?:-\d{1,3}){3}\b"),
    (Cause.IDENTIFIER, r"\b[A-Za-z]{1,12}[_-](?=[A-Za-z0-9]{0,40}\d)[A-Za-z0-9]{10,64}\b"),
    (Cause.IDENTIFIER, r"\b(?=[0-9a-f]{0,64}\d)(?=[0-9a-f]{0,64}[a-f])[0-9a-f]{12,128}\b"),
    (Cause.IDENTIFIER, r"\b(?=[A-Za-z0-9]{0,64}\d)(?=[A-Za-z0-9]{0,64}[A-Z])(?=[A-Za-z0-9]{0,64}[a-z])[A-Za-z0-9]{20,128}\b"),
    (Cause.IDENTIFIER, r"\b0x[0-9a-fA-F]{6,16}\b"),
)  # fmt: skip

_ANY = re.compile("|".join(f"(?P<p{index}>{pattern})" for index, (_, pattern) in enumerate(_PATTERNS)))

_REACH = 256
"""Characters about a place in which the piece that covers it must lie: longer than any pattern's usual match."""

_NAMES: dict[Cause, str] = {
    Cause.TIMESTAMP: "a date or time",
    Cause.IDENTIFIER: "an identifier",
    Cause.USER: "an e-mail address",
    Cause.PATH: "a path of one machine",
    Cause.HOST: "a machine's name or address",
}


@dataclass(frozen=True)
class VolatileText:
    """A piece of text, characters `start` to `end`, that is likely to change."""

    cause: Cause
    start: int
    end: int
    text: str

    @property
    def name(self) -> str:
        """What it is, in words."""
        return _NAMES[self.cause]


def find_volatile(text: str, start: int = 0, end: int | None = None) -> Iterator[VolatileText]:
    """The volatile pieces that begin between the characters `start` and `end`, in order, none overlapping."""
    stop = len(text) if end is None else end
    for match in _ANY.finditer(text, start, min(stop + _REACH, len(text))):
        if match.start() >= stop:
            break
        cause = _PATTERNS[int((match.lastgroup or "p0")[1:])][0]
        yield VolatileText(cause, match.start(), match.end(), match[0])


def volatile_at(text: str, start: int, end: int) -> VolatileText | None:
    """The volatile piece that covers the characters `start` to `end`, or None."""
    pieces = find_volatile(text, max(start - _REACH, 0), end + 1)
    return next((found for found in pieces if found.start <= start and end <= found.end), None)
