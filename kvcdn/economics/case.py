"""A case: every assumption of one question to the economics, checked, and the sizes and speeds that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvcdn.economics.checks import number, whole
from kvcdn.economics.devices import Device, Link
from kvcdn.economics.models import Model
from kvcdn.economics.precisions import Precision
from kvcdn.economics.prices import Delivery, Store, Tariff
from kvcdn.layout import BLOCK_RAW_BYTES, MAX_BLOCK_TOKENS, MIN_BLOCK_TOKENS

LONGEST_TOKENS = 1 << 24
"""The last position that FORMAT.md 4.1 lets a block start at."""

MOST_READS = 1e15
"""More than all people could ask in a lifetime."""

DAYS_PER_MONTH = 365 / 12

GB = 1e9

OPEN_BYTES_PER_S = 2.4e9
"""Raw KV that a reader verifies, decrypts and decodes: some 300 MB/s a thread (`client/loading/fetch.py`), times eight."""

ROUND_TRIPS = 4
"""Before the first byte of KV: TCP, TLS, the match, the block."""

REQUEST_BYTES = 8 << 20
"""What a reader asks a store for at once (LARGEST_RANGE_BYTES in client/sources/stored.py): most blocks are one request."""

RANGE_BYTES = 1 << 20
"""What it asks an edge for at once, for long documents (client/sources/source.py)."""

STREAMED_BLOCKS = 16
"""Up to so many blocks an edge streams whole, one request each (client/loading/fetch.py)."""

CONNECTIONS = 8
"""Requests under way at once: a reader's threads (client/loading/fetch.py). Each waits a round trip for its next piece."""


@dataclass(frozen=True)
class Speed:
    """How fast the reader's model runs, from one of three kinds of knowledge."""

    usd_per_hour: float
    """Of all devices together."""
    flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    tokens_per_s: float | None = None
    """A constant rate, where FLOPs are not known."""
    source: str = "given"
    price_source: str = "given"

    @classmethod
    def of_device(cls, device: Device, count: int, utilisation: float, usd_per_hour: float | None = None) -> Speed:
        """`count` devices that share every pass evenly, at `usd_per_hour` each, or at the device's own price."""
        memory = device.memory_bytes_per_s * count if device.memory_bytes_per_s else None
        flops = device.sustained_flops(utilisation) * count
        shown = device.source if device.measured else f"{device.source}, at {utilisation:.0%} of the peak"
        hour, paid = hourly(device, usd_per_hour)
        return cls(hour * count, flops, memory, None, f"{count} x {device.name}: {shown}", paid)

    @classmethod
    def of_rate(cls, model: Model, tokens: int, tokens_per_s: float, price: tuple[float, str], source: str = "given") -> Speed:
        """A prefill rate at a length of `tokens`, at a price an hour with its source.

        Other lengths are scaled by FLOPs where the model's are known.
        """
        number("--prefill-rate", tokens_per_s, positive=True)
        if not model.active:
            return cls(price[0], tokens_per_s=tokens_per_s, source=source, price_source=price[1])
        return cls(price[0], model.flops(0, tokens) * tokens_per_s / tokens, source=source, price_source=price[1])

    def seconds(self, model: Model, start: int, end: int) -> float:
        """A forward pass over the tokens from `start` to `end`, given those before."""
        if end == start:
            return 0.0
        if self.flops_per_s is None:
            return (end - start) / (self.tokens_per_s or math.nan)
        memory = model.read_bytes(start, end) / self.memory_bytes_per_s if self.memory_bytes_per_s else 0.0
        return max(model.flops(start, end) / self.flops_per_s, memory)

    @property
    def usd_per_s(self) -> float:
        return self.usd_per_hour / 3600


def hourly(device: Device, usd_per_hour: float | None) -> tuple[float, str]:
    """The price of an hour of one device, given or its own, and where that is from."""
    return (device.usd_per_hour, f"{device.price_source}, {device.date}") if usd_per_hour is None else (usd_per_hour, "given")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything that is assumed. Raises UsageError for a number that cannot be."""

    model: Model
    precision: Precision
    speed: Speed
    store: Store
    delivery: Delivery
    zero_egress: Store
    tariff: Tariff
    link: Link
    tokens: int = 3774
    """Of the document."""
    question_tokens: int = 32
    """That the reader's model computes in any case, after the document."""
    reads: float = 1000.0
    """In `days`, all together."""
    days: float = 30.0
    hit_ratio: float = 0.9
    """Share of reads that edges answer without the origin."""
    retrain_days: float | None = None
    """A new version of the model every so many days: everything is published anew."""
    open_bytes_per_s: float = OPEN_BYTES_PER_S
    round_trips: int = ROUND_TRIPS
    request_bytes: float = REQUEST_BYTES
    """That a reader asks a store for at once; a block's size or more: by whole blocks."""
    gpu_waits: bool = False
    """Whether the reader's device stands idle, paid, while the cache arrives. A busy server does not; a lone job does."""

    def __post_init__(self) -> None:
        whole("--tokens", self.tokens, least=1, most=LONGEST_TOKENS)
        whole("--question-tokens", self.question_tokens, least=1, most=LONGEST_TOKENS)
        number("--reads", self.reads, positive=True, most=MOST_READS)
        number("--days", self.days, positive=True, most=1e5)
        number("--hit-ratio", self.hit_ratio, most=1)
        number("--open-rate", self.open_bytes_per_s, positive=True)
        number("--request-bytes", self.request_bytes, least=1)
        number("--gpu-hour", self.speed.usd_per_hour)
        if self.retrain_days is not None:
            number("--retrain-days", self.retrain_days, positive=True, most=1e5)

    @cached_property
    def raw_bytes(self) -> float:
        return self.model.kv_bytes(self.tokens)

    @cached_property
    def stored_bytes(self) -> float:
        return self.raw_bytes * self.precision.ratio

    @cached_property
    def stored_gb(self) -> float:
        return self.stored_bytes / GB

    @cached_property
    def blocks(self) -> int:
        """Objects of the document beside its manifest, by FORMAT.md 2.4; states and windows are counted as if spread evenly."""
        affordable = max(int(BLOCK_RAW_BYTES * self.tokens / self.raw_bytes), 1)
        length = min(max(1 << (affordable.bit_length() - 1), MIN_BLOCK_TOKENS), MAX_BLOCK_TOKENS)
        return math.ceil(self.tokens / length)

    @cached_property
    def ranges(self) -> int:
        """Requests to a store for all blocks, read in pieces of `request_bytes`."""
        return self.blocks * math.ceil(self.stored_bytes / self.blocks / self.request_bytes)

    @cached_property
    def edge_requests(self) -> int:
        """Requests to an edge for all blocks: one each, or pieces where they are many."""
        pieces = math.ceil(self.stored_bytes / self.blocks / RANGE_BYTES)
        return self.blocks if self.blocks <= STREAMED_BLOCKS else self.blocks * pieces

    @property
    def turns_s(self) -> float:
        """Round trips that a connection spends waiting, one for each of its requests in turn."""
        return math.ceil(self.edge_requests / CONNECTIONS) * self.link.round_trip_s

    @property
    def publications(self) -> int:
        """In the case's days."""
        return math.ceil(self.days / self.retrain_days) if self.retrain_days else 1

    @property
    def months(self) -> float:
        return self.days / DAYS_PER_MONTH

    @cached_property
    def prefill_s(self) -> float:
        """The document alone."""
        return self.speed.seconds(self.model, 0, self.tokens)

    @cached_property
    def miss_s(self) -> float:
        """To the first token without a cache: document and question."""
        return self.speed.seconds(self.model, 0, self.tokens + self.question_tokens)

    @cached_property
    def question_s(self) -> float:
        """The question's own pass, with the document's KV in memory."""
        return self.speed.seconds(self.model, self.tokens, self.tokens + self.question_tokens)

    @property
    def overhead_s(self) -> float:
        return self.round_trips * self.link.round_trip_s

    @property
    def open_s(self) -> float:
        return self.raw_bytes / self.open_bytes_per_s

    @property
    def fetch_s(self) -> float:
        """Round trips, then the slowest of the link, of opening what arrives, and of asking for it piece by piece."""
        return self.overhead_s + max(self.stored_bytes / self.link.bytes_per_s, self.open_s, self.turns_s)

    @property
    def hit_s(self) -> float:
        """To the first token from a cache. Layer streaming overlaps the two a little; that gain is left out."""
        return self.fetch_s + self.question_s

    def assumptions(self) -> dict[str, dict[str, Any]]:
        """Every assumption: its value, its unit, and where it comes from."""
        model, speed, store, free = self.model, self.speed, self.store, self.zero_egress
        rows: list[tuple[str, Any, str, str, str]] = [
            ("model", model.name, model.kind, model.source, model.date),
            ("parameters", model.parameters, "", model.source, model.date),
            ("active_parameters", model.active, "a token", model.source, model.date),
            ("weights", model.resident_bytes, "bytes", model.source, model.date),
            ("state", model.state_bytes, "bytes", model.source, model.date),
            ("tokens", self.tokens, "tokens of the document", "given", ""),
            ("question_tokens", self.question_tokens, "tokens after it", "given", ""),
            ("reads", self.reads, "in all the days", "given", ""),
            ("days", self.days, "days", "given", ""),
            ("retrain_days", self.retrain_days, "days between versions of the model", "given", ""),
            ("stored_ratio", self.precision.ratio, "stored over raw bytes", self.precision.source, self.precision.date),
            ("flops", speed.flops_per_s, "FLOPs a second, sustained", speed.source, ""),
            ("memory_bandwidth", speed.memory_bytes_per_s, "bytes a second", speed.source, ""),
            ("prefill_rate", speed.tokens_per_s, "tokens a second, at any length", speed.source, ""),
            ("gpu_hour_usd", speed.usd_per_hour, "USD an hour, all devices", speed.price_source, ""),
            ("gpu_waits", self.gpu_waits, "whether a fetch occupies the device", "given", ""),
            ("storage_usd_per_gb_month", store.storage_usd_per_gb_month, "USD", store.source, store.date),
            ("read_usd_per_1000", store.read_usd_per_1000, "USD", store.source, store.date),
            ("write_usd_per_1000", store.write_usd_per_1000, "USD", store.source, store.date),
            ("egress_usd_per_gb", store.egress_usd_per_gb, "USD", store.source, store.date),
            ("edge_egress_usd_per_gb", self.delivery.egress_usd_per_gb, "USD", self.delivery.source, self.delivery.date),
            ("hit_ratio", self.hit_ratio, "of the reads, at edges", "assumed", ""),
            ("zero_egress_store", free.name, "", free.source, free.date),
            ("zero_egress_storage_usd_per_gb_month", free.storage_usd_per_gb_month, "USD", free.source, free.date),
            ("zero_egress_read_usd_per_1000", free.read_usd_per_1000, "USD", free.source, free.date),
            ("zero_egress_write_usd_per_1000", free.write_usd_per_1000, "USD", free.source, free.date),
            ("input_usd_per_million", self.tariff.input_usd_per_million, "USD", self.tariff.source, self.tariff.date),
            ("cached_usd_per_million", self.tariff.cached_usd_per_million, "USD", self.tariff.source, self.tariff.date),
            ("link", self.link.bytes_per_s, "bytes a second", self.link.source, ""),
            ("round_trip", self.link.round_trip_s, "seconds", self.link.source, ""),
            ("round_trips", self.round_trips, "before the first byte: TCP, TLS, match, block", "assumed", ""),
            ("open_rate", self.open_bytes_per_s, "raw bytes a second: verify, decrypt, decode", "assumed: 8 threads", ""),
            ("request_bytes", self.request_bytes, "bytes of one request to the store, at most", "client/sources/stored.py", ""),
            ("connections", CONNECTIONS, "requests under way at once", "client/loading/fetch.py", ""),
            ("requests_per_read", self.ranges + 1, "from the store; one more to match", "computed", ""),
            ("requests_per_fill", self.blocks + 1, "from the store by an edge: whole blocks", "computed", ""),
        ]
        return {name: {"value": v, "unit": unit, "source": source, "date": date} for name, v, unit, source, date in rows}
