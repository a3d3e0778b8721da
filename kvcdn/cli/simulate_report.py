"""The tables and plots of docs/simulation.md: simulated anew, and put between the document's markers.

`kvcdn simulate --report docs/simulation.md --trace FOLDER` renews them; the traces themselves are not part of the project. What
came of them is kept beside the document, in RECORD, with a digest of the inputs: a test holds that the tables are what comes of
it, and that the inputs are today's. Tables that need no trace are simulated anew by the test.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kvcdn.cli.bench.page import machine_words
from kvcdn.cli.output import size
from kvcdn.cli.simulate_parts import REAL
from kvcdn.cli.trace_file import trace_lines
from kvcdn.economics.pricebook import PriceBook
from kvcdn.economics.report import table
from kvcdn.economics.verdict import rounded, seconds, usd
from kvcdn.simulation.comparison import Traffic, compare
from kvcdn.simulation.presets import PRESETS
from kvcdn.simulation.topology import Topology
from kvcdn.simulation.workload import Zipf, read_requests

TRACES: Mapping[str, str] = {"conversation": "mooncake_conversation.jsonl.gz", "synthetic": "mooncake_synthetic.jsonl.gz"}

PLOTS: Mapping[str, str] = {name: f"simulation-{name}.svg" for name in TRACES}
"""Beside the document."""

RECORD = "simulation.json"
"""Beside the document: what came of the traces, of which the tables are made."""

CHECK_RECORD = "simulation-check.json"
"""Beside the document: the last check that was written into it."""

Tell = Callable[[str, int], None]

Runs = Callable[..., dict[str, Any]]
"""What came of a trace, by its name, on the preset with settings by their keys."""

_KEPT: Mapping[str, tuple[str, ...]] = {
    "first_token_s": ("p50", "p90", "p99"),
    "tokens_share": ("memory", "fetched"),
    "origin": ("sent_bytes",),
    "devices": ("utilisation",),
    "usd_per_million_tokens": (),
}
"""Of a run, with kvcdn and without, what tables show; and of nodes what _KEPT_OF_NODES names."""

_KEPT_OF_NODES = ("hit_ratio", "filled_bytes")

_BOOK = PriceBook.presets()

_RULES: Mapping[str, int] = {"when computed twice": 2, "when computed once": 1, "before anybody asks": 0}

_CAPACITIES = (250, 500, 1000, 2000, 4000)

_MEMORIES = (0, 250, 1000, 4000)


def sections(runs: Runs, tell: Tell) -> dict[str, Callable[[], str]]:
    """The tables by their names; those of traces are made of `runs`."""
    return {
        "traces": lambda: _traces(runs),
        "memory": lambda: _memory(runs),
        "capacity": lambda: _capacity(runs),
        **drawn_sections(tell),
    }


class Recording:
    """Runs of the traces in `folder`, each simulated when it is first asked for, and kept."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        self._folder, self._tell = folder, tell
        self.kept: dict[str, Any] = {}

    def __call__(self, name: str, **settings: str) -> dict[str, Any]:
        key = _key(name, settings)
        if key not in self.kept:
            found = _run(cluster(**settings), read_trace(self._folder, name), self._tell)
            self.kept[key] = {side: _part(found[side]) for side in ("with", "without")}
        return dict(self.kept[key])

    def to_json(self) -> str:
        """What is kept of it."""
        return json.dumps({"inputs": inputs(), "runs": self.kept}, indent=1) + "\n"


def recorded(text: str) -> Runs:
    """The runs of such a text."""
    kept = json.loads(text)["runs"]
    return lambda name, **settings: kept[_key(name, settings)]


def inputs() -> str:
    """A digest of what the runs are made of, beside the traces: the preset, and all sizes, speeds and prices."""
    return hashlib.sha256(repr((PRESETS["cluster"], _BOOK)).encode()).hexdigest()


@cache
def read_trace(folder: Path, name: str) -> Traffic:
    """A trace of `folder`, by its name."""
    with trace_lines(folder / TRACES[name]) as lines:
        return Traffic(name, trace=tuple(read_requests(lines, name, [1], 1.0, 0)))


def _key(name: str, settings: Mapping[str, str]) -> str:
    return " ".join((name, *(f"{key.replace('__', '.')}={value}" for key, value in sorted(settings.items()))))


def _part(found: Mapping[str, Any]) -> dict[str, Any]:
    part = {
        name: {field: rounded(found[name][field]) for field in fields} if fields else rounded(found[name])
        for name, fields in _KEPT.items()
    }
    nodes = {name: {field: rounded(node[field]) for field in _KEPT_OF_NODES} for name, node in found["nodes"].items()}
    return {**part, "nodes": nodes}


def drawn_sections(tell: Tell) -> dict[str, Callable[[], str]]:
    """The tables that need no trace."""
    return {"readers": lambda: _readers(tell), "method": lambda: _method(tell)}


def check_sections(found: Mapping[str, Any]) -> dict[str, Callable[[], str]]:
    """The table of `kvcdn simulate --check`, of what it told as JSON."""
    return {"check": lambda: _check(found)}


def _check(found: Mapping[str, Any]) -> str:
    names = {"mean": "mean", "p50": "median", "p90": "90th percentile", "max": "longest"}
    rows = [
        [
            names[name],
            *(seconds(row[key]) for key in ("real_s", "slowest_s")),
            f"{row['rounds_apart']:+.1%}",
            seconds(row["simulated_s"]),
            f"{row['error']:+.1%}",
        ]
        for name, row in found["fetch"].items()
    ]
    filled, hits = found["filled_bytes"], found["hit_ratio"]
    rows.append(["filled by the edge", size(filled["real"]), "", "", size(filled["simulated"]), _apart(filled)])
    rows.append(["hits of the edge", f"{hits['real']:.1%}", "", "", f"{hits['simulated']:.1%}", ""])
    alone = found["alone"]
    headings = ["", "real", "slowest round", "a round is off by", "simulated", "error"]
    return (
        f"{machine_words(found)} {found['requests']} fetches of {size(found['document_bytes'])}, {found['rounds']} rounds:\n\n"
        f"{table(headings, rows)}\n\n"
        f"Alone, a hit took {seconds(alone['hit_s'])} beside its bytes on the link, where round trips are"
        f" {seconds(alone['round_trips_of_a_hit_s'])}; a miss {seconds(alone['miss_s'])} more, where they are"
        f" {seconds(alone['round_trips_of_a_miss_s'])}. The reader opened {size(alone['open_bytes_per_s'])} of KV a second."
    )


def _apart(pair: Mapping[str, float]) -> str:
    return f"{pair['simulated'] / pair['real'] - 1:+.1%}" if pair["real"] else ""


def plot_runs(folder: Path, tell: Tell) -> dict[str, dict[str, Any]]:
    """What each plot shows, as the command's own result."""
    found = {}
    for name in TRACES:
        runs = [{"set": "", **_run(cluster(), read_trace(folder, name), tell)}]
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


def _traces(runs: Runs) -> str:
    rows = []
    for name in TRACES:
        for place, (rule, after) in enumerate(_RULES.items()):
            found = runs(name, publish__after_requests=str(after))
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


def _memory(runs: Runs) -> str:
    rows = []
    for name in TRACES:
        for gigabytes in _MEMORIES:
            found = runs(name, readers__memory_gb=str(gigabytes))
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


def _capacity(runs: Runs) -> str:
    rows = []
    for gigabytes in _CAPACITIES:
        cells = []
        for name in TRACES:
            for policy in ("edge", "lru"):
                found = runs(name, edge__capacity_gb=str(gigabytes), edge__policy=policy, publish__after_requests="1")
                node = found["with"]["nodes"]["edge"]
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
