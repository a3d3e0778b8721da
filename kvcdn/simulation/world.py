"""A world: a topology built into links, caches and devices, and requests run through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvcdn.economics.precisions import PRECISIONS
from kvcdn.economics.pricebook import PriceBook
from kvcdn.errors import UsageError
from kvcdn.simulation.catalogue import Catalogue
from kvcdn.simulation.link import Link
from kvcdn.simulation.loop import Loop
from kvcdn.simulation.node import Cache, Node, Origin, Source
from kvcdn.simulation.pool import Pool
from kvcdn.simulation.reader import Reader
from kvcdn.simulation.scale import Scale, speed_of
from kvcdn.simulation.site import Planner, Site, Tally
from kvcdn.simulation.topology import Edge, Region, Topology
from kvcdn.simulation.workload import Request

_BYTES = 1e6 / 8
"""A megabit's."""

_LARGEST_BLOCKS = 1 << 40
"""What `inf` GB hold."""


class MakeCache(Protocol):
    """Makes empty caches. `place` is the name of the edge or region, or `memory` of an edge's devices."""

    def __call__(self, policy: str, blocks: int, place: str) -> Cache: ...


@dataclass(frozen=True)
class Parts:
    """What is not simulated but real, handed in: eviction and the client's plan."""

    make_cache: MakeCache
    planner: Planner


class World:
    """One run. `with_kvcdn` False leaves edges and origin out."""

    def __init__(self, topology: Topology, scale: Scale, parts: Parts, *, with_kvcdn: bool) -> None:
        self.topology, self.scale, self.with_kvcdn = topology, scale, with_kvcdn
        self.loop = Loop()
        self.catalogue = Catalogue(self.loop, scale, topology.publish)
        self.origin = Origin(self.loop, Link(self.loop, topology.origin.mbit * _BYTES), topology.origin.latency_ms / 1000)
        self._parts = parts
        self.regions = {region.name: self._region(region) for region in topology.regions}
        self.requests = self.finished = 0
        self.last_s = 0.0
        """When the last prompt had its first token."""
        self.arrived_s = 0.0
        """When the last prompt was asked."""
        self.sites = [self._site(edge) for edge in topology.edges]

    def run(self, requests: Iterable[Request], progress: Callable[[int], None] | None = None) -> None:
        """Until every prompt has its first token, or nothing moves any more."""
        arriving = iter(requests)

        def arrive(request: Request) -> None:
            self.requests += 1
            self.arrived_s = request.time
            following = next(arriving, None)
            if following is not None:
                self.loop.at(following.time, lambda: arrive(following))
            Reader(self.sites[request.edge], request).begin()

        first = next(arriving, None)
        if first is None:
            raise UsageError("there is no request to simulate")
        self.loop.at(first.time, lambda: arrive(first))
        self.loop.run(None if progress is None else lambda: progress(self.finished))
        self.catalogue.finish(max(self.last_s, self.loop.now))

    def nodes(self) -> dict[str, Node]:
        """Edges by their names, after regions by theirs."""
        found = dict(self.regions)
        found |= {site.edge.name: site.node for site in self.sites if site.node is not None}
        return found

    def _blocks(self, gigabytes: float, block_bytes: float) -> int:
        return min(max(int(min(gigabytes * 1e9 / block_bytes, _LARGEST_BLOCKS)), 0), _LARGEST_BLOCKS)

    def _cache(self, policy: str, gigabytes: float, block_bytes: float, place: str) -> Cache:
        return self._parts.make_cache(policy, self._blocks(gigabytes, block_bytes), place)

    def _region(self, region: Region) -> Node:
        return Node(
            self.loop,
            self._cache(region.policy, region.capacity_gb, self.scale.block_bytes, region.name),
            Link(self.loop, region.mbit * _BYTES),
            region.rtt_ms / 1000,
            self.origin,
            Link(self.loop, region.out_mbit * _BYTES),
        )

    def _site(self, edge: Edge) -> Site:
        readers = self.topology.readers
        source: Source = self.regions[edge.region] if edge.region else self.origin
        node = Node(
            self.loop,
            self._cache(edge.policy, edge.capacity_gb, self.scale.block_bytes, edge.name),
            Link(self.loop, edge.uplink_mbit * _BYTES),
            edge.uplink_rtt_ms / 1000,
            source,
            Link(self.loop, edge.mbit * _BYTES, edge.reader_mbit * _BYTES),
        )
        raw_block_bytes = self.scale.raw_token_bytes * self.scale.block_tokens
        return Site(
            loop=self.loop,
            scale=self.scale,
            edge=edge,
            readers=readers,
            pool=Pool(self.loop, readers.devices),
            memory=self._cache("lru", readers.memory_gb, raw_block_bytes, f"memory of {edge.name}"),
            node=node if self.with_kvcdn else None,
            catalogue=self.catalogue,
            planner=self._parts.planner,
            tally=Tally(),
            finished=self._finish,
        )

    def _finish(self) -> None:
        self.finished += 1
        self.last_s = self.loop.now


def scale_of(topology: Topology, book: PriceBook, block_tokens: int) -> Scale:
    """Sizes and speeds of the topology's model on its readers' devices."""
    model = book.models[topology.readers.model]
    ratio = PRECISIONS[topology.readers.precision].ratio
    return Scale(model, ratio, speed_of(topology.readers, model, book.devices[topology.readers.device]), block_tokens)
