"""Match: how many blocks lead a chain, asked of the cache first, and bodies that are hostile."""

from __future__ import annotations

import gzip
import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcdn.edge.http.body import MAX_BODY_BYTES
from kvcdn.edge.reads.match import MAX_ADDRESSES, MatchRequest
from kvcdn.edge.reads.presence import ABSENT_SECONDS
from kvcdn.edge.serve import ServingEdge
from kvcdn.errors import CorruptError
from kvcdn.store import BlobInfo
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document, make_document
from support.edge_process import (
    Reply,
    WatchedStore,
    ask,
    ask_match,
    connect,
    edge_in_thread,
    exchange,
    origin_gets,
    origin_stats,
    running_edge,
    settle,
)
from support.waiting import WAIT_SECONDS

TAG = "0f" * 16


@pytest.fixture(scope="module")
def document() -> Document:
    return make_document(tokens=4000, layers=1, heads=1, dim=8)


def _address(number: int) -> str:
    return f"{number:064x}"


def _key(number: int) -> str:
    address = _address(number)
    return f"v1/{TAG}/blocks/{address[:2]}/{address}"


class CountedStats(WatchedStore):
    """A store whose blocks 0 to n - 1 of a made-up chain exist, with sizes that follow from their number."""

    def __init__(self, existing: int, holes: frozenset[int] = frozenset()) -> None:
        super().__init__(MemoryStore())
        self._sizes = {_key(number): 1000 + number for number in range(existing) if number not in holes}

    def stat(self, key: str) -> BlobInfo | None:
        self.stats.append(key)
        self._refuse_if_down(key)
        size = self._sizes.get(key)
        return None if size is None else BlobInfo(key, size, 0.0)


def _matched(reply: Reply) -> tuple[int, list[int]]:
    assert 200 == reply.status, reply.body
    answer = reply.json()
    assert {"matched", "sizes"} == set(answer)
    return answer["matched"], answer["sizes"]


def test_sizes_are_those_of_the_objects(document: Document, tmp_path: Path) -> None:
    """The sizes of the blocks that lead, cached or not, on a real edge process."""
    document.publish(FolderStore(tmp_path / "origin"))
    sizes = [len(data) for data in document.blocks.values()]
    with running_edge(str(tmp_path / "origin"), tmp_path / "cache") as edge:
        for _ in range(2):
            reply = ask_match(edge.url, document.model.tag, document.addresses)
            assert (len(sizes), sizes) == _matched(reply)
            assert ("application/json", "no-store") == (reply.headers["Content-Type"], reply.headers["Cache-Control"])
            for key in document.blocks:
                ask(edge.url, f"/{key}")
        longer = [*document.addresses, "00" * 32, "11" * 32]
        assert (len(sizes), sizes) == _matched(ask_match(edge.url, document.model.tag, longer))
        assert (0, []) == _matched(ask_match(edge.url, document.model.tag, []))
        assert (0, []) == _matched(ask_match(edge.url, "00" * 16, document.addresses))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(existing=st.integers(0, 70), asked=st.integers(0, 90))
def test_any_chain_is_matched_to_its_end(tmp_path_factory: pytest.TempPathFactory, existing: int, asked: int) -> None:
    """However many blocks exist and are asked for, the answer is the smaller number, and their sizes."""
    store = CountedStats(existing)
    with edge_in_thread(store, tmp_path_factory.mktemp("match") / "cache") as edge:
        expected = [1000 + number for number in range(min(existing, asked))]
        assert (len(expected), expected) == _matched(ask_match(edge.url, TAG, [_address(n) for n in range(asked)]))
        assert len(store.stats) == len(set(store.stats)) <= len(expected) + 24


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(holes=st.frozensets(st.integers(0, 29), min_size=1, max_size=29))
def test_a_chain_with_holes_is_matched_to_a_hole(tmp_path_factory: pytest.TempPathFactory, holes: frozenset[int]) -> None:
    """Where objects were deleted, what is answered does exist from the first on, and ends before a hole."""
    store = CountedStats(30, holes)
    with edge_in_thread(store, tmp_path_factory.mktemp("match") / "cache") as edge:
        matched, sizes = _matched(ask_match(edge.url, TAG, [_address(n) for n in range(30)]))
        assert [1000 + number for number in range(matched)] == sizes
        assert matched in holes
        assert holes.isdisjoint(range(matched))


def test_an_unpublished_chain_costs_the_origin_little(tmp_path: Path, memory_clock: list[float]) -> None:
    """4,096 addresses that do not exist are one round of questions, then none for two seconds."""
    store = CountedStats(0)
    addresses = [_address(number) for number in range(MAX_ADDRESSES)]
    with edge_in_thread(store, tmp_path / "cache") as edge:
        for _ in range(3):
            assert (0, []) == _matched(ask_match(edge.url, TAG, addresses))
        assert len(store.stats) <= 8


def test_a_chain_that_is_no_chain_is_given_up_early(tmp_path: Path) -> None:
    """An existing last block after thousands that do not exist does not cost thousands of questions."""
    store = CountedStats(MAX_ADDRESSES, frozenset(range(MAX_ADDRESSES - 1)))
    with edge_in_thread(store, tmp_path / "cache") as edge:
        assert (0, []) == _matched(ask_match(edge.url, TAG, [_address(n) for n in range(MAX_ADDRESSES)]))
        assert len(store.stats) <= 60


def test_a_warm_match_asks_nobody(tmp_path: Path) -> None:
    """A cold chain is looked up once however many ask together; then the sizes are remembered."""
    store = CountedStats(200)
    addresses = [_address(number) for number in range(200)]
    with edge_in_thread(store, tmp_path / "cache") as edge, ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: _matched(ask_match(edge.url, TAG, addresses)), range(8)))
        assert [(200, [1000 + number for number in range(200)])] * 8 == replies
        assert 200 == len(store.stats)
        ask_match(edge.url, TAG, addresses)
        assert 200 == len(store.stats)


def test_a_cached_chain_is_answered_at_once_without_the_origin(document: Document, tmp_path: Path) -> None:
    """With all blocks cached, a match makes no origin request even while the origin is down."""
    document.publish(FolderStore(tmp_path / "origin"))
    with running_edge(str(tmp_path / "origin"), tmp_path / "cache") as edge:
        for key in document.blocks:
            ask(edge.url, f"/{key}")
        settle(edge.url)
        before = origin_gets(edge.url), origin_stats(edge.url)
        (tmp_path / "origin").rename(tmp_path / "gone")
        body = json.dumps({"addresses": document.addresses, "model": str(document.model.tag)}).encode()
        connection = connect(edge.url)
        for _ in range(50):
            assert len(document.addresses) == exchange(connection, "/v1/match", "POST", body=body).json()["matched"]
        connection.close()
        assert before == (origin_gets(edge.url), origin_stats(edge.url))


def test_what_is_missing_is_found_once_published(document: Document, tmp_path: Path, memory_clock: list[float]) -> None:
    """A negative answer is remembered for a while, no longer."""
    store = WatchedStore(MemoryStore())
    with edge_in_thread(store, tmp_path / "cache") as edge:
        assert 0 == _matched(ask_match(edge.url, document.model.tag, document.addresses))[0]
        document.publish(store)
        assert 0 == _matched(ask_match(edge.url, document.model.tag, document.addresses))[0]
        memory_clock[0] = ABSENT_SECONDS
        assert len(document.addresses) == _matched(ask_match(edge.url, document.model.tag, document.addresses))[0]


def test_with_the_origin_down_what_is_here_is_answered(document: Document, tmp_path: Path) -> None:
    """The blocks that lead and are cached, with a note in Cache-Status; with none of them here, 504."""
    store = WatchedStore(MemoryStore())
    document.publish(store)
    keys, sizes = list(document.blocks), [len(data) for data in document.blocks.values()]
    with edge_in_thread(store, tmp_path / "cache") as edge:
        for key in keys[:2]:
            ask(edge.url, f"/{key}")
        settle(edge.url)
        store.down = True
        reply = ask_match(edge.url, document.model.tag, document.addresses)
        assert (2, sizes[:2]) == _matched(reply)
        assert "origin-unavailable" in reply.headers["Cache-Status"]
        reply = ask_match(edge.url, document.model.tag, document.addresses[2:])
        assert (504, "kvcdn; fwd=miss; detail=origin-unavailable") == (reply.status, reply.headers["Cache-Status"])
        assert "1" == reply.headers["Retry-After"]


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingEdge]:
    with edge_in_thread(CountedStats(5), tmp_path_factory.mktemp("idle") / "cache") as edge:
        yield edge


GOOD = _address(0)

BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe{}",
    json.dumps({"addresses": [GOOD]}).encode(),
    json.dumps({"model": TAG}).encode(),
    json.dumps({"addresses": [GOOD], "model": TAG, "more": 1}).encode(),
    json.dumps({"addresses": GOOD, "model": TAG}).encode(),
    json.dumps({"addresses": [GOOD.upper().replace("0", "A")], "model": TAG}).encode(),
    json.dumps({"addresses": [GOOD[1:]], "model": TAG}).encode(),
    json.dumps({"addresses": [GOOD[2:] + "\n0"], "model": TAG}).encode(),
    json.dumps({"addresses": ["\u0660" * 64], "model": TAG}).encode(),
    json.dumps({"addresses": [[GOOD]], "model": TAG}).encode(),
    json.dumps({"addresses": [None], "model": TAG}).encode(),
    json.dumps({"addresses": [5], "model": TAG}).encode(),
    json.dumps({"addresses": [GOOD], "model": TAG + "0"}).encode(),
    json.dumps({"addresses": [GOOD], "model": "../" * 10 + "aa"}).encode(),
    json.dumps({"addresses": [GOOD], "model": 5}).encode(),
    f'{{"addresses":["{GOOD}"],"model":"{TAG}","model":"{TAG}"}}'.encode(),
    json.dumps({"addresses": ["0" * 64] * (MAX_ADDRESSES + 1), "model": TAG}).encode(),
    b"[" * 100_000,
    b'{"addresses":' + b"[" * 100_000,
    b'{"addresses":' + b"9" * 10_000 + b"}",
    gzip.compress(json.dumps({"addresses": [GOOD], "model": TAG}).encode(), mtime=0),
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_bodies_that_are_no_match_are_refused(idle: ServingEdge, body: bytes) -> None:
    """400 with a reason in one line, whatever came; compressed or not."""
    headers = {"Content-Encoding": "gzip"} if body.startswith(b"\x1f\x8b") else {}
    reply = ask(idle.url, "/v1/match", "POST", headers, body)
    assert (400, "no-store", 1) == (reply.status, reply.headers["Cache-Control"], reply.body.count(b"\n"))


def test_the_longest_chain_fits(idle: ServingEdge) -> None:
    """4,096 addresses with generous white space stay under the limit."""
    body = json.dumps({"addresses": [_address(n) for n in range(MAX_ADDRESSES)], "model": TAG}, indent=1).encode()
    assert len(body) < MAX_BODY_BYTES
    assert 5 == ask(idle.url, "/v1/match", "POST", body=body).json()["matched"]


def test_an_oversized_body_is_refused_unread(idle: ServingEdge) -> None:
    """By its announced length at once; in chunks as soon as it exceeds the limit."""
    host, port = idle.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as sock:
        sock.sendall(b"POST /v1/match HTTP/1.1\r\nHost: edge\r\nContent-Length: 999999999999\r\n\r\n")
        assert b" 413 " in sock.recv(1000)
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as sock:
        sock.sendall(b"POST /v1/match HTTP/1.1\r\nHost: edge\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(6):
            sock.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert b" 413 " in sock.recv(1000)


def test_expect_100_continue_is_honoured(idle: ServingEdge) -> None:
    """A client that waits for permission gets it, then its answer."""
    host, port = idle.url.removeprefix("http://").split(":")
    body = json.dumps({"addresses": [GOOD], "model": TAG}).encode()
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as sock:
        sock.sendall(
            f"POST /v1/match HTTP/1.1\r\nHost: edge\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        assert sock.recv(1000).startswith(b"HTTP/1.1 100 ")
        sock.sendall(body)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")


@given(
    st.one_of(
        st.binary(max_size=300), st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps).map(str.encode)
    )
)
def test_parsing_ends_in_a_request_or_one_error(body: bytes) -> None:
    """Any bytes: a MatchRequest or CorruptError, nothing else."""
    try:
        request = MatchRequest.parse(body)
    except CorruptError:
        return
    assert all(key.startswith("v1/") for key in request.keys)


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=20))
def test_keys_are_those_of_the_format(addresses: list[bytes]) -> None:
    """Parsing builds the object keys of FORMAT.md 2.6."""
    from kvcdn.digest import Digest, ModelTag
    from kvcdn.keys import block_key

    body = json.dumps({"addresses": [address.hex() for address in addresses], "model": TAG}).encode()
    expected = tuple(block_key(ModelTag.parse(TAG, "tag"), Digest(address)) for address in addresses)
    assert expected == MatchRequest.parse(body).keys


def test_probing_order_does_not_matter(tmp_path: Path) -> None:
    """Chains that share a beginning are matched right whatever was asked before."""
    store = CountedStats(60)
    rng = random.Random(1)
    with edge_in_thread(store, tmp_path / "cache") as edge:
        for _ in range(20):
            asked = rng.randrange(1, 90)
            assert min(asked, 60) == _matched(ask_match(edge.url, TAG, [_address(n) for n in range(asked)]))[0]
