"""A comparison: the same traffic over the same topology, with kvcdn and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvcdn.economics.checks import known, whole
from kvcdn.economics.pricebook import PriceBook
from kvcdn.economics.verdict import rounded
from kvcdn.errors import UsageError
from kvcdn.simulation.outcome import outcome
from kvcdn.simulation.scale import Scale
from kvcdn.simulation.steady import SteadyCaches, steady_caches
from kvcdn.simulation.topology import Topology
from kvcdn.simulation.workload import TRACE_BLOCK_TOKENS, Request, Zipf
from kvcdn.simulation.world import Parts, World, scale_of

MOST_EVENTS_REQUESTS = 1_000_000
"""Up to so many requests each is simulated; more take hours."""

WINDOW_REQUESTS = 200_000
"""Of more requests so many are simulated, with caches in their steady state (`steady`)."""

METHODS = ("auto", "events", "window")

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


def compare(
    topology: Topology,
    traffic: Traffic,
    book: PriceBook,
    parts: Parts,
    progress: Progress,
    *,
    method: str = "auto",
    window: int = WINDOW_REQUESTS,
) -> dict[str, Any]:
    """Both outcomes, `without` and `with`, and the `method`: each prompt's `events`, or those of a `window` of the traffic.

    Raises UsageError for a topology that names what is not known, and for a window of what has none.
    """
    topology.check(book)
    known("method", method, dict.fromkeys(METHODS))
    whole("--window", window, least=1, most=MOST_EVENTS_REQUESTS)
    if method == "auto":
        method = "window" if traffic.requests > MOST_EVENTS_REQUESTS else "events"
    requests = min(window, traffic.requests) if method == "window" else traffic.requests
    scale = scale_of(topology, book, traffic.block_tokens)
    found: dict[str, Any] = {"method": method}
    for name, with_kvcdn in (("without", False), ("with", True)):
        if method == "window":
            parts = Parts(_steady(topology, traffic, scale), parts.planner)
        world = World(topology, scale, parts, with_kvcdn=with_kvcdn)
        publish(world, traffic)
        doing = f"prompts of {requests:,} {name} kvcdn"
        world.run(traffic.draw(topology, requests), lambda done, doing=doing: progress(doing, done))  # type: ignore[misc]
        span = traffic.zipf.seconds if method == "window" and traffic.zipf else None
        found[name] = rounded(outcome(world, book, traffic.requests / requests, span))
    return found


def _steady(topology: Topology, traffic: Traffic, scale: Scale) -> SteadyCaches:
    if traffic.zipf is None or topology.publish.after_requests:
        raise UsageError(
            "a window is simulated of drawn traffic on documents that are published ahead, and of nothing else",
            hint="set after_requests = 0, or ask for fewer readers",
        )
    return steady_caches(topology, scale, traffic.zipf, traffic.seed)


def publish(world: World, traffic: Traffic) -> None:
    """Publishes all there is, where the topology says that it is published ahead."""
    if world.topology.publish.after_requests or not world.with_kvcdn:
        return
    if traffic.zipf is not None:
        world.catalogue.publish_documents(traffic.zipf.documents, traffic.zipf.document_tokens)
    for request in traffic.trace:
        world.catalogue.publish_chain(request.chain, request.covered)
