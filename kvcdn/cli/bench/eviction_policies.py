"""Eviction policies to compare the edge's with: LRU, S3-FIFO, SIEVE, ARC, and the offline optimum. Objects are of one size.

Each is as its paper has it. They know single objects, not chains; a chain is given to them from its end, so that heads are the
more recently used and leave last, which is the better order for all of them.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

Chain = Sequence[int]
"""A request: the ids of the blocks of its prompt, in order."""

NEVER = 1 << 60


class Policy(Protocol):
    """A cache of a fixed number of objects, by id."""

    def holds(self, block: int) -> bool:
        """Whether it is a hit; not a use."""

    def request(self, chain: Chain) -> None:
        """A use of every block of `chain`; those that are missing are fetched."""


class _OneByOne(ABC):
    """A policy that knows single objects only."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def request(self, chain: Chain) -> None:
        for block in reversed(chain):
            self.use(block)

    @abstractmethod
    def use(self, block: int) -> None:
        """A use of one block, which is fetched where it is missing."""


class Lru(_OneByOne):
    """Least recently used first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def holds(self, block: int) -> bool:
        return block in self._blocks

    def use(self, block: int) -> None:
        if block in self._blocks:
            self._blocks.move_to_end(block)
            return
        if len(self._blocks) >= self.capacity:
            self._blocks.popitem(last=False)
        self._blocks[block] = None


class S3Fifo(_OneByOne):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue of a tenth, a main one, and ghosts as many as the main one holds."""

    _SMALL_SHARE = 10

    _MOST_COUNTED = 3

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._small_size = max(capacity // self._SMALL_SHARE, 1)

    def holds(self, block: int) -> bool:
        return block in self._small or block in self._main

    def use(self, block: int) -> None:
        for queue in (self._small, self._main):
            if block in queue:
                queue[block] = min(queue[block] + 1, self._MOST_COUNTED)
                return
        while len(self._small) + len(self._main) >= self.capacity:
            self._evict()
        if block in self._ghosts:
            del self._ghosts[block]
            self._main[block] = 0
        else:
            self._small[block] = 0

    def _evict(self) -> None:
        if len(self._small) >= self._small_size or not self._main:
            self._evict_small()
        else:
            self._evict_main()

    def _evict_small(self) -> None:
        block, count = self._small.popitem(last=False)
        if count > 1:
            self._main[block] = 0
            return
        self._ghosts[block] = None
        if len(self._ghosts) > self.capacity - self._small_size:
            self._ghosts.popitem(last=False)

    def _evict_main(self) -> None:
        while True:
            block, count = self._main.popitem(last=False)
            if not count:
                return
            self._main[block] = count - 1


class Sieve(_OneByOne):
    """SIEVE (Zhang et al., NSDI 2024): a queue in order of arrival, and a hand that spares what was used since it last came by.

    The hand moves from the oldest to the newest. What it has passed and spared lies in `_spared`, the rest in `_ahead`.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._used: dict[int, bool] = {}
        self._ahead: deque[int] = deque()
        self._spared: deque[int] = deque()

    def holds(self, block: int) -> bool:
        return block in self._used

    def use(self, block: int) -> None:
        if block in self._used:
            self._used[block] = True
            return
        if len(self._used) >= self.capacity:
            self._evict()
        self._used[block] = False
        self._ahead.append(block)

    def _evict(self) -> None:
        while True:
            block = self._ahead.popleft()
            spared = self._used[block]
            if spared:
                self._used[block] = False
                self._spared.append(block)
            else:
                del self._used[block]
            if not self._ahead:
                self._ahead, self._spared = self._spared, self._ahead
            if not spared:
                return


class Arc(_OneByOne):
    """ARC (Megiddo and Modha, FAST 2003): recency and frequency, their shares set by ghosts of either."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._frequent: OrderedDict[int, None] = OrderedDict()
        self._recent_ghosts: OrderedDict[int, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0

    def holds(self, block: int) -> bool:
        return block in self._recent or block in self._frequent

    def use(self, block: int) -> None:
        if self.holds(block):
            self._recent.pop(block, None)
            self._frequent.pop(block, None)
            self._frequent[block] = None
        elif block in self._recent_ghosts:
            gain = max(len(self._frequent_ghosts) / len(self._recent_ghosts), 1.0)
            self._target = min(self._target + gain, float(self.capacity))
            self._replace(in_frequent_ghosts=False)
            del self._recent_ghosts[block]
            self._frequent[block] = None
        elif block in self._frequent_ghosts:
            loss = max(len(self._recent_ghosts) / len(self._frequent_ghosts), 1.0)
            self._target = max(self._target - loss, 0.0)
            self._replace(in_frequent_ghosts=True)
            del self._frequent_ghosts[block]
            self._frequent[block] = None
        else:
            self._make_room()
            self._recent[block] = None

    def _make_room(self) -> None:
        known = len(self._recent) + len(self._recent_ghosts)
        everything = known + len(self._frequent) + len(self._frequent_ghosts)
        if known == self.capacity:
            if len(self._recent) == self.capacity:
                self._recent.popitem(last=False)
                return
            self._recent_ghosts.popitem(last=False)
            self._replace(in_frequent_ghosts=False)
        elif everything >= self.capacity:
            if everything == 2 * self.capacity:
                self._frequent_ghosts.popitem(last=False)
            self._replace(in_frequent_ghosts=False)

    def _replace(self, *, in_frequent_ghosts: bool) -> None:
        size = len(self._recent)
        if size and (size > self._target or (in_frequent_ghosts and size == self._target)):
            self._recent_ghosts[self._recent.popitem(last=False)[0]] = None
        else:
            self._frequent_ghosts[self._frequent.popitem(last=False)[0]] = None


class Optimum:
    """Belady's rule, with knowledge of all requests: what is used last leaves first, or does not come in at all.

    A block is used whenever one behind it is, so with ties broken from the end of a chain no hole ever opens: for blocks of one
    size no policy has more leading hits.
    """

    def __init__(self, capacity: int, requests: Iterable[Chain]) -> None:
        self.capacity = capacity
        self._next_uses = _next_uses(list(requests))
        self._number = 0
        self._stored: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []

    def holds(self, block: int) -> bool:
        return block in self._stored

    def request(self, chain: Chain) -> None:
        uses = self._next_uses[self._number]
        self._number += 1
        for place, (block, use) in enumerate(zip(chain, uses, strict=True)):
            if use == NEVER:
                self._stored.pop(block, None)
            else:
                self._stored[block] = use
                heapq.heappush(self._heap, (-use, -place, block))
        while len(self._stored) > self.capacity:
            use, _, block = heapq.heappop(self._heap)
            if self._stored.get(block) == -use:
                del self._stored[block]


def _next_uses(requests: Sequence[Chain]) -> list[list[int]]:
    """For each block of each request the number of the next request that has it."""
    following: dict[int, int] = {}
    found = []
    for number in range(len(requests) - 1, -1, -1):
        chain = requests[number]
        found.append([following.get(block, NEVER) for block in chain])
        following.update(dict.fromkeys(chain, number))
    found.reverse()
    return found
