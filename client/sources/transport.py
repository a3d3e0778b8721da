"""Transport: objects from edges over HTTP, read front to back in exact pieces, whatever a single edge or connection does.

Over HTTP a block is one GET on a connection of its own, and bytes are received into place. Where a prefix has more
blocks than is fair to hold connections for, blocks are read in ranges instead, over as many connections as there are
threads. From the bottom up: `wire` (a connection whose every wait is bounded), `connections` (a server's pool), `exchange` (a
request), `edges` (which server, and a second request where the first answer is late), `tries` (what to do after a failure),
`transfer` (a span of an object, taken up again where it breaks), `readers`, and the sources here. `patience` is what one prompt
may lose on all of it together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvcdn.client.network.connections import CONNECT_SECONDS
from kvcdn.client.network.edges import Edge, EdgeGroup
from kvcdn.client.network.exchange import Exchange, lacks_origin, unexpected
from kvcdn.client.network.link import LinkEstimate
from kvcdn.client.network.patience import STALL_SECONDS, Patience
from kvcdn.client.network.tally import Tally
from kvcdn.client.network.tries import Tries
from kvcdn.client.network.wire import BrokenError
from kvcdn.client.sources.readers import RangedReader, StreamReader
from kvcdn.client.sources.source import ObjectReader, OpenSource, Session, probe_lead
from kvcdn.client.sources.transfer import Identity, Transfer
from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import CorruptError, UnavailableError
from kvcdn.keys import block_key

MATCH_ADDRESSES = 4096
"""Addresses an edge accepts in one match (FORMAT.md section 7)."""

MATCH_REPLY_BYTES = 1 << 20

_Found = TypeVar("_Found")


class EdgesSource(OpenSource):
    """Objects from several kvcdn edges, or other web servers over the same keys; the nearest that is well is asked first."""

    def __init__(
        self, urls: Sequence[str], token: str | None = None, *, stall_seconds: float = STALL_SECONDS, ca_file: str | None = None
    ) -> None:
        """`urls` are http or https, with an optional path; `token` is for all of them.

        `ca_file` holds the certificates of the authorities to trust, in place of the system's. Raises UsageError.
        """
        self._group = EdgeGroup(urls, token, ca_file)
        self._stall_seconds = stall_seconds
        self.url = self._group.url

    def session(self, limit_s: float | None = None, tally: Tally | None = None) -> Session:
        return _EdgeSession(self._group, Patience.of_prompt(limit_s, stall_s=self._stall_seconds, tally=tally))

    def link(self) -> LinkEstimate:
        return self._group.link()

    def close(self) -> None:
        """Closes idle connections and remembers the links."""
        self._group.close()


class EdgeSource(EdgesSource):
    """Objects from one kvcdn edge, or from any web server over the same keys."""

    def __init__(
        self, url: str, token: str | None = None, *, stall_seconds: float = STALL_SECONDS, ca_file: str | None = None
    ) -> None:
        """As `EdgesSource`. Raises UsageError."""
        super().__init__([url], token, stall_seconds=stall_seconds, ca_file=ca_file)


class _EdgeSession:
    """Edges for one prompt."""

    def __init__(self, group: EdgeGroup, patience: Patience) -> None:
        self._group, self._patience = group, patience
        self.url = group.url
        self.cut_short = ""

    def match(self, tag: ModelTag, addresses: Sequence[Digest]) -> int:
        matched = 0
        for first in range(0, len(addresses), MATCH_ADDRESSES):
            part = addresses[first : first + MATCH_ADDRESSES]
            found = self._match_once(tag, part)
            matched += found
            if found < len(part):
                break
        return matched

    def _match_once(self, tag: ModelTag, addresses: Sequence[Digest]) -> int:
        body = json.dumps({"addresses": [str(address) for address in addresses], "model": str(tag)}).encode("ascii")

        def matched(exchange: Exchange) -> int | None:
            if exchange.status in (404, 405, 501):
                return None
            if exchange.status != 200:  # noqa: PLR2004 - HTTP's own number
                raise unexpected(exchange, "match")
            count = _count(exchange.read_all(MATCH_REPLY_BYTES), len(addresses), exchange.pool.url)
            if count < len(addresses) and lacks_origin(exchange.header("Cache-Status")):
                self.cut_short = f"{exchange.pool.url} cannot reach its origin, and does not know what follows"
            return count

        # The last address stands for the chain: all clients with this prefix ask the same edge, which then knows it.
        found = self._ask("POST", "/v1/match", str(addresses[-1]) if addresses else "", matched, body)
        if found is None:
            # Not an edge but a plain web server or CDN: ask for the blocks themselves.
            return probe_lead([block_key(tag, address) for address in addresses], self._exists)
        return found

    def _exists(self, key: str) -> bool:
        def exists(exchange: Exchange) -> bool:
            if exchange.status not in (200, 404, 410):
                raise unexpected(exchange, key)
            return exchange.status == 200  # noqa: PLR2004 - HTTP's own number

        return self._ask("HEAD", f"/{key}", key, exists)

    def _ask(self, method: str, path: str, key: str, use: Callable[[Exchange], _Found], body: bytes | None = None) -> _Found:
        """What `use` makes of the answer to a small request, tried again while that may help."""

        def send(edge: Edge, *, fresh: bool = False, connect_s: float = CONNECT_SECONDS) -> Exchange:
            edge.health.asked()
            return Exchange(edge.pool, self._patience, method, path, body=body, fresh=fresh, connect_s=connect_s)

        tries = Tries(self._group, self._patience, key)
        while True:
            edge, asked = tries.edge, self._patience.clock()
            try:
                exchange = self._group.answered(send(edge), key, self._patience, send)
                edge = self._group.edge_of(exchange)
                with exchange:
                    found = use(exchange)
            except UnavailableError as error:
                tries.failed(edge, error, asked, asked)
            else:
                edge.health.worked()
                return found

    def open(self, key: str, *, ranged: bool) -> ObjectReader:
        return (RangedReader if ranged else StreamReader)(self._group, self._patience, key)

    def read(self, key: str, limit: int) -> bytes:
        if self._patience.budget.tally is not None:
            self._patience.budget.tally.read_whole()
        known = Identity()
        transfer = Transfer(self._group, self._patience, key, known)
        try:
            transfer.await_head()
            if known.size is None or known.size > limit:
                raise CorruptError(f"{key} is larger than {limit} bytes")
            data = bytearray(known.size)
            transfer.read_into(memoryview(data))
            return bytes(data)
        finally:
            transfer.close()

    def link(self) -> LinkEstimate:
        return self._group.link()

    def session(self, limit_s: float | None = None, tally: Tally | None = None) -> Session:  # noqa: ARG002 - the whole's
        return _EdgeSession(self._group, self._patience.part(limit_s))

    def failing_s(self) -> float:
        since = self._patience.budget.failing_since
        return 0.0 if since is None else self._patience.clock() - since

    def hurry(self, failing_s: float) -> None:
        self._patience.budget.failing_limit_s = failing_s

    def abort(self) -> None:
        self._patience.abort()

    def close(self) -> None:
        """Nothing is held between reads."""


def _count(reply: bytes, most: int, url: str) -> int:
    """The number of blocks that a match's reply says."""
    try:
        matched = json.loads(reply)["matched"]
    except (ValueError, KeyError, TypeError, RecursionError):
        matched = None
    if not isinstance(matched, int) or isinstance(matched, bool) or not 0 <= matched <= most:
        raise BrokenError(f"{url} answers a match with something that is not a count of blocks", elsewhere=True)
    return matched
