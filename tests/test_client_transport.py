"""Transport over one edge: whatever it does at whatever stage, the bytes are right or the error is typed, within a bound."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import struct
import sys
import threading
import time

import pytest

from kvcdn.client.network import edges, patience, tries, wire
from kvcdn.client.network.exchange import Exchange
from kvcdn.client.sources.source import probe_lead
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.sources.transport import EdgeSource
from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import CorruptError, KvcdnError, NotFoundError, UnavailableError, UsageError
from kvcdn.stores.memory import MemoryStore
from support.edge_process import edge_in_thread
from support.faults import HOST, Fault, deaf_port, faulty_link
from support.scripted import asked_range, right_answer, scripted
from support.waiting import WAIT_SECONDS
from support.web import running_web

KEY = "v1/object"
DATA = random.Random(7).randbytes(900_000)
STALL = 0.12
LONG_STALL = 1.0


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    """Pauses between tries take time and prove nothing."""
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.005)


@pytest.fixture
def few_tries(monkeypatch):
    """What fails for ever need not fail five times to show it."""
    monkeypatch.setattr(tries, "TRIES", 2)


@pytest.fixture
def many_tries(monkeypatch):
    """On a busy machine an answer may be late by itself, and then counts as one more failure."""
    monkeypatch.setattr(tries, "TRIES", 30)
    monkeypatch.setattr(patience, "RETRIES_ALWAYS", 100)


@pytest.fixture
def patient(monkeypatch):
    """Makes sources that ask no second time because an answer is late, as it may be on a busy machine."""
    for name in ("HEDGE_UNKNOWN_SECONDS", "HEDGE_FLOOR_SECONDS"):
        monkeypatch.setattr(edges, name, math.inf)
    return EdgeSource


@pytest.fixture
def store():
    store = MemoryStore()
    store.create(KEY, [DATA])
    return store


def read_all(source, *, ranged=False, piece=70_001):
    """The whole object in exact pieces, as a fetch reads it."""
    reader = source.open(KEY, ranged=ranged)
    try:
        sizes = [min(piece, len(DATA) - start) for start in range(0, len(DATA), piece)]
        return b"".join(bytes(reader.read_exact(size)) for size in sizes)
    finally:
        reader.close()


def edge(url, **options):
    return EdgeSource(url, **options)


def hasty(url):
    """Takes an edge for gone that is silent for a moment, as a busy one is now and then: for what need not succeed."""
    return EdgeSource(url, stall_seconds=STALL)


def waiting(url, fault):
    """Waits for whoever is not silent, and for silence longer than a busy edge is silent."""
    return EdgeSource(url, stall_seconds=LONG_STALL) if "silent" in fault else EdgeSource(url)


# -- faults of a connection --------------------------------------------------------------------------------------------

BUSY = b"HTTP/1.1 %s\r\nContent-Length: 0\r\n%s\r\n"
ONCE = {
    "reply lost": Fault(pass_bytes=0),
    "cut in the status line": Fault(pass_bytes=5),
    "cut in the head": Fault(pass_bytes=40),
    "reset in the head": Fault(pass_bytes=40, reset=True),
    "silent before the head": Fault(pass_bytes=0, stall=True),
    "silent in the head": Fault(pass_bytes=40, stall=True),
    "cut at once in the body": Fault(pass_bytes=300),
    "cut in the body": Fault(pass_bytes=333_333),
    "reset in the body": Fault(pass_bytes=333_333, reset=True),
    "silent in the body": Fault(pass_bytes=333_333, stall=True),
    "429": Fault(answer=BUSY % (b"429 Slow down", b"Retry-After: 0\r\n")),
    "502": Fault(answer=BUSY % (b"502 Bad", b"")),
    "503": Fault(answer=BUSY % (b"503 Busy", b"Retry-After: 0\r\n")),
    "503, at a nonsense time": Fault(answer=BUSY % (b"503 Busy", b"Retry-After: soon\r\n")),
    "504": Fault(answer=BUSY % (b"504 Late", b"")),
}


@pytest.mark.parametrize("fault", ONCE)
@pytest.mark.parametrize("ranged", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_what_fails_a_few_times_is_tried_again(store, many_tries, fault, ranged, times):
    """The bytes are the object's, whichever request failed and wherever it broke off."""
    with running_web(store) as web, faulty_link(web.port) as link, contextlib.closing(waiting(link.url, fault)) as source:
        link.inject(ONCE[fault], times=times)
        assert DATA == read_all(source, ranged=ranged)
        assert 0 == link.pending


@pytest.mark.parametrize("fault", ONCE)
@pytest.mark.parametrize("ranged", [False, True])
def test_what_fails_for_ever_ends_in_a_typed_error(store, few_tries, fault, ranged):
    """Unless each connection brings something, when all of it arrives in the end."""
    with running_web(store) as web, faulty_link(web.port) as link, contextlib.closing(hasty(link.url)) as source:
        link.inject(ONCE[fault], times=100_000)
        with contextlib.suppress(UnavailableError):
            assert DATA == read_all(source, ranged=ranged)
        assert link.connections < 40


def test_a_broken_body_goes_on_where_it_broke_off(store):
    """What has arrived is not asked for again."""
    with running_web(store) as web, faulty_link(web.port) as link, contextlib.closing(edge(link.url)) as source:
        link.inject(Fault(pass_bytes=500_000))
        assert DATA == read_all(source)
        first, second = (headers.get("Range", "") for _, _, headers in web.requests)
        start = int(second.removeprefix("bytes=").removesuffix("-"))
        # What passed before was the head as well.
        assert ("", True) == (first, 499_000 < start < 500_000)


def test_a_connection_that_is_refused_at_first_is_tried_again(store, many_tries, monkeypatch):
    """An edge that comes back while it restarts is not a miss."""
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.05)
    with running_web(store) as web, faulty_link(web.port) as link, contextlib.closing(edge(link.url)) as source:
        link.refusing = True
        session, over = source.session(), threading.Event()
        assert session.failing_s() == 0.0

        def come_back():
            # Whoever waits can know that it fails.
            while session.failing_s() == 0.0 and not over.is_set():
                time.sleep(0.005)
            link.refusing = False

        thread = threading.Thread(target=come_back)
        thread.start()
        try:
            assert DATA == read_all(session)
        finally:
            over.set()
            thread.join()
        assert link.connections > 1
        assert session.failing_s() == 0.0


def test_an_edge_is_asked_again_when_it_says(store, patient):
    """Retry-After, in seconds, is waited for."""
    busy = Fault(answer=BUSY % (b"503 Busy", b"Retry-After: 1\r\n"))
    with running_web(store) as web, faulty_link(web.port) as link, contextlib.closing(patient(link.url)) as source:
        link.inject(busy)
        began = time.monotonic()
        assert DATA == read_all(source)
        assert time.monotonic() - began >= 1


def test_an_idle_connection_that_the_edge_has_closed_is_no_failure(patient):
    """It costs no retry and no pause: every keep-alive connection ends some day."""

    def answer(number, head, client):
        client.sendall(right_answer(head, DATA))
        return False

    with scripted(answer) as server, contextlib.closing(patient(server.url)) as source:
        for _ in range(20):
            assert DATA == read_all(source)
        assert 20 == len(server.requests)


def test_a_connection_that_is_closed_under_a_request_is_no_failure(patient):
    """The edge's idle limit strikes just as the request is on its way: it is sent again, and not held against the edge."""

    def answer(number, head, client):
        # Every second request of a connection finds it closed.
        if number % 2 == 0:
            client.sendall(right_answer(head, DATA))
        return number % 2 == 0

    with scripted(answer) as server, contextlib.closing(patient(server.url)) as source:
        for _ in range(5):
            assert DATA == source.read(KEY, len(DATA))
            assert source._group.edges[0].health.well
        assert 9 == len(server.requests)


def test_a_name_with_several_addresses_is_tried_at_each(store):
    """The one that refuses first costs nothing: an edge may listen on one of them only."""
    with running_web(store) as web:
        addresses = [(socket.AF_INET, 1, 6, "", ("127.0.0.1", 9)), (socket.AF_INET, 1, 6, "", ("127.0.0.1", web.port))]

        def look_up(host, port, **options):
            if options.get("flags"):
                raise OSError
            return addresses

        with pytest.MonkeyPatch.context() as patched, contextlib.closing(edge("http://edge.example")) as source:
            patched.setattr("kvcdn.client.network.connections.socket.getaddrinfo", look_up)
            assert DATA == read_all(source)
            assert 1 == len(web.requests)


@pytest.mark.parametrize("end", ["limit", "abort", "never found", "not a name"])
def test_a_name_that_is_not_found_in_time_holds_nobody(monkeypatch, end):
    """A resolver cannot be stopped, but left."""
    go = threading.Event()

    def look_up(host, port, **options):
        if options.get("flags"):
            raise OSError
        if end == "not a name":
            raise UnicodeError
        go.wait(WAIT_SECONDS)
        return []

    monkeypatch.setattr("kvcdn.client.network.connections.socket.getaddrinfo", look_up)
    monkeypatch.setattr(tries, "TRIES", 1)
    session = EdgeSource("http://edge.example", stall_seconds=0.3 if end == "never found" else 600).session(
        0.2 if end == "limit" else None
    )
    timer = threading.Timer(0.1, session.abort if end == "abort" else lambda: None)
    timer.start()
    expected = {"limit": "within", "abort": "stopped", "never found": "not found in time", "not a name": "not a host name"}
    with pytest.raises(UnavailableError, match=expected[end]):
        session.read(KEY, 10)
    timer.join()
    go.set()


def test_connections_are_used_again(store):
    """One request after the other needs one connection."""
    with running_web(store) as web, faulty_link(web.port) as link, contextlib.closing(edge(link.url)) as source:
        for _ in range(5):
            assert DATA == source.read(KEY, len(DATA))
            assert DATA == read_all(source, ranged=True)
        assert 1 == link.connections


# -- hostile answers ---------------------------------------------------------------------------------------------------


def slowly(text, pause=0.02):
    def answer(number, head, client):
        for byte in text:
            client.sendall(bytes([byte]))
            time.sleep(pause)
        return False

    return answer


def endlessly(beginning, again):
    def answer(number, head, client):
        client.sendall(beginning)
        for _ in range(1_000_000):
            client.sendall(again)
        return False

    return answer


def once(text):
    def answer(number, head, client):
        client.sendall(text)
        return False

    return answer


def drip(number, head, client):
    client.sendall(right_answer(head, DATA)[: -len(DATA)])
    for position in range(200):
        client.sendall(DATA[position : position + 1])
        time.sleep(0.02)
    return False


HOSTILE = {
    "not HTTP": once(b"SSH-2.0-hello\r\n"),
    "nothing": once(b""),
    "a head, a byte at a time": slowly(right_answer(b"", DATA)[:300]),
    "a head without end": endlessly(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "a line without end": endlessly(b"HTTP/1.1 200 OK\r\nX: ", b"y" * 4096),
    "100 Continue without end": endlessly(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a body, a byte at a time": drip,
    "no length": once(b"HTTP/1.1 200 OK\r\n\r\n" + DATA),
    "a negative length": once(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"),
    "a length that is no number": once(b"HTTP/1.1 200 OK\r\nContent-Length: much\r\n\r\n"),
    "a length beyond all objects": once(b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 99999999999999999999\r\n\r\n'),
    "chunks": once(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
    "another encoding": once(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello"),
    "206 to no Range": once(b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-4/5\r\nContent-Length: 5\r\n\r\nhello"),
    "a redirect": once(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"),
    "500": once(BUSY % (b"500 Oh", b"")),
    "418": once(BUSY % (b"418 Teapot", b"")),
    "a status that is none": once(b"HTTP/1.1 9999 Hm\r\n\r\n"),
    "Retry-After a year": once(BUSY % (b"503 Busy", b"Retry-After: 31536000\r\n")),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("ranged", [False, True])
def test_a_hostile_answer_ends_in_a_typed_error(few_tries, case, ranged):
    """Of any form, in bounded time and memory."""
    with scripted(HOSTILE[case]) as server, contextlib.closing(hasty(server.url)) as source:
        with pytest.raises((UnavailableError, CorruptError)):
            read_all(source, ranged=ranged)
        assert len(server.requests) < 20


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_answer_to_a_match_ends_in_a_typed_error(few_tries, case):
    """The lookup comes from the same edge."""
    expected = pytest.raises((UnavailableError, CorruptError))
    with scripted(HOSTILE[case]) as server, contextlib.closing(hasty(server.url)) as source, expected:
        source.match(ModelTag(bytes(16)), [Digest(bytes(32))])


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 410, 412, 414, 422])
def test_a_refusal_is_not_asked_for_again(status, patient):
    """4xx but for 429: another try would be told the same."""
    with scripted(once(BUSY % (f"{status} No".encode(), b""))) as server, contextlib.closing(patient(server.url)) as source:
        with pytest.raises(NotFoundError if status in (404, 410) else UnavailableError):
            read_all(source)
        assert 1 == len(server.requests)


MATCHES = [
    b"",
    b"[]",
    b"nothing",
    b'{"matched": -1}',
    b'{"matched": true}',
    b'{"matched": 2}',
    b"[" * 100_000,
    b'{"matched": 1e0}',
]


@pytest.mark.parametrize("body", MATCHES, ids=range(len(MATCHES)))
def test_a_match_that_is_no_count_is_an_error(body):
    """Whatever it is instead."""
    text = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with scripted(once(text)) as server, contextlib.closing(edge(server.url)) as source, pytest.raises(UnavailableError):
        source.match(ModelTag(bytes(16)), [Digest(bytes(32))])


@pytest.mark.parametrize("form", ["length", "chunks", "to the end"])
def test_a_match_may_come_in_any_form(form):
    """Proxies change it."""
    body = b'{"matched": 1, "sizes": [5]}'
    heads = {
        "length": b"Content-Length: %d\r\n\r\n%s" % (len(body), body),
        "chunks": b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
        "to the end": b"Connection: close\r\n\r\n" + body,
    }
    with scripted(once(b"HTTP/1.1 200 OK\r\n" + heads[form])) as server, contextlib.closing(edge(server.url)) as source:
        assert 1 == source.match(ModelTag(bytes(16)), [Digest(bytes(32))])


# -- the rest of an object ---------------------------------------------------------------------------------------------

CUT = 400_000


def resumes(rest):
    """A server that breaks off in mid-body and answers the request for the rest with `rest(head)`."""

    def answer(number, head, client):
        if number == 0:
            client.sendall(right_answer(head, DATA)[: -len(DATA) + CUT])
            return False
        client.sendall(rest(head))
        return False

    return answer


def changed(**fields):
    return lambda head: right_answer(head, DATA, **fields)


WRONG_RESTS = {
    "another entity tag": changed(etag='"other"'),
    "no entity tag": changed(etag=""),
    "a weak entity tag": changed(etag='W/"tag"'),
    "200 to a Range": lambda head: right_answer(b"", DATA),
    "no Content-Range": changed(Content_Range=""),
    "a Content-Range that is none": changed(Content_Range="bytes 5"),
    "an unknown size": changed(Content_Range=f"bytes {CUT}-{len(DATA) - 1}/*"),
    "a later start": changed(Content_Range=f"bytes {CUT + 1}-{len(DATA) - 1}/{len(DATA)}"),
    "an earlier start": changed(Content_Range=f"bytes {CUT - 1}-{len(DATA) - 1}/{len(DATA)}"),
    "an earlier end": changed(Content_Range=f"bytes {CUT}-{len(DATA) - 2}/{len(DATA)}"),
    "another size": lambda head: right_answer(head, DATA + b"x"),
    "a length that contradicts": changed(Content_Length="17"),
    "gone": lambda head: BUSY % (b"404 Gone", b""),
    "out of range": lambda head: BUSY % (b"416 No", b"Content-Range: bytes */5\r\n"),
    "elsewhere": lambda head: BUSY % (b"307 There", b"Location: http://127.0.0.1:1/\r\n"),
}


@pytest.mark.parametrize("case", WRONG_RESTS)
def test_a_rest_that_is_not_the_rest_is_refused(case, patient):
    """Not one byte of it is handed out."""
    with scripted(resumes(WRONG_RESTS[case])) as server, contextlib.closing(patient(server.url)) as source:
        reader = source.open(KEY, ranged=False)
        assert DATA[:CUT] == bytes(reader.read_exact(CUT))
        with pytest.raises((UnavailableError, NotFoundError)):
            reader.read_exact(1000)
        reader.close()
        assert f"{CUT}-" == server.ranges[1]


def test_an_object_that_changes_between_two_ranges_is_refused(patient):
    """Ranges of one object are pieces of the same bytes."""

    def answer(number, head, client):
        client.sendall(right_answer(head, DATA, etag=f'"{number}"'))
        return True

    with scripted(answer) as server, contextlib.closing(patient(server.url)) as source:
        reader = source.open(KEY, ranged=True)
        reader.read_exact(1000, 1000)
        with pytest.raises(UnavailableError):
            reader.read_exact(1000, 1000)
        reader.close()


@pytest.mark.parametrize("seed", range(12))
def test_a_link_that_breaks_anywhere_any_number_of_times_gives_the_right_bytes(seed, patient):
    """Random cuts and resets, streamed and ranged."""
    chance = random.Random(seed)

    def answer(number, head, client):
        whole = right_answer(head, DATA)
        cut = chance.randrange(len(whole)) if number < 4 else len(whole)
        client.sendall(whole[:cut])
        if cut < len(whole) and chance.random() < 0.3:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        return False

    with scripted(answer) as server, contextlib.closing(patient(server.url)) as source:
        assert DATA == read_all(source, ranged=bool(seed % 2), piece=chance.randrange(1, 300_000))


# -- readers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["edge", "store"])
@pytest.mark.parametrize("ranged", [False, True])
def test_readers_read_skip_and_know_the_end(store, kind, ranged):
    """Exact pieces, passed-over bytes, the end, and what lies behind it."""
    with running_web(store) as web, contextlib.closing(edge(web.url) if kind == "edge" else StoreSource(store)) as source:
        reader = source.open(KEY, ranged=ranged)
        assert DATA[:10] == bytes(reader.read_exact(10, 10))
        assert 0 <= reader.skip(100_000) <= 100_000
        assert DATA[100_010:300_000] == bytes(reader.read_exact(199_990))
        assert DATA[300_000:899_999] == bytes(reader.read_exact(599_999))
        assert not reader.at_end()
        assert DATA[899_999:] == bytes(reader.read_exact(1))
        assert reader.at_end()
        with pytest.raises(CorruptError):
            reader.read_exact(1)
        reader.close()
        reader.close()


@pytest.mark.parametrize("kind", ["edge", "store"])
def test_what_is_missing_is_missing_and_what_is_large_is_refused(store, kind):
    """Each with its own error."""
    with running_web(store) as web, contextlib.closing(edge(web.url) if kind == "edge" else StoreSource(store)) as source:
        assert DATA == source.read(KEY, len(DATA))
        with pytest.raises(CorruptError):
            source.read(KEY, len(DATA) - 1)
        with pytest.raises(NotFoundError):
            source.read("v1/other", 10)
        reader = source.open("v1/other", ranged=False)
        with pytest.raises(NotFoundError):
            reader.read_exact(1)
        reader.close()


def test_an_empty_object_has_nothing(store):
    """And that is no failure of the link."""
    store.create("v1/empty", [b""])
    with running_web(store) as web, contextlib.closing(edge(web.url)) as source:
        assert b"" == source.read("v1/empty", 10)
        for ranged in (False, True):
            reader = source.open("v1/empty", ranged=ranged)
            with pytest.raises(CorruptError):
                reader.read_exact(1)
            reader.close()


@pytest.mark.parametrize("length", range(6))
def test_probing_finds_what_leads(length):
    """For every number of keys that exist, with few questions."""
    asked = []
    keys = [str(number) for number in range(5)]
    assert length == probe_lead(keys, lambda key: asked.append(key) or int(key) < length) if length <= 5 else True
    assert len(asked) <= 4


def test_many_threads_read_at_once(store, tmp_path):
    """One source, forty readers, a link that fails now and then: everybody gets the object."""
    from concurrent.futures import ThreadPoolExecutor

    with running_web(store) as web, faulty_link(web.port) as link, contextlib.closing(edge(link.url)) as source:
        link.inject(Fault(pass_bytes=200_000), times=5)
        with ThreadPoolExecutor(20) as pool:
            got = list(pool.map(lambda number: read_all(source, ranged=bool(number % 2)), range(40)))
    assert [True] * 40 == [data == DATA for data in got]


def test_a_real_edge_serves_streams_ranges_and_rests(tmp_path):
    """The entity tags and ranges of our own edge are what a resumed transfer asks for."""
    from support.blocks import make_document

    document, store = make_document(tokens=1500), MemoryStore()
    document.publish(store)
    with (
        edge_in_thread(store, tmp_path) as served,
        faulty_link(int(served.url.rpartition(":")[2])) as link,
        contextlib.closing(EdgeSource(link.url)) as source,
    ):
        assert 2 == source.match(document.model.tag, [block.address for block in document.names.blocks])
        for key, data in document.objects.items():
            for cut in (None, len(data) // 2):
                if cut:
                    link.inject(Fault(when=b"GET /", pass_bytes=cut))
                assert data == source.read(key, len(data))
        assert 0 == link.pending


# -- being stopped -----------------------------------------------------------------------------------------------------


def silent_after(count):
    def answer(number, head, client):
        client.sendall(right_answer(head, DATA)[:count])
        client.recv(1)
        return False

    return answer


@pytest.mark.parametrize("who", ["reader", "session"])
@pytest.mark.parametrize("stage", ["head", "body"])
@pytest.mark.parametrize("ranged", [False, True])
def test_a_reader_that_waits_is_stopped_from_another_thread(who, stage, ranged):
    """At once, not when the silence has become too long."""
    with scripted(silent_after(0 if stage == "head" else 5000)) as server:
        session = EdgeSource(server.url, stall_seconds=600).session()
        reader = session.open(KEY, ranged=ranged)
        timer = threading.Timer(0.1, reader.abort if who == "reader" else session.abort)
        timer.start()
        with pytest.raises(UnavailableError, match="stopped"):
            reader.read_exact(10_000, 10_000)
        with pytest.raises(UnavailableError, match="stopped"):
            reader.read_exact(10_000, 10_000)
        timer.join()
        reader.close()


def test_a_connection_that_is_being_made_is_stopped_from_another_thread(monkeypatch):
    """A host that swallows packets holds nobody for longer than wanted."""
    monkeypatch.setattr("kvcdn.client.network.connections.CONNECT_SECONDS", 600.0)
    with deaf_port() as port:
        session = EdgeSource(f"http://{HOST}:{port}", stall_seconds=600).session()
        timer = threading.Timer(0.1, session.abort)
        timer.start()
        with pytest.raises(UnavailableError, match="stopped"):
            session.read(KEY, 100)
        timer.join()


@pytest.mark.parametrize("stage", ["connect", "head", "body"])
def test_a_limit_ends_everything(stage):
    """A caller that would rather prefill says when."""
    with contextlib.ExitStack() as stack:
        if stage == "connect":
            url = f"http://{HOST}:{stack.enter_context(deaf_port())}"
        else:
            url = stack.enter_context(scripted(silent_after(0 if stage == "head" else 5000))).url
        session = EdgeSource(url, stall_seconds=600).session(0.2)
        with pytest.raises(UnavailableError, match=r"within the 0\.2 s"):
            session.read(KEY, len(DATA))
        with pytest.raises(UnavailableError, match=r"within the 0\.2 s"):
            session.match(ModelTag(bytes(16)), [Digest(bytes(32))])


def test_a_sick_edge_delays_a_prompt_by_a_bounded_time(monkeypatch):
    """However many objects are asked of it: what is lost is counted for all of them together."""
    budget = patience.Patience.of_prompt(stall_s=0.2, sick_s=0.5)
    with scripted(silent_after(0)) as server:
        from kvcdn.client.network.edges import EdgeGroup
        from kvcdn.client.sources.readers import StreamReader

        group = EdgeGroup([server.url], None, None)
        # That it is left alone for a while is another matter.
        monkeypatch.setattr(group.edges[0].health, "failed", lambda *_: None)
        for _ in range(10):
            reader = StreamReader(group, budget, KEY)
            with pytest.raises(UnavailableError):
                reader.read_exact(10)
            reader.close()
    assert budget.budget.sick_left() < 0.1
    # Each asks once. Of retries, which cost 0.2 s and more, all ten together have two.
    assert len(server.requests) <= 10 + 2


def test_a_reader_gets_what_has_come_where_more_does_not(patient):
    """Who waits is woken for much at once; what he asked for he gets all the same, while the rest is held back."""
    read = threading.Event()

    def answer(number, head, client):
        whole = right_answer(head, DATA)
        client.sendall(whole[: len(whole) - len(DATA) + CUT])
        assert read.wait(WAIT_SECONDS)
        client.sendall(DATA[CUT:])
        return True

    with scripted(answer) as server, contextlib.closing(patient(server.url)) as source:
        reader = source.open(KEY, ranged=False)
        assert DATA[:CUT] == b"".join(bytes(reader.read_exact(CUT // 100)) for _ in range(100))
        read.set()
        assert DATA[CUT:] == bytes(reader.read_exact(len(DATA) - CUT))
        assert reader.at_end()
        reader.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere who waits is woken for every packet")
def test_a_body_that_comes_in_crumbs_is_received_at_once(patient, monkeypatch):
    """Its reader is not woken for each of them."""
    monkeypatch.setattr(wire, "GATHER_SECONDS", WAIT_SECONDS)
    small, received = DATA[: wire.GATHER_BYTES], []
    receive = Exchange.receive
    monkeypatch.setattr(Exchange, "receive", lambda self, view: received.append(receive(self, view)) or received[-1])

    def answer(number, head, client):
        whole = right_answer(head, small)
        for start in range(0, len(whole), 1024):
            client.sendall(whole[start : start + 1024])
            time.sleep(0.002)
        return True

    with scripted(answer) as server, contextlib.closing(patient(server.url)) as source:
        reader = source.open(KEY, ranged=False)
        assert small == bytes(reader.read_exact(len(small)))
        reader.close()
    # With the head, what had come by then, and all that followed; the system may find its buffer full of crumbs before.
    assert (len(small), True) == (sum(received), len(received) < len(small) // 1024 // 4)


def test_what_a_reader_does_between_two_reads_is_no_time_lost(store):
    """A link that breaks while the reader decodes has cost nothing yet."""
    with running_web(store) as web, faulty_link(web.port) as link:
        link.inject(Fault(pass_bytes=500_000))
        session, between = edge(link.url).session(), [0.0]
        session._patience.clock = session._patience.budget.clock = lambda: time.monotonic() + between[0]
        reader = session.open(KEY, ranged=False)
        reader.read_exact(1000)
        between[0] = 1000.0
        reader.read_exact(len(DATA) - 1000)
        reader.close()
        assert 0 == link.pending
        assert session._patience.budget.sick_left() > 0


def test_a_prompt_that_is_stopped_does_not_stop_the_next_one(store):
    """Its connection serves another by then."""
    with running_web(store) as web, contextlib.closing(edge(web.url)) as source:
        first = source.session().open(KEY, ranged=False)
        loan = first._transfer._exchange.wire._loan
        first.read_exact(len(DATA))
        first.close()
        second = source.session().open(KEY, ranged=False)
        assert second._transfer._exchange.wire is loan._wire
        loan.abort()
        assert DATA == bytes(second.read_exact(len(DATA)))
        second.close()


def test_retries_are_at_most_a_share_of_the_requests():
    """Readers do not multiply the load of an edge that has too much of it."""
    with scripted(once(BUSY % (b"503 Busy", b"Retry-After: 0\r\n"))) as server:
        session = EdgeSource(server.url).session()
        for _ in range(20):
            with pytest.raises(UnavailableError):
                session.read(KEY, 100)
        assert len(server.requests) <= 20 + patience.RETRIES_ALWAYS + 20 * patience.RETRY_SHARE


# -- what one asks for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        *("", "edge", "ftp://edge", "http://", "http://user:secret@edge", "http://edge?x", "http://edge#x", "http://edge:0"),
        *("http://edge:99999", "http://edge /", "http://edge\r\nX: y", "http://[::1", "http://ed\u00fcge"),
    ],
)
def test_what_is_no_url_of_an_edge_is_refused(url):
    """Before anything is asked of anybody, and without showing a password."""
    with pytest.raises(UsageError) as caught:
        EdgeSource(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["a b", "a\r\nX: y", "", "\u00fc"])
def test_a_token_that_is_none_is_refused_and_not_shown(token):
    """It would be a header of its own."""
    with pytest.raises(UsageError) as caught:
        EdgeSource("http://edge.example", token)
    assert not token or repr(token)[1:-1] not in str(caught.value)


def test_the_token_goes_to_the_edge_and_is_shown_to_nobody(store):
    """Not in errors, not in what is printed of a source."""
    with running_web(store) as web:
        web.token = "sesame"
        for token, right in (("sesame", True), ("secret-thing", False), (None, False)):
            with contextlib.closing(edge(web.url, token=token)) as source:
                if right:
                    assert DATA == read_all(source)
                    continue
                with pytest.raises(UnavailableError) as caught:
                    read_all(source)
                assert "secret-thing" not in f"{caught.value!r} {caught.value.hint} {source!r} {vars(source)!r}"
                assert "token" in caught.value.hint


def test_asked_range_of_the_script_is_the_requests():
    """The scripted server of these tests reads ranges as HTTP means them."""
    assert (5, 10) == asked_range(b"Range: bytes=5-9\r\n", 100)
    assert (5, 100) == asked_range(b"Range: bytes=5-\r\n", 100)
    assert (0, 100) == asked_range(b"", 100)
    assert issubclass(UnavailableError, KvcdnError)


@pytest.mark.parametrize(("limit_s", "tries"), [(math.inf, 4), (0.0, 1)])
def test_a_prompt_in_a_hurry_does_not_wait_for_an_edge_that_is_down(limit_s, tries):
    """What is sooner computed is not waited for: a request that has failed is tried again at once, elsewhere, or not at all."""
    budget = patience.Budget(1.0, 20.0, time.monotonic)
    budget.failing_limit_s = limit_s
    budget.failed()
    pauses = (0.05, 0.1, 0.2, 0.4)
    assert tries == 1 + sum(budget.may_retry(pause) for pause in pauses[:3])
    assert budget.may_retry(0.0)
