"""Load: how busy this edge is beside the others of its site, and whether it is too busy to serve them as well.

Rendezvous hashing shares keys evenly, and readers do not ask for keys evenly. So an edge that sends far more bodies than the
others refuses them what it owns, and they ask the next in order, or the origin, and keep what they got: a key that is too
popular for one disk spreads (Mirrokni, Thorup and Zadimoghaddam 2018, with loads as they were told lately). Pure accounting.
"""

from __future__ import annotations

from collections.abc import Callable

FEW_BODIES = 32
"""Bodies sent at once up to which nobody is refused: that much any edge does, whatever the others do."""

BOUND = 1.5
"""How many times the mean of the site one edge may do. Nearer to 1 keys wander for nothing, as what was told is old."""

TOLD_SECONDS = 10.0
"""How long a load counts that another edge told of itself."""

MAX_LOAD = 1_000_000
"""More bodies than any edge sends at once: beyond, somebody makes the mean up."""


class SiteLoad:
    """Loads of the edges of a site. For the event loop's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told: dict[str, tuple[float, int]] = {}

    def note(self, url: str, load: int) -> None:
        """The edge `url`, one of the site's, sends `load` bodies just now."""
        self._told[url] = self._clock(), min(max(load, 0), MAX_LOAD)

    def too_much(self, own: int) -> bool:
        """Whether `own` bodies are more than this edge's share of what the site sends, as far as it was told."""
        if own <= FEW_BODIES:
            return False
        since = self._clock() - TOLD_SECONDS
        others = [load for at, load in self._told.values() if at >= since]
        return bool(others) and own > BOUND * (own + sum(others)) / (1 + len(others))
