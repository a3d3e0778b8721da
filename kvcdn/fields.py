"""Typed reading of hostile JSON objects: every field asked for once, of the type and range given, and none left over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from kvcdn.digest import FixedBytes
from kvcdn.errors import CorruptError

F = TypeVar("F", bound=FixedBytes)


class Fields:
    """A JSON object being read. Every accessor raises CorruptError that names `what` and the field."""

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise CorruptError(f"{what}: expected an object")
        self._left: dict[str, Any] = dict(value)
        self._what = what

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that nobody has asked for yet, sorted."""
        return tuple(sorted(self._left))

    def _take(self, name: str) -> Any:
        try:
            return self._left.pop(name)
        except KeyError:
            raise CorruptError(f"{self._what}: field {name!r} is missing") from None

    def integer(self, name: str, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        value = self._take(name)
        if type(value) is not int or not low <= value <= high:
            raise CorruptError(f"{self._what}: field {name!r} must be an integer from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """As `integer`, or None where the field is null."""
        if self._left.get(name, 0) is None:
            self._take(name)
            return None
        return self.integer(name, low, high)

    def string(self, name: str, longest: int) -> str:
        """A string of at most `longest` characters."""
        value = self._take(name)
        if not isinstance(value, str) or len(value) > longest:
            raise CorruptError(f"{self._what}: field {name!r} must be a string of at most {longest} characters")
        return value

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        """One of the `allowed` strings."""
        value = self._take(name)
        if not isinstance(value, str) or value not in allowed:
            shown = repr(value)[:40]
            raise CorruptError(f"{self._what}: field {name!r} is {shown}; this version knows {', '.join(allowed)}")
        return value

    def fixed(self, name: str, kind: type[F]) -> F:
        """A digest or tag in its text form."""
        text = self._take(name)
        value = kind.read(text)
        if value is None:
            raise CorruptError(f"{self._what}: field {name!r} must be {2 * kind.SIZE} lowercase hexadecimal digits")
        return value

    def array(self, name: str, least: int, most: int) -> list[Any]:
        """An array of `least` to `most` items."""
        value = self._take(name)
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise CorruptError(f"{self._what}: field {name!r} must be an array of {least} to {most} items")
        return value

    def any(self, name: str) -> Any:
        """The field as it is, for a reader of its own."""
        return self._take(name)

    def done(self) -> None:
        """Refuses what nobody asked for: an unknown field is a version we do not know, or an attack."""
        if self._left:
            raise CorruptError(f"{self._what}: unknown field {min(self._left)[:40]!r}")

    @staticmethod
    def integers(values: Sequence[Any], what: str, low: int, high: int) -> list[int]:
        """`values`, each an integer (not a bool) from `low` to `high`."""
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise CorruptError(f"{what} must be an integer from {low} to {high}")
        return list(values)
