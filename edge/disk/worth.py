"""Worth: what keeping an object of some age is expected to pay, learnt from what became of others like it. Pure arithmetic.

Objects are sorted into kinds; for each kind it is counted how often objects of an age were used again (`uses`) and how long
objects were of that age (`exposure`), those that were evicted included: their quotient is the rate of reuse, and eviction does
not bias it. The worth of an object is its Gittins index (Gittins 1979): the best rate, over all horizons, of expected uses per
time that it takes up space from now on. Where the rate falls with age this is the rate of today, and the order within a kind
that of LRU; where it rises, because readers come back after a while, an object gains by waiting. A use's gain and an object's
cost both grow with its size, so the size does not matter for the share of bytes that hit.

Time is counted in uses of objects, and ages fall into bins that double: no step is finer than what was counted supports.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

AGE_STARTS = (0, *(64 << step for step in range(24)))
"""Where each bin of ages begins, in uses of objects: the first is as long as a chain or two, the last is beyond any cache."""

AGE_BINS = len(AGE_STARTS)

AGE_WIDTHS = (*(after - before for before, after in itertools.pairwise(AGE_STARTS)), AGE_STARTS[-1])

_PRIOR_USES = 8.0
"""Weight of what is known of all kinds against what was counted of one: as much as eight uses seen."""

_PRIOR_EXPOSURE = 1000.0
"""Weight of all ages against one age, in uses of objects times objects."""


@dataclass(frozen=True)
class Tally:
    """What was counted of one kind, by bin of age."""

    uses: Sequence[float]
    exposure: Sequence[float]


def worths(tallies: Mapping[Hashable, Tally]) -> dict[Hashable, list[float]]:
    """The worth of an object of each kind and bin of age: expected uses per time. Comparable with each other only."""
    pooled = _pooled_rates(tallies)
    last = max((age for tally in tallies.values() for age in range(AGE_BINS) if tally.exposure[age] > 0), default=0)
    return {kind: _indices(_rates(tally, pooled)[: last + 1]) for kind, tally in tallies.items()}


def _pooled_rates(tallies: Mapping[Hashable, Tally]) -> list[float]:
    """Rates of reuse by age, of all kinds together; where little is known of an age, the rate of all ages."""
    uses = [sum(tally.uses[age] for tally in tallies.values()) for age in range(AGE_BINS)]
    exposure = [sum(tally.exposure[age] for tally in tallies.values()) for age in range(AGE_BINS)]
    overall = (sum(uses) + 1.0) / (sum(exposure) + 1.0)
    return [(u + overall * _PRIOR_EXPOSURE) / (e + _PRIOR_EXPOSURE) for u, e in zip(uses, exposure, strict=True)]


def _rates(tally: Tally, pooled: Sequence[float]) -> list[float]:
    """Rates of one kind: those of all kinds, times the kind's own factor, corrected age by age as far as counts support."""
    expected = sum(e * rate for e, rate in zip(tally.exposure, pooled, strict=True))
    factor = (sum(tally.uses) + _PRIOR_USES) / (expected + _PRIOR_USES)
    return [
        (u + _PRIOR_USES) / (e + _PRIOR_USES / (rate * factor))
        for u, e, rate in zip(tally.uses, tally.exposure, pooled, strict=True)
    ]


def _indices(rates: Sequence[float]) -> list[float]:
    """The Gittins index at the beginning of each bin; older bins than those given are worth what the last one is."""
    chances = [-math.expm1(-rate * width) for rate, width in zip(rates, AGE_WIDTHS, strict=False)]
    found = []
    for first in range(len(rates)):
        best = gain = time = 0.0
        surviving = 1.0
        for chance, rate in zip(chances[first:], rates[first:], strict=True):
            gain += surviving * chance
            time += surviving * chance / rate
            surviving *= 1.0 - chance
            best = max(best, gain / time)
        found.append(best)
    return found + [found[-1]] * (AGE_BINS - len(found))
