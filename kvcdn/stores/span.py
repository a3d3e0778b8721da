"""A span: which bytes of an object a reader asked for, and the iterators that hand them out."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from kvcdn.errors import UsageError


@dataclass(frozen=True)
class Span:
    """The bytes from `start` up to `stop`, or to the object's end where `stop` is None."""

    start: int
    stop: int | None

    @classmethod
    def of(cls, start: int, length: int | None) -> Span:
        """Raises UsageError for a negative start or length."""
        if start < 0 or (length is not None and length < 0):
            raise UsageError(f"a range cannot start at {start} and have length {length}: neither may be negative")
        return cls(start, None if length is None else start + length)

    @property
    def empty(self) -> bool:
        """Whether it holds no byte of any object."""
        return self.stop is not None and self.stop <= self.start

    def clip(self, size: int) -> tuple[int, int]:
        """Start and stop within an object of `size` bytes; equal where nothing of it is asked for."""
        start = min(self.start, size)
        stop = size if self.stop is None else min(self.stop, size)
        return start, max(start, stop)

    @property
    def header(self) -> str:
        """The value of the request header Range (RFC 9110 section 14.1.2); not for an empty span."""
        return f"bytes={self.start}-" if self.stop is None else f"bytes={self.start}-{self.stop - 1}"


def nothing() -> Generator[bytes, None, None]:
    """The stream of an empty span; can be closed like any other."""
    yield from ()


class Pieces(Iterator[bytes]):
    """The bytes of a span, and how long the store says that the whole object is."""

    def __init__(self, pieces: Generator[bytes, None, None], size: int) -> None:
        """`pieces` begin with a dummy, see `begun`."""
        self._pieces, self.size = begun(pieces), size

    def __next__(self) -> bytes:
        return next(self._pieces)

    def close(self) -> None:
        """Lets go of the object, as a generator does."""
        self._pieces.close()


def begun(pieces: Generator[bytes, None, None]) -> Generator[bytes, None, None]:
    """`pieces` after its first yield, which is a dummy: a generator runs its `finally` at close only once it has begun."""
    next(pieces)
    return pieces
