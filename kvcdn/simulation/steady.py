"""The steady state: what caches hold of a workload too large to be simulated prompt by prompt, by Che's approximation.

In a cache that evicts the least recently used, an object is here if it was asked for within the *characteristic time* T of the
cache: the time in which just so many different objects are asked for as it holds (Che, Tung and Wang, 2002). With requests
that are independent of each other, object i with rate r is here with probability 1 - exp(-r T), and T follows from the sum of
these being the capacity. Over a span that begins with an empty cache the mean of that probability counts the first, cold,
requests too. What a cache misses is what the one behind it is asked for; but an object that was missed does not come again
before it has left, that is within T. So such a stream counts as random with a gap after each of its requests.

So of a span with billions of requests a *window* is simulated, at full rate on full links, where each cache's answer is drawn
with these probabilities, document by document; counts are then scaled to the span. What is approximated: every cache evicts
the least recently used whole document, whatever its policy; the drawn answers are independent. docs/simulation.md tells how far
that is from simulating every prompt, where both can be done.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvcdn.simulation.node import Cache
from kvcdn.simulation.scale import Scale
from kvcdn.simulation.topology import Topology
from kvcdn.simulation.workload import Zipf

Shares = NDArray[np.float64]

_HALVINGS = 60
"""Of the interval in which the characteristic time lies."""

_STEPS = 64
"""Times at which a cache that fills is looked at, each a constant factor after the one before."""

_FIRST_STEP = 1e-7
"""The first of them, as a share of the last."""


@dataclass(frozen=True)
class Stream:
    """Requests for objects: each object's at its rate a second, none sooner than `gap_s` after the one before."""

    rates: Shares
    gap_s: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.gap_s):
            # Behind a cache that holds all, an object comes once and never again.
            object.__setattr__(self, "gap_s", 0.0)

    @cached_property
    def _filled(self) -> Shares:
        """Share of the time that is within a gap."""
        return np.minimum(self.rates * self.gap_s, 1 - 1e-9)

    @cached_property
    def _after_gap(self) -> Shares:
        """Rate once a gap is over."""
        return np.asarray(self.rates / (1 - self._filled))

    def silent(self, seconds: float) -> Shares:
        """The probability that an object was not asked for within the last `seconds`."""
        if seconds <= self.gap_s:
            return np.asarray(1 - self._filled * (seconds / self.gap_s) if self.gap_s else np.ones_like(self.rates))
        return np.asarray((1 - self._filled) * np.exp(-self._after_gap * (seconds - self.gap_s)))

    def silent_before(self, seconds: float) -> Shares:
        """The same, just before a request of this stream."""
        return np.exp(-self._after_gap * max(seconds - self.gap_s, 0.0))


def characteristic_time(streams: Sequence[Stream], capacity: float) -> float:
    """Seconds in which `capacity` different objects are asked for; infinite where that is all there are."""
    if capacity >= np.count_nonzero(sum(stream.rates for stream in streams)):
        return math.inf
    low, high = 0.0, 1.0
    while _present(streams, high) < capacity:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _present(streams, middle) < capacity else (low, middle)
    return high


def _present(streams: Sequence[Stream], seconds: float) -> float:
    """Objects asked for within the last `seconds`, on average."""
    return float(np.sum(1 - math.prod(stream.silent(seconds) for stream in streams)))


def hit_shares(streams: Sequence[Stream], capacity: float, seconds: float) -> tuple[list[Shares], float]:
    """For each stream the share of each object's requests that are hits, in a span that begins with nothing cached; and T."""
    time = characteristic_time(streams, capacity)
    return [_hits(streams, number, min(time, seconds), seconds) for number in range(len(streams))], time


def _hits(streams: Sequence[Stream], asking: int, filling: float, seconds: float) -> Shares:
    """While a cache fills, an object is here if it was asked for at all; then, if it was within `filling` seconds."""

    def at(time: float) -> Shares:
        others = math.prod(stream.silent(time) for number, stream in enumerate(streams) if number != asking)
        return np.asarray(1 - streams[asking].silent_before(time) * others)

    rates = streams[asking].rates
    if len(streams) == 1 and not streams[asking].gap_s:
        with np.errstate(divide="ignore", invalid="ignore"):
            filled = np.where(rates > 0, filling + np.expm1(-rates * filling) / rates, 0.0)
    else:
        times = [0.0, *(filling * np.geomspace(_FIRST_STEP, 1.0, _STEPS)).tolist()]
        filled, before = np.zeros_like(rates), at(0.0)
        for start, end in itertools.pairwise(times):
            after = at(end)
            filled += (before + after) / 2 * (end - start)
            before = after
    return np.asarray((filled + at(filling) * (seconds - filling)) / seconds)


@dataclass
class DrawnCache:
    """Answers as a cache in the steady state would: each document is here as a whole, or not at all."""

    hits: Shares
    blocks: int
    """Of a document."""
    rng: np.random.Generator

    def missing(self, chain: Sequence[int]) -> list[int]:
        return [] if not chain or self.rng.random() < self.hits[chain[0] // self.blocks] else list(chain)

    def use(self, chain: Sequence[int]) -> None:
        """What is here hangs on no single request."""


@dataclass
class SteadyCaches:
    """Makes the drawn caches of a topology, by the names of its nodes."""

    by_place: dict[str, Shares]
    blocks: int
    rng: np.random.Generator

    def __call__(self, policy: str, blocks: int, place: str) -> Cache:  # noqa: ARG002 - by the protocol
        return DrawnCache(self.by_place[place], self.blocks, self.rng)


def steady_caches(topology: Topology, scale: Scale, zipf: Zipf, seed: int) -> SteadyCaches:
    """The hit shares of devices' memories, edges and regions, each asked for what the one before it lacks."""
    popularity, total = zipf.popularity(), sum(edge.share for edge in topology.edges)
    raw = zipf.document_tokens * scale.raw_token_bytes / 1e9
    stored = raw * scale.ratio
    found: dict[str, Shares] = {}
    asked: dict[str, list[Stream]] = {region.name: [] for region in topology.regions}
    for edge in topology.edges:
        rates = popularity * (zipf.requests / zipf.seconds * edge.share / total)
        ((memory,), time) = hit_shares([Stream(rates)], topology.readers.memory_gb / raw, zipf.seconds)
        missed = Stream(rates * (1 - memory), time)
        ((hits,), time) = hit_shares([missed], edge.capacity_gb / stored, zipf.seconds)
        found[f"memory of {edge.name}"], found[edge.name] = memory, hits
        if edge.region:
            asked[edge.region].append(Stream(missed.rates * (1 - hits), time))
    for region in topology.regions:
        streams = asked[region.name]
        if streams:
            shares, _ = hit_shares(streams, region.capacity_gb / stored, zipf.seconds)
            rates = sum((stream.rates for stream in streams), np.zeros(zipf.documents))
            hit = sum((stream.rates * share for stream, share in zip(streams, shares, strict=True)), np.zeros(zipf.documents))
            found[region.name] = np.divide(hit, rates, out=np.zeros(zipf.documents), where=rates > 0)
        else:
            found[region.name] = np.zeros(zipf.documents)
    return SteadyCaches(found, zipf.document_blocks, np.random.default_rng(seed))
