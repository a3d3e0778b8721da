"""Edges for tests: a real process, or a thread before a store that the test watches; and a small HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

from kvcdn.edge.launch import RunningEdge, launch_edge
from kvcdn.edge.serve import ServingEdge, serving
from kvcdn.edge.settings import load_settings
from kvcdn.errors import UnavailableError
from kvcdn.store import BlobInfo, BlobStore
from support.waiting import WAIT_SECONDS, until


@dataclass(frozen=True)
class Reply:
    """One HTTP response, read to its end."""

    status: int
    headers: Message
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def connect(url: str) -> http.client.HTTPConnection:
    """A keep-alive connection to an edge."""
    return http.client.HTTPConnection(url.removeprefix("http://"), timeout=WAIT_SECONDS)


def exchange(
    connection: http.client.HTTPConnection,
    path: str,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> Reply:
    """One request on `connection`."""
    connection.request(method, path, body=body, headers=dict(headers or {}))
    response = connection.getresponse()
    return Reply(response.status, response.headers, response.read())


def ask(
    url: str,
    path: str,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> Reply:
    """One request on a connection of its own."""
    with contextlib.closing(connect(url)) as connection:
        return exchange(connection, path, method, headers, body)


def ask_part(url: str, path: str, headers: Mapping[str, str] | None = None) -> Reply:
    """As `ask` with GET, but what came before the connection broke, if it did."""
    with contextlib.closing(connect(url)) as connection:
        response = begin(connection, path, headers)
        return Reply(response.status, response.headers, what_comes(response))


def begin(
    connection: http.client.HTTPConnection, path: str, headers: Mapping[str, str] | None = None
) -> http.client.HTTPResponse:
    """A GET whose answer has begun."""
    connection.request("GET", path, headers=dict(headers or {}))
    return connection.getresponse()


def what_comes(response: http.client.HTTPResponse) -> bytes:
    """The rest of a body, as far as it comes before the connection breaks."""
    body = bytearray()
    with contextlib.suppress(ConnectionError, http.client.IncompleteRead):
        while piece := response.read1(1 << 16):
            body += piece
    return bytes(body)


def settle(url: str) -> None:
    """Waits until no fill runs: readers have the last byte before the disk has made it durable."""
    until(lambda: not metric(url, "kvcdn_edge_fills_running"))


def ask_match(url: str, tag: object, addresses: Sequence[str]) -> Reply:
    """A match of `addresses`."""
    return ask(url, "/v1/match", "POST", body=json.dumps({"addresses": list(addresses), "model": str(tag)}).encode())


def metric(url: str, sample: str) -> float:
    """The value of one line of /metrics, such as `kvcdn_edge_origin_requests_total{operation="get"}`; 0 where there is none."""
    shown = ask(url, "/metrics")
    assert shown.status == 200, shown
    for line in shown.body.decode().splitlines():
        name, _, value = line.rpartition(" ")
        if name == sample:
            return float(value)
    return 0.0


def origin_gets(url: str) -> float:
    """Objects that the edge asked its origin for."""
    return metric(url, 'kvcdn_edge_origin_requests_total{operation="get"}')


def origin_stats(url: str) -> float:
    """Lookups that the edge asked its origin for."""
    return metric(url, 'kvcdn_edge_origin_requests_total{operation="stat"}')


def disk_bytes(cache_dir: Path) -> int:
    """Bytes that files of objects, complete or not, take at some instant of the call, or fewer; exact while nothing changes.

    Walking a folder is not one instant. Names are never used twice, so what two walks both find was there between them.
    """
    first, second = _sizes(cache_dir), _sizes(cache_dir)
    return sum(size for path, size in first.items() if path in second)


def _sizes(cache_dir: Path) -> dict[Path, int]:
    sizes = {}
    for folder, _, names in os.walk(cache_dir):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if name != "lock" and not name.startswith(("index", "pins")):
                    sizes[Path(folder, name)] = os.lstat(f"{folder}/{name}").st_size
    return sizes


def object_files(cache_dir: Path) -> list[Path]:
    """The files of complete objects."""
    return sorted(path for path in (cache_dir / "objects").rglob("*") if path.is_file())


@contextlib.contextmanager
def running_edge(origin_url: str, cache_dir: Path, **settings: Any) -> Iterator[RunningEdge]:
    """A real edge process on a free port of 127.0.0.1."""
    with launch_edge(origin=origin_url, cache_dir=cache_dir, **settings) as edge:
        yield edge


class WatchedStore:
    """A store as an edge's origin, seen by the test: it counts, can hold streams back, and can be down."""

    def __init__(self, inner: BlobStore) -> None:
        self.inner = inner
        self.streams: list[str] = []
        self.stats: list[str] = []
        self.down = False
        self.go = threading.Event()
        """Streams wait for this behind their first piece."""
        self.go.set()
        self.streaming = threading.Event()
        """Set once a stream has begun."""

    @property
    def url(self) -> str:
        return self.inner.url

    def stat(self, key: str) -> BlobInfo | None:
        self.stats.append(key)
        self._refuse_if_down(key)
        return self.inner.stat(key)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.inner.read(key, start, length)

    def stream(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        self.streams.append(key)
        self._refuse_if_down(key)
        return self._pieces(key, self.inner.stream(key, start, length))

    def create(self, key: str, pieces: Sequence[bytes]) -> bool:
        return self.inner.create(key, pieces)

    def list(self, prefix: str, after: str = "") -> Iterator[BlobInfo]:
        return self.inner.list(prefix, after)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def _pieces(self, key: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
        self.streaming.set()
        for piece in pieces:
            middle = len(piece) // 2
            yield piece[:middle]
            self.go.wait(WAIT_SECONDS)
            self._refuse_if_down(key)
            yield piece[middle:]

    def _refuse_if_down(self, key: str) -> None:
        if self.down:
            raise UnavailableError(f"{self.url}: {key} is out of reach")


@contextlib.contextmanager
def edge_in_thread(store: BlobStore, cache_dir: Path, *more: BlobStore, **settings: Any) -> Iterator[ServingEdge]:
    """An edge before `store`, and `more` behind it, on real sockets, in a thread of this process."""
    checked = load_settings(None, {"origin": "memory:", "cache_dir": cache_dir, "listen": "127.0.0.1:0", **settings})
    started: list[ServingEdge] = []
    failed: list[BaseException] = []
    up = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def live() -> None:
        async with serving(checked, store, *more) as edge:
            started.append(edge)
            up.set()
            await stop.wait()

    def work() -> None:
        try:
            loop.run_until_complete(live())
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            failed.append(error)
        finally:
            loop.close()
            up.set()

    thread = threading.Thread(target=work, name="edge under test")
    thread.start()
    assert up.wait(WAIT_SECONDS)
    try:
        if failed:
            raise failed[0]
        yield started[0]
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
