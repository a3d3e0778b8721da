"""What every benchmark's result and progress have, whatever it measures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.command import Ran

MACHINE = {
    "cpu",
    "cores",
    "memory_bytes",
    "system",
    "time",
    "load_average",
    "load_before",
    "scheduling",
    "python",
    "kvcdn",
    "torch",
}

SPREAD = {"median", "least", "most", "runs"}

COMPUTED = {"eviction"}
"""Benchmarks whose figures are simulated and the same at each run: they have no spread."""


def spreads(value: Any) -> Iterator[dict[str, float]]:
    """Every spread in a result, however deep."""
    if isinstance(value, dict):
        if value.keys() == SPREAD:
            yield value
        for inner in value.values():
            yield from spreads(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from spreads(inner)


def check_benched(name: str, ran: Ran) -> dict[str, Any]:
    """The result of the benchmark `name`, after a look at its machine, versions, spreads, and what it told meanwhile."""
    assert 0 == ran.code, ran.err
    result = ran.json
    assert MACHINE <= result["machine"].keys()
    assert len(result["machine"]["load_average"]) == 3
    found = list(spreads(result))
    assert (name in COMPUTED) is not bool(found)
    assert all(one["least"] <= one["median"] <= one["most"] and one["runs"] >= 1 for one in found)
    # At its beginning, and again before its end.
    assert 2 <= len(ran.err.splitlines()), ran.err
    return result
