"""The edge among programs that are not ours: nginx that caches and slices before it, curl, an HTTP linter; and its sockets."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcdn.access.listening import ListenAddress
from kvcdn.cli.bench.nginx import nginx_path, running_nginx
from kvcdn.edge.launch import RunningEdge
from kvcdn.errors import UnavailableError
from kvcdn.stores.folder import FolderStore
from support.blocks import Document, make_document
from support.edge_process import ask, metric, origin_gets, running_edge

needs_nginx = pytest.mark.skipif(nginx_path() is None, reason="there is no nginx (apt-get install nginx-light)")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")

NEEDED_ALL_THE_SAME = {"STORE_PUBLIC_UNNECESSARY"}
"""`public` lets caches keep answers to requests that carry a token (RFC 9111 section 3.5), of which the linter sends none."""

REDBOT = Path(__file__).parents[1] / ".venv-redbot" / "bin" / "redbot"
"""In an environment of its own, which `make peers` makes: what it needs would change what urllib3 asks servers for."""

CACHING = """
    proxy_cache_path {folder}/cache levels=1:2 keys_zone=kvcdn:1m max_size=100m;
"""

SLICING = """
    location / {{
        slice 64k;
        proxy_cache kvcdn;
        proxy_cache_key $uri$slice_range;
        proxy_cache_valid 200 206 1h;
        proxy_set_header Range $slice_range;
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_pass {upstream};
    }}
"""


@pytest.fixture(scope="module")
def document() -> Document:
    return make_document(tokens=1500)


@pytest.fixture(scope="module")
def origin(document: Document, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("peers")
    document.publish(FolderStore(folder / "origin"))
    return str(folder / "origin")


@pytest.fixture(scope="module")
def edge(origin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEdge]:
    with running_edge(origin, tmp_path_factory.mktemp("edge") / "cache") as running:
        yield running


@needs_nginx
def test_nginx_caches_and_slices_a_cold_edge(origin: str, document: Document, tmp_path: Path) -> None:
    """Whole objects and ranges through slices of 64 kB, by many at once, before nginx has them and after; one fill each."""
    keys = list(document.objects)
    with running_edge(origin, tmp_path / "cache") as edge:
        server, http = SLICING.format(upstream=edge.url), CACHING.format(folder=tmp_path)
        with running_nginx(tmp_path / "nginx", server, http) as nginx, ThreadPoolExecutor(8) as pool:

            def read(number: int) -> bool:
                key = keys[number % len(keys)]
                data = document.objects[key]
                if number % 3:
                    return ask(nginx, f"/{key}").body == data
                start, stop = len(data) // 5, len(data) // 2
                reply = ask(nginx, f"/{key}", headers={"Range": f"bytes={start}-{stop - 1}"})
                return (206, data[start:stop]) == (reply.status, reply.body)

            assert [True] * 48 == list(pool.map(read, range(48)))
            assert len(keys) == origin_gets(edge.url)
            asked = metric(edge.url, 'kvcdn_edge_requests_total{cache="hit",route="object",status="206"}')
            assert [True] * 12 == list(pool.map(read, range(12)))
            assert asked == metric(edge.url, 'kvcdn_edge_requests_total{cache="hit",route="object",status="206"}')


@needs_nginx
def test_nginx_over_a_unix_socket_hides_a_restart(origin: str, document: Document, tmp_path: Path) -> None:
    """`proxy_pass http://unix:...`; after the edge has ended and begun again at the same path, the same nginx serves on."""
    path = tmp_path / "edge.sock"
    server = f"location / {{ proxy_pass http://unix:{path}:; }}"
    key, data = next(iter(document.blocks.items()))
    with running_nginx(tmp_path / "nginx", server) as nginx:
        for _ in range(2):
            with running_edge(origin, tmp_path / "cache", listen=f"unix:{path}") as edge:
                assert f"unix:{path}" == edge.url
                assert data == ask(nginx, f"/{key}").body
                assert 0o660 == stat.S_IMODE(path.stat().st_mode)
            assert not path.exists()
            assert 502 == ask(nginx, f"/{key}").status


def test_a_socket_in_use_is_refused_and_a_dead_one_replaced(origin: str, tmp_path: Path) -> None:
    """Nobody's socket is taken from him; what a killed edge left behind is no obstacle."""
    path = tmp_path / "edge.sock"
    with (
        running_edge(origin, tmp_path / "a", listen=f"unix:{path}") as edge,
        pytest.raises(UnavailableError, match="ended with 5: error: cannot listen on unix:"),
        running_edge(origin, tmp_path / "b", listen=f"unix:{path}"),
    ):
        pass
    with running_edge(origin, tmp_path / "a", listen=f"unix:{path}") as edge:
        edge.process.kill()
        edge.process.wait()
    assert path.exists()
    with running_edge(origin, tmp_path / "a", listen=f"unix:{path}"), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: edge\r\nConnection: close\r\n\r\n")
        assert b" 200 " in client.recv(1000)


@pytest.mark.parametrize("text", ["unix:", "unix:relative", "unix:/" + "x" * 120])
def test_a_socket_has_an_absolute_path(text: str) -> None:
    """And one that the system can take."""
    with pytest.raises(ValueError, match="absolute path"):
        ListenAddress.parse(text)


def test_an_edge_listens_on_ipv6(origin: str, document: Document, tmp_path: Path) -> None:
    """[::1] is loopback as 127.0.0.1 is."""
    key, data = next(iter(document.blocks.items()))
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"IPv6 is switched off here, nothing can listen on ::1: {error}")
    with running_edge(origin, tmp_path / "cache", listen="[::1]:0") as edge:
        assert edge.url.startswith("http://[::1]:")
        assert data == ask(edge.url, f"/{key}").body


def _curl(*arguments: str) -> bytes:
    return subprocess.run(["curl", "-sS", "--noproxy", "*", *arguments], capture_output=True, check=True).stdout


@needs_curl
def test_curl_reads_resumes_and_revalidates(edge: RunningEdge, document: Document, tmp_path: Path) -> None:
    """Whole, by range, several ranges (which may be ignored), resumed at an offset, and 304 by entity tag."""
    key, data = next(iter(document.blocks.items()))
    url = f"{edge.url}/{key}"
    assert data == _curl(url)
    assert data[5:100] == _curl("--range", "5-99", url)
    assert data[-7:] == _curl("--range", "-7", url)
    assert data == _curl("--range", "0-1,5-6", url)
    part = tmp_path / "part"
    part.write_bytes(data[:1000])
    _curl("--continue-at", "-", "--output", str(part), url)
    assert data == part.read_bytes()
    tag = tmp_path / "tag"
    _curl("--etag-save", str(tag), "--output", "/dev/null", url)
    assert b"304" == _curl("--etag-compare", str(tag), "--output", "/dev/null", "--write-out", "%{http_code}", url)
    assert f"content-length: {len(data)}".encode() in _curl("--head", url).lower()


@needs_curl
def test_no_answer_invites_other_sites(edge: RunningEdge, document: Document) -> None:
    """Cross-origin requests get no leave: no Access-Control header, and no preflight."""
    url = f"{edge.url}/{document.manifest_key}"
    answer = _curl("--include", "--header", "Origin: https://example.org", url)
    assert b"access-control" not in answer.lower()
    preflight = (
        "--request",
        "OPTIONS",
        "--header",
        "Access-Control-Request-Method: GET",
        "--header",
        "Origin: https://example.org",
    )
    assert b"405" == _curl(*preflight, "--output", "/dev/null", "--write-out", "%{http_code}", url)


@pytest.mark.skipif(not REDBOT.exists(), reason="there is no .venv-redbot (make peers makes it, with redbot 2.7.1)")
@pytest.mark.parametrize("what", ["block", "manifest", "missing", "nothing"])
def test_redbot_finds_nothing_to_warn_of(edge: RunningEdge, document: Document, what: str) -> None:
    """A public linter, which also tries ranges and conditions, is content."""
    zeros = f"v1/{'0' * 32}/manifests/{'0' * 64}"
    path = {"block": next(iter(document.blocks)), "manifest": document.manifest_key, "missing": zeros, "nothing": "x"}[what]
    ask(edge.url, f"/{path}")
    done = subprocess.run([REDBOT, "-o", "har", f"{edge.url}/{path}"], capture_output=True, check=True)
    notes = json.loads(done.stdout)["log"]["entries"][0]["_red_messages"]
    assert notes
    warnings = [note for note in notes if note["level"] in ("WARN", "BAD")]
    assert [] == [note for note in warnings if note["note_id"] not in NEEDED_ALL_THE_SAME]


def test_parts_asked_for_in_parallel_make_the_object(edge: RunningEdge, document: Document) -> None:
    """As S3's clients read: size from HEAD, then parts on connections of their own, guarded by If-Match."""
    key, data = list(document.blocks.items())[-1]
    head = ask(edge.url, f"/{key}", "HEAD")
    size, tag, part = int(head.headers["Content-Length"]), head.headers["ETag"], 40_000
    found: dict[int, bytes] = {}

    def read(start: int) -> None:
        headers = {"Range": f"bytes={start}-{min(start + part, size) - 1}", "If-Match": tag}
        found[start] = ask(edge.url, f"/{key}", headers=headers).body

    threads = [threading.Thread(target=read, args=(start,)) for start in range(0, size, part)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert data == b"".join(found[start] for start in sorted(found))
