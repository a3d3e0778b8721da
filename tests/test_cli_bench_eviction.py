"""Simulated eviction: each baseline against a literal reading of its paper, the optimum against all there is, and the CLI."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvcdn.cli.bench.eviction import compare, hit_share, make_policy, read_trace
from kvcdn.cli.bench.eviction_policies import Arc, Lru, Optimum, S3Fifo, Sieve
from kvcdn.cli.main import app
from kvcdn.errors import UsageError


def plain_lru(capacity: int) -> Callable[[int], set[int]]:
    """A list, the latest last."""
    queue: list[int] = []

    def use(block: int) -> set[int]:
        if block in queue:
            queue.remove(block)
        elif len(queue) == capacity:
            queue.pop(0)
        queue.append(block)
        return set(queue)

    return use


def plain_sieve(capacity: int) -> Callable[[int], set[int]]:
    """Algorithm 1 of the paper: index 0 is the tail, the oldest; the hand walks to the head and starts over at the tail."""
    queue: list[int] = []
    visited: set[int] = set()
    hand = 0

    def use(block: int) -> set[int]:
        nonlocal hand
        if block in queue:
            visited.add(block)
            return set(queue)
        if len(queue) == capacity:
            hand %= len(queue)
            while queue[hand] in visited:
                visited.discard(queue[hand])
                hand = (hand + 1) % len(queue)
            queue.pop(hand)
            if hand == len(queue):
                hand = 0
        queue.append(block)
        return set(queue)

    return use


def plain_s3_fifo(capacity: int) -> Callable[[int], set[int]]:
    """Algorithm 1 of the paper, with lists of [block, count], the oldest first."""
    small: list[list[int]] = []
    main: list[list[int]] = []
    ghosts: list[int] = []
    share = max(capacity // 10, 1)

    def evict() -> None:
        if len(small) >= share or not main:
            block, count = small.pop(0)
            if count > 1:
                main.append([block, 0])
            else:
                ghosts.append(block)
                del ghosts[: max(len(ghosts) - (capacity - share), 0)]
            return
        while True:
            block, count = main.pop(0)
            if not count:
                return
            main.append([block, count - 1])

    def use(block: int) -> set[int]:
        found = [item for item in small + main if item[0] == block]
        if found:
            found[0][1] = min(found[0][1] + 1, 3)
        else:
            while len(small) + len(main) >= capacity:
                evict()
            if block in ghosts:
                ghosts.remove(block)
                main.append([block, 0])
            else:
                small.append([block, 0])
        return {item[0] for item in small + main}

    return use


def plain_arc(capacity: int) -> Callable[[int], set[int]]:  # noqa: C901 - as the paper has it
    """Figure 4 of the paper, with lists, the least recent first."""
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    target = 0.0

    def replace(block: int) -> None:
        if t1 and ((block in b2 and len(t1) == target) or len(t1) > target):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    def use(block: int) -> set[int]:
        nonlocal target
        if block in t1 or block in t2:
            (t1 if block in t1 else t2).remove(block)
            t2.append(block)
        elif block in b1:
            target = min(target + max(len(b2) / len(b1), 1), capacity)
            replace(block)
            b1.remove(block)
            t2.append(block)
        elif block in b2:
            target = max(target - max(len(b1) / len(b2), 1), 0)
            replace(block)
            b2.remove(block)
            t2.append(block)
        else:
            if len(t1) + len(b1) == capacity:
                if len(t1) < capacity:
                    b1.pop(0)
                    replace(block)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= capacity:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                    b2.pop(0)
                replace(block)
            t1.append(block)
        return set(t1 + t2)

    return use


@pytest.mark.parametrize(
    ("policy", "plain"),
    [(Lru, plain_lru), (Sieve, plain_sieve), (S3Fifo, plain_s3_fifo), (Arc, plain_arc)],
    ids=["lru", "sieve", "s3-fifo", "arc"],
)
@given(capacity=st.integers(2, 25), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_baseline_is_what_its_paper_says(
    policy: type, plain: Callable[..., Callable[[int], set[int]]], capacity: int, seed: int
) -> None:
    """After every use the same objects are held as by the slow, literal version."""
    rng = random.Random(seed)
    fast, slow = policy(capacity), plain(capacity)
    for _ in range(300):
        block = min(int(rng.paretovariate(0.5)), 80)
        fast.use(block)
        expected = slow(block)
        assert expected == {other for other in range(81) if fast.holds(other)}


def _best_hits(requests: list[list[int]], capacity: int) -> int:
    """The most leading hits that any sequence of cache contents gives: every content is tried after every request."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for chain in requests:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            leading = sum(1 for _ in itertools.takewhile(held.__contains__, chain))
            there = held | set(chain)
            for size in range(min(capacity, len(there)) + 1):
                for kept in itertools.combinations(sorted(there), size):
                    state = frozenset(kept)
                    following[state] = max(following.get(state, 0), hits + leading)
        states = following
    return max(states.values())


@given(st.integers(1, 4), st.lists(st.integers(0, 999), min_size=2, max_size=6))
@settings(max_examples=40, deadline=None)
def test_the_optimum_is_the_best_there_is(capacity: int, seeds: list[int]) -> None:
    """On small trees of chains no choice of what to keep has more leading hits."""
    requests = [[seed % 2, 10 + seed % 2 * 10 + seed // 2 % 2, 100 + seed % 8][: seed // 8 % 3 + 1] for seed in seeds]
    share = hit_share(Optimum(capacity, requests), requests)
    assert _best_hits(requests, capacity) == round(share * sum(map(len, requests)))


def _write(path: Path, requests: list[list[int]]) -> Path:
    text = "".join(json.dumps({"timestamp": number, "hash_ids": chain}) + "\n" for number, chain in enumerate(requests))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def _conversations(count: int) -> list[list[int]]:
    """Conversations of one to four turns under two system prompts, interleaved, three of five ending after their first turn."""
    rng = random.Random(7)
    fresh = itertools.count(100)
    running: list[list[int]] = []
    requests = []
    for _ in range(count):
        goes_on = running and rng.random() < 0.55
        chain = running.pop(rng.randrange(min(len(running), 30))) if goes_on else [rng.randrange(2)]
        chain = [*chain, *(next(fresh) for _ in range(rng.randrange(1, 12)))]
        requests.append(chain)
        if rng.random() < (0.4 if len(chain) < 12 else 0.75):
            running.append(chain)
    return requests


def test_the_edge_is_not_below_the_best_online_policy(tmp_path: Path) -> None:
    """On conversations, at two sizes, it is within half a point of the best, above it somewhere, and below the optimum."""
    requests = read_trace(_write(tmp_path / "trace.jsonl", _conversations(4000)))
    distinct = len({block for chain in requests for block in chain})
    margins = []
    for percent in (5, 20):
        capacity = distinct * percent // 100
        share = {
            name: hit_share(make_policy(name, capacity, requests), requests) for name in ("lru", "s3-fifo", "sieve", "arc")
        }
        edge, optimum = (hit_share(make_policy(name, capacity, requests), requests) for name in ("edge", "optimum"))
        margins.append(edge - max(share.values()))
        assert edge <= optimum
    assert min(margins) >= -0.005, margins
    assert max(margins) > 0.005, margins


def test_the_edge_knows_the_few_that_are_asked_for_most(tmp_path: Path) -> None:
    """Documents by Zipf's law, of which a small cache holds some fifty: those at its margin are all used dozens of times."""
    rng, fresh = random.Random(3), itertools.count()
    documents = [[next(fresh) for _ in range(16)] for _ in range(500)]
    drawn = rng.choices(documents, [1 / rank**0.9 for rank in range(1, 501)], k=8000)
    requests = read_trace(_write(tmp_path / "trace.jsonl", [[*document, next(fresh)] for document in drawn]))
    share = {name: hit_share(make_policy(name, 800, requests), requests) for name in ("lru", "s3-fifo", "sieve", "arc", "edge")}
    assert share.pop("edge") >= max(share.values())


def test_the_command_prints_one_object(tmp_path: Path) -> None:
    """Rows of trace, capacity, policy and byte_hit, for every policy at every capacity; a second run says the same."""
    trace = _write(tmp_path / "short.jsonl.gz", _conversations(100))
    results = []
    for _ in range(2):
        done = CliRunner().invoke(app, ["bench", "eviction", "--trace", str(trace), "--capacity", "5,50", "--json"])
        assert 0 == done.exit_code
        results.append(json.loads(done.stdout))
    rows = results[0]["rows"]
    expected = [(size, name) for size in (5, 50) for name in ("lru", "s3-fifo", "sieve", "arc", "edge", "optimum")]
    assert expected == [(row["capacity"], row["policy"]) for row in rows]
    assert {"short"} == {row["trace"] for row in rows}
    assert [row["byte_hit"] for row in rows] == [row["byte_hit"] for row in results[1]["rows"]]
    assert [5, 50] == [row["capacity"] for row in results[0]["compared"]]
    shown = CliRunner().invoke(app, ["bench", "eviction", "--trace", str(trace), "--capacity", "5"])
    assert shown.stdout.startswith("CAPACITY  LRU ")


def test_a_comparison_names_the_best_baseline() -> None:
    """Half of the way from the best online policy to the optimum is half of the gap."""
    hits = {"lru": 0.1, "s3-fifo": 0.2, "sieve": 0.15, "arc": 0.12, "edge": 0.3, "optimum": 0.4}
    rows = [{"capacity": 5, "policy": name, "byte_hit": share} for name, share in hits.items()]
    assert [{"capacity": 5, "best_online": "s3-fifo", "edge_ahead": 0.1, "gap_closed": 0.5}] == compare(rows)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}\n",
        "no\n",
        '{"hash_ids": 5}\n',
        '{"hash_ids": [1, "2"]}\n',
        '{"hash_ids": [1, 1]}\n',
        "[" * 100_000,
        '{"hash_ids": []}\n',
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    """The error names the file and the line."""
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(UsageError, match="trace"):
        read_trace(tmp_path / "trace.jsonl")


@pytest.mark.parametrize("data", [b"not gzip", gzip.compress(b'{"hash_ids": [1]}\n', mtime=0)[:-6]])
def test_a_broken_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    """A damaged or missing file is a usage error, too."""
    (tmp_path / "trace.jsonl.gz").write_bytes(data)
    for name in ("trace.jsonl.gz", "none"):
        with pytest.raises(UsageError, match="cannot read the trace"):
            read_trace(tmp_path / name)


@pytest.mark.parametrize("capacity", ["", "0", "5,101", "5,5", "five", "nan"])
def test_capacities_are_percentages(tmp_path: Path, capacity: str) -> None:
    """Anything else is told as such, before the trace is read."""
    done = CliRunner().invoke(app, ["bench", "eviction", "--trace", "none", "--capacity", capacity])
    assert isinstance(done.exception, UsageError)
