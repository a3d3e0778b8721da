"""Costs: what the counts come to at given prices, in US dollars. The prices are those of `kvcdn.economics`.

Money is decimal. A price is a decimal number as its list shows it, products and sums are exact, and nothing is rounded here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

from kvcdn.accounting.hits import Row
from kvcdn.economics.prices import Delivery, Store

GB = Decimal(10**9)

MS_PER_HOUR = Decimal(3_600_000)


@dataclass(frozen=True)
class Prices:
    """What things cost: the store of the origin, the delivery from edges, and an hour of the device that prefills."""

    store: Store
    delivery: Delivery
    device_hour_usd: float
    device: str = "given"


@dataclass(frozen=True)
class Cost:
    """What one row came to. USD. What fills cost is nobody's in particular: other readers have the benefit."""

    edge_traffic: Decimal = Decimal(0)
    """Bytes that edges sent to readers."""
    tier_traffic: Decimal = Decimal(0)
    """Bytes that edges sent to edges that fill from them."""
    origin_traffic: Decimal = Decimal(0)
    """Bytes that edges filled from the store, and that clients read from it themselves."""
    origin_requests: Decimal = Decimal(0)
    """Reads and writes at the store."""
    publishing: Decimal = Decimal(0)
    """The device's time for what was published."""
    saved: Decimal = Decimal(0)
    """The device's time that readers did not need, less what they lost."""

    @property
    def spent(self) -> Decimal:
        return self.edge_traffic + self.tier_traffic + self.origin_traffic + self.origin_requests + self.publishing

    @property
    def net(self) -> Decimal:
        """Saved, less spent."""
        return self.saved - self.spent

    def to_json(self) -> dict[str, Any]:
        """Decimal numbers as text: nothing is lost to binary fractions."""
        found = {field.name: format(getattr(self, field.name).normalize(), "f") for field in fields(self)}
        return {**found, "spent": format(self.spent.normalize(), "f"), "net": format(self.net.normalize(), "f")}


def exact(price: float) -> Decimal:
    """The decimal number that a price list shows."""
    return Decimal(repr(price))


def cost_of(row: Row, prices: Prices) -> Cost:
    """What a row's counts come to; storage by the month is not in them, for ledgers do not say what lies where how long."""
    client, edge, origin = row.client, row.edge, row.origin
    hour = exact(prices.device_hour_usd)
    read = edge.get("origin_bytes", 0) + client.get("bytes_origin", 0)
    reads = edge.get("origin_requests", 0) + client.get("requests_origin", 0)
    # A publication writes its blocks and a manifest.
    writes = origin.get("blocks_uploaded", 0) + (origin.get("documents", 0) if origin.get("blocks_uploaded") else 0)
    sent = exact(prices.delivery.egress_usd_per_gb) / GB
    return Cost(
        edge_traffic=row.bytes_to_readers * sent,
        tier_traffic=edge.get("bytes_tiers", 0) * sent,
        origin_traffic=read * exact(prices.store.egress_usd_per_gb) / GB,
        origin_requests=(reads * exact(prices.store.read_usd_per_1000) + writes * exact(prices.store.write_usd_per_1000))
        / 1000,
        publishing=origin.get("prefill_ms", 0) * hour / MS_PER_HOUR,
        saved=row.saved_ms * hour / MS_PER_HOUR,
    )
