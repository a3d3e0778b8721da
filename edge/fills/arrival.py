"""Arrival: one object on its way from the origins to the disk, checked before any byte of it is passed on.

The blocking half of a fill; `fetch` runs it in threads. `begin` reads and checks the envelope, from which the size follows;
then the loop makes room; `land` writes the object and tells how far it is proven. Where an origin breaks off, or sends what is
damaged, the next goes on at the frontier: at the end of the last segment that is proven. Whatever origins send, each byte is
held against the hashes of the one envelope that readers were promised.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from threading import Event

from kvcdn.edge.disk.staging import Staging
from kvcdn.edge.fills.inspection import ObjectHead, inspect_head, read_head
from kvcdn.edge.fills.origins import Giver, Origin, close_pieces, graver
from kvcdn.edge.http.target import ObjectName
from kvcdn.errors import CorruptError, IntegrityError, KvcdnError, NotFoundError, UnavailableError
from kvcdn.signing import TrustList
from kvcdn.stores.span import Pieces, begun

FILL_SECONDS = 60.0
"""What any fill may take."""

SLOWEST_BYTES_PER_SECOND = 256 * 1024
"""What it may take besides: an origin slower than this for a whole object serves nobody better than a prefill."""

RESUMES = 3
"""How often an object is taken up again, beyond what a store does by itself: a fill has moved, so waiting a little may pay."""

RESUME_PAUSE_SECONDS = 0.2
"""First pause before the same origin is asked again; it doubles each time."""

DAMAGES = 2
"""What an origin may send damaged of one object before it is asked no more: once may have been the link's fault."""

Tell = Callable[[int], None]
"""Called, in the thread that fills, with the number of leading bytes that are on disk and proven."""


class Arrival:
    """An object whose envelope has come and was found good."""

    def __init__(
        self, name: ObjectName, sources: Sequence[Origin], origin: Origin, head: ObjectHead, pieces: Iterator[bytes]
    ) -> None:
        self._name, self._sources, self.origin, self._pieces = name, sources, origin, pieces
        self.head = head
        self.deadline = time.monotonic() + FILL_SECONDS + head.size / SLOWEST_BYTES_PER_SECOND
        """On the monotonic clock."""
        self.resumes = 0
        """How often the object was taken up again so far."""
        self._damaged: Counter[Origin] = Counter()
        self._given: Counter[Giver] = Counter()

    @classmethod
    def begin(
        cls, sources: Sequence[Origin], name: ObjectName, trust: TrustList | None, asking: Callable[[Origin], None]
    ) -> Arrival:
        """Asks `sources`, peers before origins, in turn, and the origins once more where one sent what is damaged.

        `asking` is told of each before. Raises NotFoundError, CorruptError, UntrustedError, UnavailableError, as the origins
        say: what peers do not give is nobody's trouble.
        """
        failure: KvcdnError | None = None
        origins = [origin for origin in sources if origin.authority]
        for number, origin in enumerate([*sources, *origins * (DAMAGES - 1)]):
            if number >= len(sources) and not isinstance(failure, CorruptError):
                break
            asking(origin)
            try:
                pieces = origin.stream(name.key)
                try:
                    first = read_head(name, pieces)
                    head = inspect_head(name, first, trust)
                    _require_size(name, head, origin, pieces)
                except BaseException:
                    close_pieces(pieces)
                    raise
            except KvcdnError as error:
                origin.accuse(error)
                failure = graver(failure, error) if origin.authority else failure
                continue
            return cls(name, sources, origin, head, begun(_joined(first, pieces)))
        raise failure or NotFoundError(f"there is no origin for {name}")

    def land(self, staging: Staging, stopping: Event, tell: Tell) -> None:
        """Writes the whole object. Raises CorruptError, NotFoundError, UnavailableError, and OSError of the disk."""
        body, position = self.head.body, 0
        try:
            while True:
                try:
                    for piece in self._pieces:
                        self._check_time(stopping)
                        # Written first: what the check proves of a piece that it refuses in the middle is on disk then.
                        staging.write(piece[: max(self.head.size - position, 0)], position)
                        body.update(piece)
                        position += len(piece)
                        tell(body.verified)
                    body.finish()
                    return
                except KvcdnError as error:
                    self._check_time(stopping)
                    position = self._resume(error)
        finally:
            self.abandon()

    def given(self) -> Counter[Giver]:
        """Bytes that are proven, by who gave them."""
        return self._given + Counter({self.origin.giver: self.head.body.verified - self._given.total()})

    def abandon(self) -> None:
        """Lets go of the origin."""
        close_pieces(self._pieces)

    def _resume(self, failure: KvcdnError) -> int:
        """Goes on at the frontier with the next origin that can; the position there. Raises `failure` where none can."""
        self.abandon()
        self.origin.accuse(failure)
        if isinstance(failure, IntegrityError):
            self._damaged[self.origin] += 1
        place = self._sources.index(self.origin)
        others = (*self._sources[place + 1 :], *self._sources[: place + 1])
        while usable := [origin for origin in others if self._damaged[origin] < DAMAGES]:
            for origin in usable:
                if self.resumes == RESUMES:
                    raise failure
                self.resumes += 1
                if origin is self.origin:
                    time.sleep(RESUME_PAUSE_SECONDS * 2**self.resumes * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
                try:
                    self._pieces = self._reopened(origin)
                except KvcdnError as error:
                    origin.accuse(error)
                    continue
                self._given = self.given()
                self.origin = origin
                self.head.body.restart()
                return self.head.body.verified
        raise failure

    def _reopened(self, origin: Origin) -> Iterator[bytes]:
        """What `origin` has of the object behind the frontier."""
        pieces = origin.stream(self._name.key, self.head.body.verified)
        try:
            _require_size(self._name, self.head, origin, pieces)
        except CorruptError:
            close_pieces(pieces)
            raise
        return pieces

    def _check_time(self, stopping: Event) -> None:
        if stopping.is_set():
            raise UnavailableError(f"{self._name}: the edge is stopping")
        if time.monotonic() > self.deadline:
            raise UnavailableError(f"{self._name}: the origin takes too long to send {self.head.size:,} bytes")


def _require_size(name: ObjectName, head: ObjectHead, origin: Origin, pieces: Iterator[bytes]) -> None:
    """Raises CorruptError where `origin` announces another length than the object has, be it too much or too little.

    Nobody was promised anything yet; and for what is said to come behind an object's end a fill would wait long.
    """
    if isinstance(pieces, Pieces) and pieces.size != head.size:
        raise CorruptError(f"{name}: {origin.url} says that it has {pieces.size:,} bytes, its envelope says {head.size:,}")


def _joined(first: bytes, rest: Iterator[bytes]) -> Generator[bytes, None, None]:
    """`first`, then `rest`, behind a dummy, see `begun`."""
    try:
        yield b""
        yield first
        yield from rest
    finally:
        close_pieces(rest)
