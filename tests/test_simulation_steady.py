"""The steady state: Che's approximation against a cache, and a window of traffic against all of it."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

from kvcdn.cli.simulate_parts import REAL
from kvcdn.economics.pricebook import PriceBook
from kvcdn.errors import UsageError
from kvcdn.simulation.comparison import Traffic, compare
from kvcdn.simulation.presets import PRESETS
from kvcdn.simulation.steady import Stream, characteristic_time, hit_shares
from kvcdn.simulation.topology import Edge, Origin, Readers, Region, Topology
from kvcdn.simulation.workload import Zipf

BOOK = PriceBook.presets()


def test_two_objects_by_hand():
    """Room for one of two equal ones: T solves 2 (1 - exp(-r T)) = 1, and each is a hit half of the time."""
    streams = [Stream(np.array([3.0, 3.0]))]
    assert math.log(2) / 3 == pytest.approx(characteristic_time(streams, 1))
    (shares,), _ = hit_shares(streams, 1, 1e9)
    assert [pytest.approx(0.5)] * 2 == list(shares)


def test_room_for_all_misses_once():
    """Of n requests for an object, one misses, if any comes at all."""
    streams = [Stream(np.array([0.5, 0.0]))]
    (found,), time = hit_shares(streams, 2, 100.0)
    assert pytest.approx(1 - (1 - math.exp(-50)) / 50) == found[0]
    assert 0.0 == found[1]
    assert math.inf == time
    # The same by steps, as of two streams that are one.
    halves = [Stream(np.array([0.25, 0.0]))] * 2
    for found in hit_shares(halves, 2, 100.0)[0]:
        assert pytest.approx(1 - (1 - math.exp(-50)) / 50, abs=1e-3) == found[0]


def test_a_gap_by_hand():
    """Requests 2 s apart on average, none within 1 s: after the gap one a second."""
    stream = Stream(np.array([0.5]), 1.0)
    assert [pytest.approx(1.0), pytest.approx(math.exp(-2))] == [stream.silent_before(1.0)[0], stream.silent_before(3.0)[0]]
    assert [pytest.approx(0.75), pytest.approx(0.5 * math.exp(-2))] == [stream.silent(0.5)[0], stream.silent(3.0)[0]]


@pytest.mark.parametrize("capacity", [10, 100, 400])
def test_hits_are_those_of_a_cache(capacity):
    """Within half a point of LRU itself, over 60,000 requests that begin with an empty cache."""
    zipf = Zipf(requests=60_000, seconds=60_000, documents=1000, exponent=0.9, document_tokens=16)
    cache, hits = OrderedDict(), 0
    for request in zipf.draw(60_000, [1], 3):
        document = request.chain[0]
        if document in cache:
            hits += 1
            cache.move_to_end(document)
        else:
            cache[document] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
    popularity = zipf.popularity()
    (shares,), _ = hit_shares([Stream(popularity)], capacity, 60_000.0)
    assert hits / 60_000 == pytest.approx(float((popularity * shares).sum()), abs=0.005)


TIERS = Topology(
    origin=Origin(mbit=10_000),
    readers=Readers(model="qwen3-4b", device="m1-pro", mode="fetch"),
    regions=(Region(name="region", capacity_gb=60, policy="lru", mbit=5000),),
    edges=tuple(
        Edge(
            name=name, share=share, region="region", capacity_gb=20, policy="lru", mbit=4000, reader_mbit=1000, uplink_mbit=4000
        )
        for name, share in (("one", 2.0), ("two", 1.0))
    ),
)


def test_a_window_is_like_the_whole():
    """20,000 prompts over two tiers, each simulated, and a window of a quarter: hits, egress, times and money agree."""
    traffic = Traffic("test", zipf=Zipf(requests=20_000, seconds=20_000, documents=1000, document_tokens=2048), seed=4)
    whole, window = (
        compare(TIERS, traffic, BOOK, REAL, lambda doing, done: None, method=method, window=5000)["with"]
        for method in ("events", "window")
    )
    assert [20_000, 20_000, 5000] == [whole["simulated"], window["requests"], window["simulated"]]
    for name in ("one", "two", "region"):
        assert whole["nodes"][name]["hit_ratio"] == pytest.approx(window["nodes"][name]["hit_ratio"], abs=0.02)
    assert whole["origin"]["sent_bytes"] == pytest.approx(window["origin"]["sent_bytes"], rel=0.04)
    for key in ("mean", "p50", "p90"):
        assert whole["first_token_s"][key] == pytest.approx(window["first_token_s"][key], rel=0.03)
    assert whole["tokens"] == window["tokens"]
    assert whole["usd"] == pytest.approx(window["usd"], rel=0.04)


def test_eighty_million_readers():
    """The paper's case: one document, 80 million readers. One fill an edge, and times as of one reader alone."""
    zipf = Zipf(requests=80e6, seconds=30 * 86400, documents=1, document_tokens=3774)
    given = replace(PRESETS["laptops"], edges=PRESETS["laptops"].edges[:1])
    found = compare(given, Traffic("test", zipf=zipf), BOOK, REAL, lambda doing, done: None, window=2000)
    assert "window" == found["method"]
    assert 80_000_000 == found["with"]["requests"]
    assert found["with"]["nodes"]["europe"]["hit_ratio"] > 0.999
    assert found["with"]["first_token_s"]["p50"] < found["without"]["first_token_s"]["p50"]
    assert 80e6 * (3774 + 32) == pytest.approx(found["with"]["tokens"])


def test_what_has_no_steady_state_is_refused():
    """A trace is simulated as a whole, and so is what is published as it is asked for."""
    zipf = Zipf(requests=100, seconds=100)
    later = PRESETS["laptops"].varied("publish.after_requests", "2")
    for topology, traffic in (
        (later, Traffic("t", zipf=zipf)),
        (PRESETS["laptops"], Traffic("t", trace=tuple(zipf.draw(9, [1], 0)))),
    ):
        with pytest.raises(UsageError, match="a window is simulated"):
            compare(topology, traffic, BOOK, REAL, lambda doing, done: None, method="window")
