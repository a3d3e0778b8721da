"""A fallback: edges first, and the origin itself for what no edge delivers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from kvcdn.client.network.link import LinkEstimate
from kvcdn.client.network.patience import StoppedError
from kvcdn.client.network.tally import Tally
from kvcdn.client.sources.source import RANGE_BYTES, ObjectReader, OpenSource, Session, Source
from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import UnavailableError

_Found = TypeVar("_Found")


class FallbackSource(OpenSource):
    """Objects from `edges`, and from `origin` where these are not available. What an edge says is missing is missing."""

    def __init__(self, edges: Source, origin: Source) -> None:
        self._edges, self._origin = edges, origin
        self.url = f"{edges.url},{origin.url}"

    def session(self, limit_s: float | None = None, tally: Tally | None = None) -> Session:
        return _FallbackSession(self.url, self._edges.session(limit_s, tally), self._origin.session(limit_s, tally))

    def link(self) -> LinkEstimate:
        """Of the edges; of the origin while nothing is known of them."""
        found = self._edges.link()
        return found if found.samples else self._origin.link()

    def close(self) -> None:
        self._edges.close()
        self._origin.close()


class _FallbackSession:
    """Edges and an origin for one prompt. Edges that have failed it are not asked again."""

    def __init__(self, url: str, edges: Session, origin: Session) -> None:
        self._edges, self._origin = edges, origin
        self._failed = self._asked = False
        self.url = url

    def match(self, tag: ModelTag, addresses: Sequence[Digest]) -> int:
        matched = self._first(lambda source: source.match(tag, addresses))
        if self._failed or not self._edges.cut_short:
            return matched
        # The edges cannot ask the origin. It may be for us that it is there.
        with suppress(UnavailableError):
            matched = max(matched, self._origin.match(tag, addresses))
            self._asked = True
        return matched

    @property
    def cut_short(self) -> str:
        return "" if self._failed or self._asked else self._edges.cut_short

    def read(self, key: str, limit: int) -> bytes:
        return self._first(lambda source: source.read(key, limit))

    def open(self, key: str, *, ranged: bool) -> ObjectReader:
        if self._failed:
            return self._origin.open(key, ranged=ranged)
        return _FallbackReader(self._first(lambda source: source.open(key, ranged=ranged)), lambda: self._give_up(key))

    def _first(self, use: Callable[[Session], _Found]) -> _Found:
        if not self._failed:
            try:
                return use(self._edges)
            except StoppedError:
                raise
            except UnavailableError:
                self._failed = True
        return use(self._origin)

    def _give_up(self, key: str) -> ObjectReader:
        self._failed = True
        return self._origin.open(key, ranged=True)

    def link(self) -> LinkEstimate:
        return (self._origin if self._failed else self._edges).link()

    def session(self, limit_s: float | None = None, tally: Tally | None = None) -> Session:
        return _FallbackSession(self.url, self._edges.session(limit_s, tally), self._origin.session(limit_s, tally))

    def failing_s(self) -> float:
        return (self._origin if self._failed else self._edges).failing_s()

    def hurry(self, failing_s: float) -> None:
        self._edges.hurry(failing_s)
        self._origin.hurry(failing_s)

    def abort(self) -> None:
        self._edges.abort()
        self._origin.abort()

    def close(self) -> None:
        self._edges.close()
        self._origin.close()


class _FallbackReader:
    """An object from an edge, and from where that failed on from the origin.

    Should that hold another object under this name, the hashes of what follows do not match: an error, no wrong bytes.
    """

    def __init__(self, reader: ObjectReader, give_up: Callable[[], ObjectReader]) -> None:
        self._reader = reader
        self._give_up: Callable[[], ObjectReader] | None = give_up
        self._position = 0
        self._aborted = False

    def read_exact(self, count: int, ahead: int = RANGE_BYTES) -> memoryview:
        view = self._try(lambda: self._reader.read_exact(count, ahead))
        self._position += count
        return view

    def skip(self, count: int) -> int:
        received = self._try(lambda: self._reader.skip(count))
        self._position += count
        return received

    def _try(self, step: Callable[[], _Found]) -> _Found:
        try:
            return step()
        except StoppedError:
            raise
        except UnavailableError:
            give_up, self._give_up = self._give_up, None
            if give_up is None:
                raise
        self._reader.close()
        self._reader = give_up()
        if self._aborted:
            self._reader.abort()
        self._reader.skip(self._position)
        return step()

    def at_end(self) -> bool:
        return self._reader.at_end()

    def abort(self) -> None:
        self._aborted = True
        self._reader.abort()

    def close(self) -> None:
        self._reader.close()
