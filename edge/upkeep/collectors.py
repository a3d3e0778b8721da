"""Collectors: what an edge counts anyway, in the terms of Prometheus, made when it is asked for.

Labels are bounded: origins by the settings, tenants and models by `traffic`, the rest by enums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcdn import __version__
from kvcdn.edge.disk.storage import DiskCache, Harm
from kvcdn.edge.fills.origins import Origin
from kvcdn.edge.http.outcome import CacheOutcome
from kvcdn.edge.telemetry.traffic import Traffic
from kvcdn.edge.upkeep.pins import Pins


class CacheCollector(Collector):
    """The state of a disk cache."""

    def __init__(self, cache: DiskCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("kvcdn_edge_cache_bytes", "Disk taken by complete objects.", value=self._cache.used)
        yield GaugeMetricFamily("kvcdn_edge_cache_capacity_bytes", "The hard cap.", value=self._cache.capacity)
        yield GaugeMetricFamily("kvcdn_edge_cache_objects", "Objects in the cache.", value=len(self._cache))
        dropped = CounterMetricFamily("kvcdn_edge_dropped_objects", "Files found harmed and dropped.", labels=["harm"])
        for harm in Harm:
            dropped.add_metric([harm], self._cache.dropped[harm])
        yield dropped
        yield GaugeMetricFamily("kvcdn_edge_quarantine_bytes", "Disk taken by rotten files.", value=self._cache.quarantine.used)
        yield CounterMetricFamily("kvcdn_edge_evictions", "Objects evicted.", value=self._cache.evicted)


class PinCollector(Collector):
    """How much is pinned."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("kvcdn_edge_pinned_documents", "Documents that are pinned.", value=len(self._pins))
        yield GaugeMetricFamily("kvcdn_edge_pinned_bytes", "Disk that pinned documents take.", value=self._pins.used)


class OriginCollector(Collector):
    """How origins are, or peers, and how fast."""

    def __init__(self, kind: str, origins: Mapping[str, Origin]) -> None:
        """`kind` is the label, and part of the names, `origins` are by the label's values."""
        self._kind, self._origins = kind, origins

    def collect(self) -> Iterator[Metric]:
        kind = self._kind
        prefix = f"kvcdn_edge_{kind}"
        up = GaugeMetricFamily(f"{prefix}_up", f"0 while this {kind} rests, because it is down.", labels=[kind])
        bad = CounterMetricFamily(
            f"{prefix}_verification_failures", f"Times that this {kind} sent what failed a check.", labels=[kind]
        )
        spans = HistogramMetricFamily(
            f"{prefix}_seconds", f"Until the head of the {kind}'s answer was here.", labels=[kind, "operation"]
        )
        for value, origin in self._origins.items():
            up.add_metric([value], float(not origin.down))
            bad.add_metric([value], origin.accused)
            for operation, latency in origin.latency.items():
                buckets, total = latency.buckets()
                spans.add_metric([value, operation], buckets, total)
        yield from (up, bad, spans)


class TrafficCollector(Collector):
    """What was delivered, to whom, of which model, and what that saved."""

    def __init__(self, traffic: Traffic, name_of: Callable[[str], str]) -> None:
        """`name_of` gives a model's name by its tag."""
        self._traffic, self._name_of = traffic, name_of

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("kvcdn_edge_info", "1, with what runs here.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        yield from self._by_cache()
        yield from self._by_reader()
        yield from self._saved()

    def _by_cache(self) -> Iterator[Metric]:
        labels = ["cache"]
        requests = CounterMetricFamily("kvcdn_edge_object_requests", "Answers with an object, by its way.", labels=labels)
        sizes = CounterMetricFamily("kvcdn_edge_object_bytes", "Body bytes of objects, by their way.", labels=labels)
        for outcome in (CacheOutcome.HIT, CacheOutcome.COLLAPSED, CacheOutcome.MISS, CacheOutcome.PASSED):
            sums = self._traffic.by_outcome.get(outcome)
            requests.add_metric([outcome], sums.requests if sums else 0)
            sizes.add_metric([outcome], sums.bytes if sums else 0)
        yield from (requests, sizes)

    def _by_reader(self) -> Iterator[Metric]:
        sent: Counter[tuple[str, str]] = Counter()
        for (tenant, tag), sums in list(self._traffic.by_pair.items()):
            # A model may be named as the sum of what has no name of its own is.
            sent[tenant, self._name_of(tag)] += sums.bytes
        family = CounterMetricFamily(
            "kvcdn_edge_delivered_bytes", "Body bytes of objects, by to whom and of which model.", labels=["tenant", "model"]
        )
        for pair, size in sent.items():
            family.add_metric(pair, size)
        yield family

    def _saved(self) -> Iterator[Metric]:
        tokens: Counter[str] = Counter()
        seconds: Counter[str] = Counter()
        for tag, sums in list(self._traffic.by_model.items()):
            tokens[self._name_of(tag)] += sums.tokens  # type: ignore[assignment] # a Counter counts floats as well
            if sums.seconds:
                seconds[self._name_of(tag)] += sums.seconds  # type: ignore[assignment]
        for name, words, saved in (
            ("tokens", "Tokens delivered, which need no prefill.", tokens),
            ("seconds", "How long they would have taken, by prefill_speeds.", seconds),
        ):
            family = CounterMetricFamily(f"kvcdn_edge_saved_prefill_{name}", words, labels=["model"])
            for model, value in saved.items():
                family.add_metric([model], value)
            yield family
