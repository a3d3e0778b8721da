"""Cohorts: objects of one kind that were last used together, sorted by how old that use is. Pure accounting.

A chain that is asked for is one use of all its blocks, so they age together, and moving one cohort moves them all. A `Shelf`
holds the cohorts of one kind in one bin of ages, and counts there what `worth` asks for.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcdn.edge.disk.worth import AGE_BINS, AGE_STARTS, AGE_WIDTHS, Tally


class Kind(NamedTuple):
    """What objects have in common that are expected to be used again at similar rates."""

    uses: int
    """How often it was asked for, in steps: 1, 2, 3 to 4, 5 to 8, and so on up to `ranking.MOST_STEPS`."""
    place: int
    """0 within a chain, 1 at its end, 2 alone."""
    continued: bool
    """Whether the chain begins with more than one block seen before."""
    fresh: int
    """How many blocks of the chain were new, in steps: below 2, 8, 64, or more."""


class Node:
    """One object that is stored, or was, or is on its way. `size` is what it is charged: 0 unless it is stored."""

    __slots__ = ("cohort", "depth", "evicted", "key", "kids", "parent", "parked", "pinned", "size", "until", "uses")

    def __init__(self, key: str, cohort: Cohort) -> None:
        self.key, self.cohort = key, cohort
        self.size = self.uses = self.depth = 0
        self.until = math.inf
        """Reads before this belong to its last use; infinity until the first of them. On the caller's clock, in seconds."""
        self.parent: Node | None = None
        self.kids = 0
        """Stored objects whose parent it is, but for pinned ones."""
        self.evicted = False
        """Whether it was stored, and had to leave for others."""
        self.parked = False
        """It would have left but for its kids or its pin, and is no member of its cohort until they are gone."""
        self.pinned = False
        """It does not leave. Its parent may, as it would not bring it anything to stay."""


@dataclass(eq=False, slots=True)
class Cohort:
    """Objects of one kind that were last used at `used`, on the clock of uses."""

    shelf: Shelf
    used: int
    members: list[Node] = field(default_factory=list)
    """Stored objects in the order of their chain, so that tails leave first. May hold some that have left meanwhile."""
    count: int = 0
    """Objects in it, stored or not."""


class Shelf:
    """The cohorts of one kind in one bin of ages."""

    __slots__ = ("_exposure", "age", "cohorts", "count", "place", "ready", "used", "uses")

    def __init__(self, age: int) -> None:
        self.age = age
        self.cohorts: deque[Cohort] = deque()
        """All of them, oldest first."""
        self.ready: OrderedDict[Cohort, None] = OrderedDict()
        """Those with members."""
        self.count = self.used = 0
        """Objects on the shelf, and the sum of their times of use."""
        self.uses = self._exposure = 0.0
        self.place = 0
        """Its place in the order of worth."""

    def leave(self, cohort: Cohort, clock: int) -> None:
        """An object of `cohort` is used again or forgotten."""
        self.count -= 1
        self.used -= cohort.used
        cohort.count -= 1
        self._exposure += max(clock - cohort.used - AGE_STARTS[self.age], 0)

    def take(self, cohort: Cohort) -> None:
        """Puts a cohort on the shelf as its youngest."""
        cohort.shelf = self
        self.cohorts.append(cohort)
        self.count += cohort.count
        self.used += cohort.count * cohort.used

    def pass_on(self) -> Cohort:
        """Takes the oldest cohort off the shelf: it has grown out of it."""
        cohort = self.cohorts.popleft()
        self.ready.pop(cohort, None)
        self.count -= cohort.count
        self.used -= cohort.count * cohort.used
        self._exposure += cohort.count * AGE_WIDTHS[self.age]
        return cohort

    def exposure(self, clock: int) -> float:
        """How long objects were of this age, those that are included, in objects times uses."""
        return self._exposure + max(self.count * (clock - AGE_STARTS[self.age]) - self.used, 0)

    def fade(self, factor: float) -> None:
        """Makes what was counted long ago count less."""
        self._exposure *= factor
        self.uses *= factor


def make_shelves() -> list[Shelf]:
    """The shelves of one kind, by age."""
    return [Shelf(age) for age in range(AGE_BINS)]


def tally(shelves: list[Shelf], clock: int) -> Tally:
    """What was counted on the shelves of one kind."""
    return Tally([shelf.uses for shelf in shelves], [shelf.exposure(clock) for shelf in shelves])
