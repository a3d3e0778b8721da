"""Pins: what stays whatever else is asked for, over restarts, within its share of the cap."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_edge_access import KEY, bearer
from test_edge_admin import edge_in_thread, order, warmed

from kvcdn.access.grant import Grant, Scope
from kvcdn.edge.disk.eviction import CHARGE_UNIT_BYTES, Eviction, charge
from kvcdn.edge.disk.ranking import Ranking
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document, make_document
from support.command import kvcdn
from support.edge_process import WatchedStore, ask, metric, object_files
from support.site import order as site_order
from support.site import running_site

UNIT = CHARGE_UNIT_BYTES


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """Five of 1.3 MB, of one model."""
    return [make_document(tokens=2500, seed=number) for number in range(5)]


@pytest.fixture
def store(documents: list[Document]) -> WatchedStore:
    store = WatchedStore(MemoryStore())
    for document in documents:
        document.publish(store)
    return store


def asked(document: Document, **more: object) -> dict[str, object]:
    return {"model": str(document.model.tag), "manifest": document.manifest_key[-64:], **more}


def read(url: str, *documents: Document) -> None:
    for document in documents:
        for key, data in document.objects.items():
            assert data == ask(url, f"/{key}").body


def kept(folder: Path, document: Document) -> set[str]:
    """Addresses of the document's objects that have a file."""
    return {path.name[:64] for path in object_files(folder)} & {key[-64:] for key in document.objects}


def test_what_is_pinned_stays(documents: list[Document], store: WatchedStore, tmp_path: Path) -> None:
    """In a cache for two and a half documents, while the others are read again and again; also over a restart."""
    pinned, *others = documents
    everything = {key[-64:] for key in pinned.objects}
    with edge_in_thread(store, tmp_path / "cache", capacity="3500kB") as edge:
        answer = warmed(edge, asked(pinned, pin=True))
        assert (len(pinned.objects), "") == (answer["here"], answer["trouble"])
        for _ in range(3):
            read(edge.url, *others)
        assert everything == kept(tmp_path / "cache", pinned)
        assert metric(edge.admin_url, "kvcdn_edge_evictions_total") > 0
        assert 1 == metric(edge.admin_url, "kvcdn_edge_pinned_documents")
        assert edge.cache.used <= edge.cache.capacity
    with edge_in_thread(store, tmp_path / "cache", capacity="3500kB") as edge:
        for _ in range(3):
            read(edge.url, *others)
        assert everything == kept(tmp_path / "cache", pinned)
        streams = len(store.streams)
        read(edge.url, pinned)
        assert streams == len(store.streams)
        assert {"documents": 1} == order(edge.admin_url, "/v1/unpin", {"manifests": [pinned.manifest_key[-64:]]}).json()
        for _ in range(6):
            read(edge.url, *others)
        assert everything != kept(tmp_path / "cache", pinned)


def test_pins_take_half_of_the_cap_at_most(documents: list[Document], store: WatchedStore, tmp_path: Path) -> None:
    """What does not fit is refused, with figures, and not pinned in part; pinning again is pinning once."""
    with edge_in_thread(store, tmp_path / "cache", capacity="6MB") as edge:
        for _ in range(2):
            assert 202 >= order(edge.admin_url, "/v1/warm", asked(documents[0], pin=True)).status
        assert 202 == order(edge.admin_url, "/v1/warm", asked(documents[1], pin=True)).status
        reply = order(edge.admin_url, "/v1/warm", asked(documents[2], pin=True))
        assert (409, True) == (reply.status, b"3000000 bytes" in reply.body)
        listed = ask(edge.admin_url, "/v1/pins").json()
        sizes = [sum(map(len, document.objects.values())) for document in documents[:2]]
        assert sizes == [pin["bytes"] for pin in listed["pins"]]
        assert (
            sum(charge(len(data)) for one in documents[:2] for data in one.objects.values())
            == listed["bytes"]
            <= listed["limit"]
        )
        assert {"documents": 2} == order(edge.admin_url, "/v1/unpin", {"all": True}).json()
        assert 202 >= order(edge.admin_url, "/v1/warm", asked(documents[2], pin=True)).status


def test_what_a_disk_lost_of_a_pin_is_fetched_again(documents: list[Document], store: WatchedStore, tmp_path: Path) -> None:
    """A file that is gone when the edge starts is here again soon, though no reader asked."""
    pinned = documents[0]
    with edge_in_thread(store, tmp_path / "cache", capacity="10MB") as edge:
        warmed(edge, asked(pinned, pin=True))
    lost = next(path for path in object_files(tmp_path / "cache") if path.name.startswith(pinned.addresses[1]))
    lost.unlink()
    (tmp_path / "cache" / "index").unlink()
    with edge_in_thread(store, tmp_path / "cache", capacity="10MB") as edge:
        assert "" == warmed(edge, asked(pinned))["trouble"]
        assert len(pinned.objects) == len(kept(tmp_path / "cache", pinned))
        assert 1 == len(ask(edge.admin_url, "/v1/pins").json()["pins"])


def test_damaged_pins_are_lost_and_the_edge_goes_on(documents: list[Document], store: WatchedStore, tmp_path: Path) -> None:
    """Whatever stands in the file of pins: the cache is served, nothing is pinned, and pinning works."""
    with edge_in_thread(store, tmp_path / "cache", capacity="10MB") as edge:
        warmed(edge, asked(documents[0], pin=True))
    (tmp_path / "cache" / "pins").write_bytes(b"what is this?" * 1000)
    with edge_in_thread(store, tmp_path / "cache", capacity="10MB") as edge:
        assert [] == ask(edge.admin_url, "/v1/pins").json()["pins"]
        read(edge.url, documents[0])
        warmed(edge, asked(documents[0], pin=True))
    with sqlite3.connect(tmp_path / "cache" / "pins") as database:
        assert [(1,)] == database.execute("SELECT count(*) FROM pins").fetchall()


def test_a_smaller_cap_unpins_the_latest(documents: list[Document], store: WatchedStore, tmp_path: Path) -> None:
    """The cap is hard: what pins take of it is bounded anew at each start."""
    with edge_in_thread(store, tmp_path / "cache", capacity="10MB") as edge:
        for document in documents[:3]:
            warmed(edge, asked(document, pin=True))
    with edge_in_thread(store, tmp_path / "cache", capacity="3MB") as edge:
        pins = ask(edge.admin_url, "/v1/pins").json()["pins"]
        assert [documents[0].manifest_key[-64:]] == [pin["manifest"] for pin in pins]
        assert edge.cache.used <= 3_000_000


def test_a_purge_unpins(documents: list[Document], store: WatchedStore, tmp_path: Path) -> None:
    """Otherwise it would come back by itself."""
    with edge_in_thread(store, tmp_path / "cache", capacity="10MB") as edge:
        for document in documents[:2]:
            warmed(edge, asked(document, pin=True))
        assert 1 == order(edge.admin_url, "/v1/purge", {"addresses": documents[0].addresses[:1]}).json()["objects"]
        pins = ask(edge.admin_url, "/v1/pins").json()["pins"]
        assert [documents[1].manifest_key[-64:]] == [pin["manifest"] for pin in pins]


def test_a_tenant_sees_and_unpins_its_models_only(documents: list[Document], store: WatchedStore, tmp_path: Path) -> None:
    """Addresses are capabilities: a list of them is shown for models that the token covers."""
    issuers = tmp_path / "issuers"
    issuers.write_text(f"{KEY.public.text}\n", encoding="utf-8")
    own = bearer(Grant("own", frozenset((Scope.WARM,)), models=(str(documents[0].model.tag),)))
    other = bearer(Grant("other", frozenset((Scope.WARM,)), models=("qwen3-*",)))
    reads = bearer(Grant("reads", frozenset((Scope.READ, Scope.STATS))))
    with edge_in_thread(store, tmp_path / "cache", issuers_file=issuers) as edge:
        assert 202 >= order(edge.admin_url, "/v1/warm", asked(documents[0], pin=True), own).status
        assert [] == ask(edge.admin_url, "/v1/pins", headers=other).json()["pins"]
        assert {"documents": 0} == order(edge.admin_url, "/v1/unpin", {"all": True}, other).json()
        assert [403, 401] == [ask(edge.admin_url, "/v1/pins", headers=headers).status for headers in (reads, None)]
        assert 1 == len(ask(edge.admin_url, "/v1/pins", headers=own).json()["pins"])
        assert 405 == order(edge.admin_url, "/v1/pins", {}, own).status


@pytest.mark.parametrize("body", [{}, {"all": False}, {"manifests": []}, {"manifests": ["x"]}, {"manifests": [], "all": True}])
def test_a_bad_unpin_is_refused(store: WatchedStore, tmp_path: Path, body: object) -> None:
    """With a line; and pin is true or not there."""
    with edge_in_thread(store, tmp_path / "cache") as edge:
        assert 400 == order(edge.admin_url, "/v1/unpin", body).status
        wrong = {"model": "00" * 16, "manifest": "00" * 32, "pin": 1}
        assert 400 == order(edge.admin_url, "/v1/warm", wrong).status
        wrong = {"model": "00" * 16, "addresses": ["00" * 32], "pin": True}
        assert 400 == order(edge.admin_url, "/v1/warm", wrong).status


def test_an_edge_that_is_not_first_keeps_what_is_pinned_at_it(documents: list[Document], tmp_path: Path) -> None:
    """A pin is about this edge, whoever else of its site keeps the objects."""
    document = documents[0]
    store = tmp_path / "origin"

    document.publish(FolderStore(store))
    with running_site(str(store), tmp_path / "site", 3, admin_listen="127.0.0.1:0") as site:
        last = site[site_order(list(site), document.manifest_key)[-1]]
        read(last.url, document)
        warmed(last, asked(document, pin=True))
        assert len(document.objects) == len(kept(tmp_path / "site" / str(last.port), document))


def test_the_commands_pin_list_and_unpin(documents: list[Document], store: WatchedStore, tmp_path: Path) -> None:
    """`kvcdn warm --pin`, `kvcdn pins`, `kvcdn unpin`."""
    document = documents[0]
    manifest, tag = document.manifest_key[-64:], str(document.model.tag)
    with edge_in_thread(store, tmp_path / "cache") as edge:
        where = ["--edge", edge.admin_url]
        assert "pinned" in kvcdn("warm", manifest, "--model", tag, "--pin", *where).out
        told = kvcdn("pins", *where, "--json").json
        assert [(manifest, len(document.objects))] == [(pin["manifest"], pin["here"]) for pin in told["pins"]]
        assert manifest in kvcdn("pins", *where).out
        for wrong in ([], ["--all", manifest], ["abc"]):
            assert 2 == kvcdn("unpin", *wrong, *where).code
        assert {"edge": edge.admin_url, "documents": 1} == kvcdn("unpin", manifest, *where, "--json").json
        assert "0 documents" in kvcdn("unpin", "--all", *where).out
    assert 5 == kvcdn("pins", *where).code


_STEP = st.tuples(st.sampled_from(["visit", "fill", "pin", "unpin", "relieve", "remove"]), st.integers(0, 30))


@given(st.integers(4, 12), st.lists(_STEP, max_size=80))
@settings(deadline=None)
def test_the_cap_and_the_pins_hold_under_any_load(blocks: int, steps: list[tuple[str, int]]) -> None:
    """Nothing pinned is a victim; used, pinned and reserved agree with a recount; what cannot fit evicts nothing."""
    eviction = Eviction(blocks * UNIT)
    pinned: set[str] = set()
    stored: set[str] = set()
    for number, (what, which) in enumerate(steps):
        key = f"{which % 10}"
        victims: list[str] | None = []
        match what:
            case "visit":
                eviction.visit([f"{(which + step) % 10}" for step in range(4)])
            case "fill" if key not in stored:
                victims = eviction.reserve(UNIT)
                assert (victims is None) == (1 + len(pinned & stored) > blocks)
                if victims is not None:
                    eviction.commit(key, UNIT, float(number))
                    stored = {*stored, key} - set(victims)
            case "pin":
                eviction.pin(key)
                pinned.add(key)
            case "unpin":
                eviction.unpin(key)
                pinned.discard(key)
            case "relieve":
                victims = eviction.relieve(2 * UNIT)
            case "remove":
                eviction.remove(key)
                stored.discard(key)
        assert not set(victims or ()) & pinned
        stored -= set(victims or ())
        _agree(eviction, stored, pinned, blocks)
    for key in list(pinned):
        eviction.unpin(key)
    assert sorted(stored) == sorted(eviction.relieve(99 * UNIT))


def _agree(eviction: Eviction, stored: set[str], pinned: set[str], blocks: int) -> None:
    assert stored == {f"{number}" for number in range(10) if f"{number}" in eviction}
    assert len(stored) * UNIT == eviction.used <= blocks * UNIT
    assert len(pinned & stored) * UNIT == eviction._ranking.pinned


def test_kids_agree_with_a_recount_beside_pins() -> None:
    """Thousands of random steps: a node's kids are its stored children that are not pinned, and all leave in the end."""
    rng, ranking = random.Random(3), Ranking()
    for step in range(3000):
        chain = [f"{rng.randrange(4)}-{depth}" for depth in range(rng.randrange(1, 6))]
        ranking.visit(chain)
        for key in chain:
            if rng.random() < 0.5:
                ranking.store(key, UNIT, float(step))
        (ranking.pin if rng.random() < 0.4 else ranking.unpin)(rng.choice(chain))
        if ranking.total > max(10 * UNIT, ranking.pinned):
            ranking.pop()
    nodes = ranking._nodes.values()
    for node in nodes:
        assert node.kids == sum(kid.parent is node and kid.size > 0 and not kid.pinned for kid in nodes)
    for node in list(nodes):
        ranking.unpin(node.key)
    while ranking.total:
        ranking.pop()
    assert 0 == ranking.pinned == ranking.stored
