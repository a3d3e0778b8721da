"""Peers: the edges of one site, which share the objects among them so that each is kept once or twice and not by all.

All have the same list. For each key rendezvous hashing gives an order; an edge that lacks an object asks those before it in
that order, then the origins. Who is asked by one that comes before it refuses, so that edges never wait for each other in a
circle, however wrong the lists are. A peer is a shortcut and no authority: what it sends is verified like an origin's, and that
it lacks an object, or is down, slow or busy, says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from kvcdn.edge.fills.load import SiteLoad
from kvcdn.edge.fills.origins import Origin
from kvcdn.edge.http.outcome import Reason, Refusal
from kvcdn.edge.settings import MAX_URL_CHARACTERS
from kvcdn.errors import UsageError
from kvcdn.rendezvous import Contender
from kvcdn.stores.http import HttpStore, Patience, is_loopback

COPIES = 2
"""Edges of a site that keep an object: the first, and the second once its own readers ask for it."""

ASKED = 2
"""Peers asked before the origins: further ones have the object only by chance."""

PEER_PATIENCE = Patience(connect_seconds=1.0, stall_seconds=5.0, attempts=1)
"""Peers are near; whoever takes longer is passed over, since the origin has the object too."""

PEER_HEADER = "Kvcdn-Peer"
"""Of a request between peers: who asks, by the URL in its settings."""

LOAD_HEADER = "Kvcdn-Load"
"""Of the same request: how many bodies the asking edge sends just now."""


class Peer:
    """Another edge of the site."""

    def __init__(self, url: str, headers: Callable[[], dict[str, str]]) -> None:
        self.contender = Contender(url)
        self.origin = Origin(HttpStore(url, patience=PEER_PATIENCE, headers=headers), authority=False)


class Peers:
    """The site as one of its edges sees it. For the event loop's thread; the origins it returns are for any."""

    def __init__(self, urls: Sequence[str], own: str, load: Callable[[], int]) -> None:
        """`urls` of all edges, `own` among them; `load` tells how many bodies this edge sends. Raises UsageError."""
        self._own, self._me, self._load = own, Contender(own), load
        self._token = ""
        self.each = tuple(Peer(url, self._headers) for url in urls if url != own)
        self._known = {url for url in urls if url != own}
        self._site = SiteLoad(time.monotonic)

    def use_token(self, token: str | None) -> None:
        """What this edge shows to the others from now on."""
        self._token = token or ""

    def before(self, key: str) -> tuple[Origin, ...]:
        """The peers to ask for `key`, in order; none where this edge is the first."""
        return tuple(origin for origin in self._ahead(key) if not origin.resting)[:ASKED]

    def keeps(self, key: str) -> bool:
        """Whether this edge is one of those that keep `key`, as things stand: who is down has no place in the order."""
        return sum(not origin.down for origin in self._ahead(key)) < COPIES

    def refusal(self, asking: str, load: str | None, key: str) -> Refusal | None:
        """Why a request for `key` by the peer `asking`, which tells its `load`, is not answered; None where it is."""
        if asking in self._known and load is not None and load.isascii() and load.isdecimal():
            self._site.note(asking, int(load[:9]))
        if len(asking) > MAX_URL_CHARACTERS or Contender(asking).weight(key) >= self._me.weight(key):
            message = f"{self._own} is not before {asking[:MAX_URL_CHARACTERS]} for this object: is `self` right at both?"
            return Refusal(Reason.LOOP, message)
        if self._site.too_much(self._load()):
            return Refusal(Reason.BUSY, f"{self._own} sends more than its share already")
        return None

    def _ahead(self, key: str) -> list[Origin]:
        mine = self._me.weight(key)
        weighed = [(peer.contender.weight(key), peer.origin) for peer in self.each]
        return [origin for weight, origin in sorted(weighed, key=lambda item: item[0], reverse=True) if weight > mine]

    def _headers(self) -> dict[str, str]:
        told = {PEER_HEADER: self._own, LOAD_HEADER: str(self._load())}
        return told | ({"Authorization": f"Bearer {self._token}"} if self._token else {})


def require_encrypted(urls: Sequence[str]) -> None:
    """Raises UsageError where a peer's token would travel in plain HTTP beyond this machine."""
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
            raise UsageError(
                f"peers: the token would travel to {url} in plain HTTP",
                hint="give the edges tls_cert and tls_key and name them by https://; or, on a network that you trust, set"
                " insecure_http = true",
            )
