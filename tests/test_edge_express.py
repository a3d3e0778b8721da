"""Express and front: small objects are answered as the framework would, everything else by it, on any connection."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme
from test_edge_access import KEY, bearer, secure, write_certificate

from kvcdn.access.grant import Grant, Scope
from kvcdn.edge.answers import front
from kvcdn.edge.answers.express import FIELDS, LINE_BYTES
from kvcdn.edge.http import sendfile
from kvcdn.edge.serve import ServingEdge
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document, make_document
from support.edge_process import WatchedStore, ask, edge_in_thread, metric, object_files, running_edge, settle
from support.waiting import WAIT_SECONDS, until

HOST = b"Host: edge\r\n"


@pytest.fixture(scope="module")
def edge(document: Document, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingEdge]:
    store = MemoryStore()
    document.publish(store)
    with edge_in_thread(store, tmp_path_factory.mktemp("express")) as edge:
        for key in document.objects:
            ask(edge.url, f"/{key}")
        settle(edge.url)
        yield edge


@contextlib.contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as connection:
        yield connection


def answer(connection: socket.socket, request: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Status line, fields in lower case, and body of one answer."""
    connection.sendall(request)
    file = connection.makefile("rb")
    status, fields = file.readline(), {}
    while line := file.readline().strip():
        name, _, value = line.partition(b": ")
        fields[name.lower()] = value
    return status.strip(), fields, b"" if request.startswith(b"HEAD") else file.read(int(fields.get(b"content-length", b"0")))


def get(key: str, fields: bytes = HOST, method: bytes = b"GET") -> bytes:
    return b"%s /%s HTTP/1.1\r\n%s\r\n" % (method, key.encode(), fields)


def fast(edge: ServingEdge, connection: socket.socket) -> bool:
    """Whether the connection was not handed over."""
    here = connection.getsockname()[1]
    return here in [front._transport.get_extra_info("peername")[1] for front in list(edge.front.fronts)]


WAYS = {
    "small": (False, b"GET", b""),
    "head": (False, b"HEAD", b""),
    "part": (False, b"GET", b"Range: bytes=5-99\r\n"),
    "end": (False, b"GET", b"Range: bytes=-7\r\n"),
    "several parts": (False, b"GET", b"Range: bytes=0-1,5-6\r\n"),
    "large": (True, b"GET", b""),
    "head of a large one": (True, b"HEAD", b"Range: bytes=5-9\r\n"),
    "large part": (True, b"GET", b"Range: bytes=70000-299999\r\n"),
    "small part": (True, b"GET", b"Range: bytes=70000-70099\r\n"),
}


@pytest.mark.parametrize("name", WAYS)
def test_both_ways_say_the_same(edge: ServingEdge, document: Document, name: str) -> None:
    """A field that only the framework reads changes the way and, but for date, age and id, not one byte of the answer."""
    large, method, more = WAYS[name]
    key, data = next(iter(document.blocks.items())) if large else (document.manifest_key, document.manifest_bytes)
    with connected(edge.url) as express, connected(edge.url) as framework:
        for _ in range(2):
            status, fields, body = answer(express, get(key, HOST + more, method))
            other = answer(framework, get(key, HOST + more + b"X-Other: 1\r\n", method))
            for varying in (b"date", b"x-request-id"):
                assert fields.pop(varying)
                assert other[1].pop(varying)
            # The later answer is as old, or older.
            assert int(fields.pop(b"age")) <= int(other[1].pop(b"age"))
            assert other == (status, fields, body)
            assert body in data
            assert (method == b"GET") == bool(body)
        assert [True, False] == [fast(edge, express), fast(edge, framework)]


MISSES = {
    "manifest": ("manifest", b""),
    "block": ("block", b""),
    "part of a manifest": ("manifest", b"Range: bytes=5-99\r\n"),
    "large part": ("block", b"Range: bytes=70000-299999\r\n"),
    "small part": ("block", b"Range: bytes=70000-70099\r\n"),
    "end": ("block", b"Range: bytes=-7\r\n"),
    "behind the end": ("block", b"Range: bytes=999999999-\r\n"),
    "no range": ("block", b"Range: bytes=9-5\r\n"),
    "missing": ("missing", b""),
    "damaged": ("damaged", b""),
    "another": ("another", b""),
    "damaged at its end": ("damaged later", b""),
    "damaged small part": ("damaged later", b"Range: bytes=-7\r\n"),
}


@pytest.mark.parametrize("name", MISSES)
def test_both_ways_say_the_same_of_what_is_not_here(document: Document, tmp_path: Path, name: str) -> None:
    """Two edges, each asked for the first time: but for date and id no byte of the answer, and no figure, is another."""
    which, more = MISSES[name]
    block, other = list(document.blocks)[:2]
    data = document.blocks[block]
    key = {"manifest": document.manifest_key, "missing": f"v1/{'0' * 32}/manifests/{'1' * 64}"}.get(which, block)
    blocks = {
        "damaged": data[:20] + bytes([data[20] ^ 1]) + data[21:],
        "damaged later": data[:-1] + bytes([data[-1] ^ 1]),
        "another": document.blocks[other],
    }
    store = MemoryStore()
    store.create(document.manifest_key, [document.manifest_bytes])
    store.create(block, [blocks.get(which, data)])
    said = []
    for number, fields in enumerate((more, more + b"X-Other: 1\r\n")):
        with edge_in_thread(store, tmp_path / str(number)) as edge, connected(edge.url) as connection:
            status, head, body = answer(connection, get(key, HOST + fields))
            assert all(head.pop(varying) for varying in (b"date", b"x-request-id"))
            assert which == "damaged later" or (number == 0) == fast(edge, connection)
            settle(edge.url)
            lines = ask(edge.url, "/metrics").body.decode().splitlines()
            counted = [line for line in lines if re.match(r"kvcdn_edge_(requests|origin_requests|fills)[^ ]*_total", line)]
            whole = len(body) == int(head[b"content-length"])
            said.append(
                (status, head, body if whole else b"", [line for line in counted if "object" in line or "fills" in line])
            )
    assert said[0] == said[1]
    assert said[0][3]


def held(document: Document) -> WatchedStore:
    """An origin whose streams stop within their first piece, until they may go on."""
    store = WatchedStore(MemoryStore())
    document.publish(store)
    store.go.clear()
    return store


def test_requests_behind_one_that_waits_are_answered_in_turn(document: Document, tmp_path: Path) -> None:
    """Misses and hits, large and small, sent before the first is answered, on a connection that stays."""
    store = held(document)
    keys = [*document.blocks, document.manifest_key] * 2
    with edge_in_thread(store, tmp_path / "cache") as edge, connected(edge.url) as connection:
        connection.sendall(get(keys[0]))
        assert store.streaming.wait(WAIT_SECONDS)
        for key in keys[1:]:
            connection.sendall(get(key))
        store.go.set()
        file = connection.makefile("rb")
        for key in keys:
            assert file.readline() == b"HTTP/1.1 200 OK\r\n"
            fields = dict(line.split(b": ", 1) for line in iter(file.readline, b"\r\n"))
            assert document.objects[key] == file.read(int(fields[b"Content-Length"]))
        settle(edge.url)


def test_who_leaves_while_the_object_comes_harms_nobody(document: Document, tmp_path: Path) -> None:
    """The fill goes on: who has joined it, and who comes later, has the object, which was asked for once."""
    store = held(document)
    key, data = next(iter(document.blocks.items()))
    with edge_in_thread(store, tmp_path / "cache") as edge:
        with connected(edge.url) as leaving, connected(edge.url) as following:
            leaving.sendall(get(key))
            assert store.streaming.wait(WAIT_SECONDS)
            following.sendall(get(key))
            leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaving.close()
            store.go.set()
            file = following.makefile("rb")
            fields = dict(line.split(b": ", 1) for line in iter(file.readline, b"\r\n") if b": " in line)
            assert (b"kvcdn; fwd=miss; collapsed\r\n", data) == (fields[b"Cache-Status"], file.read(len(data)))
        settle(edge.url)
        assert data == ask(edge.url, f"/{key}").body
        assert [key] == store.streams


def test_who_waits_for_an_object_has_it_from_an_edge_that_is_to_end(document: Document, tmp_path: Path) -> None:
    """As with every answer that was begun."""
    store = held(document)
    key = document.manifest_key
    with ThreadPoolExecutor() as pool:
        with edge_in_thread(store, tmp_path / "cache") as edge:
            waiting = pool.submit(lambda: ask(edge.url, f"/{key}"))
            assert store.streaming.wait(WAIT_SECONDS)
            until(lambda: any(front.task for front in list(edge.front.fronts)))
            threading.Timer(0.2, store.go.set).start()
        assert document.manifest_bytes == waiting.result().body


def test_a_large_answer_comes_before_the_next(edge: ServingEdge, document: Document) -> None:
    """Requests sent while a body is sent wait for its end; all come whole, in order, on a connection that stays."""
    key, data = next(iter(document.blocks.items()))
    with connected(edge.url) as connection:
        for _ in range(3):
            connection.sendall(get(key))
            time.sleep(0.01)
            connection.sendall(get(document.manifest_key))
            file = connection.makefile("rb")
            for expected in (data, document.manifest_bytes):
                while file.readline().strip():
                    pass
                assert expected == file.read(len(expected))
        assert fast(edge, connection)


def test_what_is_being_sent_is_finished_at_the_end(document: Document, tmp_path: Path) -> None:
    """An edge that is told to stop sends on, and ends then; a reader who takes nothing is broken off after the time given."""
    large = make_document(tokens=2000, layers=2, heads=8, dim=128)
    large.publish(FolderStore(tmp_path / "origin"))
    key, data = next(iter(large.blocks.items()))
    for reads, seconds in ((True, 100), (False, 0.5)):
        with running_edge(str(tmp_path / "origin"), tmp_path / "cache", shutdown_seconds=seconds) as edge:
            ask(edge.url, f"/{key}")
            settle(edge.url)
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.settimeout(WAIT_SECONDS)
                connection.connect(("127.0.0.1", edge.port))
                connection.sendall(get(key))
                got = bytearray(connection.recv(1000))
                edge.process.send_signal(signal.SIGTERM)
                assert reads or 0 == edge.process.wait(WAIT_SECONDS)
                while piece := connection.recv(1 << 16):
                    got += piece
                assert 0 == edge.process.wait(WAIT_SECONDS)
                body = got.partition(b"\r\n\r\n")[2]
                assert body == data[: len(body)]
                assert reads == (len(body) == len(data))


OTHERWISE = {
    "range beyond": (HOST + b"Range: bytes=99999999-\r\n", 416),
    "guarded range": (HOST + b"Range: bytes=1-5\r\nIf-Range: x\r\n", 200),
    "condition": (HOST + b"If-None-Match: *\r\n", 304),
    "close": (HOST + b"Connection: close\r\n", 200),
    "body": (HOST + b"Content-Length: 2\r\n", 200),
    "space before the colon": (b"Host : edge\r\n", 400),
    "folded": (HOST + b"Accept: a\r\n b\r\n", 400),
    "null": (HOST + b"Accept: a\x00b\r\n", 400),
    "bare line feed": (HOST + b"Accept: a\nAccept-Encoding: b\r\n", 400),
    "many": (HOST + b"".join(b"X-Forwarded-%c: 1\r\n" % (97 + n) for n in range(FIELDS)), 200),
    "long": (HOST + b"Accept: " + b"a" * LINE_BYTES + b"\r\n", 200),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_not_plain_is_the_frameworks(edge: ServingEdge, document: Document, name: str) -> None:
    """Ranges, conditions, bodies, and heads that a parser refuses or counts, after a plain request on the same connection."""
    fields, status = OTHERWISE[name]
    with connected(edge.url) as connection:
        assert b"200" in answer(connection, get(document.manifest_key))[0]
        assert fast(edge, connection)
        request = get(document.manifest_key, fields) + (b"xy" if name == "body" else b"")
        assert b"%d" % status in answer(connection, request)[0]
        assert not fast(edge, connection)


@pytest.mark.parametrize("line", ["GET /%s?x=1", "GET //%s", "GET http://edge/%s", "GET /%s/", "POST /%s", "get /%s"])
def test_other_lines_are_the_frameworks(edge: ServingEdge, document: Document, line: str) -> None:
    """Nothing but the one text form of an object's path is express."""
    with connected(edge.url) as connection:
        request = (line % document.manifest_key).encode() + b" HTTP/1.1\r\n" + HOST + b"\r\n"
        status = answer(connection, request)[0]
        assert b"200" not in status or b"http://" in request or b"?" in request
        assert not fast(edge, connection)


def test_a_request_is_on_its_trail(document: Document, tmp_path: Path) -> None:
    """The id that it brings comes back and stands in the log; without one there is a new one each time, and no other's."""
    document.publish(FolderStore(tmp_path / "origin"))
    with running_edge(str(tmp_path / "origin"), tmp_path / "cache") as edge:
        ask(edge.url, f"/{document.manifest_key}")
        settle(edge.url)
        with connected(edge.url) as connection:
            named = answer(connection, get(document.manifest_key, HOST + b"X-Request-Id: mine\r\n"))[1]
            others = [answer(connection, get(document.manifest_key))[1][b"x-request-id"] for _ in range(2)]
            assert b"mine" == named[b"x-request-id"]
            assert 3 == len({b"mine", *others})
        # An answer is logged behind its last byte, and written by a thread.
        deadline, found = time.monotonic() + 60, []
        while len(found) < 3:
            assert time.monotonic() < deadline, edge.log()
            lines = [json.loads(line) for line in edge.log().splitlines() if line.startswith("{") and line.endswith("}")]
            found = [line["request_id"] for line in lines if line["event"] == "request" and line["cache"] == "hit"]
        assert ["mine", *(other.decode() for other in others)] == found


def test_a_request_in_pieces_and_two_at_once(edge: ServingEdge, document: Document) -> None:
    """Split anywhere, or pipelined: each is answered once, in order."""
    request = get(document.manifest_key)
    for cut in (1, 4, 20, len(request) - 2):
        with connected(edge.url) as connection:
            connection.sendall(request[:cut])
            time.sleep(0.02)
            assert document.manifest_bytes == answer(connection, request[cut:])[2]
    with connected(edge.url) as connection:
        connection.sendall(request * 3)
        everything = b""
        while everything.count(document.manifest_bytes) < 3:
            piece = connection.recv(1 << 16)
            assert piece
            everything += piece
        assert 3 == everything.count(b"HTTP/1.1 200 OK")


def test_a_connection_changes_hands_and_goes_on(edge: ServingEdge, document: Document) -> None:
    """Small, large, small, missing: all on one."""
    (key, data), missing = next(iter(document.blocks.items())), f"v1/{'0' * 32}/manifests/{'0' * 64}"
    assert len(data) > 64 * 1024
    with connected(edge.url) as connection:
        assert document.manifest_bytes == answer(connection, get(document.manifest_key))[2]
        assert data == answer(connection, get(key))[2]
        assert document.manifest_bytes == answer(connection, get(document.manifest_key))[2]
        assert b"404" in answer(connection, get(missing))[0]


def test_requests_are_counted_and_logged(document: Document, tmp_path: Path) -> None:
    """As every other: by route, status, outcome and tenant, a line each."""
    document.publish(FolderStore(tmp_path / "origin"))
    with running_edge(str(tmp_path / "origin"), tmp_path / "cache") as edge:
        ask(edge.url, f"/{document.manifest_key}")
        settle(edge.url)
        with connected(edge.url) as connection:
            for _ in range(3):
                answer(connection, get(document.manifest_key))
        assert 3 == metric(edge.url, 'kvcdn_edge_requests_total{cache="hit",route="object",status="200"}')
        assert 4 * len(document.manifest_bytes) == metric(edge.url, 'kvcdn_edge_response_body_bytes_total{route="object"}')
        assert 3 == edge.log().count('"cache":"hit"')


def test_tokens_and_limits_are_heeded(document: Document, tmp_path: Path) -> None:
    """401, 404 of another model, 429, and 200 for whom the token is."""
    issuers = tmp_path / "issuers"
    issuers.write_text(f"{KEY.public.text}\n", encoding="utf-8")
    store = MemoryStore()
    document.publish(store)
    reads = frozenset((Scope.READ,))
    tenants = {"slow": {"requests_per_second": 1}}
    with edge_in_thread(store, tmp_path / "cache", issuers_file=issuers, tenants=tenants) as edge:

        def read(grant: Grant | None) -> bytes:
            fields = HOST if grant is None else HOST + b"Authorization: %s\r\n" % bearer(grant)["Authorization"].encode()
            with connected(edge.url) as connection:
                return answer(connection, get(document.manifest_key, fields))[0].split()[1]

        reader = Grant("reader", reads, models=(str(document.model.tag),))
        assert b"200" == read(reader)
        until(lambda: len(edge.cache))
        assert [b"200"] * 3 == [read(reader) for _ in range(3)]
        assert [b"401", b"404", b"403"] == [
            read(grant) for grant in (None, Grant("other", reads, models=("x",)), Grant("none", frozenset((Scope.STATS,))))
        ]
        assert b"429" in [read(Grant("slow", reads)) for _ in range(4)]


def test_what_vanished_or_rotted_is_filled_again(document: Document, tmp_path: Path) -> None:
    """A file that is gone, or shorter, is no hit; the reader gets the object all the same."""
    store = MemoryStore()
    document.publish(store)
    with edge_in_thread(store, tmp_path / "cache", scrub_bytes_per_second=0) as edge:
        for harm in (os.unlink, lambda path: os.truncate(path, 100)):
            assert document.manifest_bytes == ask(edge.url, f"/{document.manifest_key}").body
            settle(edge.url)
            (file,) = object_files(tmp_path / "cache")
            harm(file)
            with connected(edge.url) as connection:
                assert document.manifest_bytes == answer(connection, get(document.manifest_key))[2]
            settle(edge.url)


def test_idle_and_greedy_clients_are_let_go(document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends nothing, from the start or after an answer, and who takes no answer, is cut off in time."""
    monkeypatch.setattr(front, "SWEEP_SECONDS", 0.05)
    monkeypatch.setattr(front, "STALL_SECONDS", 0.5)
    store = MemoryStore()
    document.publish(store)
    with edge_in_thread(store, tmp_path / "cache") as edge:
        ask(edge.url, f"/{document.manifest_key}")
        settle(edge.url)
        with connected(edge.url) as silent, connected(edge.url) as once, connected(edge.url) as greedy:
            answer(once, get(document.manifest_key))
            greedy.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                for _ in range(20_000):
                    greedy.send(get(document.manifest_key))
                    time.sleep(0.0001)
            edge.front._idle_seconds = 0.3  # by now each has asked what it asks
            assert [b"", b""] == [silent.recv(10), once.recv(10)]
            until(lambda: not edge.front.fronts)
    assert sendfile.STALL_SECONDS == 60


def test_an_edge_with_idle_connections_stops_at_once(document: Document, tmp_path: Path) -> None:
    """They are closed, and nobody waits for them."""
    document.publish(FolderStore(tmp_path / "origin"))
    with running_edge(str(tmp_path / "origin"), tmp_path / "cache", shutdown_seconds=300, keepalive_seconds=600) as edge:
        ask(edge.url, f"/{document.manifest_key}")
        settle(edge.url)
        with connected(edge.url) as idle, connected(edge.url) as fresh:
            answer(idle, get(document.manifest_key))
            edge.process.send_signal(signal.SIGTERM)
            assert 0 == edge.process.wait(WAIT_SECONDS)
            assert [b"", b""] == [idle.recv(1), fresh.recv(1)]


def test_encrypted_connections_begin_here_too(document: Document, tmp_path: Path) -> None:
    """Small and large objects, ranges, and small again, on one connection that changes hands."""
    authority = trustme.CA()
    document.publish(FolderStore(tmp_path / "origin"))
    key, data = next(iter(document.blocks.items()))
    tls = write_certificate(authority, tmp_path / "tls")
    with (
        running_edge(str(tmp_path / "origin"), tmp_path / "cache", **tls) as edge,
        contextlib.closing(secure(edge.url, authority)) as connection,
    ):
        for path, expected in ((document.manifest_key, document.manifest_bytes), (key, data)) * 2:
            connection.request("GET", f"/{path}")
            assert expected == connection.getresponse().read()


def test_who_keeps_accounts_looks_at_parts_in_full(document: Document, tmp_path: Path) -> None:
    """With a ledger whole objects are express, and counted; which part of a block begins it is the framework's to see."""
    store = MemoryStore()
    document.publish(store)
    with edge_in_thread(store, tmp_path / "cache", usage_file=tmp_path / "usage") as edge:
        ask(edge.url, f"/{document.manifest_key}")
        settle(edge.url)
        with connected(edge.url) as connection:
            assert document.manifest_bytes == answer(connection, get(document.manifest_key))[2]
            assert fast(edge, connection)
            part = answer(connection, get(document.manifest_key, HOST + b"Range: bytes=0-9\r\n"))
            assert document.manifest_bytes[:10] == part[2]
            assert not fast(edge, connection)
