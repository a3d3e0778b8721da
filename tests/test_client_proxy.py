"""Proxies and certificates: the environment's are respected, this machine is asked directly, nobody is trusted unproven."""

from __future__ import annotations

import base64
import contextlib
import random
import shutil
import ssl
import subprocess
from urllib.parse import urlsplit

import pytest
import trustme

from kvcdn.client.network.connections import ConnectionPool
from kvcdn.client.network.proxy import Proxy, proxy_for
from kvcdn.client.sources.transport import EdgeSource
from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import UnavailableError, UsageError
from kvcdn.stores.memory import MemoryStore
from support.forward import forward_proxy
from support.scripted import right_answer, scripted
from support.tls import tls_front
from support.web import running_web

KEY = "v1/object"
DATA = random.Random(9).randbytes(300_000)
HOST = "edge.example"
LOGIN = "user%20name:pass%40word"
VARIABLES = [name for stem in ("http_proxy", "https_proxy", "no_proxy", "all_proxy") for name in (stem, stem.upper())]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in (*VARIABLES, "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    """Pauses between tries take time and prove nothing."""
    monkeypatch.setattr("kvcdn.client.network.patience.PAUSE_SECONDS", 0.005)


@pytest.fixture
def web():
    store = MemoryStore()
    store.create(KEY, [DATA])
    with running_web(store) as web:
        yield web


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def ca_file(authority, tmp_path):
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return str(tmp_path / "ca.pem")


def context(authority, *names, **options):
    """A server's, with a certificate for `names`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names, **options).configure_cert(context)
    return context


def read(url, **options):
    """Streamed, in ranges, and looked up, on connections that are used again."""
    with contextlib.closing(EdgeSource(url, **options)) as source:
        data = source.read(KEY, len(DATA))
        reader = source.open(KEY, ranged=True)
        again = bytes(reader.read_exact(len(DATA)))
        reader.close()
        assert data == again
        return data


# -- which proxy -------------------------------------------------------------------------------------------------------

CHOICES = {
    "none": ({}, "http://edge.example", None),
    "http": ({"HTTP_PROXY": "http://p:3128"}, "http://edge.example", ("p", 3128)),
    "in small letters": ({"http_proxy": "http://p:3128"}, "http://edge.example", ("p", 3128)),
    "without a scheme": ({"HTTP_PROXY": "p:3128"}, "http://edge.example", ("p", 3128)),
    "without a port": ({"HTTP_PROXY": "http://p"}, "http://edge.example", ("p", 80)),
    "http is not for https": ({"HTTP_PROXY": "http://p:3128"}, "https://edge.example", None),
    "https": ({"HTTPS_PROXY": "http://p:3128"}, "https://edge.example", ("p", 3128)),
    "NO_PROXY": ({"HTTP_PROXY": "http://p", "NO_PROXY": "x,edge.example"}, "http://edge.example", None),
    "NO_PROXY of a domain": ({"HTTP_PROXY": "http://p", "NO_PROXY": ".example"}, "http://edge.example", None),
    "NO_PROXY of a port": ({"HTTP_PROXY": "http://p", "NO_PROXY": "edge.example:8400"}, "http://edge.example:8400", None),
    "NO_PROXY of another": ({"HTTP_PROXY": "http://p", "NO_PROXY": "other.example"}, "http://edge.example", ("p", 80)),
    "NO_PROXY of all": ({"HTTP_PROXY": "http://p", "NO_PROXY": "*"}, "http://edge.example", None),
    "this machine": ({"HTTP_PROXY": "http://p"}, "http://localhost:8400", None),
    "this machine by number": ({"HTTP_PROXY": "http://p"}, "http://127.0.0.2", None),
    "this machine by long number": ({"HTTP_PROXY": "http://p"}, "http://[::1]:8400", None),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_environment_names_the_proxy(case, monkeypatch):
    """As other programs read it."""
    variables, url, expected = CHOICES[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = proxy_for(urlsplit(url))
    assert expected == (None if found is None else (found.host, found.port))


@pytest.mark.parametrize("value", ["socks5://p:1080", "https://p:3128", "http://", "http://p:port", "ftp://p"])
def test_a_proxy_that_we_cannot_speak_to_is_refused(value, monkeypatch):
    """At once and by the variable's name, not by a connection that leads nowhere."""
    monkeypatch.setenv("HTTP_PROXY", value)
    with pytest.raises(UsageError) as caught:
        EdgeSource("http://edge.example")
    assert "HTTP_PROXY" in caught.value.hint


def test_a_proxys_login_is_shown_to_nobody(monkeypatch):
    """Not in a repr, not in an error."""
    monkeypatch.setenv("HTTP_PROXY", f"http://{LOGIN}@127.0.0.1:9")
    proxy = proxy_for(urlsplit("http://edge.example"))
    assert isinstance(proxy, Proxy)
    secret = base64.b64encode(b"user name:pass@word").decode()
    assert f"Basic {secret}" == proxy.authorization
    with pytest.raises(UnavailableError) as caught:
        read("http://edge.example")
    shown = f"{proxy!r} {caught.value!r} {caught.value.hint} {ConnectionPool('http://edge.example', None)!r}"
    assert not [word for word in (secret, "pass", "user") if word in shown]
    monkeypatch.setenv("HTTP_PROXY", f"socks5://{LOGIN}@127.0.0.1:9")
    with pytest.raises(UsageError) as refused:
        EdgeSource("http://edge.example")
    assert "pass" not in f"{refused.value}{refused.value.hint}"


# -- through a proxy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("login", [None, "user name:pass@word"])
def test_http_goes_through_the_proxy_in_absolute_form(web, monkeypatch, login):
    """With the login where one is asked for."""
    web.token = "sesame"
    with forward_proxy({HOST: web.port}) as proxy:
        proxy.login = login
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("//", f"//{LOGIN}@") if login else proxy.url)
        assert DATA == read(f"http://{HOST}:8400", token="sesame")
        assert {f"GET http://{HOST}:8400/{KEY}"} == set(proxy.targets)
    assert {f"/{KEY}"} == {path for _, path, _ in web.requests}
    assert {f"{HOST}:8400"} == {headers["Host"] for _, _, headers in web.requests}


@pytest.mark.parametrize("login", [None, "user name:pass@word"])
def test_https_goes_through_a_tunnel(web, monkeypatch, authority, ca_file, login):
    """The proxy sees a host's name, no token and no path."""
    web.token = "sesame"
    with tls_front(web.port, context(authority, HOST)) as front, forward_proxy({HOST: front.port}) as proxy:
        proxy.login = login
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("//", f"//{LOGIN}@") if login else proxy.url)
        assert DATA == read(f"https://{HOST}", token="sesame", ca_file=ca_file)
        assert {f"CONNECT {HOST}:443"} == set(proxy.targets)
        assert not [head for head in proxy.server.requests if b"sesame" in head or KEY.encode() in head]
    assert not [headers for _, _, headers in web.requests if "Proxy-Authorization" in headers]


def test_a_proxy_with_another_login_is_told_of(web, monkeypatch):
    """407 is not the edge's word, and not tried again."""
    with forward_proxy({HOST: web.port}) as proxy:
        proxy.login = "some:body"
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        with pytest.raises(UnavailableError, match="proxy"):
            read(f"http://{HOST}")
        assert 1 == len(proxy.targets)


CONNECT_ANSWERS = {
    "403": b"HTTP/1.1 403 No\r\n\r\n",
    "407": b"HTTP/1.1 407 Login\r\n\r\n",
    "502": b"HTTP/1.1 502 Bad\r\n\r\n",
    "not HTTP": b"SSH-2.0-hello\r\n\r\n",
    "cut": b"HTTP/1.1 200 Ma",
    "nothing": b"",
    "without end": b"HTTP/1.1 200 Made\r\n" + b"X: y\r\n" * 10_000,
    "200 and then no TLS": b"HTTP/1.1 200 Made\r\n\r\nhello, this is not TLS",
}


@pytest.mark.parametrize("case", CONNECT_ANSWERS)
def test_a_tunnel_that_is_refused_is_told_of(web, monkeypatch, ca_file, case):
    """Whatever the proxy says instead."""
    with forward_proxy({HOST: web.port}) as proxy:
        proxy.connect_answer = CONNECT_ANSWERS[case]
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with pytest.raises(UnavailableError):
            read(f"https://{HOST}", ca_file=ca_file)
        assert len(proxy.targets) <= 5
    assert [] == web.requests


def test_a_proxy_that_is_down_is_told_of(monkeypatch):
    """By its name and the variables."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with pytest.raises(UnavailableError, match=r"the proxy 127\.0\.0\.1:9 cannot be reached") as caught:
        read(f"http://{HOST}")
    assert "HTTP_PROXY" in caught.value.hint


def test_this_machine_is_asked_without_a_proxy(web, monkeypatch):
    """Or else a proxy would be sent what belongs to an edge here."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert DATA == read(web.url)


# -- certificates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ca_file", "SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_an_authority_of_ones_own_is_trusted_when_told_so(web, authority, ca_file, how, monkeypatch, tmp_path):
    """By option or variable."""
    if how == "SSL_CERT_DIR":
        if not shutil.which("openssl"):
            pytest.skip("no openssl here, which names the files of such a folder")
        folder = tmp_path / "certs"
        folder.mkdir()
        authority.cert_pem.write_to_path(str(folder / f"{_subject_hash(ca_file)}.0"))
        monkeypatch.setenv(how, str(folder))
    elif how == "SSL_CERT_FILE":
        monkeypatch.setenv(how, ca_file)
    with tls_front(web.port, context(authority, "127.0.0.1")) as front:
        assert DATA == read(f"https://127.0.0.1:{front.port}", **({"ca_file": ca_file} if how == "ca_file" else {}))


def _subject_hash(ca_file):
    """The file name that OpenSSL looks for in a folder of certificates."""
    done = subprocess.run(["openssl", "x509", "-subject_hash", "-noout", "-in", ca_file], capture_output=True, check=True)
    return done.stdout.decode().strip()


DISTRUSTED = {
    "an unknown authority": ("unknown", "127.0.0.1", {}),
    "another name": ("ours", "other.example", {}),
    "expired": ("ours", "127.0.0.1", {"not_after": "past"}),
}


@pytest.mark.parametrize("case", DISTRUSTED)
def test_a_certificate_that_does_not_prove_the_edge_ends_it(web, authority, ca_file, case):
    """Without a second try, without a byte of the request, and with words for people."""
    import datetime as dt

    whose, name, options = DISTRUSTED[case]
    if options:
        options = {"not_before": dt.datetime(2020, 1, 1, tzinfo=dt.UTC), "not_after": dt.datetime(2020, 2, 1, tzinfo=dt.UTC)}
    signer = authority if whose == "ours" else trustme.CA()
    with tls_front(web.port, context(signer, name, **options)) as front:
        with pytest.raises(UnavailableError, match="certificate is not trusted") as caught:
            read(f"https://127.0.0.1:{front.port}", token="sesame", ca_file=ca_file)
        assert 1 == front.handshakes
    assert ("ca_file" in caught.value.hint, []) == (True, web.requests)


def test_old_TLS_is_refused(web, authority, ca_file):  # noqa: N802 - its name
    """1.1 and before."""
    old = context(authority, "127.0.0.1")
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with tls_front(web.port, old) as front, pytest.raises(UnavailableError, match="no TLS connection"):
        read(f"https://127.0.0.1:{front.port}", ca_file=ca_file)


def test_a_port_without_TLS_is_told_of(web, ca_file):  # noqa: N802 - its name
    """A common mistake."""
    with pytest.raises(UnavailableError, match=r"no TLS connection|broke off"):
        read(f"https://127.0.0.1:{web.port}", ca_file=ca_file)


@pytest.mark.parametrize("file", ["missing.pem", "empty.pem"])
def test_a_ca_file_that_is_none_is_refused(tmp_path, file):
    """Before anybody is asked."""
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(UsageError, match=file):
        EdgeSource("https://edge.example", ca_file=str(tmp_path / file))


# -- redirects ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_with_the_token(web, status):
    """Nor without it: where objects lie is for the user to say."""

    def answer(number, head, client):
        client.sendall(b"HTTP/1.1 %d There\r\nLocation: %s/x\r\nContent-Length: 0\r\n\r\n" % (status, web.url.encode()))
        return True

    with scripted(answer) as server, contextlib.closing(EdgeSource(server.url, "sesame")) as source:
        for ask in (lambda: source.read(KEY, 10), lambda: source.match(ModelTag(bytes(16)), [Digest(bytes(32))])):
            with pytest.raises(UnavailableError, match="redirect") as caught:
                ask()
            assert "URL" in caught.value.hint
    assert [] == web.requests


def test_a_second_request_works_over_TLS_too(authority, ca_file, monkeypatch):  # noqa: N802 - its name
    """TLS's own messages after a handshake are not taken for an answer."""
    monkeypatch.setattr("kvcdn.client.network.edges.HEDGE_UNKNOWN_SECONDS", 0.1)

    def answer(number, head, client):
        if number == 0:
            return bool(client.recv(1))
        client.sendall(right_answer(head, DATA))
        return True

    with scripted(answer) as server, tls_front(server.port, context(authority, "127.0.0.1")) as front:
        assert DATA == read(f"https://127.0.0.1:{front.port}", ca_file=ca_file)
        assert 2 <= len(server.requests) <= 3
