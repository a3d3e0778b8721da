"""Nodes: what holds objects on the way from the origin to readers, and fetches what it lacks, once for all who wait.

A block that a node lacks is filled: its bytes go over the node's link, and whoever asks for it meanwhile joins. Bytes pass on
while they arrive, so that a transfer over several links takes as long as the slowest of them, not the sum: each link shares its
own bandwidth, and a transfer is over when it is over on all. Room is taken when a fill begins, as an edge does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvcdn.simulation.link import Link, Transfer
from kvcdn.simulation.loop import Loop

SizeOf = Callable[[int], float]
"""The stored bytes of a block."""

PRESENT_SECONDS = 600.0
"""How long a node remembers that a block exists (edge/reads/presence.py)."""


class Cache(Protocol):
    """A cache of blocks by id, all of one size."""

    def missing(self, chain: Sequence[int]) -> list[int]:
        """Which of a chain's blocks are not held; no use of them."""

    def use(self, chain: Sequence[int]) -> None:
        """A use of every block of `chain`; those that are missing come in, and others leave for them."""


@dataclass
class Counts:
    """What a node was asked for, in bytes and blocks."""

    asked_bytes: float = 0.0
    held_bytes: float = 0.0
    """Of those: here already."""
    joined_bytes: float = 0.0
    """Of those: already on their way here."""
    filled_bytes: float = 0.0
    """Of those: fetched for this request."""
    asked_blocks: int = 0
    leading_blocks: int = 0
    """Here or on their way, as are all before them."""
    filled_blocks: int = 0

    @property
    def hit_ratio(self) -> float | None:
        """Share of the bytes asked for that the origin, or the region, was not asked for."""
        return 1 - self.filled_bytes / self.asked_bytes if self.asked_bytes else None


@dataclass(eq=False)
class Fill:
    """Blocks that a node fetches together. `share` is how much of them is here."""

    size: float
    link: Link
    over: bool = False
    transfer: Transfer | None = None
    upstream: Supply | None = None
    waiting: list[Callable[[], None]] = field(default_factory=list)

    @property
    def share(self) -> float:
        if self.over:
            return 1.0
        if self.transfer is None or self.upstream is None:
            return 0.0
        return min(self.link.arrived(self.transfer) / self.size, self.upstream.share)


@dataclass(eq=False)
class Supply:
    """What one request waits for at a node: bytes that are here, and parts of fills."""

    size: float
    held: float
    parts: list[tuple[Fill, float]] = field(default_factory=list)
    out: Link | None = None
    transfer: Transfer | None = None
    """On the way out of the node, where that is a link of its own."""
    left: int = 0

    @property
    def arrived(self) -> float:
        """Bytes that have come so far."""
        here = self.held + sum(fill.share * size for fill, size in self.parts)
        if self.out is not None:
            here = min(here, self.out.arrived(self.transfer) if self.transfer is not None else 0.0)
        return here

    @property
    def share(self) -> float:
        return self.arrived / self.size if self.size else 1.0


class Source(Protocol):
    """What a node fills itself from."""

    out: Link
    latency_s: float

    def send(self, blocks: Sequence[int], size_of: SizeOf, done: Callable[[], None]) -> Supply:
        """Begins to send `blocks`; `done` is called once all have left."""

    def match_s(self, blocks: Sequence[int]) -> float:
        """What it takes to say whether `blocks` exist."""


class Origin:
    """The end of all ways: it has what is published."""

    def __init__(self, loop: Loop, out: Link, latency_s: float) -> None:
        self.out, self.latency_s = out, latency_s
        self.sent_bytes = 0.0
        self.sent_blocks = 0
        self.matched_blocks = 0
        self._loop = loop

    def match_s(self, blocks: Sequence[int]) -> float:
        self.matched_blocks += len(blocks)
        return self.latency_s

    def send(self, blocks: Sequence[int], size_of: SizeOf, done: Callable[[], None]) -> Supply:
        size = math.fsum(map(size_of, blocks))
        self.sent_bytes += size
        self.sent_blocks += len(blocks)
        supply = Supply(size, size, out=self.out)

        def begin() -> None:
            supply.transfer = self.out.start(size, done)

        self._loop.after(self.latency_s, begin)
        return supply


class Node:
    """A cache with a link to what it fills itself from. `out` is what it sends over."""

    latency_s = 0.0

    def __init__(self, loop: Loop, cache: Cache, uplink: Link, uplink_rtt_s: float, source: Source, out: Link) -> None:
        self.cache, self.uplink, self.uplink_rtt_s, self.source, self.out = cache, uplink, uplink_rtt_s, source, out
        self.counts = Counts()
        self._loop = loop
        self._fills: dict[int, Fill] = {}
        self._seen: dict[int, float] = {}

    def match_s(self, blocks: Sequence[int]) -> float:
        """Nothing for blocks that are here or were seen lately; for others the source is asked, all at once."""
        now = self._loop.now
        unknown = [block for block in self.cache.missing(blocks) if self._seen.get(block, -math.inf) + PRESENT_SECONDS < now]
        if not unknown:
            return 0.0
        self._seen.update(dict.fromkeys(unknown, now))
        return self.uplink_rtt_s + self.source.match_s(unknown)

    def look(self, blocks: Sequence[int]) -> list[int]:
        """Which of `blocks` are neither here nor on their way; no use of them."""
        return [block for block in self.cache.missing(blocks) if block not in self._fills]

    def expected_fill_s(self, size: float) -> float:
        """What a fill of `size` bytes would take, if its source had them, beside those under way."""
        rate = min(self.uplink.expected_rate, self.source.out.expected_rate)
        if not size:
            return 0.0
        return self.uplink_rtt_s + self.source.latency_s + (size / rate if rate else math.inf)

    def supply(
        self, blocks: Sequence[int], missing: Sequence[int], size_of: SizeOf, done: Callable[[], None], delay_s: float = 0.0
    ) -> Supply:
        """Gets `blocks` here, of which `look` just said that `missing` are; `done` is called once all are, perhaps at once.

        Fills begin after `delay_s`.
        """
        lacking = set(missing)
        joined: dict[Fill, float] = {}
        held = 0.0
        leading = True
        for block in blocks:
            size = size_of(block)
            fill = self._fills.get(block)
            if fill is not None:
                joined[fill] = joined.get(fill, 0.0) + size
            elif block not in lacking:
                held += size
            if block in lacking:
                leading = False
            self.counts.leading_blocks += leading
        fresh = [block for block in blocks if block in lacking]
        self.cache.use(blocks)
        supply = Supply(math.fsum(map(size_of, blocks)), held)
        supply.parts += joined.items()
        if fresh:
            supply.parts.append((self._begin(fresh, size_of, delay_s), math.fsum(map(size_of, fresh))))
        self._count(supply, blocks, fresh, size_of, sum(joined.values()))
        supply.left = len(supply.parts)

        def one_less() -> None:
            supply.left -= 1
            if not supply.left:
                done()

        for fill, _ in supply.parts:
            fill.waiting.append(one_less)
        if not supply.parts:
            done()
        return supply

    def send(self, blocks: Sequence[int], size_of: SizeOf, done: Callable[[], None]) -> Supply:
        """As a source of other nodes: what is missing comes in while the rest goes out."""
        both = [2]

        def one_less() -> None:
            both[0] -= 1
            if not both[0]:
                done()

        supply = self.supply(blocks, self.look(blocks), size_of, one_less)
        supply.out = self.out
        supply.transfer = self.out.start(supply.size, one_less)
        return supply

    def _begin(self, fresh: list[int], size_of: SizeOf, delay_s: float) -> Fill:
        fill = Fill(math.fsum(map(size_of, fresh)), self.uplink)
        self._fills.update(dict.fromkeys(fresh, fill))
        left = [2]

        def one_less() -> None:
            left[0] -= 1
            if left[0]:
                return
            fill.over = True
            for block in fresh:
                del self._fills[block]
            for call in fill.waiting:
                call()

        def begin() -> None:
            fill.upstream = self.source.send(fresh, size_of, one_less)
            fill.transfer = self.uplink.start(fill.size, one_less)

        self._loop.after(delay_s + self.uplink_rtt_s, begin)
        return fill

    def _count(self, supply: Supply, blocks: Sequence[int], fresh: Sequence[int], size_of: SizeOf, joined: float) -> None:
        counts = self.counts
        counts.asked_bytes += supply.size
        counts.asked_blocks += len(blocks)
        counts.held_bytes += supply.held
        counts.joined_bytes += joined
        counts.filled_bytes += math.fsum(map(size_of, fresh))
        counts.filled_blocks += len(fresh)
