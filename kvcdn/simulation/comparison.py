"""A comparison: the same traffic over the same topology, with kvcdn and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvcdn.economics.pricebook import PriceBook
from kvcdn.economics.verdict import rounded
from kvcdn.simulation.outcome import outcome
from kvcdn.simulation.topology import Topology
from kvcdn.simulation.workload import TRACE_BLOCK_TOKENS, Request, Zipf
from kvcdn.simulation.world import Parts, World, scale_of

MOST_EVENTS_REQUESTS = 1_000_000
"""Up to so many requests each is simulated; more take hours."""

Progress = Callable[[str, int], None]
"""What is being done, and how many prompts of it."""


@dataclass(frozen=True)
class Traffic:
    """Who asks: the requests of a trace, or those that a law gives."""

    name: str
    trace: tuple[Request, ...] = ()
    zipf: Zipf | None = None
    seed: int = 0

    @property
    def block_tokens(self) -> int:
        return self.zipf.block_tokens if self.zipf else TRACE_BLOCK_TOKENS

    @property
    def requests(self) -> int:
        return round(self.zipf.requests) if self.zipf else len(self.trace)

    def draw(self, topology: Topology, requests: int) -> Iterable[Request]:
        """The first `requests` of them."""
        if self.zipf is None:
            return self.trace[:requests]
        return self.zipf.draw(requests, [edge.share for edge in topology.edges], self.seed)


def compare(topology: Topology, traffic: Traffic, book: PriceBook, parts: Parts, progress: Progress) -> dict[str, Any]:
    """Both outcomes, `without` and `with`. Raises UsageError for a topology that names what is not known."""
    topology.check(book)
    found: dict[str, Any] = {}
    for name, with_kvcdn in (("without", False), ("with", True)):
        world = World(topology, scale_of(topology, book, traffic.block_tokens), parts, with_kvcdn=with_kvcdn)
        publish(world, traffic)
        doing = f"prompts of {traffic.requests:,} {name} kvcdn"
        world.run(traffic.draw(topology, traffic.requests), lambda done, doing=doing: progress(doing, done))  # type: ignore[misc]
        found[name] = rounded(outcome(world, book))
    return found


def publish(world: World, traffic: Traffic) -> None:
    """Publishes all there is, where the topology says that it is published ahead."""
    if world.topology.publish.after_requests or not world.with_kvcdn:
        return
    if traffic.zipf is not None:
        world.catalogue.publish_documents(traffic.zipf.documents, traffic.zipf.document_tokens)
    for request in traffic.trace:
        world.catalogue.publish_chain(request.chain, request.covered)
