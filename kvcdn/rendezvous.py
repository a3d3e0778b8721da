"""Rendezvous hashing: which of several servers is responsible for a key, the same at every client and server, without asking.

Each pair of a server and a key has a weight; the server with the highest is the first to ask. A server that comes or goes
changes the first place of those keys only that are, or become, its own (Thaler and Ravishankar 1998).
"""

from __future__ import annotations

import hashlib


class Contender:
    """One server, by the URL under which everybody knows it."""

    def __init__(self, url: str) -> None:
        """Case and a slash at the end make no difference."""
        self._seed = hashlib.blake2b(url.rstrip("/").lower().encode(), digest_size=32).digest()

    def weight(self, key: str) -> bytes:
        """How strongly the server is responsible for `key`: 16 bytes, to be compared with other servers' as such."""
        return hashlib.blake2b(key.encode(), key=self._seed, digest_size=16).digest()
