"""Edges: servers with the same objects, ranked by health, nearness and, among equals, by who is responsible for a key."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from kvcdn.client.network.connections import CONNECT_SECONDS, ConnectionPool
from kvcdn.client.network.exchange import Exchange
from kvcdn.client.network.health import Health
from kvcdn.client.network.link import LinkEstimate, LinkMeter
from kvcdn.client.network.patience import Patience
from kvcdn.client.network.wire import BrokenError, first_to_answer
from kvcdn.errors import UnavailableError, UsageError
from kvcdn.rendezvous import Contender

NEARER_FACTOR = 1.5
NEARER_SECONDS = 0.005
"""An edge is nearer than another if its latency is smaller by more than this factor and so much: the rest is noise."""

MAX_EDGES = 16

HEDGE_QUANTILE = 0.95
"""A first byte later than that of so many answers is late."""

HEDGE_SAMPLES = 16
"""Answers seen before that is known; until then HEDGE_UNKNOWN_SECONDS is late."""

HEDGE_FLOOR_SECONDS = 0.1
HEDGE_UNKNOWN_SECONDS = 1.0

HEDGE_CONNECT_SECONDS = 0.5
"""For a second request's connection, while which nobody listens to the first."""

HEDGE_SHARE = 0.05
"""Second requests are at most this share of the requests: more would be load that slows everybody down."""

HEDGES_SAVED = 2.0
"""So many unused ones are kept for a bad moment."""

SATURATED_SHARE = 0.5
"""While bytes arrive at this share of what the link gives, an answer is late because of them: a second one would be, too."""


class Edge:
    """One server: connections, health, and its own link."""

    def __init__(self, url: str, token: str | None, ca_file: str | None) -> None:
        self.pool = ConnectionPool(url, token, ca_file)
        self.health = Health()
        self._contender = Contender(self.pool.url)

    @property
    def url(self) -> str:
        return self.pool.url

    def weight(self, key: str) -> bytes:
        """Rendezvous hashing: of several edges the one with the highest weight is asked for `key`, by all clients."""
        return self._contender.weight(key)


class Send(Protocol):
    """Sends a certain request to an edge. Raises BrokenError or StoppedError."""

    def __call__(self, edge: Edge, *, fresh: bool = False, connect_s: float = CONNECT_SECONDS) -> Exchange: ...


class EdgeGroup:
    """The edges a source may choose from, and what they have in common: one link, one budget for second requests."""

    def __init__(self, urls: Sequence[str], token: str | None, ca_file: str | None) -> None:
        """Raises UsageError."""
        if not 1 <= len(urls) <= MAX_EDGES:
            raise UsageError(f"a source has 1 to {MAX_EDGES} edges, not {len(urls)}")
        self.edges = [Edge(url, token, ca_file) for url in dict.fromkeys(url.rstrip("/") for url in urls)]
        self.url = ",".join(edge.url for edge in self.edges)
        # With one edge its link is all there is to measure.
        self.meter = self.edges[0].pool.link if len(self.edges) == 1 else LinkMeter(self.url)
        for edge in self.edges if len(self.edges) > 1 else ():
            edge.pool.meters.append(self.meter)
        self._hedges = 1.0
        self._lock = threading.Lock()

    # -- which one ----------------------------------------------------------------------------------------------------------

    def ranked(self, key: str) -> list[Edge]:
        """Every edge, the one to ask for `key` first: those that are well, nearest first, equals in the key's own order."""
        if len(self.edges) == 1:
            return self.edges
        latencies = {edge.url: edge.pool.link.estimate().latency_s for edge in self.edges}
        # An edge that nobody has asked yet may be the nearest: it counts as such until it is measured.
        nearest = min((latency for latency in latencies.values() if latency is not None), default=0.0)

        def place(edge: Edge) -> tuple[bool, float, bytes]:
            latency = latencies[edge.url] or nearest
            equal = latency <= max(nearest * NEARER_FACTOR, nearest + NEARER_SECONDS)
            return edge.health.well, -(nearest if equal else latency), edge.weight(key)

        return sorted(self.edges, key=place, reverse=True)

    def require_one(self) -> None:
        """Raises UnavailableError where every edge has failed again and again, and just now: asking would only cost time."""
        wait = min(edge.health.out_for for edge in self.edges)
        if wait > 0:
            raise UnavailableError(
                f"{self.url} failed several times in a row and is left alone for another {wait:.1f} s",
                hint="is the edge running, and is its address right?",
            )

    # -- first bytes --------------------------------------------------------------------------------------------------------

    def answered(self, exchange: Exchange, key: str, patience: Patience, again: Send) -> Exchange:
        """The exchange whose answer comes first: `exchange`, or a second one where the first is late and that may help.

        `again` sends the same request once more. The other exchange is closed; so are both where this raises BrokenError.
        """
        late = exchange.sent + self._late_after(exchange)
        exchange.look()
        try:
            if first_to_answer([exchange.wire], patience, min(late, exchange.due) - patience.clock()) is not None:
                return exchange
            if late >= exchange.due or self._saturated(exchange, patience.clock()) or not self._may_hedge():
                return exchange
            first = self.edge_of(exchange)
            other = next((edge for edge in self.ranked(key) if edge is not first and edge.health.well), first)
            second = again(other, fresh=other is first, connect_s=HEDGE_CONNECT_SECONDS)
        except BrokenError:
            return exchange
        except BaseException:
            exchange.close()
            raise
        return _race(exchange, second, patience)

    def _late_after(self, exchange: Exchange) -> float:
        slow = exchange.pool.link.slow_answer(HEDGE_QUANTILE, HEDGE_SAMPLES)
        return HEDGE_UNKNOWN_SECONDS if slow is None else max(slow, HEDGE_FLOOR_SECONDS)

    def _saturated(self, exchange: Exchange, now: float) -> bool:
        rate = self.meter.estimate().bytes_per_s
        return rate is not None and self.meter.total_bytes - exchange.seen >= SATURATED_SHARE * rate * (now - exchange.sent)

    def asked(self) -> None:
        """A request was sent: a share of a second one may be."""
        with self._lock:
            self._hedges = min(self._hedges + HEDGE_SHARE, HEDGES_SAVED)

    def _may_hedge(self) -> bool:
        with self._lock:
            if self._hedges < 1:
                return False
            self._hedges -= 1
            return True

    def has_choice(self, edge: Edge) -> bool:
        """Whether another edge than `edge` is well."""
        return any(other.health.well for other in self.edges if other is not edge)

    def edge_of(self, exchange: Exchange) -> Edge:
        return next(edge for edge in self.edges if edge.pool is exchange.pool)

    # -- the link -----------------------------------------------------------------------------------------------------------

    def link(self) -> LinkEstimate:
        """Of all edges together: the nearest's latency, everybody's bytes."""
        found = self.meter.estimate()
        if len(self.edges) == 1:
            return found
        each = [edge.pool.link.estimate() for edge in self.edges]
        latency = min((one.latency_s for one in each if one.latency_s is not None), default=None)
        fastest = max((one.bytes_per_s for one in each if one.bytes_per_s is not None), default=None)
        return LinkEstimate(latency, found.bytes_per_s or fastest, sum(one.samples for one in each))

    def close(self) -> None:
        for edge in self.edges:
            edge.pool.close()
        self.meter.save(at_once=True)


def _race(first: Exchange, second: Exchange, patience: Patience) -> Exchange:
    """The first that answers as hoped for, or else the last; what is not returned is closed. Raises UnavailableError."""
    racing = [first, second]
    try:
        while True:
            left = max(exchange.due for exchange in racing) - patience.clock()
            wire = first_to_answer([exchange.wire for exchange in racing], patience, left)
            if wire is None:
                raise BrokenError(f"{first.pool.url} gives no answer in time")
            found = next(exchange for exchange in racing if exchange.wire is wire)
            racing.remove(found)
            if not racing or _as_hoped(found):
                for loser in racing:
                    # It would have taken longer: enough to know when edges are ranked.
                    loser.pool.link.answered(patience.clock() - loser.sent)
                return found
            found.close()
    finally:
        for loser in racing:
            loser.close()


def _as_hoped(exchange: Exchange) -> bool:
    try:
        return exchange.status in (200, 206)
    except BrokenError:
        return False
