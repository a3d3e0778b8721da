"""Targets: what was asked of each benchmark's figures, and whether they reach it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}

_SIGNS = {"<=": "at most", ">=": "at least", "=": "exactly"}

_EDGE_RESIDENT_BYTES, _STAMPEDE_BYTES, _SLOW_BYTES = 120e6, 150e6, 250e6


@dataclass(frozen=True)
class Target:
    """One demand on one figure. `figure` gives None where this run did not measure it."""

    what: str
    sign: str
    limit: float | Callable[[Result], float]
    figure: Callable[[Result], float | None]
    unit: str = ""

    def judge(self, result: Result) -> Judged | None:
        """The figure beside what was asked."""
        value = self.figure(result)
        if value is None:
            return None
        limit = self.limit(result) if callable(self.limit) else self.limit
        return Judged(self.what, _asked(self.sign, limit, self.unit), _shown(value, self.unit),
                      met=_COMPARISONS[self.sign](value, limit))  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """A target as a row of a table."""

    what: str
    asked: str
    measured: str
    met: bool


def judge(bench: str, result: Result) -> list[Judged]:
    """Every target of a benchmark that `result` tells about."""
    return [judged for target in targets(bench) if (judged := target.judge(result)) is not None]


def targets(bench: str) -> Iterable[Target]:
    """The targets of a benchmark, by its command's name."""
    return TARGETS.get(bench.partition("-")[0], ())


def _asked(sign: str, limit: float, unit: str) -> str:
    return "yes" if unit == "yes" else f"{_SIGNS[sign]} {_shown(limit, unit)}"


def _shown(value: float, unit: str) -> str:
    if unit == "MB":
        return f"{value / 1e6:.0f} MB"
    if unit == "yes":
        return "yes" if value else "no"
    return f"{value:.3g}{' ' if unit else ''}{unit}"


def _key(name: str) -> Callable[[Result], float | None]:
    return lambda result: result.get(name)


def _worst(rows: str, key: str, choose: Callable[..., float] = max) -> Callable[[Result], float | None]:
    return lambda result: choose(row[key] for row in result[rows])


def _p99(result: Result) -> float:
    return max(float(row["p99_ttfb_ms"] / row["nginx_p99_ttfb_ms"]) for row in result["rows"])


def _of(codec: str, key: str, choose: Callable[..., float]) -> Callable[[Result], float | None]:
    """The worst document of a codec; `noise` is its divergence in multiples of recomputing."""

    def figure(result: Result) -> float | None:
        rows = [row for row in result["rows"] if row["codec"] == codec]
        values = [row["kl"] / row["kl_recompute"] if key == "noise" else row[key] for row in rows]
        return choose(values) if values else None

    return figure


def _codec(codec: str, ratio: float, noise: float | None, speed: float) -> Iterator[Target]:
    yield Target(f"{codec}: bytes over raw, worst document", "<=", ratio, _of(codec, "ratio", max))
    if noise is not None:
        yield Target(f"{codec}: divergence, worst document", "<=", noise, _of(codec, "noise", max), "x recompute noise")
    yield Target(f"{codec}: decoding, slowest document", ">=", speed, _of(codec, "decode_gbps_per_core", min), "GB/s a core")


def _ours_wrong(result: Result) -> float | None:
    rows = [row for row in result.get("faults", {}).get("rows", ()) if row["way"].startswith("kvcdn")]
    return sum(row["wrong"] + row["unnoticed"] for row in rows) if rows else None


TARGETS: dict[str, tuple[Target, ...]] = {
    "ttft": (
        Target("warm edge: sooner than prefill", ">=", 20, _key("speedup"), "x"),
        Target("warm edge: over the floor", "<=", 2.0, _key("over_floor"), "x"),
        Target("local store: sooner than prefill", ">=", 40, _key("local_speedup"), "x"),
        Target("local store: over the floor", "<=", 1.15, _key("local_over_floor"), "x"),
        Target("bytes on the wire over raw", "<=", 0.70, _key("wire_ratio")),
        Target("bit-identical to a local prefill", "=", 1, _key("bit_identical"), "yes"),
        Target("memory of a fetch over the KV", "<=", 1.5, _key("fetch_peak_over_kv"), "x"),
        Target("resident memory of the edge", "<=", _EDGE_RESIDENT_BYTES, _key("edge_resident_bytes"), "MB"),
    ),
    "crossover": (
        Target("auto over the better of both, worst link", "<=", 1.10, _key("worst_over_best"), "x"),
        Target("auto over the better of both, at the crossover", "<=", 0.75, _key("best_at_crossover"), "x"),
        Target(
            "edge killed: over a prefill, at worst",
            "<=",
            1.25,
            lambda result: result["kill"]["worst_over_prefill"] if "kill" in result else None,
            "x",
        ),
    ),
    "decode": (Target("decoded token over DynamicCache's, worst length", "<=", 1.0, _worst("rows", "ratio"), "x"),),
    "publish": (
        Target("publishing over the bare prefill loop", ">=", 0.90, _key("ratio"), "x"),
        Target(
            "memory beside the model",
            "<=",
            lambda result: result["memory_budget_bytes"],
            _key("memory_bytes"),
            "MB",
        ),
        Target("a document behind a published prompt, over the passes of its rest", "<=", 1.1, _key("shared_ratio"), "x"),
    ),
    "edge": (
        Target("warm hits of a block over nginx, worst row", ">=", 1.0, _worst("rows", "ratio", min), "x"),
        Target("p99 of a block's first byte over nginx's, worst row", "<=", 2.0, _p99, "x"),
        Target("a cold miss adds", "<=", 5.0, lambda result: result["cold_miss"]["added_ms"], "ms"),
        Target("stampede: fetches from the origin", "=", 1, lambda result: result["stampede"]["origin_fetches"]),
        Target(
            "stampede: right bodies",
            "=",
            lambda result: result["stampede"]["clients"],
            lambda result: result["stampede"]["right_bodies"],
        ),
        Target(
            "stampede: resident memory", "<=", _STAMPEDE_BYTES, lambda result: result["stampede"]["peak_resident_bytes"], "MB"
        ),
        Target(
            "slow readers: resident memory", "<=", _SLOW_BYTES, lambda result: result["slow_readers"]["resident_bytes"], "MB"
        ),
    ),
    "eviction": (
        Target(
            "ahead of the best of LRU, S3-FIFO, SIEVE and ARC, worst capacity, in points",
            ">=",
            -0.5,
            lambda result: min(100 * row["edge_ahead"] for row in result["compared"]),
        ),
    ),
    "codec": (
        *_codec("lossless", 0.67, None, 1.0),
        *_codec("int8", 0.52, 1.2, 1.5),
        *_codec("int4", 0.29, 6.0, 1.2),
        *_codec("tc-high", 0.36, 1.2, 0.4),
        *_codec("tc-medium", 0.22, 2.0, 0.4),
        *_codec("tc-low", 0.14, 5.0, 0.4),
        *_codec("tc-least", 0.10, 5.0, 0.4),
    ),
    "against": (Target("kvcdn: damage used without a word, answers wrong", "=", 0, _ours_wrong),),
}
