"""Ranking: which of the objects an edge knows is worth least. Pure accounting, deterministic, bounded.

Objects are nodes of chains. A chain that is looked up is one use of all its blocks (`visit`); the reads that follow are none: a
reader fetches a block in several ranges. What is known of an object's worth is its kind and the age of its last use
(`worth`); nothing leaves before the objects behind it in its chain, which are worth nothing without it. Objects that left, and
those announced that have not come yet, stay known as ghosts, up to a limit, so that what would have paid can be learnt.

Work is amortised constant per object and use: a cohort moves to the next of 25 bins as it ages, and the order of shelves, some
thousand, is made anew once in a while.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from kvcdn.edge.disk.cohort import Cohort, Kind, Node, Shelf, make_shelves, tally
from kvcdn.edge.disk.worth import AGE_STARTS, worths

READ_SECONDS = 60.0
"""What a reader takes to fetch an object, in ranges: reads within this of the first are one use."""

MAX_GHOSTS = 65536
"""Objects remembered that are not stored: some 30 MB."""

AGING_STEP = 64
"""Uses between two rounds of aging: the width of the narrowest bins."""

RANKING_STEP = 2048
"""Uses between two orders of worth, at least; an order takes some milliseconds."""

RANKINGS_PER_TURNOVER = 8
"""Orders of worth while as many uses pass as there are objects: a large cache changes slowly, and is counted longer."""

FADING = 0.99
"""What a count keeps from one order of worth to the next: what was seen a hundred orders ago has little weight."""

RESTORED_TOGETHER = 256
"""Objects of an earlier process that count as used at the same time: a start with a million of them takes seconds."""

MOST_STEPS = 8
"""Steps of uses that are told apart, each twice as long as the one before; beyond 128 all are one. Where a cache holds the few
most popular of many documents, those at its margin have been used some dozens of times."""

_FRESH_STEPS = (2, 8, 64)


class Ranking:
    """Knows objects, stored or not, and names the next to leave. `total` is the sum of the sizes stored."""

    def __init__(self) -> None:
        self.total = 0
        self.stored = 0
        self.pinned = 0
        """The sum of the sizes of stored objects that are pinned."""
        self._pins: set[str] = set()
        self._clock = 0
        self._nodes: dict[str, Node] = {}
        self._ghosts: OrderedDict[Node, None] = OrderedDict()
        self._shelves: dict[Kind, list[Shelf]] = {}
        self._order: list[Shelf] = []
        self._cursor = 0
        """No shelf before this place has a member."""
        self._next_aging = 0
        self._next_ranking = 0

    def size(self, key: str) -> int:
        """What a stored object is charged; 0 where it is not stored."""
        node = self._nodes.get(key)
        return 0 if node is None else node.size

    def evicted(self, key: str) -> bool:
        """Whether an object had to leave and has not come back, as far as ghosts are remembered."""
        node = self._nodes.get(key)
        return node is not None and node.evicted

    def visit(self, keys: Sequence[str]) -> None:
        """One use of a chain, or of its end: `keys` in order."""
        keys = list(dict.fromkeys(keys))
        self._clock += len(keys)
        nodes = [self._nodes.get(key) for key in keys]
        known = next((place for place, node in enumerate(nodes) if node is None), len(nodes))
        cohorts: dict[Kind, Cohort] = {}
        previous: Node | None = None
        for place, (key, found) in enumerate(zip(keys, nodes, strict=True)):
            uses = 1 if found is None else found.uses + 1
            kind = _kind(uses, place, len(keys), known)
            cohort = cohorts.get(kind)
            if cohort is None:
                cohort = cohorts[kind] = Cohort(self._shelf(kind), self._clock)
            node = self._appear(key, cohort) if found is None else self._use(found, cohort)
            node.uses = uses
            cohort.count += 1
            if previous is not None and node.parent is not previous:
                self._link(node, previous)
            if node.size:
                cohort.members.append(node)
            previous = node
        for cohort in cohorts.values():
            cohort.shelf.take(cohort)
            self._show(cohort)
        self._keep_time()

    def touch(self, key: str, seconds: float) -> None:
        """An object is read, at `seconds` on the caller's clock: a use, unless it was looked up or read just before."""
        node = self._nodes.get(key)
        if node is None or node.until < seconds:
            self.visit([key])
            node = self._nodes[key]
        if node.until == math.inf:
            node.until = seconds + READ_SECONDS

    def store(self, key: str, size: int, seconds: float) -> None:
        """An object is stored now, because it is read, and charged `size`, which is not 0."""
        self.touch(key, seconds)
        node = self._nodes[key]
        if node.pinned:
            self.pinned += size - node.size
        if node.size:
            self.total += size - node.size
            node.size = size
            return
        del self._ghosts[node]
        node.size, node.evicted = size, False
        self.total += size
        self.stored += 1
        if node.parent is not None:
            if node.parent.depth < node.depth:
                node.parent.kids += not node.pinned
            else:
                node.parent = None
        node.cohort.members.append(node)
        self._show(node.cohort)

    def restore(self, objects: Iterable[tuple[str, int]]) -> None:
        """Objects, none of them known, with what they are charged: used one after the other just now; first in, first out."""
        objects = iter(objects)
        while chunk := list(islice(objects, RESTORED_TOGETHER)):
            self._clock += len(chunk)
            cohort = Cohort(self._shelf(_kind(1, 0, 1, 0)), self._clock)
            for key, size in reversed(chunk):
                node = self._nodes[key] = Node(key, cohort)
                node.uses, node.size, node.until = 1, size, -math.inf
                if key in self._pins:
                    node.pinned = True
                    self.pinned += size
                cohort.members.append(node)
                self.total += size
            cohort.count = len(chunk)
            self.stored += len(chunk)
            cohort.shelf.take(cohort)
            self._show(cohort)
            self._keep_time()

    def leave(self, key: str) -> None:
        """An object is not stored any more, if it was."""
        node = self._nodes.get(key)
        if node is not None and node.size:
            self._unstore(node)

    def pin(self, key: str) -> None:
        """An object, stored or not, does not leave from now on."""
        self._pins.add(key)
        node = self._nodes.get(key)
        if node is not None and not node.pinned:
            if node.size:
                self.pinned += node.size
                self._release(node.parent)
            node.pinned = True

    def unpin(self, key: str) -> None:
        """An object leaves like any other from now on."""
        self._pins.discard(key)
        node = self._nodes.get(key)
        if node is None or not node.pinned:
            return
        node.pinned = False
        if node.size:
            self.pinned -= node.size
            if node.parent is not None:
                node.parent.kids += 1
        self._unpark(node)

    def pop(self) -> str:
        """The stored object that is worth least, which is stored no more. Raises IndexError where all are pinned."""
        while self._cursor < len(self._order):
            shelf = self._order[self._cursor]
            if shelf.age == 0:
                return self._pop_recent()
            while shelf.ready:
                node = self._last_leaf(next(iter(shelf.ready)))
                if node is not None:
                    return self._evict(node)
            self._cursor += 1
        raise IndexError("nothing is stored")

    def _evict(self, node: Node) -> str:
        self._unstore(node)
        node.evicted = True
        return node.key

    def _pop_recent(self) -> str:
        """As `pop`, where all there is was used just now: the oldest use leaves, lest a chain that is fetched evicts itself."""
        while ready := [next(iter(shelf.ready)) for shelf in self._order[self._cursor :] if shelf.ready]:
            node = self._last_leaf(min(ready, key=lambda cohort: cohort.used))
            if node is not None:
                return self._evict(node)
        raise IndexError("nothing is stored")

    def _last_leaf(self, cohort: Cohort) -> Node | None:
        """The last member that may leave, which is a member no more; those that have kids, or a pin, are parked."""
        while cohort.members:
            node = cohort.members.pop()
            if node.cohort is not cohort or not node.size or node.parked:
                continue
            if not node.kids and not node.pinned:
                return node
            node.parked = True
        del cohort.shelf.ready[cohort]
        return None

    def _appear(self, key: str, cohort: Cohort) -> Node:
        node = self._nodes[key] = Node(key, cohort)
        node.pinned = key in self._pins
        self._ghosts[node] = None
        return node

    def _use(self, node: Node, cohort: Cohort) -> Node:
        shelf = node.cohort.shelf
        shelf.uses += 1
        shelf.leave(node.cohort, self._clock)
        node.cohort, node.parked, node.until = cohort, False, math.inf
        if not node.size:
            self._ghosts.move_to_end(node)
        return node

    def _link(self, node: Node, parent: Node) -> None:
        """Makes `parent` what `node` needs. Whoever looks a chain up may lie: depths that grow along links exclude circles."""
        self._unlink(node)
        if node.depth <= parent.depth:
            if node.kids:
                return
            node.depth = parent.depth + 1
        node.parent = parent
        if node.size and not node.pinned:
            parent.kids += 1

    def _unlink(self, node: Node) -> None:
        parent, node.parent = node.parent, None
        if node.size and not node.pinned:
            self._release(parent)

    def _release(self, parent: Node | None) -> None:
        """A kid that kept `parent` does so no more."""
        if parent is not None:
            parent.kids -= 1
            self._unpark(parent)

    def _unpark(self, node: Node) -> None:
        if node.parked and not node.kids and not node.pinned:
            node.parked = False
            node.cohort.members.append(node)
            self._show(node.cohort)
            # Its turn was before those that were shown while it was parked.
            node.cohort.shelf.ready.move_to_end(node.cohort, last=False)

    def _unstore(self, node: Node) -> None:
        self._unlink(node)
        self.total -= node.size
        self.stored -= 1
        if node.pinned:
            self.pinned -= node.size
        node.size, node.parked = 0, False
        self._ghosts[node] = None
        self._bound_ghosts()

    def _bound_ghosts(self) -> None:
        while len(self._ghosts) > MAX_GHOSTS:
            node, _ = self._ghosts.popitem(last=False)
            node.cohort.shelf.leave(node.cohort, self._clock)
            node.parent = None
            del self._nodes[node.key]

    def _show(self, cohort: Cohort) -> None:
        """Lets the members of `cohort` leave."""
        if cohort.members and cohort not in cohort.shelf.ready:
            cohort.shelf.ready[cohort] = None
            self._cursor = min(self._cursor, cohort.shelf.place)

    def _shelf(self, kind: Kind) -> Shelf:
        """The youngest shelf of `kind`."""
        shelves = self._shelves.get(kind)
        if shelves is None:
            shelves = self._shelves[kind] = make_shelves()
            self._rank()
        return shelves[0]

    def _keep_time(self) -> None:
        self._bound_ghosts()
        if self._clock >= self._next_aging:
            self._next_aging = self._clock + AGING_STEP
            for shelves in self._shelves.values():
                self._grow_older(shelves)
        if self._clock >= self._next_ranking:
            self._next_ranking = self._clock + max(RANKING_STEP, self.stored // RANKINGS_PER_TURNOVER)
            for shelf in self._order:
                shelf.fade(FADING)
            self._rank()

    def _grow_older(self, shelves: list[Shelf]) -> None:
        for age in range(len(shelves) - 2, -1, -1):
            shelf = shelves[age]
            while shelf.cohorts and shelf.cohorts[0].used + AGE_STARTS[age + 1] <= self._clock:
                cohort = shelf.pass_on()
                if cohort.count:
                    shelves[age + 1].take(cohort)
                    self._show(cohort)

    def _rank(self) -> None:
        """Orders the shelves, the least worth first. What was used just now, by a reader who may still fetch it, comes last."""
        found = worths({kind: tally(shelves, self._clock) for kind, shelves in self._shelves.items()})
        ranked = [
            (shelf.age == 0, worth, -shelf.age, number, shelf)
            for number, (kind, shelves) in enumerate(self._shelves.items())
            for shelf, worth in zip(shelves, found[kind], strict=True)
        ]
        ranked.sort(key=lambda item: item[:4])
        self._order = [item[4] for item in ranked]
        for place, shelf in enumerate(self._order):
            shelf.place = place
        self._cursor = 0


def _kind(uses: int, place: int, length: int, known: int) -> Kind:
    steps = min((uses - 1).bit_length(), MOST_STEPS)
    where = 2 if length == 1 else int(place == length - 1)
    fresh = sum(length - known >= step for step in _FRESH_STEPS)
    return Kind(steps, where, known > 1, fresh)
