"""Costs: what reading a document costs without kvcdn and with it, and from how many reads on the second is less.

Without: *gpu* prefills for every read at the price of the device's time; *api* pays an API's input tariff; *api-cached* its
tariff for what its own cache holds. With: *origin* delivers straight from the store, *edges* through edges at a hit ratio,
*zero-egress* from a store that charges nothing for traffic. The question is computed in any case and counted on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvcdn.economics.case import DAYS_PER_MONTH, MOST_READS, Case
from kvcdn.economics.checks import SMALLEST
from kvcdn.economics.prices import Store

WITHOUT = ("gpu", "api", "api-cached")

WITH = ("origin", "edges", "zero-egress")

CADENCES = (1, 7, 30, 90, 365)
"""Days between versions of a model, as tables show them."""


def per_read_without(case: Case) -> Mapping[str, float]:
    """USD that one read costs today, for each of WITHOUT."""
    tokens = case.tokens + case.question_tokens
    return {
        "gpu": case.miss_s * case.speed.usd_per_s,
        "api": tokens * case.tariff.input_usd_per_million / 1e6,
        "api-cached": (
            case.tokens * case.tariff.cached_usd_per_million + case.question_tokens * case.tariff.input_usd_per_million
        )
        / 1e6,
    }


def per_read_with(case: Case) -> Mapping[str, float]:
    """USD that one read costs with kvcdn, for each of WITH: delivery, requests, and the question's own compute."""
    busy = case.question_s + (case.fetch_s if case.gpu_waits else 0.0)
    compute = busy * case.speed.usd_per_s
    fill = _from_store(case, case.store, case.blocks)
    return {
        "origin": compute + _from_store(case, case.store, case.ranges),
        "edges": compute + case.stored_gb * case.delivery.egress_usd_per_gb + (1 - case.hit_ratio) * fill,
        "zero-egress": compute + _from_store(case, case.zero_egress, case.ranges),
    }


def _from_store(case: Case, store: Store, requests: int) -> float:
    """One whole reading of the document from `store`: traffic, `requests`, and one more to match."""
    return case.stored_gb * store.egress_usd_per_gb + (requests + 1) * store.read_usd_per_1000 / 1000


def store_of(case: Case, way: str) -> Store:
    """Where the objects lie for one of WITH."""
    return case.zero_egress if way == "zero-egress" else case.store


def publish_usd(case: Case, way: str) -> float:
    """One publication: the prefill, at the reader's device's price, and a write for each block and the manifest."""
    writes = (case.blocks + 1) * store_of(case, way).write_usd_per_1000 / 1000
    return case.prefill_s * case.speed.usd_per_s + writes


def storage_usd_per_month(case: Case, way: str) -> float:
    """One version of the document; older versions are deleted."""
    return case.stored_gb * store_of(case, way).storage_usd_per_gb_month


@dataclass(frozen=True)
class Comparison:
    """One way without kvcdn against one with it, over the case's days. USD."""

    without: str
    way: str
    read_without: float
    read_with: float
    publish: float
    """All publications together."""
    storage: float
    reads: float

    @property
    def total_without(self) -> float:
        return self.reads * self.read_without

    @property
    def total_with(self) -> float:
        return self.publish + self.storage + self.reads * self.read_with

    @property
    def saved(self) -> float:
        return self.total_without - self.total_with

    @property
    def pays(self) -> bool:
        return self.saved > 0

    @property
    def break_even_reads(self) -> int | None:
        """The fewest reads in the case's days with which nothing is lost; None where each read loses."""
        gain = self.read_without - self.read_with
        if gain <= 0:
            return None
        needed = (self.publish + self.storage) / gain
        return max(1, math.ceil(needed)) if math.isfinite(needed) else None


def compare(case: Case, without: str, way: str) -> Comparison:
    """The two ways in this case."""
    return Comparison(
        without=without,
        way=way,
        read_without=per_read_without(case)[without],
        read_with=per_read_with(case)[way],
        publish=case.publications * publish_usd(case, way),
        storage=case.months * storage_usd_per_month(case, way),
        reads=case.reads,
    )


def comparisons(case: Case) -> list[Comparison]:
    """Every way without against every way with."""
    return [compare(case, without, way) for without in WITHOUT for way in WITH]


def months_that_eat_the_saving(case: Case, without: str, way: str) -> float | None:
    """How long the document may lie stored before storage has cost what the case's reads save; None where nothing is saved.

    Infinite where storage is free.
    """
    found = compare(case, without, way)
    left = found.total_without - found.publish - found.reads * found.read_with
    monthly = storage_usd_per_month(case, way)
    if left <= 0:
        return None
    return left / monthly if monthly else math.inf


def shortest_cadence_days(case: Case, without: str, way: str) -> float | None:
    """Days between two versions of a model from which on publishing each of them pays at the case's reads a day.

    None where no cadence does: what a day's reads save is less than what a day's storage costs.
    """
    found = compare(case, without, way)
    daily = case.reads / case.days * (found.read_without - found.read_with)
    daily -= storage_usd_per_month(case, way) / DAYS_PER_MONTH
    return publish_usd(case, way) / daily if daily > 0 else None


def retrained(case: Case, without: str, way: str) -> list[tuple[float, Comparison]]:
    """The comparison with a new version of the model every so many days, over a year at the case's reads a day."""
    year = replace(case, days=365.0, reads=min(max(case.reads / case.days * 365, SMALLEST), MOST_READS))
    return [(float(days), compare(replace(year, retrain_days=float(days)), without, way)) for days in CADENCES]
