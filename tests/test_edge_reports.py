"""Faults that users of other HTTP caches have reported in public, replayed: nginx, Varnish, Traffic Server, Squid, Envoy,
Souin, Tempesta, Flathub's and small servers."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvcdn.block import open_header
from kvcdn.edge.http.body import MAX_BODY_BYTES
from kvcdn.edge.serve import ServingEdge
from kvcdn.stores.http import HttpStore
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document, make_document
from support.edge_process import WatchedStore, ask, ask_part, connect, edge_in_thread, exchange, settle
from support.waiting import WAIT_SECONDS, until
from support.web import Answer, Web, running_web


@pytest.fixture(scope="module")
def document() -> Document:
    return make_document(tokens=1500)


@pytest.fixture
def web(document: Document) -> Iterator[Web]:
    store = MemoryStore()
    document.publish(store)
    with running_web(store) as running:
        yield running


@pytest.fixture
def edge(web: Web, tmp_path: Path) -> Iterator[ServingEdge]:
    with edge_in_thread(HttpStore(web.url), tmp_path / "cache") as running:
        yield running


def _bounds(document: Document, key: str) -> list[int]:
    """Where the segments of a block begin, and where the last ends."""
    header = open_header(document.blocks[key], "block")
    return [header.envelope_bytes + segment.offset for segment in header.segments] + [header.size]


def _range(first: int, last: int) -> dict[str, str]:
    return {"Range": f"bytes={first}-{last}"}


def test_varnish_3560_an_origin_that_closes_early_is_no_empty_answer(document: Document, web: Web, edge: ServingEdge) -> None:
    """A body that breaks off before its first segment's end: the length stays what it is, or there is no 200 at all."""
    key, data = next(iter(document.blocks.items()))
    cut = _bounds(document, key)[0] + 100

    def breaks(answer: Answer) -> Answer:
        length = str(len(answer.body))
        return replace(
            answer,
            headers={**answer.headers, "Content-Length": length},
            body=answer.body[: cut if answer.status == 200 else 10],
        )

    web.bend = breaks
    reply = ask_part(edge.url, f"/{key}")
    assert reply.status != 200 or int(reply.headers["Content-Length"]) == len(data) > len(reply.body)
    settle(edge.url)
    assert 0 == len(edge.cache)


def test_varnish_1618_a_range_of_what_is_not_here_yet_is_that_range(document: Document, edge: ServingEdge) -> None:
    """Each cold, and the rest of the object warm."""
    for key, data in document.blocks.items():
        reply = ask(edge.url, f"/{key}", headers=_range(1000, 5000))
        assert (206, data[1000:5001], f"bytes 1000-5000/{len(data)}") == (
            reply.status,
            reply.body,
            reply.headers["Content-Range"],
        )


def test_varnish_1918_a_body_without_a_length_is_not_an_empty_object(document: Document, web: Web, edge: ServingEdge) -> None:
    """An origin that only closes the connection at the end: nobody could tell a whole body from a broken one."""
    key = next(iter(document.blocks))
    web.bend = lambda answer: replace(answer, headers={**answer.headers, "Content-Length": "", "Connection": "close"})
    assert 504 == ask(edge.url, f"/{key}").status
    settle(edge.url)
    assert 0 == len(edge.cache)


def test_trafficserver_3991_ranges_beside_the_fill_are_whole(document: Document, tmp_path: Path) -> None:
    """Many ranges, within segments and across their ends, while the object comes piece by piece."""
    key, data = next(iter(document.blocks.items()))
    store = WatchedStore(MemoryStore())
    document.publish(store)
    bounds = _bounds(document, key)
    spans = [(max(one - 700, 0), min(one + 700, len(data) - 1)) for one in bounds] * 4
    with edge_in_thread(store, tmp_path / "cache") as edge, ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda span: ask(edge.url, f"/{key}", headers=_range(*span)), spans))
    assert [data[first : last + 1] for first, last in spans] == [reply.body for reply in replies]


def test_nginx_1065_a_range_across_two_pieces_is_all_of_it(document: Document, edge: ServingEdge) -> None:
    """From the middle of any segment to the middle of any later one, all of them cached."""
    key, data = next(iter(document.blocks.items()))
    assert data == ask(edge.url, f"/{key}").body
    bounds = _bounds(document, key)
    middles = [(first + last) // 2 for first, last in itertools.pairwise(bounds)]
    connection = connect(edge.url)
    for first, last in itertools.combinations(middles, 2):
        assert data[first : last + 1] == exchange(connection, f"/{key}", headers=_range(first, last)).body
    connection.close()


def test_trafficserver_6674_ranges_of_the_last_piece_are_its_bytes(document: Document, edge: ServingEdge) -> None:
    """Cold and warm; also its first and its last byte, and as a suffix."""
    for key, data in document.blocks.items():
        start = _bounds(document, key)[-2]
        for first in (start, start + 1, len(data) - 1):
            assert data[first:] == ask(edge.url, f"/{key}", headers={"Range": f"bytes={first}-"}).body
        suffix = {"Range": f"bytes=-{len(data) - start}"}
        assert data[start:] == ask(edge.url, f"/{key}", headers=suffix).body


@pytest.mark.parametrize(
    "header",
    ["bytes=-", "bytes=5", "bytes=--5", "bytes=9-1", "bytes=a-z", "bytes=0-1-2", "bytes= ", "bytes", "=0-1", "bytes=0-1;"],
)
def test_trafficserver_9265_an_invalid_range_of_a_cached_object_harms_nobody(
    document: Document, edge: ServingEdge, header: str
) -> None:
    """It is ignored (RFC 9110 section 14.2), and the connection goes on."""
    key, data = next(iter(document.blocks.items()))
    connection = connect(edge.url)
    for _ in range(2):
        reply = exchange(connection, f"/{key}", headers={"Range": header})
        assert (200, data) == (reply.status, reply.body)
    connection.close()


@pytest.mark.parametrize("span", ["bytes=0-10", "bytes=99999999999-"])
def test_envoy_47402_a_range_of_what_is_refused_is_that_refusal(web: Web, edge: ServingEdge, span: str) -> None:
    """404 stays 404, and 504 504: neither is cut to a part, nor called unsatisfiable."""
    missing = f"/v1/{'0' * 32}/manifests/{'1' * 64}"
    assert 404 == ask(edge.url, missing, headers={"Range": span}).status
    web.bend = lambda _: Answer(503)
    assert 504 == ask(edge.url, missing[:-1] + "2", headers={"Range": span}).status


@pytest.mark.parametrize(
    "answer",
    [
        Answer(304, {"Content-Length": "0"}),
        Answer(304, {"ETag": '"x"'}),
        Answer(200),
        Answer(204),
        Answer(206),
        Answer(226, body=b"x"),
    ],
    ids=lambda answer: str(answer.status),
)
def test_squid_5538_an_answer_without_the_object_is_never_the_object(
    document: Document, web: Web, edge: ServingEdge, answer: Answer
) -> None:
    """What an origin says to a plain GET and must not: no reader gets it as the object, and the next origin's word counts."""
    key, data = next(iter(document.blocks.items()))
    web.bend = lambda _: answer
    reply = ask(edge.url, f"/{key}")
    assert reply.status in (502, 504)
    assert "no-store" == reply.headers["Cache-Control"]
    web.bend = None
    assert data == until(lambda: body if (body := ask(edge.url, f"/{key}").body) == data else None)


def test_cpp_httplib_2265_a_range_of_a_head_request_means_nothing(document: Document, edge: ServingEdge) -> None:
    """RFC 9110 section 14.2: also one that a GET could not have."""
    key, data = next(iter(document.blocks.items()))
    for span in ("bytes=0-10", "bytes=99999999999-"):
        reply = ask(edge.url, f"/{key}", "HEAD", {"Range": span})
        assert (200, str(len(data))) == (reply.status, reply.headers["Content-Length"])


def test_squid_1903_readers_who_join_a_fill_that_fails_are_told_so(document: Document, web: Web, edge: ServingEdge) -> None:
    """None of them hangs or gets another's end: each has a refusal, or a body that visibly breaks off."""
    key, data = next(iter(document.blocks.items()))
    web.bend = lambda answer: replace(answer, body=answer.body[:-1] + b"?") if len(answer.body) > 100 else answer

    def read(_: int) -> bool:
        reply = ask_part(edge.url, f"/{key}")
        broken = reply.status == 200 and data.startswith(reply.body) and len(reply.body) < len(data)
        return broken or reply.status == 502

    with ThreadPoolExecutor(16) as pool:
        assert [True] * 16 == list(pool.map(read, range(16)))
    settle(edge.url)
    assert 0 == len(edge.cache)


@pytest.mark.parametrize("span", ["bytes=0-", "bytes=0-99999999", "bytes=-99999999"])
@pytest.mark.parametrize("warm", [False, True])
def test_varnish_4081_1323_and_trafficserver_8481_a_range_of_everything_is_a_range(
    document: Document, edge: ServingEdge, span: str, warm: bool
) -> None:
    """206 with all bytes and the right Content-Range, also where nothing is known of the object yet."""
    for key, data in document.objects.items():
        if warm:
            ask(edge.url, f"/{key}")
            settle(edge.url)
        reply = ask(edge.url, f"/{key}", headers={"Range": span})
        assert (206, data) == (reply.status, reply.body)
        assert f"bytes 0-{len(data) - 1}/{len(data)}" == reply.headers["Content-Range"]


@pytest.mark.parametrize("first", ["HEAD", "conditional", "part", "impossible part", "aborted"])
def test_tempesta_416_and_souin_467_whoever_asks_first_the_whole_object_is_kept(
    document: Document, web: Web, edge: ServingEdge, first: str
) -> None:
    """The next GET has the whole body, from the cache, and the origin is not asked again."""
    for key, data in document.objects.items():
        fields = {
            "conditional": {"If-None-Match": "*"},
            "part": {"Range": "bytes=3-9"},
            "impossible part": {"Range": "bytes=99999999-"},
        }
        if first == "aborted":
            with contextlib.closing(connect(edge.url)) as connection:
                connection.request("GET", f"/{key}")
            until(partial(edge.cache.size_of, key))
        else:
            ask(edge.url, f"/{key}", "HEAD" if first == "HEAD" else "GET", headers=fields.get(first, {}))
        settle(edge.url)
        reply = ask(edge.url, f"/{key}")
        assert (200, data, "kvcdn; hit") == (reply.status, reply.body, reply.headers["Cache-Status"])
    assert len(document.objects) == len(web.requests)


def test_varnish_4089_a_partial_answer_of_unknown_length_is_not_gone_on_with(
    document: Document, web: Web, edge: ServingEdge
) -> None:
    """`bytes 5-9/*` says nothing of the whole: what came before stays right, and nothing of it is kept."""
    key, data = next(iter(document.blocks.items()))
    cut = _bounds(document, key)[1] + 100

    def bend(answer: Answer) -> Answer:
        if answer.status == 200:
            return replace(answer, headers={**answer.headers, "Content-Length": str(len(data))}, body=answer.body[:cut])
        span = answer.headers["Content-Range"].rpartition("/")[0]
        return replace(answer, headers={**answer.headers, "Content-Range": f"{span}/*"})

    web.bend = bend
    with contextlib.closing(connect(edge.url)) as connection:
        connection.request("GET", f"/{key}")
        reply = connection.getresponse()
        with reply, pytest.raises((http.client.HTTPException, ConnectionError)):
            reply.read()
    settle(edge.url)
    assert edge.cache.size_of(key) is None
    web.bend = None
    until(lambda: data == ask(edge.url, f"/{key}").body)


def test_lwan_381_no_packet_boundary_makes_a_request_of_a_field(document: Document, edge: ServingEdge) -> None:
    """Two requests whose fields and path look like a third, cut anywhere: two answers."""
    key = document.manifest_key
    phantom = b"GET /healthz HTTP/1.1"
    field = b"X-A: " + phantom + b"\r\nX-B:" + phantom + b"\r\n"
    sent = b"GET /%s HTTP/1.1\r\nHost: edge\r\n%s\r\nGET /%s HTTP/1.1\r\nHost: edge\r\n%sConnection: close\r\n\r\n"
    sent = sent % (key.encode(), field, key.encode(), field)
    address = connect(edge.url)
    for cut in range(0, len(sent), 7):
        with socket.create_connection((address.host, address.port or 0), timeout=WAIT_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in (sent[:cut], sent[cut:]):
                connection.sendall(piece)
            received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert [b"200"] * 2 == [line.split(b" ")[0] for line in received.split(b"HTTP/1.1 ")[1:]]
        assert 2 == received.count(document.manifest_bytes)


@pytest.mark.parametrize("length", [MAX_BODY_BYTES + 1, 10**9, 10**17])
@pytest.mark.parametrize("path", [b"/v1/match", b"/v1/purge", b"/nothing"])
def test_hotaru_28_what_is_behind_a_body_that_is_too_long_is_no_request(edge: ServingEdge, length: int, path: bytes) -> None:
    """It belongs to the body, however much of that is read: one answer, and the connection ends."""
    address = connect(edge.url)
    smuggled = b"GET /readyz HTTP/1.1\r\nHost: edge\r\n\r\n"
    head = b"POST %s HTTP/1.1\r\nHost: edge\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (path, length)
    with socket.create_connection((address.host, address.port or 0), timeout=WAIT_SECONDS) as connection:
        connection.sendall(head + b" " * 5000 + smuggled)
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                received += piece
    assert 1 == received.count(b"HTTP/1.1 ")
    assert received.startswith(b"HTTP/1.1 4")


def test_flathub_10172_more_announced_than_there_is_is_no_object(document: Document, web: Web, edge: ServingEdge) -> None:
    """The whole is announced as 126,509 bytes longer than it is, ranges tell the truth: no answer breaks off half-way."""
    key, data = next(iter(document.blocks.items()))
    announced = {"Content-Length": str(len(data) + 126_509), "Connection": "close"}
    web.bend = lambda answer: replace(answer, headers={**answer.headers, **announced}) if answer.status == 200 else answer
    for headers in ({}, _range(len(data) - 10, len(data) + 126_000)):
        assert 502 == ask(edge.url, f"/{key}", headers=headers).status
    assert 0 == len(edge.cache)
    web.bend = None
    until(lambda: ask(edge.url, f"/{key}").status == 200)
    assert data == ask(edge.url, f"/{key}").body


@pytest.mark.parametrize("cut", [0.5, 1.0])
def test_squid_4735_chunks_without_an_end_are_not_kept_as_a_whole(
    document: Document, web: Web, edge: ServingEdge, cut: float
) -> None:
    """The origin's connection ends before the last chunk, in the middle of the body or behind all of it."""
    key, data = next(iter(document.blocks.items()))
    part = data[: int(len(data) * cut)]
    chunked = {"Content-Length": "", "Transfer-Encoding": "chunked", "Connection": "close"}
    web.bend = lambda _: Answer(200, chunked, b"%x\r\n%b\r\n" % (len(part), part))
    assert ask(edge.url, f"/{key}").status in (502, 504)
    assert (0, 0) == (len(edge.cache), edge.cache.used)
    web.bend = None
    until(lambda: ask(edge.url, f"/{key}").status == 200)
    assert data == ask(edge.url, f"/{key}").body


def test_trafficserver_8779_an_object_that_comes_back_empty_is_neither_the_old_one_nor_empty(
    document: Document, web: Web, tmp_path: Path
) -> None:
    """Purged here and 0 bytes long at the origin since: no 200, and the connection goes on."""
    key, data = next(iter(document.blocks.items()))
    with edge_in_thread(HttpStore(web.url), tmp_path / "cache", admin_listen="127.0.0.1:0") as edge:
        assert data == ask(edge.url, f"/{key}").body
        settle(edge.admin_url)
        purged = ask(edge.admin_url, "/v1/purge", "POST", {"Content-Type": "application/json"}, b'{"all": true}')
        assert (200, 1) == (purged.status, purged.json()["objects"])
        web.bend = lambda answer: replace(answer, body=b"") if answer.status == 200 else answer
        with contextlib.closing(connect(edge.url)) as connection:
            assert (502, 502, 200) == (
                exchange(connection, f"/{key}").status,
                exchange(connection, f"/{key}", headers=_range(0, 9)).status,
                exchange(connection, "/healthz").status,
            )
        assert (0, 0) == (len(edge.cache), edge.cache.used)
