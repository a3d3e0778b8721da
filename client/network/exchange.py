"""An exchange: one request, sent at once, and its answer, awaited at first use."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Self

from kvcdn.client.network.connections import CONNECT_SECONDS, ConnectionPool
from kvcdn.client.network.patience import Patience
from kvcdn.client.network.wire import BrokenError, OriginDownError
from kvcdn.errors import CorruptError, UnavailableError
from kvcdn.stores.http import retry_after

_WAITED_SHARE = 0.2
"""An answer that was waited for less than this part of the time since its request was there before anybody looked."""

_ORIGIN_UNAVAILABLE = "detail=origin-unavailable"

_NO_FIELDS: Mapping[str, str] = {}


class Exchange:
    """A context manager: leaving it returns the connection, if the answer was read to its end, and closes it otherwise."""

    def __init__(  # noqa: PLR0913 - by name
        self,
        pool: ConnectionPool,
        patience: Patience,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] = _NO_FIELDS,
        fresh: bool = False,
        connect_s: float = CONNECT_SECONDS,
    ) -> None:
        """Sends the request; on a new connection if `fresh`, made within `connect_s` seconds if it has to be.

        Raises UnavailableError; BrokenError where a retry may help.
        """
        self.pool = pool
        self._patience = patience
        self._method, self._what = method, path
        tally, headers = patience.budget.tally, {**patience.budget.trail.headers, **headers}
        self._request = pool.request(method, path, body, headers if tally is None else {**headers, **tally.fields})
        self._tally = tally if method == "GET" else None
        if self._tally is not None:
            self._tally.asked_edge()
        self._response: http.client.HTTPResponse | None = None
        self._left: int | None = None
        self.looked: float | None = None
        """When somebody began to wait for the answer."""
        self.wire = pool.take(patience, fresh=fresh, within_s=connect_s)
        try:
            self._send()
        except BrokenError:
            if not self.wire.was_stale:
                self.wire.close()
                raise
            self._send_again()
        except BaseException:
            self.wire.close()
            raise

    def _send(self) -> None:
        self.wire.write_all(self._request)
        self.sent = self._patience.clock()
        self.due = self.wire.due = self.sent + self._patience.silence()
        """When the answer's head must be there."""
        self.seen = self.pool.meters[-1].total_bytes
        """Bytes that had come by then, from here and where else the group reads."""

    def _send_again(self) -> None:
        """On a new connection, since the old one was stale."""
        self.wire.close()
        self.wire = self.pool.take(self._patience, fresh=True)
        try:
            self._send()
        except BaseException:
            self.wire.close()
            raise

    # -- the answer's head --------------------------------------------------------------------------------------------------

    def head(self) -> http.client.HTTPResponse:
        """Waits for the answer's head. Raises BrokenError or StoppedError."""
        if self._response is None:
            self.look()
            try:
                self._response = self._parse()
            except BrokenError:
                if not self.wire.was_stale:
                    raise
                self._send_again()
                self._response = self._parse()
            now = self._patience.clock()
            if now - (self.looked or now) > _WAITED_SHARE * (now - self.sent):
                self.pool.link.answered(now - self.sent)
            self._left = self._response.length
            self.wire.due = None
        return self._response

    def look(self) -> None:
        """Somebody begins to wait for the answer."""
        self.looked = self.looked or self._patience.clock()

    def _parse(self) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(self.wire, method=self._method)  # type: ignore[arg-type] # makes a file, is all
        try:
            response.begin()
        except (http.client.HTTPException, ValueError) as error:
            if not self.wire.at_end:
                kind = type(error).__name__
                raise BrokenError(f"{self.pool.url} does not answer in HTTP ({kind})", elsewhere=True) from None
        if self.wire.at_end:
            # http.client takes a head that was cut off for a short one.
            raise BrokenError(f"{self.pool.url} broke off before its answer began")
        return response

    @property
    def status(self) -> int:
        return self.head().status

    def header(self, name: str) -> str:
        return self.head().getheader(name, "")

    @property
    def left(self) -> int | None:
        """Bytes of the body that were announced and not read; None where no length was announced."""
        self.head()
        return self._left

    # -- its body -----------------------------------------------------------------------------------------------------------

    def receive(self, view: memoryview) -> int:
        """What has come of a body of known length, waited for; 0 at its end. Raises BrokenError or StoppedError."""
        self.head()
        view = view[: self._left]
        if not len(view):
            return 0
        count = 0
        for meter in self.pool.meters:
            meter.waiting()
        try:
            count = self.wire.file.readinto1(view)
        finally:
            for meter in self.pool.meters:
                meter.received(count)
            if self._tally is not None:
                self._tally.from_edge(count)
        if not count:
            raise BrokenError(f"{self.pool.url} ended its answer {self._left:,} bytes early")
        self._left = (self._left or 0) - count
        return count

    def read_all(self, limit: int) -> bytes:
        """The whole body, of at most `limit` bytes. Raises CorruptError for a larger one, else as `receive`."""
        response = self.head()
        if self._left is None:
            return self._read_unannounced(response, limit)
        if self._left > limit:
            raise self._too_large(limit)
        data, done = bytearray(self._left), 0
        while done < len(data):
            done += self.receive(memoryview(data)[done:])
        return bytes(data)

    def _too_large(self, limit: int) -> CorruptError:
        return CorruptError(f"{self.pool.url} sends more than {limit:,} bytes for {self._what}")

    def _read_unannounced(self, response: http.client.HTTPResponse, limit: int) -> bytes:
        """A body in chunks, or up to the connection's end."""
        self.wire.due = self._patience.clock() + self._patience.stall_seconds()
        try:
            data = response.read(limit + 1)
        except (http.client.HTTPException, ValueError) as error:
            raise BrokenError(f"{self.pool.url} broke off in mid-answer: {type(error).__name__}") from None
        if len(data) > limit:
            raise self._too_large(limit)
        self._left = 0
        return data

    def close(self) -> None:
        """Returns the connection if it can be used again; may be called twice."""
        response, self._response = self._response, None
        whole = response is not None and self._left == 0
        tally, self._tally = self._tally, None
        if tally is not None and not whole and (response is None or response.status in (200, 206)):
            tally.cut()
        if whole and response is not None and not response.will_close and not self.wire.closed:
            self.pool.give_back(self.wire)
        else:
            self.wire.close()
        self.pool.link.save()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lacks_origin(cache_status: str) -> bool:
    """Whether an edge, or one behind it, says in its Cache-Status (RFC 9211) that it could not ask its origin."""
    return any(_ORIGIN_UNAVAILABLE in (part.strip() for part in cache.split(";")[1:]) for cache in cache_status.split(","))


def unexpected(exchange: Exchange, what: str) -> UnavailableError:
    """The error for an answer with a status that ends the matter, or that only another edge could better."""
    status, url = exchange.status, exchange.pool.url
    match status:
        case 401 | 403:
            return BrokenError(f"{url} refuses us ({status})", hint="set a valid token: --token or KVCDN_TOKEN", elsewhere=True)
        case 407:
            return BrokenError(f"the proxy before {url} refuses us (407)", hint="see HTTP_PROXY", elsewhere=True)
        case 429 | 502 | 503 | 504:
            kind = OriginDownError if lacks_origin(exchange.header("Cache-Status")) else BrokenError
            return kind(f"{url} answers {status} for {what}", retry_after=retry_after(exchange.header("Retry-After")))
        case _ if 300 <= status < 400:  # noqa: PLR2004 - HTTP's redirects
            return BrokenError(
                f"{url} answers with a redirect ({status}), which is not followed",
                hint="name the URL it leads to",
                elsewhere=True,
            )
    return BrokenError(f"{url} answers {status} for {what}", elsewhere=True)
