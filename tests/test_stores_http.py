"""What the HTTP store owes beyond the suite: any server is met with bounds, and every odd answer ends in words."""

from __future__ import annotations

import contextlib
import gzip
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvcdn.errors import KvcdnError, NotFoundError, UnavailableError, UsageError
from kvcdn.store import FIRST_BYTES, STREAM_CHUNK_BYTES
from kvcdn.stores import body, http
from kvcdn.stores.http import HttpStore, Patience
from kvcdn.stores.memory import MemoryStore
from kvcdn.stores.span import Span
from support.faults import Fault, FaultyLink, faulty_link
from support.web import Answer, Web, running_web

DATA = random.Random(6).randbytes(2_000_000)


@pytest.fixture
def web() -> Iterator[Web]:
    """A web server with one object, `a`."""
    store = MemoryStore()
    store.create("a", [DATA])
    with running_web(store) as found:
        yield found


@pytest.fixture
def link(web: Web) -> Iterator[FaultyLink]:
    with faulty_link(web.port) as found:
        yield found


def test_writing_is_refused(web: Web):
    """A web server is read-only: said as a usage error that names where to write instead, before any request."""
    store = HttpStore(web.url)
    for call in (lambda: store.create("b", [b"x"]), lambda: store.list(""), lambda: store.delete("a")):
        with pytest.raises(UsageError, match="can only be read") as caught:
            call()
        assert "origin" in caught.value.hint
    assert [] == web.requests


def test_base_url_with_a_path(web: Web):
    """The base may have a path of its own, with or without a slash at its end."""
    web.store.create("deep/er/a", [b"x"])
    for base in (f"{web.url}/deep/er", f"{web.url}/deep/er/"):
        assert b"x" == HttpStore(base).read("a")


def test_server_without_ranges(web: Web):
    """A server that ignores ranges sends everything: the right part is cut out, and the rest not waited for."""
    web.ignores_ranges = True
    store = HttpStore(web.url)
    for start, length in ((0, 10), (5, 10), (1_999_990, 100), (1_500_000, None), (2_000_000, 5), (3_000_000, 5)):
        stop = None if length is None else start + length
        assert DATA[start:stop] == store.read("a", start, length)


def test_server_without_ranges_is_not_read_for_ever(web: Web, monkeypatch: pytest.MonkeyPatch):
    """There is a limit on what is read in vain."""
    monkeypatch.setattr(body, "MAX_SKIP_BYTES", 1_000_000)
    web.ignores_ranges = True
    with pytest.raises(UnavailableError, match="ignores ranges"):
        HttpStore(web.url).read("a", 1_500_000, 10)


@pytest.mark.parametrize(
    ("status", "headers", "content"),
    [
        (206, {}, b"x" * 10),
        (206, {"Content-Range": "bytes 0-9/2000000"}, b"x" * 10),
        (206, {"Content-Range": "bytes 100-99/2000000"}, b""),
        (206, {"Content-Range": "bytes 100-109/*"}, b"x" * 10),
        (206, {"Content-Range": "bytes 100-109/50"}, b"x" * 10),
        (206, {"Content-Range": "bytes 100-109/" + "9" * 30}, b"x" * 10),
        (206, {"Content-Range": "octets 100-109/2000000"}, b"x" * 10),
        (206, {"Content-Range": "bytes 101-109/2000000"}, b"x" * 9),
        (416, {}, b""),
        (416, {"Content-Range": "bytes */5"}, b""),
        (200, {"Content-Length": ""}, b"x" * 10),
        (200, {"Content-Length": "-5"}, b"x" * 10),
        (200, {"Content-Length": "ten"}, b"x" * 10),
        (200, {"Content-Encoding": "gzip"}, gzip.compress(b"x" * 10, mtime=0)),
        (204, {}, b""),
        (302, {"Location": "http://127.0.0.1:9/a"}, b""),
        (400, {}, b""),
        (500, {}, b"oops"),
        (600, {}, b""),
    ],
)
def test_odd_answers(web: Web, status: int, headers: dict[str, str], content: bytes):
    """An answer that is not the bytes asked for is an error with the object's URL; its bytes are not taken for the object's."""
    web.answers.append(Answer(status, headers, content))
    with pytest.raises(UnavailableError, match=f"{web.url}/a"):
        HttpStore(web.url).read("a", 100, 10)


def test_partial_answer_that_is_too_short(web: Web):
    """A 206 may hold less than was asked for (RFC 9110 section 15.3.7): the rest is fetched."""
    web.answers.append(Answer(206, {"Content-Range": "bytes 100-104/2000000", "ETag": '"2000000"'}, DATA[100:105]))
    assert DATA[100:110] == HttpStore(web.url).read("a", 100, 10)


def test_partial_answer_that_is_too_long(web: Web):
    """Bytes beyond those asked for are not handed out."""
    web.answers.append(Answer(206, {"Content-Range": "bytes 100-199/2000000"}, DATA[100:200]))
    assert DATA[100:110] == HttpStore(web.url).read("a", 100, 10)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [({"ETag": '"new"'}, "etag"), ({"Content-Range": "bytes 100000-100009/100010"}, "size")],
    ids=["etag", "size"],
)
def test_object_changed_in_mid_stream(web: Web, headers: dict[str, str], reason: str):
    """Where the second connection offers another object than the first, the two are not mixed."""
    web.answers.append(Answer(206, {"Content-Range": "bytes 0-99999/2000000", "ETag": '"2000000"'}, DATA[:100_000]))
    web.answers.append(Answer(206, {"Content-Range": "bytes 100000-100009/2000000"} | headers, b"x" * 10))
    with pytest.raises(UnavailableError, match="changed while it was read"):
        HttpStore(web.url).read("a", 0, 200_000)


@pytest.mark.parametrize("status", [404, 410])
def test_missing(web: Web, status: int):
    """404 and 410 mean that there is no such object."""
    web.answers.extend([Answer(status), Answer(status)])
    store = HttpStore(web.url)
    assert store.stat("a") is None
    with pytest.raises(NotFoundError):
        store.read("a")


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_passing_failure_is_retried(web: Web, status: int):
    """An overloaded server or gateway is asked again, a bounded number of times."""
    web.answers.extend([Answer(status)] * 2)
    store = HttpStore(web.url)
    assert DATA == store.read("a")
    assert 3 == len(web.requests)
    web.answers.extend([Answer(status)] * 9)
    with pytest.raises(UnavailableError, match=f"answered {status}"):
        store.read("a")
    assert 3 + http.ATTEMPTS == len(web.requests)


def test_retry_after_is_honoured(web: Web):
    """The server says when to come back, within the budget; a longer wait than the budget is not begun."""
    web.answers.append(Answer(503, {"Retry-After": "1"}))
    began = time.monotonic()
    assert DATA == HttpStore(web.url).read("a")
    assert 1 <= time.monotonic() - began
    web.answers.append(Answer(503, {"Retry-After": "3600"}))
    with pytest.raises(UnavailableError, match="503"):
        HttpStore(web.url).read("a")
    assert 3 == len(web.requests)


@pytest.mark.parametrize("value", ["-1", "soon", "1e9", "Fri, 31 Dec 1999 23:59:59 GMT", "9" * 40, "²"])
def test_odd_retry_after(web: Web, value: str):
    """A Retry-After that makes no sense neither hangs nor breaks the client."""
    web.answers.append(Answer(503, {"Retry-After": value.encode().decode("latin-1")}))
    if value == "9" * 40:
        with pytest.raises(UnavailableError, match="503"):
            HttpStore(web.url).read("a")
    else:
        assert DATA == HttpStore(web.url).read("a")


def test_token(web: Web):
    """The token goes along, works, and shows nowhere; without it, or refused, the error says which."""
    web.token = "sesame-123"
    store = HttpStore(web.url, token="sesame-123")
    assert DATA == store.read("a")
    assert "sesame" not in store.url + repr(store)
    with pytest.raises(UnavailableError, match="asks for a token, and none was given"):
        HttpStore(web.url).read("a")
    for call in (lambda store: store.stat("a"), lambda store: store.read("a")):
        with pytest.raises(UnavailableError, match="the token was refused") as caught:
            call(HttpStore(web.url, token="other-token"))
        assert "other-token" not in str(caught.value) + caught.value.hint


def test_malformed_token():
    """A token with characters that could forge headers is refused, and not repeated."""
    for token in ("a b", "a\r\nX-Evil: 1", "", "ä"):
        with pytest.raises(UsageError) as caught:
            HttpStore("http://127.0.0.1:9", token=token)
        assert "Evil" not in str(caught.value)


def test_token_is_not_sent_after_a_redirect(web: Web, link: FaultyLink):
    """A redirect is not followed: the token would go to whom it names."""
    web.answers.append(Answer(307, {"Location": f"{link.url}/a"}))
    with pytest.raises(UnavailableError, match="redirect"):
        HttpStore(web.url, token="sesame").read("a")
    assert 0 == link.connections


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("ignores_ranges", [False, True], ids=["ranges", "no-ranges"])
def test_cut_body_is_resumed(web: Web, link: FaultyLink, reset: bool, ignores_ranges: bool):
    """A body cut short is taken up where it broke off."""
    web.ignores_ranges = ignores_ranges
    link.inject(Fault(when=b"GET /", pass_bytes=700_000, reset=reset))
    assert DATA[100:1_900_000] == HttpStore(link.url).read("a", 100, 1_899_900)
    assert 0 == link.pending


def test_first_pieces_are_small():
    """Until an envelope's worth has come no more is waited for at once, however little the first packet held."""
    asked: list[int] = []

    def read(size: int) -> bytes:
        asked.append(size)
        return bytes(7_000 if len(asked) == 1 else size)

    size = 3 << 20
    came = body.Body(read, lambda: None, 0, size, "")
    assert size == len(b"".join(body.resumed(came, Span(0, None), lambda _: came, "an object")))
    assert [FIRST_BYTES, FIRST_BYTES, STREAM_CHUNK_BYTES] == asked[:3]


def test_body_that_is_always_cut(link: FaultyLink, monkeypatch: pytest.MonkeyPatch):
    """A link that cuts every time ends in an error; never in a short object."""
    monkeypatch.setattr(body, "RESUME_PAUSE_SECONDS", 0.01)
    link.inject(Fault(when=b"GET /", pass_bytes=1_000), times=99)
    with pytest.raises(UnavailableError, match=r"broke off at byte [\d,]+ of 2,000,000"):
        HttpStore(link.url).read("a")


def test_stalled_body(link: FaultyLink, monkeypatch: pytest.MonkeyPatch):
    """A server that falls silent in mid-body is given up after the stall limit and taken up on a new connection."""
    # Longer than a busy machine is silent by itself: the second connection is given up for no such reason.
    monkeypatch.setattr(http, "STALL_SECONDS", 5)
    link.inject(Fault(when=b"GET /", pass_bytes=700_000, stall=True))
    began = time.monotonic()
    assert DATA == HttpStore(link.url).read("a")
    assert 5 <= time.monotonic() - began
    assert 2 == link.connections


def test_dripping_body(monkeypatch: pytest.MonkeyPatch):
    """A server that sends a byte now and then, always within the stall limit, does not hold a reader for ever."""
    monkeypatch.setattr(body, "PATIENCE_SECONDS", 0.5)
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                while not stop.wait(0.02):
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(UnavailableError, match="too slow"):
                HttpStore(f"http://127.0.0.1:{listener.getsockname()[1]}").read("a")
        finally:
            stop.set()
            thread.join()


def test_closed_port():
    """A port where nobody listens is told in one line that names the server."""
    with pytest.raises(UnavailableError, match=r"http://127\.0\.0\.1:9 cannot be reached \(.*refused") as caught:
        HttpStore("http://127.0.0.1:9").stat("a")
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_refused_connections_are_retried(web: Web, link: FaultyLink):
    """A server that is restarting is asked again."""
    link.refusals = http.ATTEMPTS - 1
    assert DATA == HttpStore(link.url).read("a")
    assert http.ATTEMPTS == link.connections


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\x00\xff" * 1000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxx",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/9.9 abc\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
    ],
    ids=["nothing", "noise", "two-lengths", "many-headers", "long-header", "chunked", "version", "ssh"],
)
def test_broken_protocol(link: FaultyLink, reply: bytes):
    """Whatever a server sends, the reader gets an error of ours and no bytes."""
    link.inject(Fault(answer=reply), times=99)
    store = HttpStore(link.url)
    for call in (store.read, store.stat):
        with pytest.raises(KvcdnError):
            call("a")


def test_tls_to_a_server_without(web: Web):
    """https to a port that speaks http fails in words."""
    with pytest.raises(UnavailableError, match="TLS"):
        HttpStore(web.url.replace("http:", "https:")).stat("a")


def test_proxy_from_the_environment(web: Web, monkeypatch: pytest.MonkeyPatch):
    """A proxy that the environment names is used for other hosts, never for this machine, and not for excepted hosts."""
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", web.url)
    web.answers.extend([Answer(200, {}, b"through the proxy"), Answer(200, {}, b"through the proxy")])
    assert b"through the proxy" == HttpStore("http://edge.example/kv").read("a")
    assert ("GET", "http://edge.example/kv/a") == web.requests[-1][:2]
    web.answers.clear()
    assert DATA == HttpStore(web.url).read("a")
    assert "/a" == web.requests[-1][1]
    monkeypatch.setenv("http_proxy", "http://user:pw@127.0.0.1:9")
    with pytest.raises(UnavailableError, match="through the proxy") as caught:
        HttpStore("http://edge.example").read("a")
    assert "pw" not in str(caught.value)


def test_connections_are_reused(web: Web, link: FaultyLink):
    """Whole reads, ranges and looks share one connection; a stream closed early gives up its own."""
    store = HttpStore(link.url)
    for _ in range(5):
        store.stat("a")
        store.read("a")
        store.read("a", 5, 10)
        assert store.stat("missing") is None
    assert 1 == link.connections
    stream = store.stream("a")
    next(stream)
    stream.close()
    store.read("a")
    assert 2 == link.connections


def test_age_from_the_server(web: Web):
    """Last-Modified is the object's age; where it is missing or senseless the object counts as new."""
    store = HttpStore(web.url)
    web.answers.append(Answer(200, {"Last-Modified": "Sun, 06 Nov 1994 08:49:37 GMT"}, b"x"))
    info = store.stat("a")
    assert info is not None
    assert 784111777 == info.modified
    for value in ("", "yesterday", "Sun, 99 Nov 1994 08:49:37 GMT"):
        web.answers.append(Answer(200, {"Last-Modified": value}, b"x"))
        info = store.stat("a")
        assert info is not None
        assert abs(time.time() - info.modified) < 5


EARLY = {
    "hints": [b"103 Early Hints"],
    "processing": [b"102 Processing", b"102 Processing"],
    "several": [b"100 Continue", b"103 Early Hints", b"100 Continue", b"199 Whatever"],
}


@pytest.mark.parametrize("name", EARLY)
def test_what_is_said_before_an_answer_is_passed_over(name: str) -> None:
    """Any number of informational answers, with fields, on a connection that stays (RFC 9110 section 15.2)."""
    early = b"".join(b"HTTP/1.1 %s\r\nLink: </a.css>\r\nContent-Length: 3\r\n\r\n" % one for one in EARLY[name])

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            for _ in range(2):
                connection.recv(1 << 16)
                connection.sendall(early + b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nbytes")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        store = HttpStore(f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert [b"bytes", b"bytes"] == [store.read("v1/x"), store.read("v1/x")]
        server.join()


@pytest.mark.parametrize("drip", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\n\r\n", b"X"])
def test_a_head_that_drips_for_ever_is_not_waited_for(drip: bytes) -> None:
    """Never silent for as long as the limit, and never done: the reader is free a moment after that limit."""
    over = threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 " if drip == b"X" else drip)
            while not over.wait(0.05):
                connection.sendall(drip)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        store = HttpStore(f"http://127.0.0.1:{listener.getsockname()[1]}", patience=Patience(5.0, 1.0, 1))
        try:
            with pytest.raises(UnavailableError, match="cannot be reached"):
                store.read("v1/x")
        finally:
            over.set()
            server.join()
