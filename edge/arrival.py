"""Arrival: one object on its way from the origin to the disk, checked byte for byte before anyone sees it.

The blocking half of a fill; `fetch` runs it in threads. `begin` reads and checks the envelope, from which the size follows;
then the loop makes room; `land` writes the object, or leaves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Event

from kvcdn.edge.inspection import ObjectHead, inspect_head, read_head
from kvcdn.edge.storage import Room, Staging
from kvcdn.edge.target import ObjectName
from kvcdn.errors import UnavailableError
from kvcdn.signing import TrustList
from kvcdn.store import BlobStore

FILL_SECONDS = 60.0
"""What any fill may take."""

SLOWEST_BYTES_PER_SECOND = 256 * 1024
"""What it may take besides: an origin slower than this for a whole object serves nobody better than a prefill."""


class Arrival:
    """An object whose envelope has come and was found good."""

    def __init__(self, name: ObjectName, head: ObjectHead, first: bytes, rest: Iterator[bytes], deadline: float) -> None:
        self._name = name
        self.head = head
        self._first = first
        self._rest = rest
        self._deadline = deadline + head.size / SLOWEST_BYTES_PER_SECOND

    @classmethod
    def begin(cls, store: BlobStore, name: ObjectName, trust: TrustList | None) -> Arrival:
        """Asks the origin. Raises NotFoundError, CorruptError, UntrustedError, UnavailableError."""
        deadline = time.monotonic() + FILL_SECONDS
        pieces = store.stream(name.key)
        try:
            first = read_head(name, pieces)
            head = inspect_head(name, first, trust)
        except BaseException:
            _close(pieces)
            raise
        return cls(name, head, first, pieces, deadline)

    def land(self, room: Room | None, stopping: Event) -> int:
        """Writes the object into `room`, or without one into a temporary file; the file's descriptor, which the caller closes.

        Raises CorruptError, UnavailableError, and OSError for what the disk refuses; nothing is left on disk then.
        """
        try:
            staging = Staging(room)
            try:
                self._take(self._first, staging)
                for piece in self._rest:
                    self._check_time(stopping)
                    self._take(piece, staging)
                self.head.body.finish()
                return staging.commit()
            except BaseException:
                staging.discard()
                raise
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Lets go of the origin."""
        _close(self._rest)

    def _take(self, piece: bytes, staging: Staging) -> None:
        self.head.body.update(piece)
        staging.write(piece)

    def _check_time(self, stopping: Event) -> None:
        if stopping.is_set():
            raise UnavailableError(f"{self._name}: the edge is stopping")
        if time.monotonic() > self._deadline:
            raise UnavailableError(f"{self._name}: the origin takes too long to send {self.head.size:,} bytes")


def _close(pieces: Iterator[bytes]) -> None:
    close = getattr(pieces, "close", None)
    if close is not None:
        close()
