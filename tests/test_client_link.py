"""The link's estimate: right for any number of streams, for pauses and changes, and remembered."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcdn.client.network.link import HALF_LIFE_SECONDS, LATENCIES, LEAST_BYTES, LinkEstimate, LinkMeter
from kvcdn.client.sources.source import Source
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.sources.transport import EdgeSource
from kvcdn.paths import cache_dir
from kvcdn.stores.memory import MemoryStore
from support.web import running_web

MEGABYTE = 1_000_000


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def meter(clock):
    return LinkMeter("http://edge.example", clock)


def read(meter, clock, count, seconds):
    """One read that waits for `seconds`."""
    meter.waiting()
    clock.now += seconds
    meter.received(count)


def test_a_slow_link_is_known_by_what_does_not_come(meter, clock):
    """However few bytes came, in half a second of waiting more would have."""
    read(meter, clock, 1000, 0.4)
    assert meter.estimate().bytes_per_s is None
    read(meter, clock, 1000, 0.2)
    assert 2000 / 0.6 == pytest.approx(meter.estimate().bytes_per_s, rel=0.2)


def test_nothing_is_known_of_a_link_that_was_never_used(meter):
    """No figure is made up."""
    assert LinkEstimate(None, None, 0) == meter.estimate()


@given(streams=st.integers(1, 20), pieces=st.integers(4, 40), rate=st.floats(1e5, 1e9))
def test_streams_share_the_time_of_the_link(streams, pieces, rate):
    """n streams that each get 1/n of a link are together as fast as the link, not n times as fast or slow."""
    clock = Clock()
    meter = LinkMeter("http://edge.example", clock)
    piece = LEAST_BYTES
    for _ in range(pieces):
        for _ in range(streams):
            meter.waiting()
        for _ in range(streams):
            clock.now += piece / rate
            meter.received(piece)
    assert rate == pytest.approx(meter.estimate().bytes_per_s, rel=0.15 if pieces * streams * piece / rate > 1 else 1e-6)


def test_what_a_reader_does_between_reads_is_not_the_links_time(meter, clock):
    """Decoding for minutes does not make a link slow."""
    for _ in range(10):
        read(meter, clock, MEGABYTE, 0.1)
        clock.now += 60
    assert 10 * MEGABYTE == pytest.approx(meter.estimate().bytes_per_s)


def test_a_change_is_noticed(meter, clock):
    """After a few half-lives the old rate is forgotten."""
    for _ in range(100):
        read(meter, clock, 10 * MEGABYTE, 0.1)
    for _ in range(40):
        read(meter, clock, MEGABYTE // 4, HALF_LIFE_SECONDS / 8)
    assert MEGABYTE == pytest.approx(meter.estimate().bytes_per_s, rel=0.35 * 100 / 32)
    for _ in range(40):
        read(meter, clock, MEGABYTE // 4, HALF_LIFE_SECONDS / 8)
    assert MEGABYTE == pytest.approx(meter.estimate().bytes_per_s, rel=0.1)


def test_a_stall_is_part_of_the_link(meter, clock):
    """A wait that ends with nothing counts."""
    read(meter, clock, MEGABYTE, 0.5)
    read(meter, clock, 0, 0.5)
    assert meter.estimate().bytes_per_s < 1.2 * MEGABYTE


def test_a_wait_that_still_goes_on_counts(meter, clock):
    """An estimate made while everybody waits falls with the time."""
    read(meter, clock, MEGABYTE, 0.1)
    meter.waiting()
    clock.now += 0.9
    assert meter.estimate().bytes_per_s < 1.5 * MEGABYTE


def test_too_little_tells_nothing(meter, clock):
    """A few bytes that came with the first packet are no throughput."""
    read(meter, clock, LEAST_BYTES - 1, 1e-6)
    meter.answered(0.02)
    assert LinkEstimate(0.02, None, 1) == meter.estimate()


def test_the_latency_is_the_median_and_outliers_do_not_matter(meter):
    """One answer that took ten seconds is not the link's latency."""
    for seconds in [0.02] * 20 + [10.0] + [0.03] * 10:
        meter.answered(seconds)
    assert 0.02 == meter.estimate().latency_s
    assert 31 == meter.estimate().samples


def test_a_slow_answer_is_a_high_percentile_of_those_seen(meter):
    """And unknown while few were seen."""
    for number in range(1, LATENCIES + 1):
        assert (meter.slow_answer(0.95, 20) is None) == (number <= 20)
        meter.answered(number / 1000)
    assert 0.061 == pytest.approx(meter.slow_answer(0.95, 20))


def test_a_link_is_remembered_by_later_processes_and_outweighed_by_what_they_measure(meter, clock):
    """The figures of the process before are a start."""
    meter.answered(0.02)
    for _ in range(20):
        read(meter, clock, MEGABYTE, 0.1)
    meter.save()
    later = LinkMeter("http://edge.example", clock)
    assert LinkEstimate(0.02, pytest.approx(10 * MEGABYTE, rel=1e-6), 1) == later.estimate()
    assert LinkEstimate() == LinkMeter("http://other.example", clock).estimate()
    for _ in range(100):
        read(later, clock, MEGABYTE, 0.5)
    assert 2 * MEGABYTE == pytest.approx(later.estimate().bytes_per_s, rel=0.5)


def test_a_link_is_written_rarely(meter, clock):
    """Many reads, few writes; at the end it is written anyway."""
    meter.answered(0.02)
    meter.save()
    file = cache_dir() / "links.json"
    before = file.read_text()
    meter.answered(0.04)
    meter.save()
    assert before == file.read_text()
    meter.save(at_once=True)
    assert before != file.read_text()


@pytest.mark.parametrize(
    "value",
    [None, 7, "fast", [], {}, {"latency_s": "1"}, {"latency_s": -1, "bytes_per_s": 0}, {"bytes_per_s": True}]
    + [{"latency_s": number, "bytes_per_s": number} for number in (math.inf, -math.inf, math.nan, 1e999, 10**400)],
)
def test_a_damaged_memory_is_no_memory(value, clock):
    """Whatever lies in the file, the estimate has sensible numbers or none."""
    file = cache_dir() / "links.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"http://edge.example": value}))
    assert LinkEstimate() == LinkMeter("http://edge.example", clock).estimate()


@pytest.mark.parametrize("kind", ["store", "edge"])
def test_every_source_measures_its_link(kind):
    """Reads of real objects leave an estimate, and the next process begins with it."""
    store = MemoryStore()
    store.create("v1/object", [bytes(4 * MEGABYTE)])

    def measured(source: Source) -> LinkEstimate:
        for _ in range(5):
            source.read("v1/object", 4 * MEGABYTE)
        source.close()
        return source.link()

    with running_web(store) as web:
        make = (lambda: EdgeSource(web.url)) if kind == "edge" else (lambda: StoreSource(store))
        found = measured(make())
        assert found.samples >= 1
        assert found.latency_s > 0
        assert found.bytes_per_s > 0
        assert make().link().bytes_per_s == pytest.approx(found.bytes_per_s, rel=0.01)
