"""Several edges: which is asked, what happens when it fails, stalls or is late, and how proxies and certificates are met."""

from __future__ import annotations

import contextlib
import random
import statistics
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcdn.client.network import edges as edges_module
from kvcdn.client.network import patience, tries
from kvcdn.client.network.edges import HEDGES_SAVED, Edge, EdgeGroup
from kvcdn.client.network.health import LEFT_OUT_SECONDS, LONGEST_LEFT_OUT_SECONDS, OPEN_FAILURES, TRIAL_SECONDS, Health
from kvcdn.client.network.link import LinkEstimate
from kvcdn.client.network.patience import LONGEST_PAUSE_SECONDS, RETRIES_ALWAYS, SICK_SECONDS, Patience
from kvcdn.client.sources.sources import open_source
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.sources.transport import EdgeSource, EdgesSource
from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import NotFoundError, UnavailableError, UsageError
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.blocks import make_document
from support.edge_process import running_edge
from support.faults import Fault, deaf_port, faulty_link
from support.scripted import right_answer, scripted
from support.waiting import until
from support.web import running_web

KEY = "v1/object"
DATA = random.Random(3).randbytes(600_000)
STALL = 0.2
LONG_STALL = 1.0
TAG, ADDRESS = ModelTag(bytes(16)), Digest(bytes(32))
MATCHED = b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"matched": 1}'


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    """Pauses between tries take time and prove nothing."""
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.005)


@pytest.fixture
def many_tries(monkeypatch):
    """On a busy machine an answer may be late by itself, and then counts as one more failure."""
    monkeypatch.setattr(tries, "TRIES", 30)
    monkeypatch.setattr(patience, "RETRIES_ALWAYS", 100)


@pytest.fixture
def store():
    store = MemoryStore()
    store.create(KEY, [DATA])
    return store


@contextlib.contextmanager
def two_links(store):
    """Two faulty links to servers of the same objects."""
    with running_web(store) as one, running_web(store) as two, faulty_link(one.port) as first, faulty_link(two.port) as second:
        yield first, second


def read_all(source, *, ranged=False):
    reader = source.open(KEY, ranged=ranged)
    try:
        return b"".join(bytes(reader.read_exact(min(50_000, len(DATA) - at))) for at in range(0, len(DATA), 50_000))
    finally:
        reader.close()


def several(*links):
    return EdgesSource([link.url for link in links])


def waiting(fault, *links):
    """Waits for whoever is not silent, and for silence longer than a busy edge is silent."""
    return EdgesSource([link.url for link in links], **({"stall_seconds": LONG_STALL} if "silent" in fault else {}))


def near_and_far(source):
    """The first edge is the one to ask."""
    for edge, latency in zip(source._group.edges, (0.0001, 1.0), strict=True):
        edge.pool.link.answered(latency)


# -- which edge --------------------------------------------------------------------------------------------------------

URLS = [f"http://edge{number}.example" for number in range(5)]


def first_choices(urls, keys):
    group = EdgeGroup(urls, None, None)
    return {key: group.ranked(key)[0].url for key in keys}


def test_every_client_asks_the_same_edge_for_a_block():
    """Whatever the order in which it was told of them, and in every process."""
    keys = [f"v1/{number}" for number in range(200)]
    assert first_choices(URLS, keys) == first_choices(URLS[::-1], keys)
    assert "http://edge2.example" == first_choices(URLS, ["v1/object"])["v1/object"]


def test_keys_are_spread_evenly_and_few_move_when_an_edge_goes():
    """Only those of the edge that went."""
    keys = [f"v1/{number}" for number in range(2000)]
    before = first_choices(URLS, keys)
    shares = [list(before.values()).count(url) for url in URLS]
    assert min(shares) > 320
    after = first_choices(URLS[:-1], keys)
    assert [key for key in keys if before[key] != after[key]] == [key for key in keys if before[key] == URLS[-1]]


def test_the_nearest_is_asked_first_and_equals_share():
    """A difference that is noise is none."""
    group = EdgeGroup(URLS[:3], None, None)
    for edge, latency in zip(group.edges, (0.010, 0.012, 0.080), strict=True):
        edge.pool.link.answered(latency)
    orders = {tuple(edge.url for edge in group.ranked(f"v1/{number}")) for number in range(50)}
    assert {(URLS[0], URLS[1], URLS[2]), (URLS[1], URLS[0], URLS[2])} == orders


def test_an_edge_that_nobody_has_measured_is_tried():
    """It may be the nearest."""
    group = EdgeGroup(URLS[:2], None, None)
    group.edges[0].pool.link.answered(0.001)
    assert {URLS[0], URLS[1]} == {group.ranked(f"v1/{number}")[0].url for number in range(50)}


def test_an_edge_that_failed_comes_last():
    """However near it is."""
    group = EdgeGroup(URLS[:2], None, None)
    group.edges[0].pool.link.answered(0.001)
    group.edges[1].pool.link.answered(0.1)
    assert URLS[0] == group.ranked(KEY)[0].url
    group.edges[0].health.failed(time.monotonic())
    assert URLS[1] == group.ranked(KEY)[0].url


@pytest.mark.parametrize("urls", [[], [f"http://edge{number}" for number in range(17)], ["http://a", "nonsense"]])
def test_what_are_no_edges_is_refused(urls):
    """None, too many, or something else."""
    with pytest.raises(UsageError):
        EdgesSource(urls)


# -- health ------------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_an_edge_that_fails_is_left_out_longer_each_time():
    """Doubling, with jitter, up to a minute; a success ends it."""
    clock, waits = Clock(), []
    health = Health(clock)
    for _ in range(12):
        health.asked()
        health.failed(clock.now)
        assert not health.well
        began = clock.now
        while not health.well:
            clock.now += 0.01
        waits.append(clock.now - began)
    for number, wait in enumerate(waits):
        expected = min(LEFT_OUT_SECONDS * 2**number, LONGEST_LEFT_OUT_SECONDS)
        assert 0.5 * expected - 0.02 <= wait <= 1.5 * expected + TRIAL_SECONDS
    health.worked()
    assert (True, 0) == (health.well, health.out_for)


def test_one_request_at_a_time_tries_an_edge_that_failed():
    """The others leave it alone until that is known, or for some seconds."""
    clock = Clock()
    health = Health(clock)
    health.failed(clock.now)
    clock.now += 2 * LEFT_OUT_SECONDS
    assert health.well
    health.asked()
    assert not health.well
    clock.now += TRIAL_SECONDS
    assert health.well


def test_what_fails_together_counts_once():
    """Sixteen streams of an edge that restarts are one failure."""
    clock = Clock()
    health = Health(clock)
    for _ in range(16):
        health.failed(clock.now)
    assert 0 == health.out_for
    for _ in range(OPEN_FAILURES - 1):
        clock.now += LONGEST_LEFT_OUT_SECONDS
        health.failed(clock.now)
    assert health.out_for > 0


def test_an_edge_that_asks_for_time_gets_it():
    """As far as that is sensible."""
    clock = Clock()
    health = Health(clock)
    health.failed(clock.now, 20.0)
    clock.now += 19
    assert not health.well
    clock.now += 2
    assert health.well


def test_a_dead_edge_costs_later_prompts_nothing(store):
    """The circuit is open: an error at once, without a connection; and once it is back it is found again."""
    with running_web(store) as web, faulty_link(web.port) as link, contextlib.closing(several(link)) as source:
        link.refusing = True
        health = source._group.edges[0].health
        while not health.out_for:
            with pytest.raises(UnavailableError):
                source.read(KEY, len(DATA))
            health._out_until = 0.0 if not health.out_for else health._out_until
        before, health._out_until = link.connections, time.monotonic() + 1000
        with pytest.raises(UnavailableError, match="left alone"):
            source.read(KEY, len(DATA))
        assert before == link.connections
        link.refusing = False
        health._out_until = 0.0
        assert DATA == source.read(KEY, len(DATA))
        assert (True, 0) == (health.well, health.out_for)


# -- budgets -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 3)), max_size=30))
def test_lost_time_is_the_union_of_what_each_lost(spans):
    """Whatever overlaps counts once, so that the sum is never more than what passed."""
    clock = Clock()
    budget = Patience.of_prompt(clock=clock).budget
    for lasted, gap in spans:
        clock.now += gap
        budget.lose(clock.now - lasted)
    lost = SICK_SECONDS - budget.sick_left()
    assert 0 <= lost <= sum(gap for _, gap in spans) + 5
    assert lost <= sum(lasted for lasted, _ in spans) + 1e-9


def test_no_silence_is_longer_than_what_may_still_be_lost():
    """So that the sum of all is bounded by one constant."""
    clock = Clock()
    waits = Patience.of_prompt(stall_s=15, clock=clock)
    assert 15 == waits.silence()
    assert waits.silence(choice=True) < 15
    clock.now += 18
    waits.budget.lose(clock.now - 18)
    assert pytest.approx(SICK_SECONDS - 18) == waits.silence()
    waits.budget.lose(clock.now - 100)
    clock.now += 18
    waits.budget.lose(clock.now - 18)
    assert 0 == waits.silence()
    assert not waits.budget.may_retry(0)


def test_retries_have_a_budget():
    """A share of the requests, a few always, and none after a long pause."""
    budget = Patience.of_prompt().budget
    assert not budget.may_retry(LONGEST_PAUSE_SECONDS + 1)
    assert RETRIES_ALWAYS == sum(budget.may_retry(0) for _ in range(100))
    for _ in range(10):
        budget.asked()
    assert 5 == sum(budget.may_retry(0) for _ in range(100))


# -- failover ----------------------------------------------------------------------------------------------------------

BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"
FAULTS = {
    "refusing": None,
    "reply lost": Fault(pass_bytes=0),
    "silent": Fault(pass_bytes=0, stall=True),
    "silent in the body": Fault(pass_bytes=300_000, stall=True),
    "cut in the body": Fault(pass_bytes=300_000),
    "reset in the body": Fault(pass_bytes=300_000, reset=True),
    "503": Fault(answer=BUSY),
    "500": Fault(answer=BUSY.replace(b"503", b"500")),
    "401": Fault(answer=BUSY.replace(b"503", b"401")),
    "not HTTP": Fault(answer=b"SSH-2.0-hello\r\n"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("ranged", [False, True])
@pytest.mark.parametrize("sick", [0, 1])
def test_another_edge_takes_over(store, many_tries, fault, ranged, sick):
    """Before the first byte or in mid-body, whichever of the two it is that fails."""
    with two_links(store) as links, contextlib.closing(waiting(fault, *links)) as source:
        if FAULTS[fault] is None:
            links[sick].refusing = True
        else:
            links[sick].inject(FAULTS[fault], times=100_000)
        for _ in range(3):
            assert DATA == read_all(source, ranged=ranged)


@pytest.mark.parametrize("fault", [name for name in FAULTS if "body" not in name])
def test_a_match_asks_the_next_edge(many_tries, fault):
    """A lookup is as urgent as a block."""

    def answer(number, head, client):
        client.sendall(MATCHED)
        return True

    with scripted(answer) as server, faulty_link(server.port) as first, faulty_link(server.port) as second:
        source = waiting(fault, first, second)
        for link in (first, second):
            if FAULTS[fault] is None:
                link.refusing = True
            else:
                link.inject(FAULTS[fault], times=100_000)
            assert 1 == source.match(TAG, [ADDRESS])
            link.refusing = False
            link.inject(Fault(), times=0)
            for edge in source._group.edges:
                edge.health.worked()
        source.close()


@pytest.mark.parametrize("same", [True, False])
def test_the_rest_comes_from_another_edge_only_if_it_is_the_same_object(same):
    """With another entity tag not a byte of it is used, and the first edge is asked once more."""

    def cutting(tag, data):
        def answer(number, head, client):
            whole = right_answer(head, data, etag=f'"{tag}"')
            client.sendall(whole if b"Range" in head else whole[:300_000])
            return b"Range" in head

        return answer

    other = DATA if same else random.Random(4).randbytes(len(DATA))
    with scripted(cutting("one", DATA)) as one, scripted(cutting("one" if same else "two", other)) as two:
        with contextlib.closing(several(one, two)) as source:
            near_and_far(source)
            assert DATA == read_all(source)
        assert (1 if same else 2, 1) == (len(one.requests), len(two.requests))


def test_a_killed_edge_is_replaced_in_mid_block(tmp_path):
    """Two real edges, of which one dies while it sends: the rest comes from the other, by the same entity tag."""
    document = make_document(tokens=512, layers=8, heads=8, dim=64)
    document.publish(FolderStore(tmp_path / "origin"))
    (key, data), *_ = document.blocks.items()
    with contextlib.ExitStack() as running:
        edges = {
            edge.url: edge
            for edge in (running.enter_context(running_edge(str(tmp_path / "origin"), tmp_path / name)) for name in "ab")
        }
        with contextlib.closing(EdgesSource(list(edges))) as source:
            reader = source.open(key, ranged=False)
            first = bytes(reader.read_exact(100_000))
            sending = reader._transfer._edge.url
            edges[sending].process.kill()
            assert data == first + bytes(reader.read_exact(len(data) - len(first)))
            assert sending != reader._transfer._edge.url
            reader.close()


def test_a_missing_object_is_missing_on_all_edges(store):
    """404 is an answer, not a failure."""
    with two_links(store) as links, contextlib.closing(several(*links)) as source:
        with pytest.raises(NotFoundError):
            source.read("v1/other", 10)
        assert 1 == links[0].connections + links[1].connections
        assert [True, True] == [edge.health.well for edge in source._group.edges]


@pytest.mark.parametrize("fault", ["refusing", "silent", "cut in the body", "503"])
@pytest.mark.parametrize("ranged", [False, True])
def test_an_origin_among_the_sources_serves_what_no_edge_can(store, tmp_path, monkeypatch, fault, ranged):
    """From where the edges broke off on."""
    monkeypatch.setattr(tries, "TRIES", 1)
    origin = FolderStore(tmp_path)
    origin.create(KEY, [DATA])
    with two_links(store) as links:
        for link in links:
            if FAULTS[fault] is None:
                link.refusing = True
            else:
                link.inject(FAULTS[fault], times=100_000)
        with contextlib.closing(open_source([links[0].url, links[1].url, str(tmp_path)])) as source:
            source._edges._stall_seconds = STALL / 2
            session = source.session()
            assert DATA == read_all(session, ranged=ranged)
            assert DATA == session.read(KEY, len(DATA))
            assert 0 == session.match(TAG, [ADDRESS])


def test_several_sources_are_edges_and_at_most_one_origin(tmp_path):
    """What else would be meant?"""
    assert isinstance(open_source(["http://a", "http://b"]), EdgesSource)
    assert isinstance(open_source([str(tmp_path)]), StoreSource)
    for wrong in ([], [str(tmp_path), str(tmp_path / "other")]):
        with pytest.raises(UsageError):
            open_source(wrong)


def test_an_origin_is_not_asked_while_the_edges_are_well(store, tmp_path):
    """It is the costly way."""
    with running_web(store) as web:
        source = open_source([web.url, str(tmp_path)])
        assert DATA == read_all(source)
        assert source.link().samples
        source.close()


# -- second requests ---------------------------------------------------------------------------------------------------


def late(seconds, data=DATA):
    """A server whose answers take `seconds`; for ever, until the client leaves, without."""

    def answer(number, head, client):
        if seconds is None:
            return bool(client.recv(1))
        time.sleep(seconds)
        client.sendall(MATCHED if b"/match" in head else right_answer(head, data))
        return True

    return answer


@pytest.fixture
def quick_hedges(monkeypatch):
    monkeypatch.setattr(edges_module, "HEDGE_UNKNOWN_SECONDS", 0.05)
    monkeypatch.setattr(edges_module, "HEDGE_FLOOR_SECONDS", 0.05)


@pytest.mark.parametrize("what", ["stream", "ranged", "match"])
def test_a_late_answer_is_overtaken_by_another_edges(quick_hedges, what):
    """The first to answer wins, and the loser is closed."""
    with scripted(late(None)) as slow, scripted(late(0)) as quick:
        source = EdgesSource([slow.url, quick.url])
        near_and_far(source)
        if what == "match":
            assert 1 == source.match(TAG, [ADDRESS])
        else:
            assert DATA == read_all(source, ranged=what == "ranged")
        # More than one where an answer of the other is late as well, for a moment; read when the server comes to it.
        until(lambda: slow.requests)
        source.close()


def test_with_one_edge_a_second_connection_may_overtake_the_first(quick_hedges):
    """A connection on which packets are lost is late alone."""

    def answer(number, head, client):
        if number == 0:
            return bool(client.recv(1))
        client.sendall(right_answer(head, DATA))
        return True

    with scripted(answer) as server:
        source = EdgeSource(server.url)
        assert DATA == read_all(source)
        assert (2, 2) == (len(server.requests), server.connections)
        source.close()


@pytest.mark.parametrize("second", ["refuses", "swallows packets", "answers an error", "breaks off"])
def test_a_second_request_that_fails_harms_nothing(quick_hedges, monkeypatch, second):
    """The first answers after all."""
    monkeypatch.setattr(edges_module, "HEDGE_CONNECT_SECONDS", 0.1)
    wrong = {"answers an error": BUSY, "breaks off": b"HTTP/1."}

    def answer(number, head, client):
        client.sendall(wrong.get(second, b""))
        return False

    with scripted(late(0.3)) as slow, scripted(answer) as other, deaf_port() as deaf:
        url = {"refuses": "http://127.0.0.1:9", "swallows packets": f"http://127.0.0.1:{deaf}"}.get(second, other.url)
        source = EdgesSource([slow.url, url])
        near_and_far(source)
        assert DATA == read_all(source)
        assert 1 == len(slow.requests)
        source.close()


def test_second_requests_are_a_small_share(quick_hedges, monkeypatch):
    """An edge that is slow for everybody does not get twice the requests."""
    monkeypatch.setattr(edges_module, "HEDGE_UNKNOWN_SECONDS", 0.001)
    monkeypatch.setattr(edges_module, "HEDGE_FLOOR_SECONDS", 0.001)
    with scripted(late(0.01)) as server:
        source = EdgeSource(server.url)
        for _ in range(60):
            assert 1 == source.match(TAG, [ADDRESS])
        source.close()
        until(lambda: len(server.requests) >= 61)
        assert len(server.requests) <= 60 + 1 + HEDGES_SAVED + 60 * edges_module.HEDGE_SHARE


def test_no_second_request_while_the_link_is_full(quick_hedges, monkeypatch):
    """What is late because bytes are arriving would be later with more of them."""

    def estimate():
        meter.waiting()
        meter.received(1_000_000)  # as much as comes in a quarter of an hour
        return LinkEstimate(0.001, 1000.0, 1)

    with scripted(late(0.3)) as server, contextlib.closing(EdgeSource(server.url)) as source:
        meter = source._group.meter
        monkeypatch.setattr(meter, "estimate", estimate)
        assert 1 == source.match(TAG, [ADDRESS])
        assert 1 == len(server.requests)


def test_late_is_a_high_percentile_of_what_was_seen(quick_hedges):
    """With a floor, and a second as long as little is known."""
    group = EdgeGroup(["http://edge.example"], None, None)
    edge = group.edges[0]

    class Sent:
        pool = edge.pool

    assert edges_module.HEDGE_UNKNOWN_SECONDS == group._late_after(Sent)
    for _ in range(40):
        edge.pool.link.answered(0.01)
    assert edges_module.HEDGE_FLOOR_SECONDS == group._late_after(Sent)
    waits = [number / 10 for number in range(64)]
    for wait in waits:
        edge.pool.link.answered(wait)
    assert statistics.quantiles(waits, n=100)[92] <= group._late_after(Sent) <= waits[-1]


def test_the_links_of_several_edges_are_one(store):
    """Bytes are counted over the time of all of them together."""
    with two_links(store) as links, contextlib.closing(several(*links)) as source:
        for _ in range(4):
            read_all(source)
        found = source.link()
        assert found.samples >= 1
        assert found.bytes_per_s > 0
        assert (
            sum(edge.pool.link.total_bytes for edge in source._group.edges) == source._group.meter.total_bytes == 4 * len(DATA)
        )


def test_an_edge_has_a_weight_of_its_own_for_every_key():
    """16 bytes, from its URL and the key."""
    one, two = Edge("http://a", None, None), Edge("http://b", None, None)
    assert len({one.weight("x"), one.weight("y"), two.weight("x"), two.weight("y")}) == 4
    assert one.weight("x") == Edge("http://A", None, None).weight("x")
