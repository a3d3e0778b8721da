"""A transfer: a span of one object, received from whichever edge, and taken up again where it broke off.

Blocks never change, so that a rest may come from another edge; that it is the rest of the same object its entity tag and
length say. Whoever takes up checks status 206, entity tag, Content-Range and length before a byte is used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvcdn.client.network.connections import CONNECT_SECONDS
from kvcdn.client.network.edges import Edge, EdgeGroup
from kvcdn.client.network.exchange import Exchange, unexpected
from kvcdn.client.network.patience import Patience
from kvcdn.client.network.tries import Tries
from kvcdn.client.network.wire import BrokenError
from kvcdn.errors import NotFoundError, UnavailableError

MAX_OBJECT_BYTES = 1 << 36
"""FORMAT.md section 5."""

PROGRESS_BYTES = 64 * 1024
"""A connection that brought so much before it broke was worth its request: what failed before it is forgotten."""

_CONTENT_RANGE = re.compile(r"bytes (\d{1,12})-(\d{1,12})/(\d{1,12})", re.IGNORECASE)


@dataclass
class Identity:
    """What is known of an object from the first answer about it."""

    etag: str = ""
    """A strong entity tag; empty where none was given."""
    size: int | None = None

    def settle(self, etag: str, size: int, where: str) -> None:
        """Takes over what the first answer says. Raises BrokenError where a later one speaks of another object."""
        strong = etag if etag.startswith('"') else ""
        if self.size is None:
            self.etag, self.size = strong, size
        elif size != self.size or strong != self.etag or not strong:
            raise BrokenError(f"{where} has another object under this name than before, or does not say which", elsewhere=True)


class Transfer:
    """Sends its request at once; the answer is awaited at the first read. Used by one thread at a time."""

    def __init__(
        self, group: EdgeGroup, patience: Patience, key: str, known: Identity, *, start: int = 0, stop: int | None = None
    ) -> None:
        """The bytes `start` to `stop` of the object `key`, or all of it without `stop`."""
        self._group, self._patience, self._key = group, patience, key
        self._known = known
        self._stop = stop
        self._position = start
        self._tries = Tries(group, patience, key)
        self._exchange: Exchange | None = None
        self._accepted = False
        """Whether the exchange's body is known to go on at our position."""
        self._end: int | None = None
        """Where the last byte asked for lies, once it is known."""
        self._trouble: UnavailableError | None = None
        self._ask()

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for, as far as it exists, was read."""
        return self._end is not None and self._position >= self._end

    def await_head(self) -> None:
        """Returns when the size of the object is known. Raises UnavailableError or NotFoundError."""
        while self._end is None:
            began = self._patience.clock()
            try:
                self._body()
            except UnavailableError as error:
                self._recover(error, began)

    def read_into(self, view: memoryview, least: int | None = None) -> int:
        """Fills `view`, or `least` bytes of it and what else has come; less only where the span or the object ends.

        Raises UnavailableError or NotFoundError.
        """
        done, enough = 0, len(view) if least is None else least
        while done < enough and not self.complete:
            began = self._patience.clock()
            try:
                body = self._body()
                count = 0 if self.complete else body.receive(view[done:])
            except UnavailableError as error:
                self._recover(error, began)
                continue
            done += count
            self._position += count
            self._patience.budget.got_on()
        return done

    def close(self) -> None:
        """Lets go of the connection; may be called twice."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    # -- asking -------------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Sends the request for what is left. What fails is dealt with at the next read: others had better be asked first."""
        self._edge, self._asked, self._asked_from = self._tries.edge, self._patience.clock(), self._position
        self._accepted = False
        try:
            self._exchange = self._send(self._edge)
        except UnavailableError as error:
            self._patience.budget.lose(self._asked)
            self._patience.budget.failed()
            self._trouble = error

    def _send(self, edge: Edge, *, fresh: bool = False, connect_s: float = CONNECT_SECONDS) -> Exchange:
        headers = {}
        if self._position or self._stop is not None:
            headers["Range"] = f"bytes={self._position}-{'' if self._stop is None else self._stop - 1}"
        edge.health.asked()
        path = f"/{self._key}"
        return Exchange(edge.pool, self._patience, "GET", path, headers=headers, fresh=fresh, connect_s=connect_s)

    def _body(self) -> Exchange:
        """The exchange whose body goes on at our position. Raises UnavailableError or NotFoundError."""
        self._patience.check()
        if self._trouble is not None or self._exchange is None:
            trouble, self._trouble = self._trouble, None
            raise trouble or UnavailableError(f"{self._key} was closed")
        if not self._accepted:
            exchange, self._exchange = self._exchange, None
            self._exchange = self._group.answered(exchange, self._key, self._patience, self._send)
            self._edge = self._group.edge_of(self._exchange)
            self._accept(self._exchange)
            self._accepted = True
            self._exchange.wire.choice = self._group.has_choice(self._edge)
        return self._exchange

    def _recover(self, error: UnavailableError, since: float) -> None:
        """Lets go of what failed and asks for the rest, where that is right. Raises `error` where it is final.

        The last wait, in vain, began at `since`: what a reader did before it is no time lost.
        """
        if self._position - self._asked_from >= PROGRESS_BYTES:
            self._tries.got_on()
        self.close()
        self._tries.failed(self._edge, error, self._asked, since)
        self._ask()

    # -- what an answer says ------------------------------------------------------------------------------------------------

    def _accept(self, exchange: Exchange) -> None:
        """Checks that the body is what was asked for (RFC 9110 section 15.3.7). Raises UnavailableError or NotFoundError."""
        where = f"{exchange.pool.url}: {self._key}"
        ranged = bool(self._position or self._stop is not None)
        if exchange.status == 416 and self._end is None and ranged:  # noqa: PLR2004 - HTTP's own number
            self._end = self._position
            exchange.close()
            return
        if exchange.status in (404, 410):
            raise NotFoundError(f"{exchange.pool.url} has no {self._key}")
        if exchange.status != (206 if ranged else 200):
            if ranged and exchange.status == 200:  # noqa: PLR2004 - HTTP's own number
                raise BrokenError(f"{where}: the server ignores ranges", elsewhere=True)
            raise unexpected(exchange, self._key)
        self._edge.health.worked()
        if exchange.header("Content-Encoding").lower() not in ("", "identity"):
            raise BrokenError(f"{where}: the server sent an encoding that was not asked for", elsewhere=True)
        size = self._announced(exchange, where) if ranged else exchange.left
        if size is None or size > MAX_OBJECT_BYTES:
            raise BrokenError(f"{where}: the answer does not say how long the object is", elsewhere=True)
        self._known.settle(exchange.header("ETag"), size, where)
        self._end = size if self._stop is None else min(self._stop, size)

    def _announced(self, exchange: Exchange, where: str) -> int:
        """The size of the whole object, by a Content-Range that says what was asked for."""
        found = _CONTENT_RANGE.fullmatch(exchange.header("Content-Range").strip())
        first, last, size = (int(number) for number in found.groups()) if found else (-1, -1, -1)
        wanted = size if self._stop is None else min(self._stop, size)
        if first != self._position or last + 1 != wanted or exchange.left != wanted - self._position:
            raise BrokenError(f"{where}: the answer holds another range than was asked for", elsewhere=True)
        return size
