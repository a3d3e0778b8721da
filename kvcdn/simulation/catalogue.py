"""The catalogue: which blocks are published, since when, and what publishing them took."""

from __future__ import annotations

from collections.abc import Sequence

from kvcdn.simulation.loop import Loop
from kvcdn.simulation.scale import Scale
from kvcdn.simulation.topology import Publish
from kvcdn.simulation.workload import Request


class Catalogue:
    """What the origin holds. A publisher's prefills are on devices of its own, as many as it takes; each is counted."""

    def __init__(self, loop: Loop, scale: Scale, publish: Publish) -> None:
        self.prefill_s = 0.0
        self.objects = 0
        self.stored_bytes = 0.0
        self.stored_byte_s = 0.0
        """Stored bytes, integrated over time up to the last publication."""
        self._loop, self._scale, self._publish = loop, scale, publish
        self._asked: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._updated = 0.0
        self._everything = False

    def publish_documents(self, documents: int, tokens: int) -> None:
        """Publishes so many documents of equal length, all there are, before anybody asks."""
        self._everything = True
        for place in range(-(-tokens // self._scale.block_tokens)):
            self._count(place, tokens, documents)

    def publish_chain(self, chain: Sequence[int], covered: int) -> None:
        """Publishes what a prompt will begin with, before anybody asks."""
        for place, block in enumerate(chain):
            if block not in self._since:
                self._count(place, covered)
                self._since[block] = 0.0

    def lead(self, chain: Sequence[int], first: int) -> int:
        """How many of a chain's blocks are published, none left out, if the first `first` are known elsewhere."""
        if self._everything:
            return len(chain)
        since, now = self._since, self._loop.now
        for place in range(first, len(chain)):
            at = since.get(chain[place])
            if at is None or at > now:
                return place
        return len(chain)

    def computed(self, request: Request, first: int) -> None:
        """Somebody had to compute the blocks from `first` on: those wanted often enough are published."""
        if not self._publish.after_requests:
            return
        for place in range(first, len(request.chain)):
            block = request.chain[place]
            if block in self._since:
                continue
            asked = self._asked[block] = self._asked.get(block, 0) + 1
            if asked >= self._publish.after_requests:
                del self._asked[block]
                self._since[block] = self._loop.now + self._publish.delay_s + self._count(place, request.covered)

    def finish(self, end: float) -> None:
        """Counts what lies stored until `end`."""
        self.stored_byte_s += self.stored_bytes * (end - self._updated)
        self._updated = end

    def _count(self, place: int, covered: int, documents: int = 1) -> float:
        """Records one block of each of so many documents; returns the seconds of its pass."""
        start = place * self._scale.block_tokens
        end = min(start + self._scale.block_tokens, covered)
        seconds = self._scale.pass_s(start, end)
        self.finish(self._loop.now)
        self.prefill_s += documents * seconds
        self.objects += documents * self._scale.objects(end - start)
        self.stored_bytes += documents * (end - start) * self._scale.token_bytes
        return seconds
