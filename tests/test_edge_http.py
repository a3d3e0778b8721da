"""The edge's HTTP, on a real process: ranges, conditions, HEAD, keep-alive, pipelining, and clients that misbehave."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcdn.block import open_header
from kvcdn.digest import hash_bytes
from kvcdn.edge.launch import RunningEdge
from kvcdn.stores.folder import FolderStore
from support.blocks import Document, make_document
from support.edge_process import Reply, ask, connect, exchange, metric, running_edge, settle
from support.waiting import WAIT_SECONDS, until

KEEPALIVE_SECONDS = 1.0

IMMUTABLE = "public, max-age=31536000, immutable"

VARYING_HEADERS = {"Date", "Age", "X-Request-Id"}


@pytest.fixture(scope="module")
def document() -> Document:
    return make_document(tokens=1500)


@pytest.fixture(scope="module")
def edge(document: Document, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEdge]:
    folder = tmp_path_factory.mktemp("edge")
    document.publish(FolderStore(folder / "origin"))
    with running_edge(str(folder / "origin"), folder / "cache") as running:
        for key in document.objects:
            ask(running.url, f"/{key}")
        settle(running.url)
        yield running


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEdge]:
    """An edge that soon cuts connections on which nothing comes."""
    folder = tmp_path_factory.mktemp("impatient")
    with running_edge(str(folder), folder / "cache", keepalive_seconds=KEEPALIVE_SECONDS) as running:
        yield running


@pytest.fixture(scope="module")
def block(document: Document) -> tuple[str, bytes]:
    """A block's path, and its bytes: half a megabyte, which travels by sendfile."""
    key, data = next(iter(document.blocks.items()))
    return "/" + key, data


def _headers(reply: Reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name not in VARYING_HEADERS}


def _read_until(sock: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = sock.recv(1 << 16)
        if not piece:
            break
        received += piece
    return bytes(received)


def test_every_object_is_served_as_published(edge: RunningEdge, document: Document) -> None:
    """Whole objects come byte for byte, first filled, then from the cache."""
    with contextlib.closing(connect(edge.url)) as connection:
        for _ in range(2):
            for key, data in document.objects.items():
                reply = exchange(connection, "/" + key)
                assert (200, data) == (reply.status, reply.body)


def test_headers_make_an_object_immutable_and_name_its_bytes(edge: RunningEdge, block: tuple[str, bytes]) -> None:
    """Strong ETag from the envelope, a year of freshness, ranges, an age, and where the answer came from."""
    path, data = block
    ask(edge.url, path)
    settle(edge.url)
    reply = ask(edge.url, path)
    assert f'"{open_header(data, "block").etag}"' == reply.headers["ETag"]
    assert (IMMUTABLE, "bytes", "kvcdn; hit", str(len(data))) == (
        reply.headers["Cache-Control"],
        reply.headers["Accept-Ranges"],
        reply.headers["Cache-Status"],
        reply.headers["Content-Length"],
    )
    assert 0 <= int(reply.headers["Age"]) < 300


def test_a_manifest_has_the_tag_of_its_bytes(edge: RunningEdge, document: Document) -> None:
    """A manifest is its envelope (FORMAT.md section 3)."""
    reply = ask(edge.url, "/" + document.manifest_key)
    assert f'"{hash_bytes(document.manifest_bytes)}"' == reply.headers["ETag"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ranges_are_python_slices(edge: RunningEdge, block: tuple[str, bytes], data: st.DataObject) -> None:
    """Any single range is answered like a slice of the object, small parts and sendfile alike."""
    path, body = block
    size = len(body)
    first = data.draw(st.integers(0, size + 10))
    length = data.draw(st.one_of(st.integers(1, 2000), st.integers(1, size + 10)))
    form = data.draw(st.sampled_from(["closed", "open", "suffix"]))
    header, expected = {
        "closed": (f"bytes={first}-{first + length - 1}", body[first : first + length]),
        "open": (f"bytes={first}-", body[first:]),
        "suffix": (f"bytes=-{length}", body[-length:]),
    }[form]
    reply = ask(edge.url, path, headers={"Range": header})
    if not expected:
        assert (416, f"bytes */{size}") == (reply.status, reply.headers["Content-Range"])
        return
    start = size - len(expected) if form == "suffix" else first
    assert (206, expected) == (reply.status, reply.body)
    assert f"bytes {start}-{start + len(expected) - 1}/{size}" == reply.headers["Content-Range"]
    assert (str(len(expected)), IMMUTABLE) == (reply.headers["Content-Length"], reply.headers["Cache-Control"])


@pytest.mark.parametrize("header", ["bytes=0-1,5-6", "lines=1-2", "bytes=9-1", "bytes=x"])
def test_a_range_that_may_be_ignored_gets_the_whole_object(edge: RunningEdge, block: tuple[str, bytes], header: str) -> None:
    """Multiple, unknown and malformed ranges: 200, not an error (14.2)."""
    reply = ask(edge.url, block[0], headers={"Range": header})
    assert (200, block[1], None) == (reply.status, reply.body, reply.headers["Content-Range"])


def test_an_unsatisfiable_range_is_not_cacheable(edge: RunningEdge, block: tuple[str, bytes]) -> None:
    """416 says how large the object is and is kept by nobody."""
    reply = ask(edge.url, block[0], headers={"Range": f"bytes={len(block[1])}-"})
    assert (416, "no-store") == (reply.status, reply.headers["Cache-Control"])


def test_conditions_are_judged_before_ranges(edge: RunningEdge, block: tuple[str, bytes]) -> None:
    """304 and 412 come first, and carry no part of the object."""
    tag = ask(edge.url, block[0], "HEAD").headers["ETag"]
    unchanged = ask(edge.url, block[0], headers={"If-None-Match": tag, "Range": "bytes=0-9"})
    assert (304, b"", tag, IMMUTABLE) == (
        unchanged.status,
        unchanged.body,
        unchanged.headers["ETag"],
        unchanged.headers["Cache-Control"],
    )
    failed = ask(edge.url, block[0], headers={"If-Match": '"x"', "Range": "bytes=0-9"})
    assert (412, "no-store") == (failed.status, failed.headers["Cache-Control"])
    met = ask(edge.url, block[0], headers={"If-Match": tag, "If-None-Match": '"x"', "Range": "bytes=0-9"})
    assert (206, block[1][:10]) == (met.status, met.body)


def test_if_range_guards_a_range(edge: RunningEdge, block: tuple[str, bytes]) -> None:
    """The part only for our own tag; for any other, or a date, the whole."""
    tag = ask(edge.url, block[0], "HEAD").headers["ETag"]
    results = [
        ask(edge.url, block[0], headers={"Range": "bytes=0-9", "If-Range": value}).status
        for value in (tag, f"W/{tag}", '"x"', "Wed, 21 Oct 2065 07:28:00 GMT")
    ]
    assert [206, 200, 200, 200] == results


@pytest.mark.parametrize(
    "headers", [{}, {"Range": "bytes=5-9"}, {"If-None-Match": "*"}, {"If-Match": '"x"'}, {"Range": "bytes=99999999-"}]
)
def test_head_has_the_headers_of_get(edge: RunningEdge, document: Document, headers: dict[str, str]) -> None:
    """HEAD is GET without the body; Range means nothing for it (14.2), so it is compared with a GET without one."""
    for key in (*document.objects, "v1/" + "0" * 32 + "/manifests/" + "0" * 64, "nothing"):
        ask(edge.url, "/" + key)
        without_range = {name: value for name, value in headers.items() if name != "Range"}
        head, get = ask(edge.url, "/" + key, "HEAD", headers), ask(edge.url, "/" + key, headers=without_range)
        said = _headers(get), _headers(head)
        if get.status == 404:  # that something is missing is remembered for two seconds, of which the second may see the end
            assert all(headers.pop("Cache-Status", "none") for headers in said)
        assert (get.status, said[0], b"") == (head.status, said[1], head.body)


ZEROS = "0" * 64


@pytest.mark.parametrize(
    "path",
    [
        "//",
        "/v1",
        f"/v1/{'0' * 32}/blocks/00/{'0' * 63}",
        f"/v1/{'0' * 32}/blocks/01/{ZEROS}",
        f"/v1/{'0' * 31}/blocks/00/{ZEROS}",
        f"/v1/{'A' * 32}/blocks/00/{ZEROS}",
        f"/v1/{'0' * 32}/blocks/{ZEROS}",
        f"/v1/{'0' * 32}/manifests/00/{ZEROS}",
        f"/v1/{'0' * 32}/manifests/{ZEROS}?x=1",
        f"/v1/{'0' * 32}/manifests/{ZEROS}/",
        f"/v1/{'0' * 32}/manifests/{ZEROS}%0a",
        f"//v1/{'0' * 32}/manifests/{ZEROS}",
        f"/v1/{'0' * 32}/manifests/%30{'0' * 63}",
        f"/v1/{'0' * 32}/blocks/../manifests/{ZEROS}",
        "/v1/match/",
        "/../../etc/passwd",
        "/healthz/",
    ],
)
def test_paths_are_read_strictly(edge: RunningEdge, path: str) -> None:
    """Anything but the one text form of a key is 404, kept by nobody, and never asked of the origin."""
    before = metric(edge.url, 'kvcdn_edge_origin_requests_total{operation="get"}')
    reply = ask(edge.url, path)
    assert (404, "no-store") == (reply.status, reply.headers["Cache-Control"])
    assert before == metric(edge.url, 'kvcdn_edge_origin_requests_total{operation="get"}')


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", f"/v1/{'0' * 32}/manifests/{ZEROS}", "GET, HEAD"),
        ("DELETE", f"/v1/{'0' * 32}/manifests/{ZEROS}", "GET, HEAD"),
        ("GET", "/v1/match", "POST"),
        ("POST", "/healthz", "GET, HEAD"),
        ("PUT", "/metrics", "GET, HEAD"),
    ],
)
def test_other_methods_are_refused(edge: RunningEdge, method: str, path: str, allow: str) -> None:
    """405 names what is allowed."""
    reply = ask(edge.url, path, method)
    assert (405, allow) == (reply.status, reply.headers["Allow"])


def test_health_and_metrics_answer(edge: RunningEdge) -> None:
    """Both are there for machines."""
    assert (200, b"ok\n") == ((reply := ask(edge.url, "/healthz")).status, reply.body)
    assert "text/plain" in ask(edge.url, "/metrics").headers["Content-Type"]
    assert metric(edge.url, "kvcdn_edge_cache_capacity_bytes") == 20e9


def test_many_requests_in_one_go_are_answered_in_order(edge: RunningEdge, block: tuple[str, bytes]) -> None:
    """Pipelined on one connection: small bodies, sendfile bodies, errors and HEAD do not mix up."""
    path, data = block
    lines = []
    expected = []
    for index in range(12):
        start, length = index * 1000, (90_000 if index % 3 == 0 else 500)
        lines.append(f"GET {path} HTTP/1.1\r\nHost: edge\r\nRange: bytes={start}-{start + length - 1}\r\n\r\n")
        expected.append((206, data[start : start + length]))
        if index % 4 == 0:
            lines.append("GET /nothing HTTP/1.1\r\nHost: edge\r\n\r\n")
            expected.append((404, b"there is nothing under this path\n"))
    with socket.create_connection(("127.0.0.1", edge.port), timeout=WAIT_SECONDS) as sock:
        sock.sendall("".join(lines).encode("ascii"))
        # One reader for all: HTTPResponse would read ahead into the next answer.
        stream = sock.makefile("rb")
        replies = []
        for _ in expected:
            status = int(stream.readline().split()[1])
            headers = http.client.parse_headers(stream)
            replies.append((status, stream.read(int(headers["Content-Length"]))))
        stream.close()
    assert expected == replies


def test_a_client_that_leaves_midway_harms_nobody(edge: RunningEdge, block: tuple[str, bytes]) -> None:
    """After clients that reset in mid-body, others are served and no file stays open."""
    path, data = block
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", edge.port), timeout=WAIT_SECONDS) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: edge\r\n\r\n".encode("ascii"))
            sock.recv(100)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert data == ask(edge.url, path).body
    until(lambda: not _open_objects(edge))


def _open_objects(edge: RunningEdge) -> int:
    count = 0
    for link in Path(f"/proc/{edge.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += "/objects/" in str(link.readlink())
    return count


@pytest.mark.parametrize(
    "sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: edge\r\nX-Slow: ", b"GET /healthz HTTP/1.1\r\nHost: edge\r\n\r\n"]
)
def test_idle_and_slow_connections_are_cut(impatient: RunningEdge, sent: bytes) -> None:
    """No request, half a request, or nothing after a request: after the keep-alive time the connection ends."""
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=WAIT_SECONDS) as sock:
        sock.sendall(sent)
        while sock.recv(4096):
            pass
    assert KEEPALIVE_SECONDS * 0.8 <= time.monotonic() - begun


def test_dripping_headers_do_not_hold_a_connection(impatient: RunningEdge) -> None:
    """A byte now and then does not restart the clock."""
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=WAIT_SECONDS) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        with pytest.raises(ConnectionError):
            until(lambda: sock.sendall(b"x"))


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: edge\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: edge\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: edge\r\n" + b"".join(b"X%d: x\r\n" % i for i in range(200)) + b"\r\n",
        b"\x16\x03\x01\x02\x00 this is TLS",
    ],
)
def test_oversized_heads_and_garbage_are_refused(edge: RunningEdge, head: bytes) -> None:
    """400, and the connection ends; the edge goes on."""
    with socket.create_connection(("127.0.0.1", edge.port), timeout=WAIT_SECONDS) as sock:
        sock.sendall(head)
        answer = _read_until(sock, 1 << 20)
    assert b"400" == answer.split()[1]
    assert 200 == ask(edge.url, "/healthz").status


def test_http_1_0_and_absolute_targets_are_served(edge: RunningEdge, block: tuple[str, bytes]) -> None:
    """Old clients and proxies' forms get the object too (RFC 9112 section 3.2.2)."""
    path, data = block
    for line in (f"GET {path} HTTP/1.0", f"GET http://edge{path} HTTP/1.1\r\nHost: edge\r\nConnection: close"):
        with socket.create_connection(("127.0.0.1", edge.port), timeout=WAIT_SECONDS) as sock:
            sock.sendall(f"{line}\r\n\r\n".encode("ascii"))
            answer = _read_until(sock, 1 << 30)
        assert data == answer.partition(b"\r\n\r\n")[2]


def test_each_answer_leaves_one_line_in_the_log(edge: RunningEdge, block: tuple[str, bytes]) -> None:
    """Method, shortened key, status, body bytes, seconds and cache outcome; never the whole address."""
    path, _ = block
    ask(edge.url, path, headers={"Range": "bytes=7-76"})
    line = json.loads(until(lambda: [line for line in edge.log().splitlines() if '"bytes":70,' in line])[-1])
    address = path.rsplit("/", 1)[1]
    assert ("GET", f"block {address[:12]}", 206, 70, "hit") == tuple(
        line[field] for field in ("method", "key", "status", "bytes", "cache")
    )
    assert 0 < line["seconds"]
    assert address not in edge.log()


def test_the_start_is_one_readable_line(edge: RunningEdge) -> None:
    """Address, origin, cache folder, capacity, objects found."""
    first = edge.log().splitlines()[0]
    assert first.startswith(f"kvcdn edge at {edge.url}, origin file:///")
    assert first.endswith("/cache: 0 objects, 0 B of 20 GB")


def test_no_request_left_a_trace_of_an_error(edge: RunningEdge) -> None:
    """After everything above, the log holds no stack trace."""
    assert "Traceback" not in edge.log()
