"""The status: how an edge is and what it has done, as one JSON object. docs/operating.md describes it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvcdn import __version__
from kvcdn.access.tasks import beside
from kvcdn.edge.disk.storage import DiskCache
from kvcdn.edge.fills.origins import Origin
from kvcdn.edge.http.target import ObjectName
from kvcdn.edge.telemetry.hot import Heat
from kvcdn.edge.telemetry.metrics import Metrics
from kvcdn.edge.telemetry.traffic import OTHER, Sums, Traffic
from kvcdn.edge.tenants.admission import Admission
from kvcdn.edge.threads import in_thread
from kvcdn.edge.upkeep.pins import Pins

RECORD_SECONDS = 10.0
"""How often the history is carried on: the width of its finest steps."""

SHOWN = 50
"""Tenants and models shown, those with most bytes first."""

HOT_SHOWN = 10

_DIGITS = 3
"""Behind the point, of tokens and seconds."""


class Status:
    """Looks at an edge. For the event loop's thread."""

    def __init__(
        self,
        traffic: Traffic,
        cache: DiskCache,
        origins: Sequence[Origin],
        peers: Sequence[Origin],
        metrics: Metrics,
        admission: Admission,
        pins: Pins,
    ) -> None:
        self._traffic, self._cache, self._origins, self._peers = traffic, cache, origins, peers
        self._metrics, self._admission, self._pins = metrics, admission, pins

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Carries the history on while the context lasts."""
        return beside(self._keep(), "history")

    async def _keep(self) -> None:
        while True:
            self._traffic.record(self._metrics.filled_bytes())
            await asyncio.sleep(RECORD_SECONDS)

    async def encode(self) -> bytes:
        """The status of now, as JSON."""
        # A network file system may take its time to say how full it is.
        free = await in_thread(_free_bytes, self._cache)
        return json.dumps(self._look(free), separators=(",", ":")).encode("ascii")

    def _look(self, free: int | None) -> dict[str, Any]:
        traffic, filled = self._traffic, self._metrics.filled_bytes()
        traffic.record(filled)
        sums = traffic.all
        return {
            "version": __version__,
            "time": round(time.time(), 3),
            "uptime_seconds": round(traffic.seconds, 3),
            "traffic": {**self._sums(sums), "origin_bytes": filled, "peer_bytes": self._metrics.peer_filled_bytes()},
            "saved": {
                "prefill_tokens": round(sums.tokens, _DIGITS),
                "prefill_seconds": round(sums.seconds, _DIGITS) if traffic.knows_speeds else None,
                "origin_bytes": max(sums.bytes - filled, 0),
            },
            "history": traffic.history.to_json(traffic.began + traffic.seconds),
            "fills": self._metrics.fills_by_outcome(),
            "disk": {
                "used_bytes": self._cache.used,
                "capacity_bytes": self._cache.capacity,
                "free_bytes": free,
                "objects": len(self._cache),
                "pinned_documents": len(self._pins),
                "pinned_bytes": self._pins.used,
                "quarantine_bytes": self._cache.quarantine.used,
                "evicted": self._cache.evicted,
                "dropped": {str(harm): count for harm, count in self._cache.dropped.items() if count},
            },
            "origins": [_origin(origin) for origin in self._origins],
            "peers": [_origin(peer) for peer in self._peers],
            "tenants": self._table("tenant", traffic.by_tenant, str),
            "models": self._table("model", traffic.by_model, self._name_of),
            "hot": {
                "prefixes": [self._prefix(key, heat) for key, heat in traffic.prefixes.first(HOT_SHOWN)],
                "objects": [self._object(key, heat) for key, heat in traffic.objects.first(HOT_SHOWN)],
            },
        }

    def _sums(self, sums: Sums) -> dict[str, Any]:
        return {**asdict(sums), "tokens": round(sums.tokens, _DIGITS), "seconds": round(sums.seconds, _DIGITS)}

    def _table(self, name: str, sums: Mapping[str, Sums], show: Callable[[str], str]) -> list[dict[str, Any]]:
        most = sorted(sums.items(), key=lambda item: item[1].bytes, reverse=True)[:SHOWN]
        return [{name: show(key), **self._sums(item)} for key, item in most]

    def _name_of(self, tag: str) -> str:
        return tag if tag == OTHER else self._admission.name_of(tag)

    def _prefix(self, key: str, heat: Heat) -> dict[str, Any]:
        return {**self._object(key, heat), "blocks": heat.blocks}

    def _object(self, key: str, heat: Heat) -> dict[str, Any]:
        name = ObjectName.from_path(f"/{key}")
        # Never the address itself: who has it can fetch the object.
        return {
            "name": "" if name is None else name.short,
            "model": self._name_of(key[3:35]),
            "asked": round(heat.asked, 2),
            "bytes": round(heat.bytes),
            "cached": self._cache.size_of(key) is not None,
        }


def _origin(origin: Origin) -> dict[str, Any]:
    health = origin.health
    return {
        "url": origin.url,
        "up": not health.down,
        "failures": health.failures,
        "verification_failures": origin.accused,
        "retry_seconds": round(health.rest_seconds, 1) if health.down else None,
        "latency": {operation: asdict(latency.recent()) for operation, latency in origin.latency.items()},
    }


def _free_bytes(cache: DiskCache) -> int | None:
    """What the cache's file system has free for this user; None where it does not say."""
    with contextlib.suppress(OSError):
        found = os.statvfs(cache.folder)
        return found.f_bavail * found.f_frsize
    return None
