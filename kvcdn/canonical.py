"""Canonical JSON (FORMAT.md section 1): one byte form per value, and readers that refuse every other."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from kvcdn.errors import CorruptError

MAX_DEPTH = 16
"""Deepest nesting a reader accepts; our deepest object has 6 levels."""

MAX_INTEGER = 2**53 - 1
"""Largest magnitude of an integer: what every JSON reader keeps exactly."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def encode(value: Any) -> bytes:
    """The canonical bytes of `value`. Raises ValueError or TypeError, programming errors, for what the form cannot hold."""
    _check(value, MAX_DEPTH)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def decode(data: bytes, what: str) -> Any:
    """The value of canonical bytes; `what` names the object in errors. Raises CorruptError for anything else."""
    try:
        value = json.loads(data.decode("ascii"), parse_float=_refuse_number, parse_constant=_refuse_number)
        canonical = encode(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptError(f"{what}: not canonical JSON ({error})") from None
    if canonical != data:
        raise CorruptError(f"{what}: JSON is valid but not in canonical form")
    return value


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"number {text[:40]!r} is not an integer")


def _check(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError("object keys must be strings")
            _check_scalar(key)
            _check(item, depth - 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check(item, depth - 1)
    else:
        _check_scalar(value)


def _check_scalar(value: Any) -> None:
    if isinstance(value, str):
        # Half of a surrogate pair is no character: readers disagree about it, and no terminal or log can print it.
        if not value.isascii() and _SURROGATE.search(value):
            raise ValueError("string holds half of a surrogate pair")
    elif isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > MAX_INTEGER:
            raise ValueError("integer out of range")
    elif not (value is None or isinstance(value, bool)):
        raise TypeError(f"canonical JSON cannot hold {type(value).__name__}")
