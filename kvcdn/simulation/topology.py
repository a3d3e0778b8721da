"""A topology: origin, regions, edges, readers, and what lies between them, from a TOML text whose every key is known.

`infra/simulation.toml` is a commented sample. Speeds are megabits, latencies milliseconds, capacities GB of 10^9 bytes; `inf`
stands for no limit. Names of models, prices and devices are those of `kvcdn economics`.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvcdn.economics.checks import LARGEST, known, number, whole
from kvcdn.economics.precisions import PRECISIONS
from kvcdn.economics.pricebook import PriceBook
from kvcdn.errors import UsageError

T = TypeVar("T")

POLICIES = ("edge", "lru", "s3-fifo", "sieve", "arc")
"""How a cache evicts: as an edge of kvcdn does, or as the usual policies do."""

MODES = ("auto", "fetch", "compute", "both")

MOST_NODES = 1000
"""Regions, or edges."""

_SAMPLE = "infra/simulation.toml is a commented sample"


def _limit(name: str, value: float) -> None:
    if value != math.inf:
        number(name, value)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where what is published lies."""

    store: str = "s3"
    """Its prices: s3, s3-in-region, r2, b2, or one of a price file."""
    mbit: float = math.inf
    """What all reads of it share."""
    latency_ms: float = 20.0
    """From a request for an object to its first byte, beside the way there."""

    def __post_init__(self) -> None:
        _limit("origin: mbit", self.mbit)
        number("origin: latency_ms", self.latency_ms, most=60_000)


@dataclass(frozen=True, kw_only=True)
class Publish:
    """When documents are published, each for its own device time, which is counted."""

    after_requests: int = 0
    """A block is published once so many requests had to compute it; 0: all is published before the first request."""
    delay_s: float = 0.0
    """From then until it can be fetched, beside the prefill."""

    def __post_init__(self) -> None:
        whole("publish: after_requests", self.after_requests, least=0, most=1_000_000)
        number("publish: delay_s", self.delay_s, most=1e9)


@dataclass(frozen=True, kw_only=True)
class Readers:
    """Who asks, and what computes for them."""

    model: str = "qwen3-4b"
    precision: str = "bf16"
    device: str = "h100"
    devices: int = 0
    """Behind each edge, sharing one queue, each as few as hold the model together; 0: every reader has a device alone."""
    utilisation: float = 0.4
    """Share of a device's peak that prefill reaches."""
    prefill_rate: float | None = None
    """Tokens a second at 4,096 tokens, as measured, in place of the device's and its utilisation."""
    gpu_hour_usd: float | None = None
    """In place of the device's price."""
    memory_gb: float = 0.0
    """Raw KV that the devices behind an edge keep by themselves, least recently used first out, with kvcdn and without.

    As if a request always found the device that has it: the most that an engine's own prefix cache can do.
    """
    open_mb_per_s: float = 2400.0
    """Raw KV that a reader verifies, decrypts and decodes, in 10^6 bytes a second."""
    round_trips: float = 4.0
    """Before the first byte: TCP, TLS, the match, the block. 2 on connections that are open."""
    mode: str = "auto"
    """auto: as the client plans; or fetch, compute or both, always."""

    def __post_init__(self) -> None:
        whole("readers: devices", self.devices, least=0, most=1_000_000)
        number("readers: utilisation", self.utilisation, positive=True, most=1)
        if self.prefill_rate is not None:
            number("readers: prefill_rate", self.prefill_rate, positive=True)
        if self.gpu_hour_usd is not None:
            number("readers: gpu_hour_usd", self.gpu_hour_usd)
        _limit("readers: memory_gb", self.memory_gb)
        number("readers: open_mb_per_s", self.open_mb_per_s, positive=True)
        number("readers: round_trips", self.round_trips, most=100)
        known("mode", self.mode, dict.fromkeys(MODES))


@dataclass(frozen=True, kw_only=True)
class Region:
    """A cache between edges and the origin."""

    name: str
    capacity_gb: float = math.inf
    policy: str = "edge"
    mbit: float = math.inf
    """Of its link to the origin."""
    rtt_ms: float = 20.0
    """To the origin."""
    out_mbit: float = math.inf
    """What all edges that it serves share."""

    def __post_init__(self) -> None:
        for name in ("capacity_gb", "mbit", "out_mbit"):
            _limit(f"region {self.name}: {name}", getattr(self, name))
        number(f"region {self.name}: rtt_ms", self.rtt_ms, most=60_000)
        known("policy", self.policy, dict.fromkeys(POLICIES))


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A cache near readers, and the links on both sides of it."""

    name: str
    share: float = 1.0
    """Of the requests, against the other edges' shares."""
    region: str = ""
    """What it fills itself from; the origin where empty."""
    capacity_gb: float = math.inf
    policy: str = "edge"
    mbit: float = math.inf
    """What all its readers share: its network card, or what its processors can send."""
    reader_mbit: float = 1000.0
    """Of one reader."""
    rtt_ms: float = 10.0
    """To its readers."""
    request_ms: float = 0.4
    """Of the edge's time for a request: about what one costs an edge and a client on two cores."""
    uplink_mbit: float = math.inf
    """Of its link to the region, or to the origin."""
    uplink_rtt_ms: float = 20.0
    delivery: str = "own"
    """Prices of what it sends: own, bunny, bunny-volume, cloudfront, fastly, or one of a price file."""

    def __post_init__(self) -> None:
        number(f"edge {self.name}: share", self.share)
        for name in ("capacity_gb", "mbit", "reader_mbit", "uplink_mbit"):
            _limit(f"edge {self.name}: {name}", getattr(self, name))
        for name in ("rtt_ms", "request_ms", "uplink_rtt_ms"):
            number(f"edge {self.name}: {name}", getattr(self, name), most=60_000)
        known("policy", self.policy, dict.fromkeys(POLICIES))


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Everything but the traffic. Raises UsageError for what cannot be."""

    name: str = "own"
    origin: Origin = field(default_factory=Origin)
    publish: Publish = field(default_factory=Publish)
    readers: Readers = field(default_factory=Readers)
    regions: tuple[Region, ...] = ()
    edges: tuple[Edge, ...] = (Edge(name="edge"),)

    def __post_init__(self) -> None:
        for kind, nodes in (("region", self.regions), ("edge", self.edges)):
            names = [node.name for node in nodes]
            if len(set(names)) != len(names) or "" in names:
                raise UsageError(f"every {kind} needs a name of its own")
            if len(names) > MOST_NODES:
                raise UsageError(f"{len(names):,} {kind}s are more than {MOST_NODES:,}")
        for edge in self.edges:
            if edge.region:
                known("region", edge.region, {region.name: region for region in self.regions})
        number("the edges' shares together", sum(edge.share for edge in self.edges), positive=True)

    def check(self, book: PriceBook) -> None:
        """Raises UsageError for a model, device or price that `book` does not know."""
        known("model", self.readers.model, book.models)
        known("precision", self.readers.precision, PRECISIONS)
        known("device", self.readers.device, book.devices)
        known("store", self.origin.store, book.stores)
        for edge in self.edges:
            known("delivery", edge.delivery, book.deliveries)

    def varied(self, key: str, value: str) -> Topology:
        """This topology with one setting, such as `edge.capacity_gb`, changed: of all edges or regions. Raises UsageError."""
        table, _, name = key.partition(".")
        kinds: dict[str, tuple[str, type[Any]]] = {
            "origin": ("origin", Origin),
            "publish": ("publish", Publish),
            "readers": ("readers", Readers),
            "region": ("regions", Region),
            "edge": ("edges", Edge),
        }
        attribute, kind = known("table", table, kinds)
        entry = {name: _parsed(value)}
        old = getattr(self, attribute)
        if isinstance(old, tuple):
            new: Any = tuple(_entry(kind, {**dataclasses.asdict(node), **entry}, f"--vary {key}") for node in old)
        else:
            new = _entry(kind, {**dataclasses.asdict(old), **entry}, f"--vary {key}")
        changed: dict[str, Any] = {attribute: new}
        return dataclasses.replace(self, **changed)


def read_topology(text: str, what: str) -> Topology:
    """The topology of a TOML text. Raises UsageError that names `what` and the key."""
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{what}: {error}", hint=_SAMPLE) from None
    unknown = set(tables) - {"origin", "publish", "readers", "region", "edge"}
    if unknown:
        raise UsageError(f"{what}: no such table or key as {min(unknown)}", hint=_SAMPLE)
    edges = _entries(Edge, tables.get("edge", []), f"{what}: [[edge]]")
    if not edges:
        raise UsageError(f"{what}: no [[edge]]", hint=_SAMPLE)
    return Topology(
        name=what,
        origin=_entry(Origin, tables.get("origin", {}), f"{what}: [origin]"),
        publish=_entry(Publish, tables.get("publish", {}), f"{what}: [publish]"),
        readers=_entry(Readers, tables.get("readers", {}), f"{what}: [readers]"),
        regions=_entries(Region, tables.get("region", []), f"{what}: [[region]]"),
        edges=edges,
    )


def _parsed(value: str) -> Any:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _entries(kind: Callable[..., T], entries: Any, what: str) -> tuple[T, ...]:
    if not isinstance(entries, list):
        raise UsageError(f"{what} is written with two brackets, once for each", hint=_SAMPLE)
    return tuple(_entry(kind, entry, what) for entry in entries)


def _entry(kind: Callable[..., T], entry: Any, what: str) -> T:
    if not isinstance(entry, dict):
        raise UsageError(f"{what} is not a table", hint=_SAMPLE)
    fields = {item.name: str(item.type) for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key, value in entry.items():
        if key not in fields:
            raise UsageError(f"{what}: {key} is no setting", hint=f"known: {', '.join(fields)}")
        if not _fits(value, fields[key]):
            raise UsageError(
                f"{what}: {key} must be {_KINDS[fields[key].partition(' ')[0]]}, not {str(value)[:40]!r}", hint=_SAMPLE
            )
    if "name" in fields and "name" not in entry:
        raise UsageError(f"{what}: name is missing", hint=_SAMPLE)
    try:
        return kind(**entry)
    except UsageError as error:
        raise UsageError(f"{what}: {error}", hint=error.hint or _SAMPLE) from None


_KINDS: Mapping[str, str] = {"str": "a string", "int": "a whole number", "float": "a number"}


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return kind.endswith("None")
    if kind.startswith("str"):
        return isinstance(value, str)
    if kind.startswith("int"):
        return type(value) is int
    return type(value) in (int, float) and not math.isnan(value) and (math.isinf(value) or abs(value) <= LARGEST)
