"""Conditional requests: preconditions on the strong entity tag (RFC 9110 section 13). Nothing here knows dates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

_ENTITY_TAG = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\uffff]*)"')
_TAG_LIST = re.compile(rf"[ \t,]*(?:{_ENTITY_TAG.pattern}[ \t]*(?:,[ \t,]*|$))*")


class Precondition(Enum):
    """What the preconditions of a GET or HEAD lead to."""

    PROCEED = 200
    NOT_MODIFIED = 304
    FAILED = 412


def evaluate(if_match: Sequence[str], if_none_match: Sequence[str], etag: str) -> Precondition:
    """Judges both fields, each as its lines came, in the order of section 13.2.2, against the object's tag (unquoted).

    There is no Last-Modified, so the fields that hold dates do not apply. A field that cannot be read matches nothing.
    """
    if if_match and not _matches(if_match, etag, weak=False):
        return Precondition.FAILED
    if if_none_match and _matches(if_none_match, etag, weak=True):
        return Precondition.NOT_MODIFIED
    return Precondition.PROCEED


def range_applies(if_range: Sequence[str], etag: str) -> bool:
    """Whether a Range field counts: without If-Range, or where it holds our tag, strongly compared (section 13.1.5)."""
    return not if_range or list(if_range) == [f'"{etag}"']


def _matches(values: Sequence[str], etag: str, *, weak: bool) -> bool:
    joined = ",".join(values).strip()
    if joined == "*":
        return True
    if not _TAG_LIST.fullmatch(joined):
        return False
    return any(tag == etag and (weak or not mark) for mark, tag in _ENTITY_TAG.findall(joined))
