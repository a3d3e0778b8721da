"""Requests that two programs on the way could read in two ways, or that HTTP does not know: refused, and that is the end."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from kvcdn.edge.launch import RunningEdge
from kvcdn.stores.folder import FolderStore
from support.blocks import Document, make_document
from support.edge_process import ask, running_edge, settle
from support.waiting import WAIT_SECONDS

HOST = b"Host: edge\r\n"
END = b"\r\n"
SMUGGLED = b"GET /healthz HTTP/1.1\r\nHost: edge\r\n\r\n"


@pytest.fixture(scope="module")
def document() -> Document:
    return make_document(tokens=600)


@pytest.fixture(scope="module")
def edge(document: Document, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEdge]:
    folder = tmp_path_factory.mktemp("edge")
    document.publish(FolderStore(folder / "origin"))
    with running_edge(str(folder / "origin"), folder / "cache", keepalive_seconds=5) as running:
        for key in document.objects:
            ask(running.url, f"/{key}")
        settle(running.url)
        yield running


@pytest.fixture(scope="module")
def path(document: Document) -> bytes:
    return b"/" + next(iter(document.blocks)).encode("ascii")


def _all(edge: RunningEdge, sent: bytes) -> bytes:
    """Everything that comes until the edge closes the connection."""
    with socket.create_connection(("127.0.0.1", edge.port), timeout=WAIT_SECONDS) as sock:
        sock.sendall(sent)
        received = bytearray()
        while piece := sock.recv(1 << 16):
            received += piece
    return bytes(received)


def _refused(edge: RunningEdge, head: bytes) -> bytes:
    """The status of the one answer to `head` and what is smuggled behind it, after which the connection has ended."""
    received = _all(edge, head + SMUGGLED)
    assert 1 == received.count(b"\r\nDate: ")
    return received.split(b" ", 2)[1]


@pytest.mark.parametrize(
    "host", [b"a b", b"edge/x", b"edge?x", b"user@edge", b"edge:http", b"[::1", b"::1", b"edge, other", b"a\x80", b"<edge>"]
)
@pytest.mark.parametrize("agent", [b"", b"Cookie: a=b\r\n"])
def test_a_host_that_is_none_is_refused(edge: RunningEdge, path: bytes, host: bytes, agent: bytes) -> None:
    """RFC 9112 section 3.2, on the short way and on the long one."""
    assert b"400" == _refused(edge, b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\n" + agent + END)


@pytest.mark.parametrize(
    "host", [b"", b"edge", b"edge:", b"edge:8080", b"127.0.0.1", b"[::1]:8080", b"a_b.example", b"xn--a.example"]
)
def test_hosts_of_all_forms_are_served(edge: RunningEdge, path: bytes, host: bytes) -> None:
    """Names, numbers, and the empty field of a target without authority."""
    received = _all(edge, b"HEAD " + path + b" HTTP/1.1\r\nConnection: close\r\nHost: " + host + b"\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("form", [b"%b#f", b"%b#", b"http://user@edge%b", b"http://user:pw@edge%b", b"ftp://edge%b"])
def test_a_target_that_is_none_is_refused(edge: RunningEdge, path: bytes, form: bytes) -> None:
    """A fragment is not sent, and a user in a target makes one host look like another (RFC 9110 section 4.2.4)."""
    assert b"400" == _refused(edge, b"GET " + form % path + b" HTTP/1.1\r\n" + HOST + END)


@pytest.mark.parametrize("form", [b"http://edge%b", b"HTTP://other:8080%b", b"https://[::1]:443%b"])
def test_absolute_targets_are_served(edge: RunningEdge, path: bytes, form: bytes) -> None:
    """RFC 9112 section 3.2.2: whatever the Host field says."""
    received = _all(edge, b"HEAD " + form % path + b" HTTP/1.1\r\nConnection: close\r\n" + HOST + END)
    assert received.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("line", [b"GET %b HTTP/2.0", b"GET %b HTTP/0.9", b"GET %b"])
def test_other_versions_are_answered_in_ours(edge: RunningEdge, path: bytes, line: bytes) -> None:
    """RFC 9110 section 15.6.6; before, an answer called itself HTTP/2.0."""
    received = _all(edge, line % path + END + HOST + END)
    assert received.startswith((b"HTTP/1.1 505 ", b"HTTP/1.0 400 "))


@pytest.mark.parametrize("first", [b"Bearer x", b"Basic eDp4", b""])
def test_two_authorizations_are_refused(edge: RunningEdge, path: bytes, first: bytes) -> None:
    """One of them may be what a proxy before us has looked at."""
    head = b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"Authorization: " + first + b"\r\nauthorization: Bearer y\r\n"
    assert b"400" == _refused(edge, head + END)


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"deflate, chunked"])
def test_transfer_codings_that_nobody_here_knows_are_refused(edge: RunningEdge, path: bytes, coding: bytes) -> None:
    """RFC 9112 section 6.1."""
    head = b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: " + coding + b"\r\n\r\n0\r\n\r\n"
    assert b"501" == _refused(edge, head)


@pytest.mark.parametrize("more", [b"", b"Connection: keep-alive\r\n", b"Content-Length: 5\r\nConnection: keep-alive\r\n"])
@pytest.mark.parametrize("line", [b"POST /v1/match", b"GET /healthz"])
def test_a_transfer_coding_of_http_1_0_is_refused(edge: RunningEdge, line: bytes, more: bytes) -> None:
    """It has none (RFC 9112 section 6.1): the framing is not to be trusted, and the connection ends."""
    head = line + b" HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n" + more + b"\r\n0\r\n\r\n"
    assert b"400" == _refused(edge, head)


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n2;x\n{}\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n",
        b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n",
        b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n",
        b"Content-Length: +0\r\n\r\n",
        b"Content-Length: 0x0\r\n\r\n",
        b"Content-Length: 1_0\r\n\r\n",
        b"Content-Length: 1 0\r\n\r\n",
        b"Content-Length: 0, 0\r\n\r\n",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length:\r\n\r\n",
        b"X-A: b\r\n Content-Length: 5\r\n\r\n",
        b"X-A: b\rContent-Length: 5\r\n\r\n",
        b"X-A: b\nContent-Length: 5\r\n\r\n",
        b"X-A: \0\r\n\r\n",
        b"X A: b\r\n\r\n",
        b": b\r\n\r\n",
    ],
)
def test_bodies_that_end_nowhere_for_sure_are_refused(edge: RunningEdge, framing: bytes) -> None:
    """Whatever was smuggled behind them is not answered."""
    assert b"400" == _refused(edge, b"POST /v1/match HTTP/1.1\r\n" + HOST + framing)


BROKEN_CHUNKS = [
    b"zz\r\n",
    b"2\r\n{}XX\r\n",
    b"-1\r\n",
    b"2;\x00\r\n{}\r\n",
    b"2\n{}\n",
    b"0\r\nX: a\x00b\r\n\r\n",
    b"fffffffffffffffff\r\n",
]


@pytest.mark.parametrize("chunk", BROKEN_CHUNKS)
@pytest.mark.parametrize("before", [b"", b"1\r\n{\r\n", b"1\r\n{"])
def test_a_body_that_breaks_later_is_refused_at_once(edge: RunningEdge, chunk: bytes, before: bytes) -> None:
    """Once and with 400, and the connection ends; not with 408 when the body's time is over."""
    with socket.create_connection(("127.0.0.1", edge.port), timeout=WAIT_SECONDS) as sock:
        sock.sendall(b"POST /v1/match HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
        # Its handler awaits the body from here on.
        assert b"HTTP/1.1 100 Continue\r\n\r\n" == sock.recv(25, socket.MSG_WAITALL)
        sock.sendall(before)
        time.sleep(0.05)
        sock.sendall((b"" if before.endswith(b"\n") or not before else b"\r\n") + chunk + SMUGGLED)
        received = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert (1, b"400") == (received.count(b"HTTP/1.1 "), received.split(b" ", 2)[1])
    assert "Traceback" not in edge.log()


UPGRADES = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
    b"Connection: upgrade\r\nUpgrade: TLS/1.0\r\n",
    b"Connection: Upgrade\r\nUpgrade: h2c, foo/2\r\n",
    b"Upgrade: h2c\r\n",
]


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("cut", [0, 1, 20, -1])
def test_what_is_behind_an_upgrade_that_is_ignored_is_answered(
    edge: RunningEdge, path: bytes, upgrade: bytes, cut: int
) -> None:
    """Wherever the packets end, and whichever way the requests behind it would go alone."""
    last = b"GET /readyz HTTP/1.1\r\nHost: edge\r\nConnection: close\r\n\r\n"
    part = b"GET " + path + b" HTTP/1.1\r\nRange: bytes=0-9\r\n" + HOST + upgrade + END
    sent = part + SMUGGLED + part + last
    with socket.create_connection(("127.0.0.1", edge.port), timeout=WAIT_SECONDS) as sock:
        for piece in (sent[:cut], sent[cut:]):
            sock.sendall(piece)
            time.sleep(0.05)
        received = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert [b"206", b"200", b"206", b"200"] == [line.split(b" ")[0] for line in received.split(b"HTTP/1.1 ")[1:]]


def test_a_client_that_leaves_within_a_body_is_no_error(edge: RunningEdge) -> None:
    """One line in the log, and no trace of the program's own."""
    with socket.create_connection(("127.0.0.1", edge.port), timeout=WAIT_SECONDS) as sock:
        sock.sendall(b"POST /v1/match HTTP/1.1\r\n" + HOST + b"Content-Length: 100\r\n\r\n{")
    settle(edge.url)
    assert "Traceback" not in edge.log()
