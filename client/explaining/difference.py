"""Differences: where two texts first differ, and what kind of difference it is. Pure text; nothing here knows of tokens."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain, islice
from typing import Any

from kvcdn.client.explaining.causes import Cause
from kvcdn.client.explaining.volatile import find_volatile, volatile_at

_WORD = re.compile(r"\s+|\w+|[^\w\s]")

_WINDOW_CHARACTERS = 2000
"""Text behind a difference in which its end is looked for: comparing words is quadratic at worst."""

_LINE_CHARACTERS = 20_000
"""Longest line looked at as a whole, for its words or its JSON."""

_LINES = 400
"""Longest list whose order is compared."""

_LABEL_CHARACTERS = 32
"""A label stands directly before its value."""

_QUOTED_CHARACTERS = 80
"""Of a difference that is shown."""

_ADDED_CHARACTERS = 160
"""Longest difference that is called by the volatile piece in it: a line."""

_LABELS: tuple[tuple[Cause, re.Pattern[str]], ...] = tuple(
    (cause, re.compile(rf"(?:^|[\W_])(?:{words})(?:[\"']?\s*[:=#]\s*[\"']?|\s+is\s+)$", re.IGNORECASE))
    for cause, words in (
        (Cause.TIMESTAMP, "date|time|now|today|day|timestamp|as of|updated"),
        (Cause.IDENTIFIER, "id|uuid|session|request|trace|run|conversation|thread|token|nonce|seed|hash|commit|build"),
        (Cause.HOST, "host|hostname|server|node|machine|pod|instance|worker"),
        (Cause.PATH, "path|cwd|dir|directory|folder|workspace"),
        (Cause.USER, "user|username|name|customer|client|account|employee|email|login|tenant"),
        (Cause.COUNTER, "count|counter|number|turn|step|attempt|iteration|remaining|left|used"),
    )
)
"""What stands before a value and tells what the value is."""


@dataclass(frozen=True)
class Difference:
    """The first place where two texts differ: its first different character, and the pieces [start, end) about it in each."""

    cause: Cause
    at: int
    ours: tuple[int, int]
    theirs: tuple[int, int]
    detail: str


def first_difference(ours: str, theirs: str) -> Difference | None:
    """Where and how `ours` first differs from `theirs`; None where they are equal or one begins with the other."""
    common = common_length(ours, theirs)
    if common == min(len(ours), len(theirs)):
        return None
    return _reordered(ours, theirs, common) or _changed(ours, theirs, common)


def common_length(ours: Any, theirs: Any) -> int:
    """How many leading items two sequences share."""
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        # Slices compare at the speed of memory.
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def visible(text: str) -> str:
    """`text` with everything that does not show, or shows like something else, written as an escape."""
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if not character.isprintable():
        return repr(character)[1:-1]
    if character == " " or not (unicodedata.combining(character) or unicodedata.category(character) in _LOOKALIKES):
        return character
    return f"\\u{ord(character):04x}" if ord(character) <= 0xFFFF else f"\\U{ord(character):08x}"  # noqa: PLR2004 - Python's escapes


_LOOKALIKES = ("Zs", "Mn", "Mc", "Me", "Co")
"""Unicode categories of characters that look like a space or change the one before."""


# -- one thing was replaced by another --------------------------------------------------------------------------------


def _changed(ours: str, theirs: str, common: int) -> Difference:
    start = _word_start(ours, theirs, common)
    left, right = (list(_WORD.findall(text[start : start + _WINDOW_CHARACTERS])) for text in (ours, theirs))
    ours_end, theirs_end = start + len("".join(left)), start + len("".join(right))
    for tag, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag != "equal":
            ours_end, theirs_end = start + len("".join(left[:b])), start + len("".join(right[:d]))
            start_ours, start_theirs = start + len("".join(left[:a])), start + len("".join(right[:c]))
            break
    else:
        start_ours = start_theirs = start
    places = (start_ours, ours_end), (start_theirs, theirs_end)
    return _classified(ours, theirs, common, *places)


def _word_start(ours: str, theirs: str, common: int) -> int:
    """Where the word or run of white space begins in which the texts part."""
    start = common
    while start and (_kind(ours[start - 1]) == _kind(ours[common]) or _kind(ours[start - 1]) == _kind(theirs[common])):
        start -= 1
        if common - start >= _WINDOW_CHARACTERS:
            break
    return start


def _kind(character: str) -> str:
    return "space" if character.isspace() else "word" if character.isalnum() or character == "_" else character


def _classified(ours: str, theirs: str, at: int, left: tuple[int, int], right: tuple[int, int]) -> Difference:
    """The kind of a difference between the characters `left` of ours and `right` of theirs."""
    a, b = ours[slice(*left)], theirs[slice(*right)]
    shown = f"{_quoted(a)} here, {_quoted(b)} there"
    spelled = _spelled_alike(a, b)
    if spelled is not None:
        return Difference(spelled, at, left, right, shown)
    found, other = volatile_at(ours, *left), volatile_at(theirs, *right)
    if found and other and found.cause is other.cause:
        detail = f"{found.name}: {_quoted(found.text)} here, {_quoted(other.text)} there"
        return Difference(found.cause, at, (found.start, found.end), (other.start, other.end), detail)
    cause = _labelled(ours[max(left[0] - _LABEL_CHARACTERS, 0) : left[0]], a, b)
    if cause is None and a.isdigit() and b.isdigit():
        cause = Cause.COUNTER
    if cause is None and max(len(a), len(b)) <= _ADDED_CHARACTERS:
        # A line that one side has, or a value that only on one side looks like what it is.
        piece = found or other or next(chain(find_volatile(ours, *left), find_volatile(theirs, *right)), None)
        cause = piece.cause if piece else None
    return Difference(cause or Cause.TEXT, at, left, right, shown)


def _quoted(text: str) -> str:
    return f"'{visible(text[:_QUOTED_CHARACTERS])}'" if text else "nothing"


def _labelled(before: str, a: str, b: str) -> Cause | None:
    """What the words before a short value say that it is."""
    if not a or not b or "\n" in a.strip() or len(a) > _QUOTED_CHARACTERS:
        return None
    return next((cause for cause, label in _LABELS if label.search(before)), None)


def _spelled_alike(a: str, b: str) -> Cause | None:
    if _lines(a) == _lines(b):
        return Cause.LINE_ENDINGS
    if "".join(a.split()) == "".join(b.split()):
        return Cause.WHITESPACE
    if _plain(a) == _plain(b):
        return Cause.UNICODE
    if a.casefold() == b.casefold():
        return Cause.CASE
    return None


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _plain(text: str) -> str:
    """Without what differs between Unicode's normal forms, invisible characters, and typographic quotes and dashes."""
    text = unicodedata.normalize("NFKC", text)
    return "".join(character for character in text.translate(_TYPOGRAPHY) if unicodedata.category(character) != "Cf")


_TYPOGRAPHY = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"})


# -- the same things in another order ---------------------------------------------------------------------------------


def _reordered(ours: str, theirs: str, common: int) -> Difference | None:
    start = ours.rfind("\n", 0, common) + 1
    left, right = (list(islice(_text_lines(text, start), _LINES)) for text in (ours, theirs))
    count = _permuted([line.item for line in left], [line.item for line in right])
    if not count:
        return None
    ends = left[count - 1].end, right[count - 1].end
    cause = _inline_order(left[0].item, right[0].item) if count == 1 else _block_order(ours[start : ends[0]])
    if cause is None:
        return None
    what = {Cause.KEY_ORDER: "the keys of an object", Cause.TOOL_ORDER: "tools", Cause.LIST_ORDER: "items of a list"}[cause]
    where = "a line" if count == 1 else f"{count} lines"
    return Difference(cause, common, (common, ends[0]), (common, ends[1]), f"{what} in another order, within {where}")


@dataclass(frozen=True)
class _Line:
    item: str
    """Without what separates it from the next."""
    end: int


def _text_lines(text: str, start: int) -> Iterator[_Line]:
    """The lines from `start` on that are not blank, up to one that is too long."""
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        if end - start > _LINE_CHARACTERS:
            return
        item = text[start:end].strip().rstrip(",")
        if item:
            yield _Line(item, end)
        start = end


def _permuted(left: list[str], right: list[str]) -> int:
    """The least number of leading items that are the same in another order, and behind which the texts go on alike.

    1 for a line of the same words; 0 where there is none.
    """
    balance: Counter[str] = Counter()
    for count, (a, b) in enumerate(zip(left, right, strict=False), 1):
        for item, sign in ((a, 1), (b, -1)):
            balance[item] += sign
            if not balance[item]:
                del balance[item]
        alike = left[count : count + 1] == right[count : count + 1]
        if not balance and alike:
            return count if count > 1 else 0
        if count == 1 and alike and _same_words(a, b):
            return 1
    return 0


def _same_words(a: str, b: str) -> bool:
    left, right = ([word for word in _WORD.findall(line) if not word.isspace()] for line in (a, b))
    return len(left) == len(right) and left != right and Counter(left) == Counter(right)


def _inline_order(a: str, b: str) -> Cause | None:
    left, right = _json_in(a), _json_in(b)
    if left is None or right is None:
        words = [word for word in _WORD.findall(a) if word[0].isalnum()]
        return Cause.LIST_ORDER if len(words) > 1 else None
    if left == right:
        return Cause.KEY_ORDER
    return Cause.TOOL_ORDER if _describes_tools(a) else Cause.LIST_ORDER


def _json_in(line: str) -> Any:
    """The first JSON object or array in a line, or None."""
    match = re.search(r"[\[{]", line)
    try:
        return json.JSONDecoder().raw_decode(line, match.start())[0] if match else None
    except (ValueError, RecursionError):
        return None


def _block_order(region: str) -> Cause:
    if _describes_tools(region) and re.search(r"[{}]", region):
        return Cause.TOOL_ORDER
    return Cause.KEY_ORDER if re.match(r'\s*["\'][^"\'\n]*["\']\s*:', region) and "{" not in region else Cause.LIST_ORDER


def _describes_tools(text: str) -> bool:
    return re.search(r'"(?:function|parameters|input_schema|inputSchema)"', text) is not None
