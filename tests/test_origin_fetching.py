"""Fetching for strangers: nothing internal is asked, whatever a name or a redirect says; size and time are bounded."""

from __future__ import annotations

import gzip
import ipaddress
import socket
import ssl
import threading
import tracemalloc
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trustme

from kvcdn.errors import NotFoundError, UnavailableError, UsageError
from kvcdn.origin.jobs.fetching import fetch_document, is_public, resolve_public

INTERNAL = [
    *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("192.0.0.1", "192.0.2.1", "198.18.0.1", "203.0.113.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::7f00:1", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "2002:7f00:1::", "2002:a9fe:a9fe::", "2001:0:1::1"),
    *("64:ff9b::7f00:1", "64:ff9b:1::1", "::ffff:0:7f00:1"),
]

PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8"]


@pytest.mark.parametrize("address", INTERNAL)
def test_internal_addresses(address) -> None:
    """Of this machine, link or network, of documentation, multicast, or wrapped in another form."""
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address) -> None:
    """Those of the internet are fetched from."""
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "2130706433", "0x7f.1", "127.1", "::1", "::ffff:127.0.0.1", "[::1]"]
)
def test_names_of_this_machine(host) -> None:
    """In every spelling that the resolver takes: refused, or not resolved."""
    with pytest.raises((UsageError, UnavailableError)):
        resolve_public(host, 80)


def test_a_name_with_one_internal_address_is_refused(monkeypatch) -> None:
    """Whichever would be taken."""
    found = [(socket.AF_INET, 1, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: found)
    with pytest.raises(UsageError):
        resolve_public("two.example", 80)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: found[:1])
    assert "8.8.8.8" == resolve_public("one.example", 80)


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.hosts.append(self.headers["Host"])
        bodies = {"/text": b"A public text.", "/large": b"x" * 5000, "/empty": b"", "/binary": b"\0\1\2"}
        packings: dict[str, str] = {}
        failures = {"/missing": 404, "/broken": 500}
        places = {"/away": "http://internal.example:9/secret", "/file": "file:///etc/passwd", "/loop": "/loop"}
        places["/nowhere"] = "http://[::1"
        if self.path in ("/bomb", "/bombs"):
            bodies[self.path] = gzip.compress(bytes(64 << 20))
            packings["/bomb"] = "gzip"
        if self.path == "/bombs":
            bodies[self.path], packings[self.path] = gzip.compress(bodies[self.path]), "gzip, gzip"
        if self.path in bodies:
            self.answer(200, bodies[self.path], **({"Content-Encoding": packings[self.path]} if self.path in packings else {}))
        elif self.path in failures:
            self.answer(failures[self.path])
        else:
            self.answer(302, Location=places.get(self.path, "/text"))

    def answer(self, status, body=b"", **headers) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def site():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.hosts = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(site, path, **options):
    asked = []

    def resolve(host, port):
        asked.append(host)
        if host == "internal.example":
            raise UsageError("internal.example has an internal address, from which nothing is fetched")
        return "127.0.0.1"

    return fetch_document(f"http://site.example:{site.server_port}{path}", resolve=resolve, **options).text, asked


def test_the_address_that_was_looked_at_is_asked(site) -> None:
    """Under the name that was given; each redirect is resolved anew."""
    text, asked = fetch(site, "/here")
    assert ("A public text.", ["site.example"] * 2) == (text, asked)
    assert {f"site.example:{site.server_port}"} == set(site.hosts)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/away", UsageError),
        ("/file", UsageError),
        ("/loop", UsageError),
        ("/nowhere", UsageError),
        ("/large", UsageError),
        ("/binary", UsageError),
        ("/empty", UsageError),
        ("/missing", NotFoundError),
        ("/broken", UnavailableError),
    ],
)
def test_what_is_not_fetched(site, path, error) -> None:
    """Redirects inside or in circles, what is too large, no text, or not there."""
    with pytest.raises(error) as caught:
        fetch(site, path, limit=1000)
    assert "secret" not in str(caught.value)


def test_a_body_has_to_end_in_time(site) -> None:
    """However slowly it comes."""
    with pytest.raises(UnavailableError):
        fetch(site, "/text", seconds=-1)


@pytest.mark.parametrize(
    "url",
    [
        *("http://user:secret@a.example/", "http://", "http://[::1", "gopher://a.example/", "http://a.example:x/"),
        *("http://a.example/\ud800", "http://\ud800.example/", f"http://{'é' * 70}.example/", "http://.é/"),
    ],
)
def test_urls_that_are_none(url) -> None:
    """Nothing is resolved for them, and no password is shown."""
    with pytest.raises(UsageError) as caught:
        fetch_document(url, resolve=lambda *_: pytest.fail("resolved"))
    assert "secret" not in str(caught.value)


DRIBBLES = {
    "silence": (b"", b""),
    "head": (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
    "many heads": (b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"x"),
    "body to the end": (b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "a chunk's size": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x"),
    "redirect": (b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 1000\r\n", b"X: x\r\n"),
    "handshake": (b"\x16\x03\x03\x40\x00\x02", b"\x00"),
}


@pytest.mark.parametrize("kind", DRIBBLES)
def test_a_server_that_sends_a_byte_now_and_then(kind) -> None:
    """For ever, of whatever it is: the deadline holds, and none of it is a document.

    As in https://github.com/midwork-finds-jobs/duckdb-crawler/pull/5.
    """
    first, then = DRIBBLES[kind]
    over = threading.Event()

    def serve() -> None:
        with server.accept()[0] as peer, suppress(OSError):
            peer.sendall(first)
            while not over.wait(0.01):
                peer.sendall(then)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            scheme = "https" if kind == "handshake" else "http"
            with pytest.raises(UnavailableError):
                fetch_document(f"{scheme}://a.example:{server.getsockname()[1]}/", resolve=lambda *_: "127.0.0.1", seconds=0.3)
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("path", ["/bomb", "/bombs"])
def test_what_unpacks_to_more_than_it_may(site, path) -> None:
    """Once, or in two layers: refused, and never in memory."""
    tracemalloc.start()
    try:
        with pytest.raises(UsageError):
            fetch(site, path, limit=1000)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 96 << 20  # the server's own 64 MiB are in there


def test_names_and_paths_beyond_ascii(site) -> None:
    """A name goes to DNS and server as DNS has it, a path in percent signs."""
    asked = []
    url = f"http://b\u00fccher.example:{site.server_port}/\u4e00 x?y=\u00e9"
    assert "A public text." == fetch_document(url, resolve=lambda host, _: asked.append(host) or "127.0.0.1").text
    assert ["xn--bcher-kva.example"] * 2 == asked
    assert f"xn--bcher-kva.example:{site.server_port}" in site.hosts


@pytest.mark.parametrize("name", ["site.example", "other.example"])
def test_https_is_checked_for_the_name_that_was_given(site, monkeypatch, tmp_path, name) -> None:
    """Although the connection goes to an address: another name's certificate will not do."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("site.example").configure_cert(context)
    site.socket = context.wrap_socket(site.socket, server_side=True)
    url = f"https://{name}:{site.server_port}/text"
    if name == "site.example":
        assert "A public text." == fetch_document(url, resolve=lambda *_: "127.0.0.1").text
    else:
        with pytest.raises(UnavailableError):
            fetch_document(url, resolve=lambda *_: "127.0.0.1")
