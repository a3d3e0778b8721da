"""Eviction, simulated: the share of a trace's blocks that are hits, by policy and capacity; `kvcdn bench eviction` reports it.

A trace is JSON lines, gzipped or not, with `hash_ids`: the ids of the prefix blocks of a request's prompt, in order. All blocks
count as equally large. A block is a hit only where all blocks before it in its request are hits: no other is worth anything.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcdn.cli.bench.eviction_policies import Arc, Chain, Lru, Optimum, Policy, S3Fifo, Sieve
from kvcdn.cli.trace_file import trace_lines
from kvcdn.edge.disk.eviction import CHARGE_UNIT_BYTES, Eviction
from kvcdn.errors import UsageError

MAX_BLOCKS = 20_000_000
"""Blocks of all requests together: what simulates in some minutes, in a few GB of memory."""

EDGE, OPTIMUM = "edge", "optimum"

_BASELINES: dict[str, Callable[[int], Policy]] = {"lru": Lru, "s3-fifo": S3Fifo, "sieve": Sieve, "arc": Arc}


class EdgePolicy:
    """The edge's own, driven as an edge drives it: a match names the chain, then what is missing is filled in order."""

    def __init__(self, capacity: int) -> None:
        self._eviction = Eviction(capacity * CHARGE_UNIT_BYTES)
        self._clock = 0.0

    def holds(self, block: int) -> bool:
        return str(block) in self._eviction

    def request(self, chain: Chain) -> None:
        self._clock += 1.0
        keys = [str(block) for block in chain]
        self._eviction.visit(keys)
        for key in keys:
            if key in self._eviction:
                self._eviction.touch(key, self._clock)
            elif self._eviction.reserve(CHARGE_UNIT_BYTES) is not None:
                self._eviction.commit(key, CHARGE_UNIT_BYTES, self._clock)


def read_trace(path: Path) -> list[Chain]:
    """The requests of a trace. Raises UsageError where the file is none."""
    requests: list[Chain] = []
    blocks = 0
    with trace_lines(path) as lines:
        for number, line in enumerate(lines, 1):
            requests.append(_chain(line, f"{path}, line {number}"))
            blocks += len(requests[-1])
            if blocks > MAX_BLOCKS:
                raise UsageError(f"{path} has more than {MAX_BLOCKS:,} blocks", hint="give a shorter trace")
    if not blocks:
        raise UsageError(f"{path} holds no request", hint="a trace is JSON lines with hash_ids")
    return requests


def simulate(path: Path, capacities: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Rows of `trace, capacity, policy, byte_hit`, the optimum of each capacity last.

    Capacities are in percent of the trace's distinct blocks; `blocks` is the same in blocks, `seconds` what it took of a core.
    """
    requests = read_trace(path)
    distinct = len({block for chain in requests for block in chain})
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    for percent in capacities:
        capacity = max(int(distinct * percent / 100), 1)
        for policy in (*_BASELINES, EDGE, OPTIMUM):
            started = time.process_time()
            share = hit_share(make_policy(policy, capacity, requests), requests)
            seconds = round(time.process_time() - started, 2)
            row = {"trace": name, "capacity": percent, "policy": policy, "byte_hit": round(share, 4)}
            yield {**row, "blocks": capacity, "seconds": seconds}


def make_policy(name: str, capacity: int, requests: Sequence[Chain]) -> Policy:
    """An empty cache of `capacity` blocks."""
    if name == OPTIMUM:
        return Optimum(capacity, requests)
    return EdgePolicy(capacity) if name == EDGE else _BASELINES[name](capacity)


def hit_share(policy: Policy, requests: Sequence[Chain]) -> float:
    """Share of all blocks asked for that are hits together with all blocks before them."""
    hits = total = 0
    for chain in requests:
        total += len(chain)
        for block in chain:
            if not policy.holds(block):
                break
            hits += 1
        policy.request(chain)
    return hits / total


def compare(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each capacity the best online policy beside the edge's, and how much of its gap to the optimum that one closes."""
    found = []
    for percent in dict.fromkeys(row["capacity"] for row in rows):
        hit = {row["policy"]: row["byte_hit"] for row in rows if row["capacity"] == percent}
        best = max(_BASELINES, key=lambda name: hit[name])
        gap = hit[OPTIMUM] - hit[best]
        closed = round((hit[EDGE] - hit[best]) / gap, 3) if gap > 0 else None
        margin = round(hit[EDGE] - hit[best], 4)
        found.append({"capacity": percent, "best_online": best, "edge_ahead": margin, "gap_closed": closed})
    return found


def _chain(line: bytes, where: str) -> Chain:
    try:
        chain = json.loads(line)["hash_ids"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{where} is not a request", hint="a trace is JSON lines with hash_ids") from None
    if not isinstance(chain, list) or not all(type(block) is int for block in chain) or len(set(chain)) != len(chain):
        raise UsageError(f"{where}: hash_ids is not an array of different integers")
    return chain
