"""The verdict on a case: where kvcdn pays, where it does not, and everything computed, as one JSON object."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvcdn.economics.case import Case
from kvcdn.economics.costs import (
    WITH,
    WITHOUT,
    Comparison,
    compare,
    comparisons,
    months_that_eat_the_saving,
    retrained,
    shortest_cadence_days,
)
from kvcdn.economics.thresholds import break_even_link, cheaper_from, faster_from, simple_link

INSTEAD = {"gpu": "prefilling on your own device", "api": "an API's input tariff", "api-cached": "an API's cached-read tariff"}

_DIGITS = 6
"""Significant digits of JSON numbers: more than any input has, few enough to be the same on every machine."""


@dataclass(frozen=True)
class Verdict:
    """One sentence, and whether it says yes."""

    pays: bool
    text: str


def best(case: Case, without: str) -> Comparison:
    """The cheapest way with kvcdn, against `without`."""
    return min((compare(case, without, way) for way in WITH), key=lambda found: found.total_with)


def on_time(case: Case) -> Verdict:
    """Whether the first token comes sooner."""
    hit, miss = seconds(case.hit_s), seconds(case.miss_s)
    if case.hit_s < case.miss_s:
        return Verdict(True, f"the first token comes after {hit} in place of {miss}, {case.miss_s / case.hit_s:.1f} x sooner")
    needed = break_even_link(case)
    if needed is None:
        slow = "opening what arrives" if case.open_s > case.turns_s + case.overhead_s else "waiting for round trips"
        what = f"no link is fast enough, {slow} alone takes too long"
    else:
        what = f"it takes a link of {bits(needed)}"
    return Verdict(False, f"do not, for speed: fetching takes {hit} and prefilling {miss}; {what}")


def on_money(case: Case, without: str) -> Verdict:
    """Whether it costs less than `without`, by the cheapest way."""
    found = best(case, without)
    what = INSTEAD[without]
    if found.pays:
        text = f"saves {usd(found.saved)} of {usd(found.total_without)} against {what}, delivered by {found.way}"
        return Verdict(True, f"{text}; from {found.break_even_reads:,} reads on")
    if found.break_even_reads is None:
        why = f"a read costs {usd(found.read_with)} at best ({found.way}) in place of {usd(found.read_without)}"
    else:
        why = f"{found.break_even_reads:,} reads are needed in that time, and there are {case.reads:,.0f}"
    return Verdict(False, f"do not, for money, against {what}: {why}")


def to_json(case: Case) -> dict[str, Any]:
    """What `kvcdn economics --json` prints: stable names, USD, bytes and seconds, None for never."""
    time = on_time(case)
    money = {without: on_money(case, without) for without in WITHOUT}
    found = {
        "model": case.model.name,
        "tokens": case.tokens,
        "sizes": {
            "raw_bytes": round(case.raw_bytes),
            "stored_bytes": round(case.stored_bytes),
            "kv_bytes_per_token": case.raw_bytes / case.tokens,
            "blocks": case.blocks,
        },
        "latency": {
            "prefill_tokens_per_s": case.tokens / case.prefill_s,
            "prefill_ttft_s": case.miss_s,
            "fetch_s": case.fetch_s,
            "reuse_ttft_s": case.hit_s,
            "speedup": case.miss_s / case.hit_s,
        },
        "costs": [_comparison(case, item) for item in comparisons(case)],
        "break_even": {
            "link_bytes_per_s": break_even_link(case),
            "link_bytes_per_s_formula": simple_link(case),
            "tokens_faster": faster_from(case),
            "tokens_cheaper": {w: {way: cheaper_from(case, w, way) for way in WITH} for w in WITHOUT},
        },
        "retraining": {
            without: [
                {"every_days": days, "saved_usd_per_year": item.saved, "pays": item.pays}
                for days, item in retrained(case, without, best(case, without).way)
            ]
            for without in WITHOUT
        },
        "pays": {"time": time.pays, **{without: verdict.pays for without, verdict in money.items()}},
        "verdict": {"time": time.text, **{without: verdict.text for without, verdict in money.items()}},
        "assumptions": case.assumptions(),
    }
    return {key: rounded(value) for key, value in found.items()}


def _comparison(case: Case, found: Comparison) -> dict[str, Any]:
    return {
        "without": found.without,
        "with": found.way,
        "read_without_usd": found.read_without,
        "read_with_usd": found.read_with,
        "publish_usd": found.publish,
        "storage_usd": found.storage,
        "total_without_usd": found.total_without,
        "total_with_usd": found.total_with,
        "saved_usd": found.saved,
        "pays": found.pays,
        "break_even_reads": found.break_even_reads,
        "storage_months_that_eat_the_saving": months_that_eat_the_saving(case, found.without, found.way),
        "shortest_retrain_days": shortest_cadence_days(case, found.without, found.way),
    }


def rounded(value: Any) -> Any:
    """`value` with every float cut to `_DIGITS` significant digits; what JSON cannot say (infinity) is None."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value


def usd(value: float) -> str:
    """Dollars for people: `$1.51 M`, `$30,377`, `$0.019`, `$0.000097`."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    if size >= 1e6:  # noqa: PLR2004 - the units below are the point
        return f"{sign}${size / 1e6:,.2f} M"
    if size >= 100:  # noqa: PLR2004
        return f"{sign}${size:,.0f}"
    if size >= 1:
        return f"{sign}${size:.2f}"
    return f"{sign}${size:.2g}" if size >= 1e-4 or not size else f"{sign}${size:.1e}"  # noqa: PLR2004


def seconds(value: float) -> str:
    """Seconds for people, to three digits: `87.3 ms`, `14.7 s`, `1,200 s`."""
    if value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"  # noqa: PLR2004


def span(days: float) -> str:
    """A time between versions for people: days, hours or minutes."""
    if days >= 1:
        return f"{days:,.3g} days"
    return f"{days * 24:.2g} hours" if days * 24 >= 1 else f"{days * 24 * 60:.2g} min"


def bits(bytes_per_s: float) -> str:
    """A link speed in the unit links are sold by."""
    size, unit = bytes_per_s * 8 / 1e6, "Mbit/s"
    for larger in ("Gbit/s", "Tbit/s"):
        if size >= 1000:  # noqa: PLR2004
            size, unit = size / 1000, larger
    return f"{size:,.3g} {unit}"
