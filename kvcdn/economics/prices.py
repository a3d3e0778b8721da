"""Prices: what storage, delivery and API tokens cost, as dated presets with their sources, in US dollars.

A GB is 10^9 bytes (some bills count 2^30, which is 7 % more). List prices of the first tier, before volume discounts, free
allowances, commitments and taxes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcdn.economics.checks import number


@dataclass(frozen=True)
class Store:
    """Where the objects lie, and what reading them from there costs."""

    name: str
    storage_usd_per_gb_month: float
    read_usd_per_1000: float
    write_usd_per_1000: float
    egress_usd_per_gb: float
    source: str = "given"
    date: str = ""

    def __post_init__(self) -> None:
        for field in ("storage_usd_per_gb_month", "read_usd_per_1000", "write_usd_per_1000", "egress_usd_per_gb"):
            number(f"{self.name}: {field}", getattr(self, field))


@dataclass(frozen=True)
class Delivery:
    """What delivers from edges to readers: a price per GB, whatever the hit ratio."""

    name: str
    egress_usd_per_gb: float
    source: str = "given"
    date: str = ""

    def __post_init__(self) -> None:
        number(f"{self.name}: egress_usd_per_gb", self.egress_usd_per_gb)


@dataclass(frozen=True)
class Tariff:
    """What an API charges for input tokens, and for those it finds in its own cache."""

    name: str
    input_usd_per_million: float
    cached_usd_per_million: float
    source: str = "given"
    date: str = ""

    def __post_init__(self) -> None:
        for field in ("input_usd_per_million", "cached_usd_per_million"):
            number(f"{self.name}: {field}", getattr(self, field))


_LIST = "list price, first tier"

_SEEN = "2026-11"

_API = "price data of litellm 1.110 and genai-prices 0.2.3"

STORES: Mapping[str, Store] = {
    store.name: store
    for store in (
        Store("s3", 0.023, 0.0004, 0.005, 0.09, f"Amazon S3 Standard, us-east-1, to the internet, {_LIST}", _SEEN),
        Store("s3-in-region", 0.023, 0.0004, 0.005, 0.0, "Amazon S3 Standard, read from the same region, which is free", _SEEN),
        Store("r2", 0.015, 0.00036, 0.0045, 0.0, f"Cloudflare R2 Standard, no egress fee, {_LIST}", _SEEN),
        Store("b2", 0.006, 0.0, 0.0, 0.01, f"Backblaze B2, {_LIST}", _SEEN),
    )
}

DELIVERIES: Mapping[str, Delivery] = {
    delivery.name: delivery
    for delivery in (
        Delivery("cloudfront", 0.085, f"Amazon CloudFront, {_LIST}", _SEEN),
        Delivery("bunny", 0.01, f"Bunny CDN standard network, {_LIST}", _SEEN),
        Delivery("bunny-volume", 0.005, f"Bunny CDN volume network, {_LIST}", _SEEN),
        Delivery("fastly", 0.12, f"Fastly, {_LIST}", _SEEN),
        Delivery("own", 0.0, "an edge of one's own beside the readers: traffic is free, the machine is not counted", _SEEN),
    )
}

TARIFFS: Mapping[str, Tariff] = {
    tariff.name: tariff
    for tariff in (
        Tariff("claude-sonnet-4-6", 3.0, 0.30, _API, _SEEN),
        Tariff("claude-opus-5", 5.0, 0.50, _API, _SEEN),
        Tariff("claude-opus-5-5", 4.0, 0.20, _API, _SEEN),
        Tariff("claude-sonnet-5-5", 2.0, 0.10, _API, _SEEN),
        Tariff("gpt-5.6", 4.0, 0.40, _API, _SEEN),
        Tariff("gpt-6.1-sol", 2.0, 0.10, _API, _SEEN),
        Tariff("gemini-3.8-flash", 0.75, 0.075, _API, _SEEN),
        Tariff("deepseek-v4-flash", 0.30, 0.006, f"{_API}, peak hours", _SEEN),
    )
}
