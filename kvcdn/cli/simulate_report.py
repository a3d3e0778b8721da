"""The tables and plots of docs/simulation.md: simulated anew, and put between the document's markers.

`kvcdn simulate --report docs/simulation.md --trace FOLDER` renews them; the traces themselves are not part of the project. A
test holds that the tables which need no trace are what comes out, and the others where the traces are at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kvcdn.cli.simulate_parts import REAL
from kvcdn.cli.trace_file import trace_lines
from kvcdn.economics.pricebook import PriceBook
from kvcdn.economics.report import table
from kvcdn.economics.verdict import seconds, usd
from kvcdn.simulation.comparison import Traffic, compare
from kvcdn.simulation.presets import PRESETS
from kvcdn.simulation.topology import Topology
from kvcdn.simulation.workload import Zipf, read_requests

TRACES: Mapping[str, str] = {"conversation": "mooncake_conversation.jsonl.gz", "synthetic": "mooncake_synthetic.jsonl.gz"}

PLOTS: Mapping[str, str] = {name: f"simulation-{name}.svg" for name in TRACES}
"""Beside the document."""

Tell = Callable[[str, int], None]

_BOOK = PriceBook.presets()

_RULES: Mapping[str, int] = {"when computed twice": 2, "when computed once": 1, "before anybody asks": 0}

_CAPACITIES = (250, 500, 1000, 2000, 4000)

_MEMORIES = (0, 250, 1000, 4000)


def sections(folder: Path, tell: Tell) -> dict[str, Callable[[], str]]:
    """The tables by their names; those of traces read them from `folder`."""

    @cache
    def traffic(name: str) -> Traffic:
        with trace_lines(folder / TRACES[name]) as lines:
            return Traffic(name, trace=tuple(read_requests(lines, name, [1], 1.0, 0)))

    return {
        "traces": lambda: _traces(traffic, tell),
        "memory": lambda: _memory(traffic, tell),
        "capacity": lambda: _capacity(traffic, tell),
        **drawn_sections(tell),
    }


def drawn_sections(tell: Tell) -> dict[str, Callable[[], str]]:
    """The tables that need no trace."""
    return {"readers": lambda: _readers(tell), "method": lambda: _method(tell)}


def plot_runs(folder: Path, tell: Tell) -> dict[str, dict[str, Any]]:
    """What each plot shows, as the command's own result."""
    found = {}
    for name, file in TRACES.items():
        with trace_lines(folder / file) as lines:
            traffic = Traffic(name, trace=tuple(read_requests(lines, name, [1], 1.0, 0)))
        runs = [{"set": "", **_run(cluster(), traffic, tell)}]
        found[PLOTS[name]] = {"traffic": name, "topology": "cluster", "runs": runs}
    return found


def cluster(**settings: str) -> Topology:
    """The preset, with settings by their keys, `__` for the dot."""
    found = PRESETS["cluster"]
    for key, value in settings.items():
        found = found.varied(key.replace("__", "."), value)
    return found


def _run(topology: Topology, traffic: Traffic, tell: Tell, **options: Any) -> dict[str, Any]:
    return compare(topology, traffic, _BOOK, REAL, tell, **options)


def _times(found: Mapping[str, Any]) -> list[str]:
    return [seconds(found["first_token_s"][key]) for key in ("p50", "p90", "p99")]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _gb(value: float) -> str:
    return f"{value / 1e9:,.0f} GB"


def _traces(traffic: Callable[[str], Traffic], tell: Tell) -> str:
    rows = []
    for name in TRACES:
        for place, (rule, after) in enumerate(_RULES.items()):
            found = _run(cluster(publish__after_requests=str(after)), traffic(name), tell)
            without, kvcdn = found["without"], found["with"]
            if not place:
                rows.append(
                    [
                        name,
                        "without kvcdn",
                        *_times(without),
                        "",
                        "",
                        "",
                        _busy(without),
                        usd(without["usd_per_million_tokens"]),
                    ]
                )
            rows.append(
                [
                    name,
                    rule,
                    *_times(kvcdn),
                    _share(kvcdn["tokens_share"]["fetched"]),
                    _share(kvcdn["nodes"]["edge"]["hit_ratio"]),
                    _gb(kvcdn["origin"]["sent_bytes"]),
                    _busy(kvcdn),
                    usd(kvcdn["usd_per_million_tokens"]),
                ]
            )
    headings = ["trace", "published", "p50", "p90", "p99", "fetched", "edge hits", "origin sent", "devices busy", "$ a million"]
    return table(headings, rows)


def _busy(found: Mapping[str, Any]) -> str:
    return _share(found["devices"]["utilisation"])


def _memory(traffic: Callable[[str], Traffic], tell: Tell) -> str:
    rows = []
    for name in TRACES:
        for gigabytes in _MEMORIES:
            found = _run(cluster(readers__memory_gb=str(gigabytes)), traffic(name), tell)
            without, kvcdn = found["without"], found["with"]
            rows.append(
                [
                    name,
                    f"{gigabytes:,} GB",
                    _share(without["tokens_share"]["memory"]),
                    *_times(without),
                    _share(kvcdn["tokens_share"]["fetched"]),
                    *_times(kvcdn),
                ]
            )
    headings = ["trace", "memory", "in memory", "p50", "p90", "p99", "fetched with kvcdn", "p50", "p90", "p99"]
    return table(headings, rows)


def _capacity(traffic: Callable[[str], Traffic], tell: Tell) -> str:
    rows = []
    for gigabytes in _CAPACITIES:
        cells = []
        for name in TRACES:
            for policy in ("edge", "lru"):
                given = cluster(edge__capacity_gb=str(gigabytes), edge__policy=policy, publish__after_requests="1")
                node = _run(given, traffic(name), tell)["with"]["nodes"]["edge"]
                cells += [_share(node["hit_ratio"]), _gb(node["filled_bytes"])]
        rows.append([f"{gigabytes:,} GB", *cells])
    headings = [
        "capacity",
        *(f"{name}, {policy}: {what}" for name in TRACES for policy in ("edge", "lru") for what in ("hits", "filled")),
    ]
    return table(headings, rows)


def _readers(tell: Tell) -> str:
    rows = []
    for documents in (1, 1000, 100_000):
        zipf = Zipf(requests=80e6, seconds=30 * 86400.0, documents=documents, document_tokens=3774)
        found = _run(PRESETS["laptops"], Traffic("readers", zipf=zipf), tell, window=5000)
        kvcdn = found["with"]
        hits = [_share(kvcdn["nodes"][name]["hit_ratio"]) for name in ("europe", "shield")]
        sent = kvcdn["origin"]["sent_bytes"] / 1e12
        # The few first reads of a document do not show in a window of so many.
        left = f"{sent:,.0f} TB" if sent else "first reads"
        costs = [usd(kvcdn["costs_usd"][name]) for name in ("delivery", "store_requests", "storage")]
        rows.append(
            [
                f"{documents:,}",
                *_times(found["without"])[:1],
                *_times(kvcdn)[::2],
                *hits,
                left,
                *costs,
                usd(kvcdn["usd_per_million_tokens"]),
            ]
        )
    headings = [
        "documents",
        "prefill p50",
        "p50",
        "p99",
        "edge hits",
        "shield hits",
        "origin sent",
        "edges' egress",
        "store requests",
        "storage",
        "$ a million",
    ]
    return table(headings, rows)


def _method(tell: Tell) -> str:
    given = PRESETS["laptops"]
    small = replace(
        given,
        regions=tuple(replace(region, capacity_gb=60.0) for region in given.regions),
        edges=tuple(replace(edge, capacity_gb=20.0) for edge in given.edges),
    )
    lru = small.varied("edge.policy", "lru").varied("region.policy", "lru")
    zipf = Zipf(requests=10_000, seconds=100_000.0, documents=1000, document_tokens=2048)
    traffic = Traffic("method", zipf=zipf)
    rows = []
    for name, topology, method in (
        ("every prompt, LRU", lru, "events"),
        ("every prompt, kvcdn's eviction", small, "events"),
        ("a window of 2,500 prompts", small, "window"),
    ):
        found = _run(topology.varied("readers.mode", "fetch"), traffic, tell, method=method, window=2500)["with"]
        hits = [_share(found["nodes"][node]["hit_ratio"]) for node in ("europe", "asia", "shield")]
        rows.append([name, *hits, _gb(found["origin"]["sent_bytes"]), *_times(found), usd(found["usd_per_million_tokens"])])
    return table(["method", "europe hits", "asia hits", "shield hits", "origin sent", "p50", "p90", "p99", "$ a million"], rows)
