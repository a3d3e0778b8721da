"""A source: where blocks come from, as those see it who fetch them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from kvcdn.client.network.link import LinkEstimate
from kvcdn.client.network.tally import Tally
from kvcdn.digest import Digest, ModelTag

RANGE_BYTES = 1 << 20
"""Piece of a block read in ranges from an edge: a request costs some 0.4 ms, so smaller pieces would be mostly requests."""


class ObjectReader(Protocol):
    """One object, front to back. Used by one thread at a time, but for `abort`."""

    def read_exact(self, count: int, ahead: int = RANGE_BYTES) -> memoryview:
        """The next `count` bytes; valid until the next call. Raises CorruptError where the object ends before.

        `ahead` bytes from here on will be asked for without a gap: a hint of how much to read at once.
        """

    def skip(self, count: int) -> int:
        """Passes over the next `count` bytes and tells how many of them were received nevertheless."""

    def at_end(self) -> bool:
        """False where more bytes are known to follow."""

    def abort(self) -> None:
        """From any thread: a read that waits, and every later one, raises UnavailableError at once."""

    def close(self) -> None:
        """Lets go of what the reader holds; may be called twice."""


class Source(Protocol):
    """Where blocks come from. Thread-safe. Failures are NotFoundError, UnavailableError or CorruptError."""

    @property
    def url(self) -> str: ...

    def match(self, tag: ModelTag, addresses: Sequence[Digest]) -> int:
        """How many of the block `addresses`, a chain, exist from its front."""

    def open(self, key: str, *, ranged: bool) -> ObjectReader:
        """A reader of the object `key`; `ranged` holds no connection between reads."""

    def read(self, key: str, limit: int) -> bytes:
        """The whole object `key`, of at most `limit` bytes."""

    def link(self) -> LinkEstimate:
        """How soon answers come from here and how fast bytes do, as measured so far."""

    def session(self, limit_s: float | None = None, tally: Tally | None = None) -> Session:
        """This source for one prompt. It bears with failures as long as a prompt should, and ends within `limit_s` seconds.

        What comes is counted in `tally`; a session's own sessions are parts of it, and count there.
        """

    def close(self) -> None: ...


class Session(Source, Protocol):
    """A source for one prompt, with its own budget of time and retries. Closing it leaves the source open."""

    def failing_s(self) -> float:
        """For how many seconds requests have been failing, and nothing has come; 0 while all is well."""

    def hurry(self, failing_s: float) -> None:
        """From now on requests that have failed for so long are tried again only where another source is left."""

    @property
    def cut_short(self) -> str:
        """Why a match may have said less than is published; empty where none has."""

    def abort(self) -> None:
        """From any thread: whatever waits for this prompt, and every later call, raises UnavailableError at once."""


class OpenSource(ABC):
    """A source, of which each call that is not of a prompt is a session of its own."""

    @abstractmethod
    def session(self, limit_s: float | None = None, tally: Tally | None = None) -> Session:
        """As of every source."""

    def match(self, tag: ModelTag, addresses: Sequence[Digest]) -> int:
        return self.session().match(tag, addresses)

    def open(self, key: str, *, ranged: bool) -> ObjectReader:
        return self.session().open(key, ranged=ranged)

    def read(self, key: str, limit: int) -> bytes:
        return self.session().read(key, limit)


def probe_lead(keys: Sequence[str], exists: Callable[[str], bool]) -> int:
    """How many of `keys` lead the chain, by bisection: where one exists, so do those before it (FORMAT.md section 7)."""
    low, high = 0, len(keys)
    while low < high:
        # The last key first: a published document is the common case, and one probe then tells.
        middle = high if low == 0 and high == len(keys) else (low + high + 1) // 2
        if exists(keys[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low
