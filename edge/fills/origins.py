"""Origins: the places an edge fills from, in order, each behind a breaker.

An object that one origin lacks, or cannot give, may come from the next. That an object does not exist is only said when every
origin said so; while one of them is down, it is not known.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from typing import TypeVar

from kvcdn.edge.fills.breaker import Breaker
from kvcdn.edge.telemetry.latency import Latency
from kvcdn.edge.telemetry.tracing import Span, SpanKind, Tracing, begin
from kvcdn.errors import IntegrityError, KvcdnError, NotFoundError, RevokedError, UnavailableError
from kvcdn.store import BlobInfo, BlobStore
from kvcdn.stores.http import HttpStore
from kvcdn.stores.span import Pieces, begun

T = TypeVar("T")

log = logging.getLogger("kvcdn.edge.fills.origins")


class Giver(StrEnum):
    """Who gives an object. The values begin the names of what is counted (FORMAT.md section 14)."""

    ORIGIN = "origin"
    TIER = "tier"
    """An edge that is this one's origin."""
    PEER = "peer"
    """An edge of the same site."""


@dataclass(frozen=True)
class Health:
    """How an origin is: whether it counts as down, failures in a row, and seconds until it is tried again."""

    down: bool
    failures: int
    rest_seconds: float


class Origin:
    """One place. Thread-safe."""

    def __init__(self, store: BlobStore, clock: Callable[[], float] = time.monotonic, *, authority: bool = True) -> None:
        """`authority`: whether it counts what it says of objects that it does not give; so it is but for peers."""
        self._store, self._clock, self.authority = store, clock, authority
        self._breaker, self._lock = Breaker(), Lock()
        self.latency = {"get": Latency(), "stat": Latency()}
        """Until the head of an answer was here, by what was asked; that there is no such object is an answer."""
        self.tracing: Tracing | None = None
        self.accused = 0
        """How often something that it sent failed a check."""

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def giver(self) -> Giver:
        """Who it is, as far as its answers have told."""
        if not self.authority:
            return Giver.PEER
        return Giver.TIER if isinstance(self._store, HttpStore) and self._store.is_edge else Giver.ORIGIN

    @property
    def down(self) -> bool:
        return self._breaker.open

    @property
    def resting(self) -> bool:
        """Whether nobody may ask it just now."""
        with self._lock:
            return self._breaker.rest(self._clock()) > 0

    @property
    def health(self) -> Health:
        with self._lock:
            return Health(self._breaker.open, self._breaker.failures, self._breaker.rest(self._clock()))

    def accuse(self, failure: KvcdnError) -> None:
        """Counts it, if `failure` says that what came from here is not what it should be."""
        if isinstance(failure, IntegrityError) and not isinstance(failure, RevokedError):
            with self._lock:
                self.accused += 1

    def stat(self, key: str) -> BlobInfo | None:
        """As a store's. Raises UnavailableError, at once while the origin rests."""
        self._admit()
        span = self._span("stat")
        try:
            with span.within():
                found = self._watched(lambda: self._store.stat(key), self.latency["stat"], told=True)
        except KvcdnError as error:
            span.end(error="" if isinstance(error, NotFoundError) else type(error).__name__)
            raise
        span.end()
        return found

    def stream(self, key: str, start: int = 0) -> Iterator[bytes]:
        """The object's pieces from `start`, `Pieces` where the store told its size.

        It is a generator or the like. Raises, at the call, NotFoundError and UnavailableError.
        """
        self._admit()
        span = self._span("get")
        try:
            with span.within():
                pieces = self._watched(lambda: self._store.stream(key, start), self.latency["get"], told=False)
        except KvcdnError as error:
            span.end(error="" if isinstance(error, NotFoundError) else type(error).__name__)
            raise
        watched = self._pieces(pieces, span)
        return Pieces(watched, pieces.size) if isinstance(pieces, Pieces) else begun(watched)

    def _span(self, operation: str) -> Span:
        kind = "origin" if self.authority else "peer"
        return begin(self.tracing, f"{kind} {operation}", SpanKind.CLIENT, origin=self.url)

    def _admit(self) -> None:
        with self._lock:
            rest = self._breaker.rest(self._clock())
            if not self._breaker.admit(self._clock()):
                raise UnavailableError(f"{self.url} is down and will be tried again in {rest:.0f} s")

    def _watched(self, ask: Callable[[], T], latency: Latency, *, told: bool) -> T:
        """What `ask` gives; `told` where that is the whole answer."""
        began = time.monotonic()
        try:
            answer = ask()
        except UnavailableError:
            self._note(good=False)
            raise
        except KvcdnError:
            latency.add(time.monotonic() - began)
            self._note(good=True)
            raise
        latency.add(time.monotonic() - began)
        if told:
            self._note(good=True)
        return answer

    def _pieces(self, pieces: Iterator[bytes], span: Span) -> Generator[bytes, None, None]:
        """`pieces`, behind a dummy; how they end says how the origin is, for one that breaks every body begins each well."""
        good, size = True, 0
        try:
            yield b""
            for piece in pieces:
                size += len(piece)
                yield piece
        except UnavailableError:
            good = False
            raise
        finally:
            close_pieces(pieces)
            self._note(good=good)
            span.set(bytes=size)
            span.end(error="" if good else UnavailableError.__name__)

    def _note(self, *, good: bool) -> None:
        with self._lock:
            before = self._breaker.open
            if good:
                self._breaker.succeed()
            else:
                self._breaker.fail(self._clock(), random.random())  # noqa: S311 - no secret
            if before != self._breaker.open:
                word = "origin" if self.authority else "peer"
                log.warning("%s %s is %s", word, self.url, "back" if before else "down")


class Origins:
    """All places, in order. Thread-safe."""

    def __init__(self, stores: Sequence[BlobStore]) -> None:
        """Takes one or more."""
        self.each = tuple(Origin(store) for store in stores)

    @property
    def url(self) -> str:
        """For people."""
        return ", then ".join(origin.url for origin in self.each)

    def stat(self, key: str) -> BlobInfo | None:
        """The object's size, from the first that has it; None where no origin does. Raises UnavailableError."""
        failure: UnavailableError | None = None
        for origin in self.each:
            try:
                info = origin.stat(key)
            except UnavailableError as error:
                failure = failure or error
            else:
                if info is not None:
                    return info
        if failure is not None:
            raise failure
        return None


def graver(one: KvcdnError | None, other: KvcdnError) -> KvcdnError:
    """Which of two origins' answers is to be told: that the object is damaged, else that one is down, else that none has it."""
    if one is None:
        return other
    return min(one, other, key=lambda error: next(rank for rank, kind in enumerate(_GRAVITY) if isinstance(error, kind)))


_GRAVITY = (IntegrityError, UnavailableError, NotFoundError, KvcdnError)


def close_pieces(pieces: Iterator[bytes]) -> None:
    """Lets go of a stream."""
    close = getattr(pieces, "close", None)
    if close is not None:
        close()
