"""Administration of an edge: what is purged is gone when the answer is here, and orders are read strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from test_edge_access import KEY, bearer

from kvcdn.access.grant import Grant, Scope
from kvcdn.edge.http.body import MAX_BODY_BYTES
from kvcdn.edge.serve import ServingEdge
from kvcdn.stores.memory import MemoryStore
from support import edge_process
from support.blocks import Document
from support.command import kvcdn
from support.edge_process import Reply, WatchedStore, ask, ask_part, metric, object_files, settle
from support.waiting import WAIT_SECONDS, until

ORDERS = ("/v1/purge", "/v1/warm")

JSON = {"Content-Type": "application/json"}


def edge_in_thread(store: WatchedStore, cache: Path, **more: Any) -> AbstractContextManager[ServingEdge]:
    """An edge with an address for administration."""
    return edge_process.edge_in_thread(store, cache, admin_listen="127.0.0.1:0", **more)


def order(url: str, path: str, value: Any, headers: dict[str, str] | None = None) -> Reply:
    return ask(url, path, "POST", {**JSON, **(headers or {})}, json.dumps(value).encode())


def fill(edge: ServingEdge, document: Document, headers: dict[str, str] | None = None) -> None:
    """Has the edge keep all of the document: readers have the last byte before the disk has made it durable."""
    for key in document.objects:
        assert 200 == ask(edge.url, "/" + key, headers=headers).status
    until(lambda: len(edge.cache) >= len(document.objects))


@pytest.mark.parametrize("by", ["addresses", "models", "all"])
def test_what_is_purged_is_gone(document: Document, store: WatchedStore, tmp_path: Path, by: str) -> None:
    """Once the answer is here, no file is left, nor after a restart; and it comes back when somebody asks."""
    tag = str(document.model.tag)
    asked = {"addresses": {"addresses": document.addresses[:2]}, "models": {"models": [tag]}, "all": {"all": True}}[by]
    objects = document.objects if by != "addresses" else {key: document.blocks[key] for key in list(document.blocks)[:2]}
    with edge_in_thread(store, tmp_path / "cache") as edge:
        fill(edge, document)
        reply = order(edge.admin_url, "/v1/purge", asked)
        assert {"objects": len(objects), "bytes": sum(map(len, objects.values()))} == reply.json()
        left = len(document.objects) - len(objects)
        assert left == len(object_files(tmp_path / "cache"))
        assert len(objects) == metric(edge.admin_url, "kvcdn_edge_purged_objects_total")
        assert {"objects": 0, "bytes": 0} == order(edge.admin_url, "/v1/purge", asked).json()
    with edge_in_thread(store, tmp_path / "cache") as edge:
        assert left == len(edge.cache)
        key = next(iter(document.blocks))
        assert document.blocks[key] == ask(edge.url, "/" + key).body


def test_others_stay(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """Unknown addresses and models take nothing with them."""
    with edge_in_thread(store, tmp_path / "cache") as edge:
        fill(edge, document)
        for asked in ({"addresses": ["00" * 32]}, {"models": ["00" * 16]}):
            assert {"objects": 0, "bytes": 0} == order(edge.admin_url, "/v1/purge", asked).json()
        assert len(document.objects) == len(object_files(tmp_path / "cache"))


def test_a_running_fill_is_passed_on_and_not_kept(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """Who waits for the object gets it, whole; the next who asks has it filled anew, and kept."""
    key, data = next(iter(document.blocks.items()))
    store.go.clear()
    with edge_in_thread(store, tmp_path / "cache") as edge, ThreadPoolExecutor(1) as pool:
        reader = pool.submit(ask_part, edge.url, "/" + key)
        assert store.streaming.wait(WAIT_SECONDS)
        assert 200 == order(edge.admin_url, "/v1/purge", {"all": True}).status
        store.go.set()
        assert data == reader.result().body
        settle(edge.admin_url)
        assert [] == object_files(tmp_path / "cache")
        assert data == ask(edge.url, "/" + key).body
        settle(edge.admin_url)
        assert 1 == len(object_files(tmp_path / "cache"))
    assert [key] * 2 == store.streams


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("idle")
    (folder / "issuers").write_text(f"{KEY.public.text}\n", encoding="utf-8")
    with edge_in_thread(WatchedStore(MemoryStore()), folder / "cache", issuers_file=folder / "issuers") as edge:
        yield f"{edge.url} {edge.admin_url}"


@pytest.mark.parametrize("path", ORDERS)
@pytest.mark.parametrize("scope", list(Scope))
def test_an_order_needs_its_scope(idle: str, path: str, scope: Scope) -> None:
    """And none else; the address of objects does not know it at all."""
    url, admin = idle.split()
    headers, fits = bearer(Grant("op", frozenset((scope,)))), path == f"/v1/{scope}"
    assert (400 if fits else 403) == order(admin, path, {}, headers).status
    assert 404 == order(url, path, {}, headers).status
    assert 401 == order(admin, path, {}).status
    if fits:
        assert 405 == ask(admin, path, headers=headers).status


@pytest.mark.parametrize("path", ORDERS)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b'{"all": false}', 400),
        (b'{"all": 1}', 400),
        (b'{"all": true, "all": true}', 400),
        (b'{"all": true, "models": []}', 400),
        (b'{"addresses": []}', 400),
        (b'{"addresses": ["../../lock"]}', 400),
        (b'{"addresses": ["' + b"AB" * 32 + b'"]}', 400),
        (b'{"addresses": [7]}', 400),
        (b'{"models": "0123"}', 400),
        (b'{"models": ["*"]}', 400),
        (b'{"what": true}', 400),
        (b'{"model": "' + b"0" * 32 + b'"}', 400),
        (b'{"model": "' + b"0" * 32 + b'", "addresses": []}', 400),
        (b'{"model": "' + b"0" * 32 + b'", "addresses": ["../../lock"]}', 400),
        (b'{"model": "' + b"0" * 32 + b'", "manifest": null}', 400),
        (b'{"model": "../../index", "manifest": "' + b"0" * 64 + b'"}', 400),
        (b"[" * 100_000, 400),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
)
def test_a_bad_order_is_refused(idle: str, path: str, body: bytes, status: int) -> None:
    """With a status, a line, and nothing done."""
    admin = idle.split()[1]
    headers = {**JSON, **bearer(Grant("op", frozenset(Scope)))}
    assert status == ask(admin, path, "POST", headers, body).status


@pytest.mark.parametrize("path", ORDERS)
def test_who_only_reads_cannot_order(document: Document, store: WatchedStore, tmp_path: Path, path: str) -> None:
    """Where nobody needs a token and there is one address for all, such as behind a proxy on loopback."""
    with edge_process.edge_in_thread(store, tmp_path / "cache") as edge:
        fill(edge, document)
        reply = order(edge.url, path, {"all": True})
        assert (403, True) == (reply.status, b"admin_listen" in reply.body)
        assert len(document.objects) == len(edge.cache)


@pytest.mark.parametrize("path", ORDERS)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_page_in_a_browser_cannot_order(
    document: Document, store: WatchedStore, tmp_path: Path, path: str, kind: str
) -> None:
    """On loopback nobody is asked for a token; what a page may send unasked has one of these types, and is refused."""
    with edge_in_thread(store, tmp_path / "cache") as edge:
        fill(edge, document)
        assert 415 == ask(edge.admin_url, path, "POST", {"Content-Type": kind}, b'{"all": true}').status
        assert 405 == ask(edge.admin_url, path, "OPTIONS").status
        assert len(document.objects) == len(edge.cache)


def test_a_tenant_purges_its_models_only(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """Objects of models that its token does not cover stay, whatever it asks for."""
    issuers = tmp_path / "issuers"
    issuers.write_text(f"{KEY.public.text}\n", encoding="utf-8")
    everything = bearer(Grant("op", frozenset(Scope)))
    with edge_in_thread(store, tmp_path / "cache", issuers_file=issuers) as edge:
        fill(edge, document, everything)
        other = bearer(Grant("other", frozenset((Scope.PURGE,)), models=("qwen3-*",)))
        for asked in ({"all": True}, {"models": [str(document.model.tag)]}, {"addresses": document.addresses}):
            assert {"objects": 0, "bytes": 0} == order(edge.admin_url, "/v1/purge", asked, other).json()
        own = bearer(Grant("own", frozenset((Scope.PURGE,)), models=(str(document.model.tag),)))
        assert len(document.objects) == order(edge.admin_url, "/v1/purge", {"all": True}, own).json()["objects"]


def warmed(edge: ServingEdge, asked: Any) -> dict[str, Any]:
    """The last answer, once nothing waits."""
    answers = []
    until(lambda: not (answers.append(order(edge.admin_url, "/v1/warm", asked).json()) or answers[-1]["waiting"]))
    return answers[-1]


@pytest.mark.parametrize("by", ["manifest", "addresses"])
def test_what_is_warmed_is_here(document: Document, store: WatchedStore, tmp_path: Path, by: str) -> None:
    """Fetched once each, in the background, however often it is asked for; then readers hit."""
    tag, manifest = str(document.model.tag), str(document.names.manifest_address)
    asked = {"model": tag} | ({"manifest": manifest} if by == "manifest" else {"addresses": document.addresses})
    objects = document.objects if by == "manifest" else document.blocks
    with edge_in_thread(store, tmp_path / "cache") as edge:
        first = order(edge.admin_url, "/v1/warm", asked)
        assert (202, len(objects)) == (first.status, first.json()["objects"])
        counts = {"objects": len(objects), "here": len(objects), "bytes": sum(map(len, objects.values()))}
        assert {**counts, "waiting": 0, "trouble": ""} == warmed(edge, asked)
        assert 200 == order(edge.admin_url, "/v1/warm", asked).status
        assert sorted(objects) == sorted(store.streams)
        store.down = True
        assert list(objects.values()) == [ask(edge.url, "/" + key).body for key in objects]


def test_what_cannot_be_warmed_is_told(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """A manifest that does not exist is a 404; a block is a trouble that the order names, and the others come."""
    tag = str(document.model.tag)
    with edge_in_thread(store, tmp_path / "cache") as edge:
        assert 404 == order(edge.admin_url, "/v1/warm", {"model": tag, "manifest": "00" * 32}).status
        answer = warmed(edge, {"model": tag, "addresses": ["00" * 32, *document.addresses]})
        assert (len(document.blocks) + 1, len(document.blocks)) == (answer["objects"], answer["here"])
        assert "00" * 32 in answer["trouble"]


def test_what_has_no_room_is_told(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """It is passed through once, and not again and again by who waits for it."""
    with edge_in_thread(store, tmp_path / "cache", capacity=2 << 20) as edge:
        edge.cache._eviction.capacity = 4096
        answer = warmed(edge, {"model": str(document.model.tag), "addresses": document.addresses[:1]})
        assert (0, True) == (answer["here"], "no room" in answer["trouble"])
        warmed(edge, {"model": str(document.model.tag), "addresses": document.addresses[:1]})
    assert 1 == len(store.streams)


def test_a_tenant_warms_its_models_only(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """Another model's documents are not there for it, and cost the origin nothing."""
    issuers = tmp_path / "issuers"
    issuers.write_text(f"{KEY.public.text}\n", encoding="utf-8")
    other = bearer(Grant("other", frozenset((Scope.WARM,)), models=("qwen3-*",)))
    asked = {"model": str(document.model.tag), "manifest": str(document.names.manifest_address)}
    with edge_in_thread(store, tmp_path / "cache", issuers_file=issuers) as edge:
        assert 404 == order(edge.admin_url, "/v1/warm", asked, other).status
    assert [] == store.streams


def test_the_command_warms(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """`kvcdn warm` ends when all is there; what it cannot do is one line and an exit code."""
    tag, manifest = str(document.model.tag), str(document.names.manifest_address)
    with edge_in_thread(store, tmp_path / "cache") as edge:
        told = kvcdn("warm", manifest, "--model", tag, "--edge", edge.admin_url, "--json").json
        assert (len(document.objects), manifest) == (told["objects"], told["manifest"])
        assert len(document.objects) == len(edge.cache)
        assert 3 == kvcdn("warm", "00" * 32, "--model", tag, "--edge", edge.admin_url).code
        assert 2 == kvcdn("warm", "a document", "--model", tag, "--edge", edge.admin_url).code
    assert 5 == kvcdn("warm", manifest, "--model", tag, "--edge", edge.admin_url).code


def test_the_command_purges(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """`kvcdn purge` says how much went; what it cannot do is one line and an exit code."""
    with edge_in_thread(store, tmp_path / "cache", token="secret-of-these-tests") as edge:
        fill(edge, document, {"Authorization": "Bearer secret-of-these-tests"})
        where = ["--edge", edge.admin_url, "--token", "secret-of-these-tests"]
        first = kvcdn("purge", document.addresses[0], *where, "--json").json
        size = len(next(iter(document.blocks.values())))
        assert {"edge": edge.admin_url, "objects": 1, "bytes": size} == first
        assert len(document.objects) - 1 == kvcdn("purge", "--model", str(document.model.tag), *where, "--json").json["objects"]
        assert "0 objects" in kvcdn("purge", "--all", *where).out
        assert 4 == kvcdn("purge", "--all", "--edge", edge.admin_url).code
    assert 5 == kvcdn("purge", "--all", *where).code
    for wrong in ([], ["--all", "--model", "00" * 16], ["abc"], ["--model", "qwen3"]):
        assert 2 == kvcdn("purge", *wrong, *where).code
