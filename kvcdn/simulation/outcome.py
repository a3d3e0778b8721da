"""An outcome: what a world's run comes to, in hits, bytes, time to the first token, and money."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcdn.economics.case import DAYS_PER_MONTH, GB
from kvcdn.economics.pricebook import PriceBook
from kvcdn.simulation.node import Node
from kvcdn.simulation.world import World

PERCENTILES = (50, 90, 95, 99)

_MONTH_S = DAYS_PER_MONTH * 86400


def outcome(world: World, book: PriceBook, times: float = 1.0, seconds: float | None = None) -> dict[str, Any]:
    """One run as a JSON object: seconds, bytes, tokens, US dollars.

    `times` scales what was counted, where one in so many requests was simulated; `seconds` is then the whole span. Times to the
    first token and ratios are as simulated.
    """
    tallies = [site.tally for site in world.sites]
    first = np.array([value for tally in tallies for value in tally.first_token_s])
    tokens = times * sum(tally.tokens for tally in tallies)
    span = world.last_s if seconds is None else seconds
    found: dict[str, Any] = {
        "requests": round(times * world.requests),
        "simulated": world.requests,
        "unfinished": world.requests - world.finished,
        "seconds": span,
        "drained_s": world.last_s - world.arrived_s,
        "tokens": tokens,
        "first_token_s": _spread(first),
        "first_token_quantiles_s": np.percentile(first, range(101)).tolist() if len(first) else [],
        "tokens_share": {
            name: times * sum(getattr(tally, f"tokens_{name}") for tally in tallies) / tokens if tokens else 0.0
            for name in ("memory", "fetched", "computed")
        },
        "ways": {way: times * sum(tally.modes.get(way, 0) for tally in tallies) for way in _ways(world)},
        "turned": times * sum(tally.turned for tally in tallies),
        "devices": _devices(world, times, span),
        "nodes": {name: _node(node, times) for name, node in world.nodes().items()} if world.with_kvcdn else {},
        "origin": {"sent_bytes": times * world.origin.sent_bytes, "requests": times * _objects(world)},
        "published": _published(world) if world.with_kvcdn else None,
    }
    costs = _costs(world, book, times, span)
    found["costs_usd"] = costs
    total = sum(costs.values())
    found["usd"] = total
    found["usd_per_million_tokens"] = total / tokens * 1e6 if tokens else None
    return found


def _spread(values: np.ndarray[Any, Any]) -> dict[str, float | None]:
    if not len(values):
        return {"mean": None, **{f"p{share}": None for share in PERCENTILES}, "max": None}
    found = np.percentile(values, PERCENTILES)
    return {
        "mean": float(values.mean()),
        **{f"p{share}": float(value) for share, value in zip(PERCENTILES, found, strict=True)},
        "max": float(values.max()),
    }


def _ways(world: World) -> list[str]:
    return sorted({way for site in world.sites for way in site.tally.modes})


def _devices(world: World, times: float, span: float) -> dict[str, float | None]:
    """`utilisation` and the price of all hours only where devices are shared: readers' own are idle most of their lives."""
    busy, count = times * sum(site.pool.busy_s for site in world.sites), world.topology.readers.devices * len(world.sites)
    waited, jobs = sum(site.pool.waited_s for site in world.sites), sum(site.pool.jobs for site in world.sites)
    return {
        "count": count or None,
        "busy_s": busy,
        "utilisation": busy / (count * span) if count and span else None,
        "mean_wait_s": waited / jobs if jobs else 0.0,
        "rented_usd": count * span * world.scale.speed.usd_per_s if count else None,
    }


def _node(node: Node, times: float) -> dict[str, float | None]:
    counts = node.counts
    return {
        "asked_bytes": times * counts.asked_bytes,
        "held_bytes": times * counts.held_bytes,
        "joined_bytes": times * counts.joined_bytes,
        "filled_bytes": times * counts.filled_bytes,
        "hit_ratio": counts.hit_ratio,
        "leading_hit_ratio": counts.leading_blocks / counts.asked_blocks if counts.asked_blocks else None,
        "sent_bytes": times * node.out.sent,
    }


def _objects(world: World) -> float:
    """Requests to the store: one an object sent, and one an object that an edge or region had to ask about."""
    blocks = world.origin.sent_blocks + world.origin.matched_blocks
    return float(blocks * world.scale.objects(world.scale.block_tokens))


def _published(world: World) -> dict[str, float]:
    catalogue = world.catalogue
    return {"prefill_s": catalogue.prefill_s, "objects": catalogue.objects, "stored_bytes": catalogue.stored_bytes}


def _costs(world: World, book: PriceBook, times: float, span: float) -> dict[str, float]:
    """Device time that was used, and what kvcdn adds to it. What an edge's machine costs is not counted."""
    usd_per_s, store, catalogue = world.scale.speed.usd_per_s, book.stores[world.topology.origin.store], world.catalogue
    costs = {"compute": times * sum(site.pool.busy_s for site in world.sites) * usd_per_s}
    if not world.with_kvcdn:
        return costs
    delivered = sum(
        site.node.out.sent * book.deliveries[site.edge.delivery].egress_usd_per_gb
        for site in world.sites
        if site.node is not None
    )
    # What was published ahead lies there all the time, of which a window is but a part.
    stored_byte_s = catalogue.stored_byte_s if times == 1.0 else catalogue.stored_bytes * span
    return {
        **costs,
        "publishing": catalogue.prefill_s * usd_per_s + catalogue.objects * store.write_usd_per_1000 / 1000,
        "storage": stored_byte_s / GB / _MONTH_S * store.storage_usd_per_gb_month,
        "store_requests": times * _objects(world) * store.read_usd_per_1000 / 1000,
        "origin_egress": times * world.origin.sent_bytes / GB * store.egress_usd_per_gb,
        "delivery": times * delivered / GB,
    }
