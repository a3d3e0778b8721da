"""Sites: several edges in processes of their own that are each other's peers."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcdn.edge.launch import RunningEdge
from kvcdn.rendezvous import Contender
from support.edge_process import object_files, running_edge, settle


def free_urls(count: int) -> list[str]:
    """URLs on ports of 127.0.0.1 that nobody has just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"http://127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def cache_of(folder: Path, url: str) -> Path:
    """Where the edge `url` of a site in `folder` keeps objects."""
    return folder / url.rpartition(":")[2]


@contextlib.contextmanager
def running_site(origin: str, folder: Path, count: int, **settings: Any) -> Iterator[dict[str, RunningEdge]]:
    """`count` edges by URL, all with the same list of peers."""
    urls = free_urls(count)
    with contextlib.ExitStack() as stack:
        edges = {}
        for url in urls:
            given = {"listen": url.removeprefix("http://"), "peers": urls, "self": url, **settings}
            edges[url] = stack.enter_context(running_edge(origin, cache_of(folder, url), **given))
        yield edges


def order(urls: list[str], key: str) -> list[str]:
    """The edges `urls`, the one first that is the first to keep `key`."""
    return sorted(urls, key=lambda url: Contender(url).weight(key), reverse=True)


def copies(site: Mapping[str, RunningEdge], folder: Path) -> Counter[str]:
    """How many edges of a site in `folder` keep each object, by its address, once no edge fills any more."""
    for edge in site.values():
        settle(edge.url)
    return Counter(path.name[:64] for url in site for path in object_files(cache_of(folder, url)))
