"""Simulated worlds: small ones recomputed by hand, and what must hold in all of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import pytest

from kvcdn.cli.bench.eviction import hit_share, make_policy
from kvcdn.cli.simulate_parts import REAL
from kvcdn.economics.pricebook import PriceBook
from kvcdn.errors import UnsupportedModelError
from kvcdn.simulation.comparison import Traffic, compare, publish
from kvcdn.simulation.presets import PRESETS
from kvcdn.simulation.topology import Edge, Origin, Publish, Readers, Region, Topology
from kvcdn.simulation.workload import Request, Zipf
from kvcdn.simulation.world import World, scale_of

BOOK = PriceBook.presets()

TOKEN_BYTES = 147_456 * 0.67
"""Of qwen3-4b, stored as bf16."""

FLOPS = 989.4e12 * 0.4


def prefill(start, end):
    """Seconds of a pass of qwen3-4b on an H100, by hand: 2 x parameters a token, 4 x layers x width a pair."""
    pairs = end * (end + 1) / 2 - start * (start + 1) / 2
    flops = 2 * 4.02e9 * (end - start) + 4 * 36 * 32 * 128 * pairs
    # The weights are read once a pass, and the KV before it.
    memory = (8.04e9 * min(1, end - start) + 147_456 * start) / 3.35e12
    return max(flops / FLOPS, memory)


def topology(*, edge=None, origin=None, publish=None, regions=(), **readers):
    """An H100 for every reader, behind one edge, with latencies of 0 and no limits but those given."""
    return Topology(
        origin=origin or Origin(latency_ms=0),
        publish=publish or Publish(),
        readers=Readers(**{"round_trips": 0, "open_mb_per_s": 1e12, **readers}),
        regions=regions,
        edges=(
            Edge(**{"name": "edge", "rtt_ms": 0, "request_ms": 0, "uplink_rtt_ms": 0, "reader_mbit": math.inf, **(edge or {})}),
        ),
    )


def run(topology, requests, *, with_kvcdn=True):
    world = World(topology, scale_of(topology, BOOK, 512), REAL, with_kvcdn=with_kvcdn)
    publish(world, Traffic("test", trace=tuple(requests)))
    world.run(requests)
    return world


def times(world):
    return [value for site in world.sites for value in site.tally.first_token_s]


def one(chain, time=0.0, question=32, edge=0):
    """A prompt of whole blocks and a question."""
    return Request(time, 512 * len(chain) + question, chain, 512 * len(chain), edge)


def test_one_edge_one_object_by_hand():
    """Two readers of one document of 8 blocks over 1 Gbit/s: the first waits for the fill, the second for the edge alone."""
    given = topology(
        edge={"reader_mbit": 1000, "uplink_mbit": 500, "rtt_ms": 10, "uplink_rtt_ms": 30, "request_ms": 1},
        origin=Origin(latency_ms=20),
        round_trips=4,
        mode="fetch",
    )
    world = run(given, [one(range(8)), one(range(8), 100.0)])
    size = 8 * 512 * TOKEN_BYTES
    question = prefill(4096, 4096 + 32)
    # That the blocks exist is asked of the origin once.
    first = 4 * 0.010 + (0.030 + 0.020) + 0.030 + max(0.020 + 0.0, size / (500e6 / 8)) + question
    second = 4 * 0.010 + size / (1000e6 / 8) + question
    assert [pytest.approx(first), pytest.approx(second)] == times(world)
    assert pytest.approx(size) == world.origin.sent_bytes
    counts = world.sites[0].node.counts
    assert [pytest.approx(2 * size), pytest.approx(size), 0.5] == [counts.asked_bytes, counts.filled_bytes, counts.hit_ratio]


def test_turns_by_hand():
    """4,096 tokens in objects of 64 are 64, asked for in pieces of 1 MiB over 8 connections: 56 turns of 11 ms each."""
    given = topology(edge={"rtt_ms": 10, "request_ms": 1}, mode="fetch")
    world = run(given, [one(range(8))])
    pieces = math.ceil(64 * TOKEN_BYTES / 2**20)
    assert [pytest.approx(math.ceil(64 * pieces / 8) * 0.011 + prefill(4096, 4128))] == times(world)


def test_without_kvcdn_a_prompt_is_one_pass():
    """Nothing is fetched, and each prompt takes what its tokens take; two that share a device wait."""
    world = run(topology(), [one(range(8)), one(range(4), 100.0)], with_kvcdn=False)
    assert [pytest.approx(prefill(0, 4128)), pytest.approx(prefill(0, 2080))] == times(world)
    world = run(topology(devices=1), [one(range(8)), one(range(4))], with_kvcdn=False)
    assert [pytest.approx(prefill(0, 4128)), pytest.approx(prefill(0, 4128) + prefill(0, 2080))] == times(world)
    assert world.sites[0].pool.busy_s == pytest.approx(prefill(0, 4128) + prefill(0, 2080))


def test_both_meet_by_hand():
    """On a slow link the model computes from the left until what is left has arrived from the right."""
    given = topology(edge={"reader_mbit": 16_000}, mode="both")
    world = run(given, [one(range(8))])
    block = 512 * TOKEN_BYTES / 2e9
    computed = [prefill(512 * place, 512 * (place + 1)) for place in range(8)]
    # After `count` blocks computed, those behind have arrived: the first count where that holds.
    count = next(count for count in range(9) if sum(computed[:count]) >= (8 - count) * block)
    meeting = max(sum(computed[:count]), (8 - count) * block)
    earlier = max(sum(computed[: count - 1]), (8 - count + 1) * block)
    assert [pytest.approx(min(meeting, earlier) + prefill(4096, 4128))] == times(world)
    tally = world.sites[0].tally
    assert 0 < tally.tokens_fetched < 4096
    assert tally.tokens == tally.tokens_fetched + tally.tokens_computed


def test_infinite_capacity_misses_once():
    """Every block is filled once, whatever is asked for."""
    requests = [one(range(start, start + 4), 10.0 * number) for number, start in enumerate((0, 100, 0, 200, 100, 0))]
    world = run(topology(mode="fetch"), requests)
    counts = world.sites[0].node.counts
    assert 12 == counts.filled_blocks
    assert 24 == counts.asked_blocks
    assert pytest.approx(12 * 512 * TOKEN_BYTES) == world.origin.sent_bytes


def test_zero_bandwidth_is_no_kvcdn():
    """Over a dead link the plan computes: the times are those without kvcdn, and no byte is sent. Fetching alone never ends."""
    requests = [one(range(8)), one(range(8), 50.0)]
    plain = run(topology(), requests, with_kvcdn=False)
    dead = run(topology(edge={"mbit": 0}), requests)
    assert times(plain) == times(dead)
    assert {"compute": 2} == dead.sites[0].tally.modes
    assert 0.0 == dead.sites[0].node.out.sent
    assert 0 == run(topology(edge={"mbit": 0}, mode="fetch"), requests).finished


def test_readers_of_one_fill_join():
    """A stampede on a cold document is one fill, however many come while it runs."""
    requests = [one(range(8), 0.001 * number) for number in range(20)]
    world = run(topology(edge={"uplink_mbit": 1000}, mode="fetch"), requests)
    assert 8 == world.origin.sent_blocks
    counts = world.sites[0].node.counts
    assert pytest.approx(19 / 20 * counts.asked_bytes) == counts.joined_bytes
    # All end with the fill, at the speed of the uplink, and the question after it.
    end = 8 * 512 * TOKEN_BYTES / 125e6 + prefill(4096, 4128)
    assert [pytest.approx(end - 0.001 * number) for number in range(20)] == times(world)


def test_published_after_requests():
    """With a threshold of two, two readers compute, and the third fetches what took the publisher its time."""
    requests = [one(range(8), 100.0 * number) for number in range(3)]
    world = run(topology(mode="fetch", publish=Publish(after_requests=2)), requests)
    assert {"none": 2, "fetch": 1} == world.sites[0].tally.modes
    by_blocks = sum(prefill(512 * place, 512 * (place + 1)) for place in range(8))
    assert pytest.approx(by_blocks) == world.catalogue.prefill_s
    late = run(topology(mode="fetch", publish=Publish(after_requests=2, delay_s=100.0)), requests)
    assert {"none": 3} == late.sites[0].tally.modes


def test_memory_of_devices_counts_with_and_without():
    """What the devices hold is neither computed nor fetched again, with kvcdn or without."""
    requests = [one(range(8)), one(range(8), 100.0)]
    for with_kvcdn in (False, True):
        world = run(topology(memory_gb=1, mode="fetch"), requests, with_kvcdn=with_kvcdn)
        assert 4096 == world.sites[0].tally.tokens_memory
        assert pytest.approx(prefill(4096, 4128)) == times(world)[1]


def test_a_slow_fetch_is_joined_by_computing():
    """A fetch planned on an idle link that then fills up is planned anew, and computing helps it."""
    link = {"mbit": 200_000, "reader_mbit": 200_000}
    requests = [one(range(100 * number, 100 * number + 64), 0.001 * number) for number in range(6)]
    world = run(topology(edge=link), requests)
    assert world.sites[0].tally.turned > 0
    assert 6 == world.finished
    plain = run(topology(edge=link), requests, with_kvcdn=False)
    assert max(times(world)) <= 1.1 * max(times(plain))


def conversations(count):
    """Turns that grow, interleaved, one request a second."""
    fresh = itertools.count(1000)
    running = [[number] for number in range(20)]
    requests = []
    for number in range(count):
        place = number * 7 % 20
        running[place] = [*running[place], *(next(fresh) for _ in range(number % 5))]
        requests.append(tuple(running[place]))
        if len(running[place]) > 25:
            running[place] = running[place][:1]
    return requests


@pytest.mark.parametrize("policy", ["edge", "lru", "s3-fifo", "sieve", "arc"])
def test_hits_are_those_of_bench_eviction(policy):
    """On a trace, with links that take no time, a simulated edge has the very hits that `kvcdn bench eviction` reports."""
    chains = conversations(600)
    blocks = 150
    given = topology(mode="fetch", edge={"capacity_gb": (blocks + 0.5) * 512 * TOKEN_BYTES / 1e9, "policy": policy})
    world = run(given, [one(chain, float(number)) for number, chain in enumerate(chains)])
    counts = world.sites[0].node.counts
    assert hit_share(make_policy(policy, blocks, chains), chains) == counts.leading_blocks / counts.asked_blocks


def test_bytes_are_conserved():
    """Origin's bytes are the region's misses, its bytes out are the edges' misses, and readers get what they asked for."""
    given = replace(
        PRESETS["laptops"],
        readers=replace(PRESETS["laptops"].readers, mode="fetch"),
        regions=(Region(name="shield", capacity_gb=20, rtt_ms=10),),
        edges=tuple(replace(edge, capacity_gb=10) for edge in PRESETS["laptops"].edges),
    )
    zipf = Zipf(requests=2000, seconds=20_000, documents=300)
    world = World(given, scale_of(given, BOOK, 512), REAL, with_kvcdn=True)
    publish(world, Traffic("test", zipf=zipf))
    world.run(zipf.draw(2000, [edge.share for edge in given.edges], 3))
    region = world.regions["shield"]
    edges = [site.node for site in world.sites]
    assert world.origin.sent_bytes == pytest.approx(region.counts.filled_bytes) == pytest.approx(region.uplink.sent)
    assert world.origin.out.sent == pytest.approx(world.origin.sent_bytes)
    filled = sum(edge.counts.filled_bytes for edge in edges)
    assert filled == pytest.approx(region.counts.asked_bytes) == pytest.approx(region.out.sent)
    assert filled == pytest.approx(sum(edge.uplink.sent for edge in edges))
    for counts in (node.counts for node in world.nodes().values()):
        parts = counts.held_bytes + counts.joined_bytes + counts.filled_bytes
        assert counts.asked_bytes == pytest.approx(parts)
    fetched = sum(site.tally.tokens_fetched for site in world.sites)
    assert sum(edge.out.sent for edge in edges) == pytest.approx(fetched * TOKEN_BYTES)
    assert 2000 * 4128 == sum(site.tally.tokens for site in world.sites)
    assert 0 < region.counts.filled_bytes < region.counts.asked_bytes


def base(**changes):
    """A comparison where everything has a price and nothing is free, with settings changed by their keys."""
    given = Topology(
        origin=Origin(store="s3", mbit=10_000),
        readers=Readers(model="qwen3-4b", device="h100", devices=2),
        edges=(
            Edge(name="edge", capacity_gb=10, mbit=20_000, reader_mbit=20_000, rtt_ms=1, uplink_mbit=8000, delivery="bunny"),
        ),
    )
    drawn = {"requests": 750, "seconds": 200, "documents": 400, "document_tokens": 8192, "seed": 5}
    for key, value in changes.items():
        if key in drawn:
            drawn[key] = value
        else:
            given = given.varied(key.replace("__", "."), str(value))
    seed = drawn.pop("seed")
    return compare(given, Traffic("test", zipf=Zipf(**drawn), seed=seed), BOOK, REAL, lambda doing, done: None)


@cache
def plain():
    """Nothing changed."""
    return base()


def test_the_same_seed_gives_the_same():
    """To the last digit; another seed gives something else."""
    assert plain() == base()
    assert plain() != base(seed=6)


def pick(found, path):
    for key in path.split("."):
        found = found[key]
    return found


TIME, EGRESS, EDGE = "with.first_token_s.mean", "with.costs_usd.origin_egress", "with.nodes.edge.hit_ratio"

BUSY = "without.devices.utilisation"


@pytest.mark.parametrize(
    ("change", "up", "down", "same"),
    [
        ({"edge__capacity_gb": 40}, [EDGE], [EGRESS, "with.usd", "with.costs_usd.store_requests"], ["without.usd", BUSY]),
        ({"origin__store": "r2"}, [], [EGRESS, "with.usd", "with.costs_usd.storage"], [TIME, EDGE, "without.usd"]),
        ({"edge__delivery": "own"}, [], ["with.costs_usd.delivery", "with.usd"], [EGRESS, TIME, EDGE]),
        ({"edge__uplink_mbit": 1000}, [TIME], [], ["without.first_token_s.mean"]),
        ({"edge__reader_mbit": 2000}, [TIME, "with.tokens_share.computed"], ["with.tokens_share.fetched"], ["without.usd"]),
        ({"edge__rtt_ms": 20}, [TIME], [], ["without.first_token_s.mean"]),
        ({"origin__latency_ms": 500}, [TIME], [], ["without.first_token_s.mean"]),
        ({"readers__utilisation": 0.8}, [], [BUSY, "without.usd", "with.costs_usd.publishing", TIME], []),
        (
            {"readers__gpu_hour_usd": 8},
            ["without.usd", "with.costs_usd.compute", "with.costs_usd.publishing"],
            [],
            [TIME, EGRESS],
        ),
        ({"readers__devices": 1}, [BUSY, "without.first_token_s.p99"], [], ["without.usd"]),
        ({"readers__precision": "int4"}, [], [EGRESS, TIME, "with.published.stored_bytes"], ["without.usd"]),
        ({"readers__memory_gb": 50}, ["without.tokens_share.memory"], ["without.usd", "with.costs_usd.compute"], []),
        ({"readers__open_mb_per_s": 500}, [TIME], [], ["without.first_token_s.mean"]),
        ({"documents": 4000}, [EGRESS, "with.published.prefill_s", "with.costs_usd.storage"], [EDGE], ["without.usd"]),
        ({"document_tokens": 16_384}, ["without.usd", TIME, "with.published.stored_bytes", "with.tokens"], [], []),
        ({"seconds": 2000}, ["with.costs_usd.storage"], [BUSY, "without.first_token_s.p99"], ["without.usd"]),
        ({"publish__after_requests": 1}, [], ["with.published.objects", "with.tokens_share.fetched"], ["without.usd"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_one_input_moves_what_it_must(change, up, down, same):
    """Each setting moves the outputs that hang on it, in the right direction, and leaves the others alone."""
    before, after = plain(), base(**change)
    assert [path for path in up if not pick(after, path) > pick(before, path)] == []
    assert [path for path in down if not pick(after, path) < pick(before, path)] == []
    assert [path for path in same if pick(after, path) != pytest.approx(pick(before, path))] == []


def test_costs_by_hand():
    """Each part of the cost is its count times its price."""
    found = base()["with"]
    hour = 3.99
    assert found["costs_usd"]["compute"] == pytest.approx(found["devices"]["busy_s"] * hour / 3600, rel=1e-4)
    assert found["costs_usd"]["origin_egress"] == pytest.approx(found["origin"]["sent_bytes"] / 1e9 * 0.09, rel=1e-4)
    assert found["costs_usd"]["delivery"] == pytest.approx(found["nodes"]["edge"]["sent_bytes"] / 1e9 * 0.01, rel=1e-4)
    assert found["published"]["stored_bytes"] == pytest.approx(400 * 8192 * TOKEN_BYTES, rel=1e-4)
    months = found["seconds"] / (365 / 12 * 86400)
    assert found["costs_usd"]["storage"] == pytest.approx(400 * 8192 * TOKEN_BYTES / 1e9 * 0.023 * months, rel=1e-2)
    assert found["published"]["objects"] == 400 * 128
    writes = 400 * 128 * 0.005 / 1000
    assert found["costs_usd"]["publishing"] == pytest.approx(found["published"]["prefill_s"] * hour / 3600 + writes, rel=1e-4)
    assert found["usd_per_million_tokens"] == pytest.approx(found["usd"] / (750 * 8224) * 1e6, rel=1e-4)


def test_a_model_with_states_is_refused():
    """Its KV is not proportional to its tokens, and it is refused by name."""
    with pytest.raises(UnsupportedModelError, match=r"qwen3\.6-27b keeps states"):
        scale_of(topology(model="qwen3.6-27b"), BOOK, 512)
