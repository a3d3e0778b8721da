"""Canonical JSON (FORMAT.md section 1): one byte form per value, and readers that refuse every other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from kvcdn.errors import CorruptError

MAX_DEPTH = 16
"""Deepest nesting a reader accepts; our deepest object has 6 levels."""

MAX_INTEGER = 2**53 - 1
"""Largest magnitude of an integer: what every JSON reader keeps exactly."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_LONG_NUMBER = re.compile(b"[0-9]{16}")
"""What MAX_INTEGER may be exceeded by."""

_CONTAINERS = (dict, list, tuple)
_PLAIN = {str, int, bool, type(None), *_CONTAINERS}

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def encode(value: Any) -> bytes:
    """The canonical bytes of `value`. Raises ValueError or TypeError, programming errors, for what the form cannot hold."""
    for items in _levels(value):
        _check_scalars(items)
    return encode_checked(value)


def encode_checked(value: Any) -> bytes:
    """As `encode`, for values known to hold only what canonical JSON can: those that came from `decode`."""
    return _ENCODER.encode(value).encode("ascii")


def decode(data: bytes, what: str) -> Any:
    """The value of canonical bytes; `what` names the object in errors. Raises CorruptError for anything else."""
    try:
        text = data.decode("ascii")
        plain = _is_plain(data)
        bounded = None if plain else _bounded_int
        value = json.loads(text, parse_int=bounded, parse_float=_refuse_number, parse_constant=_refuse_number)
        if not plain:
            for items in _levels(value):
                _check_scalars(items)
        canonical = encode_checked(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptError(f"{what}: not canonical JSON ({error})") from None
    if canonical != data:
        raise CorruptError(f"{what}: JSON is valid but not in canonical form")
    return value


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"number {text[:40]!r} is not an integer")


def _bounded_int(text: str) -> int:
    value = int(text)
    if not -MAX_INTEGER <= value <= MAX_INTEGER:
        raise ValueError("integer out of range")
    return value


def _is_plain(data: bytes) -> bool:
    """Whether data, if it is JSON at all, shows by its bytes alone that it keeps the limits.

    Headers are read on the way to the first byte and to the first token: this takes half of looking at all their values.
    """
    if b"\\" in data:
        return False
    outside = b"".join(data.split(b'"')[::2])
    if _LONG_NUMBER.search(outside):
        return False
    nesting = outside.translate(_BRACKETS, _NO_BRACKETS)
    for _ in range(MAX_DEPTH - 1):
        nesting = nesting.replace(b"[]", b"")
    return not nesting


def _levels(value: Any) -> Iterator[list[Any]]:
    """Everything in `value`, level by level. Raises ValueError for what lies below MAX_DEPTH.

    Without recursion: headers are read on the way to the first token, and hold thousands of values.
    """
    containers = [value]
    for _ in range(MAX_DEPTH - 1):
        items: list[Any] = []
        for container in containers:
            if isinstance(container, dict):
                items += container
                items += container.values()
            elif isinstance(container, list | tuple):
                items += container
            else:
                items.append(container)
        containers = [item for item in items if isinstance(item, _CONTAINERS)]
        yield items
        if not containers:
            return
    if any(containers):
        raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _check_scalars(items: Sequence[Any]) -> None:
    """Raises ValueError or TypeError where one of `items` is not a container and not what the form can hold."""
    # All at once: a block's header has thousands, of plain types and sound.
    kinds = set(map(type, items))
    numbers = [item for item in items if type(item) is int]
    text = "".join([item for item in items if type(item) is str])
    plain = kinds <= _PLAIN and text.isascii()
    if not plain or (numbers and not -MAX_INTEGER <= min(numbers) <= max(numbers) <= MAX_INTEGER):
        for item in items:
            _check_scalar(item)


def _check_scalar(value: Any) -> None:
    if isinstance(value, str):
        # Half of a surrogate pair is no character: readers disagree about it, and no terminal or log can print it.
        if not value.isascii() and _SURROGATE.search(value):
            raise ValueError("string holds half of a surrogate pair")
    elif isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > MAX_INTEGER:
            raise ValueError("integer out of range")
    elif not (value is None or isinstance(value, (bool, *_CONTAINERS))):
        raise TypeError(f"canonical JSON cannot hold {type(value).__name__}")
