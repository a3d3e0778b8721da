"""A site: edges in processes of their own that share the objects, before an origin that counts."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcdn.edge.launch import RunningEdge
from kvcdn.stores.folder import FolderStore
from support.blocks import Document, make_document
from support.edge_process import ask, ask_match, metric, object_files, origin_gets, running_edge, settle
from support.site import cache_of, copies, kept_urls, order, running_site
from support.waiting import until

PEERS_ASKED = "kvcdn_edge_peer_requests_total"

TOKEN = "what-readers-of-this-site-show"

PEER_TOKEN = "what-peers-of-this-site-show-each-other"


@pytest.fixture(scope="module")
def document() -> Document:
    return make_document(tokens=5000)


@pytest.fixture(scope="module")
def origin(document: Document, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEdge]:
    """An edge before a folder: its requests are those that the site sends to its origin."""
    folder = tmp_path_factory.mktemp("site-origin")
    document.publish(FolderStore(folder / "origin"))
    with running_edge(str(folder / "origin"), folder / "far") as running:
        yield running


def served(edge: RunningEdge) -> float:
    """Objects, or parts of them, that an edge sent."""
    found = ask(edge.url, "/metrics").body.decode().splitlines()
    lines = [line for line in found if line.startswith("kvcdn_edge_requests_total{") and 'route="object"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines if 'status="200"' in line or 'status="206"' in line)


def read_anywhere(edges: list[RunningEdge], document: Document, seed: int) -> list[bool]:
    """Every object, each at some edge, whole or a range of it; whether each came right."""
    rng, right = random.Random(seed), []
    keys = list(document.objects)
    for key in rng.sample(keys, len(keys)):
        data, edge = document.objects[key], rng.choice(edges)
        if rng.random() < 0.5:
            right.append(data == ask(edge.url, f"/{key}").body)
        else:
            start = rng.randrange(len(data))
            reply = ask(edge.url, f"/{key}", headers={"Range": f"bytes={start}-{start + 9999}"})
            right.append((206, data[start : start + 10_000]) == (reply.status, reply.body))
    return right


def test_readers_anywhere_cost_the_origin_one_fetch_an_object(origin: RunningEdge, document: Document, tmp_path: Path) -> None:
    """Five edges, 24 readers of everything at once: one request an object at the origin, at most two copies of each."""
    before = served(origin)
    with running_site(origin.url, tmp_path, 5) as site, ThreadPoolExecutor(8) as pool:
        edges = list(site.values())
        results = pool.map(lambda seed: read_anywhere(edges, document, seed), range(24))
        assert [[True] * len(document.objects)] * 24 == list(results)
        assert len(document.objects) == served(origin) - before
        assert len(document.objects) == sum(origin_gets(edge.url) for edge in edges)
        assert sum(metric(edge.url, PEERS_ASKED) for edge in edges) >= len(document.objects)
        kept = copies(site, tmp_path)
        assert {key[-64:] for key in document.objects} == set(kept)
        assert max(kept.values()) <= 2


def test_a_reader_of_ranges_costs_the_owner_one_request(origin: RunningEdge, document: Document, tmp_path: Path) -> None:
    """At an edge that does not keep it, a block stays long enough for all its ranges, and takes no file's name."""
    with running_site(origin.url, tmp_path, 4) as site:
        key, data = next(iter(document.blocks.items()))
        first, _, _, last = order(list(site), key)
        parts = []
        for start in range(0, len(data), 20_000):
            reply = ask(last, f"/{key}", headers={"Range": f"bytes={start}-{start + 19_999}"})
            assert 206 == reply.status
            parts.append(reply.body)
        assert data == b"".join(parts)
        assert (1, 0) == (metric(last, PEERS_ASKED), origin_gets(last))
        assert {"1"} == {str(number) for number in copies(site, tmp_path).values()}
        assert 1 == served(site[first])


def test_a_document_is_warmed_at_any_edge(origin: RunningEdge, document: Document, tmp_path: Path) -> None:
    """All of it is here, as an order sees it, once each object is at an edge that keeps it."""
    asked = json.dumps({"model": str(document.model.tag), "manifest": document.manifest_key[-64:]}).encode()
    admin = {"admin_listen": "127.0.0.1:0"}
    with running_site(origin.url, tmp_path, 4, **admin) as site:
        edge = next(iter(site.values()))
        objects = len(document.objects)

        def waiting() -> int:
            reply = ask(edge.admin_url, "/v1/warm", "POST", {"Content-Type": "application/json"}, asked)
            assert "" == reply.json()["trouble"]
            return reply.json()["waiting"]

        until(lambda: not waiting())
        done = ask(edge.admin_url, "/v1/warm", "POST", {"Content-Type": "application/json"}, asked)
        told = done.json()
        # Of what this edge keeps itself: an object once or twice for the site.
        assert 0 <= told.pop("bytes") <= sum(map(len, document.objects.values()))
        assert (200, {"objects": objects, "here": objects, "waiting": 0, "trouble": ""}) == (done.status, told)
        for key in document.objects:
            first = site[order(list(site), key)[0]]
            settle(first.admin_url)
            assert any(path.name.startswith(key[-64:]) for path in object_files(cache_of(tmp_path, first.url)))


def test_a_killed_owner_is_passed_over(origin: RunningEdge, document: Document, tmp_path: Path) -> None:
    """kill -9 of an edge while all are read: the others go on, every byte right, and find each object once more at most."""
    with running_site(origin.url, tmp_path, 4) as site, ThreadPoolExecutor(6) as pool:
        victim, *rest = list(site.values())
        running = [pool.submit(read_anywhere, rest, document, seed) for seed in range(6)]
        time.sleep(0.05)
        victim.process.kill()
        victim.process.wait()
        running += [pool.submit(read_anywhere, rest, document, seed) for seed in range(6, 24)]
        assert [[True] * len(document.objects)] * 24 == [one.result() for one in running]
        for edge in rest:
            settle(edge.url)
        assert sum(origin_gets(edge.url) for edge in rest) <= 2 * len(document.objects)


def test_an_owner_that_hangs_is_passed_over(origin: RunningEdge, document: Document, tmp_path: Path) -> None:
    """It accepts connections and says nothing: after five seconds the next is asked."""
    with running_site(origin.url, tmp_path, 2) as site:
        key, data = next(iter(document.blocks.items()))
        first, second = order(list(site), key)
        site[first].process.send_signal(signal.SIGSTOP)
        try:
            assert data == ask(second, f"/{key}").body
            assert (1, 1) == (metric(second, PEERS_ASKED), origin_gets(second))
        finally:
            site[first].process.send_signal(signal.SIGCONT)


def test_a_site_serves_on_without_its_origin(document: Document, tmp_path: Path) -> None:
    """What any edge keeps is matched and served at all of them while the origin is gone."""
    document.publish(FolderStore(tmp_path / "origin"))
    with ExitStack() as stack:
        far = stack.enter_context(running_edge(str(tmp_path / "origin"), tmp_path / "far"))
        site = stack.enter_context(running_site(far.url, tmp_path / "site", 3))
        urls = list(site)
        for key in document.objects:
            ask(order(urls, key)[0], f"/{key}")
        for url in urls:
            settle(url)
        far.process.kill()
        far.process.wait()
        for url in urls:
            # A peer that is slow to answer counts as one that does not: then it is asked again.
            deadline = time.monotonic() + 60
            while len(document.blocks) != (matched := ask_match(url, document.model.tag, document.addresses).json()["matched"]):
                assert time.monotonic() < deadline, matched
                time.sleep(0.1)
            assert document.blocks == {key: ask(url, f"/{key}").body for key in document.blocks}


def test_circles_are_refused(origin: RunningEdge, document: Document, tmp_path: Path) -> None:
    """Who comes first is asked by nobody before it; edges that all think they are the same one ask each other once."""
    key, data = next(iter(document.blocks.items()))
    with ExitStack() as stack:
        urls = stack.enter_context(kept_urls(3))
        for url in urls:
            given = {"listen": url.removeprefix("http://"), "peers": urls, "self": order(urls, key)[-1]}
            stack.enter_context(running_edge(origin.url, tmp_path / url[-5:], **given))
        assert [data] * 3 == [ask(url, f"/{key}").body for url in urls]
        reply = ask(urls[0], f"/{key}", headers={"Kvcdn-Peer": order(urls, key)[0]})
        assert 508 == reply.status
        assert b"is `self` right" in reply.body
        assert 200 == ask(urls[0], f"/{key}").status


def test_peers_show_a_token_of_their_own(origin: RunningEdge, document: Document, tmp_path: Path) -> None:
    """It is for reading objects and for nothing else; an edge that has another is passed over."""
    (tmp_path / "token").write_text(PEER_TOKEN)
    (tmp_path / "other").write_text(PEER_TOKEN[::-1])
    key, data = next(iter(document.blocks.items()))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with ExitStack() as stack:
        urls = order(stack.enter_context(kept_urls(3)), key)
        for url, file in zip(urls, ("token", "token", "other"), strict=True):
            given = {"listen": url.removeprefix("http://"), "peers": urls, "self": url, "token": TOKEN}
            stack.enter_context(running_edge(origin.url, tmp_path / url[-5:], peer_token_file=tmp_path / file, **given))
        assert 401 == ask(urls[1], f"/{key}").status
        assert [data] * 2 == [ask(url, f"/{key}", headers=headers).body for url in urls[1:]]

        def asked(url: str, name: str) -> str:
            lines = ask(url, "/metrics", headers=headers).body.decode().splitlines()
            return next(line.rpartition(" ")[2] for line in lines if line.startswith(name))

        gets = 'kvcdn_edge_origin_requests_total{operation="get"}'
        assert ["1.0", "1.0"] == [asked(urls[0], gets), asked(urls[2], gets)]
        assert "1.0" == asked(urls[1], PEERS_ASKED)
        peer = {"Authorization": f"Bearer {PEER_TOKEN}", "Content-Type": "application/json"}
        assert 200 == ask(urls[0], f"/{key}", headers=peer).status
        assert 403 == ask(urls[0], "/metrics", headers=peer).status
        assert 403 == ask(urls[0], "/v1/purge", "POST", headers=peer, body=json.dumps({"all": True}).encode()).status


def test_an_owner_with_more_than_its_share_is_passed_over(tmp_path: Path) -> None:
    """Forty readers who do not read on are more than the site's mean: the owner says so, and the asking edge keeps a copy."""
    document = make_document(tokens=1024, layers=16, heads=4, dim=64, seed=5)
    document.publish(FolderStore(tmp_path / "origin"))
    key, data = next(iter(document.blocks.items()))
    with running_site(str(tmp_path / "origin"), tmp_path / "site", 2) as site, ExitStack() as stack:
        first, second = order(list(site), key)
        ask(first, f"/{key}")
        for _ in range(40):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", site[first].port))
            reader.sendall(f"GET /{key} HTTP/1.1\r\nHost: edge\r\n\r\n".encode())
            reader.recv(100)
        assert data == ask(second, f"/{key}").body
        assert (1, 1) == (metric(second, PEERS_ASKED), origin_gets(second))
        refused = 'kvcdn_edge_requests_total{cache="refused",route="object",status="503"}'
        assert 1 == metric(first, refused)
        assert data == ask(first, f"/{key}").body


def test_a_reader_stops_no_fill_of_others(origin: RunningEdge, document: Document, tmp_path: Path) -> None:
    """Edges that ask each other for different objects at the same moment do not wait for each other."""
    with running_site(origin.url, tmp_path, 2) as site:
        urls = list(site)
        done: list[bool] = []

        def read(url: str) -> None:
            done.extend(document.objects[key] == ask(url, f"/{key}").body for key in document.objects)

        threads = [threading.Thread(target=read, args=(url,)) for url in urls * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [True] * (6 * len(document.objects)) == done
