"""Metrics: what an edge counts, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kvcdn.edge.telemetry.traffic import MAX_TENANTS, OTHER

CONTENT_TYPE = CONTENT_TYPE_LATEST

SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""From a hit on loopback to a fill over a slow link."""


class Metrics:
    """The counters. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvcdn_edge_requests", "Requests answered.", ["route", "status", "cache"], registry=self.registry
        )
        self.response_bytes = Counter("kvcdn_edge_response_body_bytes", "Body bytes sent.", ["route"], registry=self.registry)
        self.seconds = Histogram(
            "kvcdn_edge_request_seconds",
            "From a request's headers to the last byte of its answer.",
            ["route"],
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self._counters: dict[tuple[str, int, str], tuple[Counter, Counter, Histogram]] = {}
        self.origin_requests = Counter(
            "kvcdn_edge_origin_requests", "Requests to the origin.", ["operation"], registry=self.registry
        )
        self.origin_bytes = Counter("kvcdn_edge_origin_bytes", "Object bytes filled from the origin.", registry=self.registry)
        self.peer_requests = Counter("kvcdn_edge_peer_requests", "Objects asked of peers.", registry=self.registry)
        self.peer_bytes = Counter("kvcdn_edge_peer_bytes", "Object bytes filled from peers.", registry=self.registry)
        self.fills = Counter("kvcdn_edge_fills", "Fills ended, by how.", ["outcome"], registry=self.registry)
        self.resumes = Counter(
            "kvcdn_edge_fill_resumes", "Fills taken up again behind what was proven, by any origin.", registry=self.registry
        )
        self.fills_running = Gauge("kvcdn_edge_fills_running", "Fills under way or waiting.", registry=self.registry)

        self.tenant_requests = Counter(
            "kvcdn_edge_tenant_requests", "Requests answered, by whose they were.", ["tenant", "status"], registry=self.registry
        )
        self.tenant_bytes = Counter(
            "kvcdn_edge_tenant_body_bytes", "Body bytes sent, by to whom.", ["tenant"], registry=self.registry
        )
        self._tenants: set[str] = set()
        self._tenant_counters: dict[tuple[str, int], tuple[Counter, Counter]] = {}

        self.purged = Counter("kvcdn_edge_purged_objects", "Cached objects deleted on demand.", registry=self.registry)
        self.scrubbed = Counter(
            "kvcdn_edge_scrubbed_objects", "Cached files read again, by what was found.", ["finding"], registry=self.registry
        )
        self.scrubbed_bytes = Counter("kvcdn_edge_scrubbed_bytes", "Bytes read again.", registry=self.registry)

    def watch(self, *collectors: Collector) -> None:
        """Shows what `collectors` find besides."""
        for collector in collectors:
            self.registry.register(collector)

    def observe(self, route: str, status: int, cache: str, size: int, seconds: float) -> None:
        """Counts one answered request."""
        kind = route, status, cache
        counters = self._counters.get(kind)
        if counters is None:
            # Looked up once for each of the few kinds there are: on the way of a small hit it is felt.
            counters = self._counters[kind] = (
                self.requests.labels(route, str(status), cache),
                self.response_bytes.labels(route),
                self.seconds.labels(route),
            )
        requests, response_bytes, spans = counters
        requests.inc()
        response_bytes.inc(size)
        spans.observe(seconds)

    def observe_tenant(self, tenant: str, status: int, size: int) -> None:
        """Counts one answered request of `tenant`; of nobody where the name is empty."""
        if not tenant:
            return
        if tenant not in self._tenants:
            # Time series are not free: what further tenants do is counted together.
            if len(self._tenants) >= MAX_TENANTS:
                tenant = OTHER
            else:
                self._tenants.add(tenant)
        counters = self._tenant_counters.get((tenant, status))
        if counters is None:
            counters = self._tenant_counters[tenant, status] = (
                self.tenant_requests.labels(tenant, str(status)),
                self.tenant_bytes.labels(tenant),
            )
        counters[0].inc()
        counters[1].inc(size)

    def filled_bytes(self) -> int:
        """Object bytes filled from origins so far."""
        return int(sum(_values(self.origin_bytes).values()))

    def peer_filled_bytes(self) -> int:
        """Object bytes filled from peers so far."""
        return int(sum(_values(self.peer_bytes).values()))

    def fills_by_outcome(self) -> dict[str, int]:
        """Fills ended so far."""
        return {labels[0]: int(value) for labels, value in _values(self.fills).items()}

    def render(self) -> bytes:
        """The exposition text, of type CONTENT_TYPE."""
        return generate_latest(self.registry)


def _values(counter: Counter) -> dict[tuple[str, ...], float]:
    """The values of `counter` by its labels' values."""
    samples = [sample for family in counter.collect() for sample in family.samples if sample.name.endswith("_total")]
    return {tuple(sample.labels.values()): sample.value for sample in samples}
