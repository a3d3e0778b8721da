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


@contextlib.contextmanager
def kept_urls(count: int) -> Iterator[list[str]]:
    """URLs on ports of 127.0.0.1 that nobody is given, while the context lasts, but who asks for them by number.

    A port that is bound and not listened at is free for whoever binds it as servers do (SO_REUSEADDR), and for nobody else.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [f"http://127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def cache_of(folder: Path, url: str) -> Path:
    """Where the edge `url` of a site in `folder` keeps objects."""
    return folder / url.rpartition(":")[2]


@contextlib.contextmanager
def running_site(origin: str, folder: Path, count: int, **settings: Any) -> Iterator[dict[str, RunningEdge]]:
    """`count` edges by URL, all with the same list of peers."""
    with contextlib.ExitStack() as stack:
        urls = stack.enter_context(kept_urls(count))
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
