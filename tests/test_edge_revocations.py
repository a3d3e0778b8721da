"""Revocations at an edge: what is revoked is gone from cache, match and wire, and lists never go back."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcdn.digest import Digest
from kvcdn.edge.fills.revocations import KeptLists
from kvcdn.edge.serve import ServingEdge
from kvcdn.revocation import MAX_REVOCATIONS_BYTES, RevocationList, revocation_key
from kvcdn.signing import PublicKey, SigningKey
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document, make_document
from support.edge_process import (
    WatchedStore,
    ask,
    ask_match,
    ask_part,
    connect,
    edge_in_thread,
    metric,
    object_files,
    running_edge,
    settle,
)
from support.waiting import WAIT_SECONDS, until

SIGNER = SigningKey.generate()


KINDS = ("addresses", "models", "publishers")


@pytest.fixture(scope="module")
def document() -> Document:
    return make_document(tokens=2500, key=SigningKey.generate())


@pytest.fixture(scope="module")
def large() -> Document:
    """Of one block of 8 MB, which no socket takes at once."""
    return make_document(tokens=2000, layers=2, heads=8, dim=128, key=SigningKey.generate())


@pytest.fixture
def trust(tmp_path: Path, document: Document, large: Document) -> Path:
    path = tmp_path / "trust"
    path.write_text("".join(f"{key.public.text}\n" for key in (SIGNER, document.key, large.key)), encoding="utf-8")
    return path


def listed(document: Document, kind: str, version: int = 1, place: int = 0, seconds: int = 3600) -> RevocationList:
    now = int(time.time())
    named: dict[str, Any] = {
        "addresses": frozenset((document.names.blocks[place].address,)),
        "models": frozenset((document.model.tag,)),
        "publishers": frozenset((document.key.public,)),
        "nothing": frozenset(),
    }
    content = {} if kind == "nothing" else {kind: named[kind]}
    return RevocationList(version, now - 60, now - 60 + seconds, **content)


def revoke(store: WatchedStore, found: RevocationList, key: SigningKey = SIGNER) -> None:
    assert store.create(revocation_key(SIGNER.public, found.version), [found.seal(key)])


@contextlib.contextmanager
def edge_before(store: WatchedStore, tmp_path: Path, trust: Path | None, **more: Any) -> Iterator[ServingEdge]:
    more = {"revocation_poll_seconds": 0.05, **more}
    with edge_in_thread(store, tmp_path / "cache", trust_file=trust, **more) as edge:
        yield edge


class HeldBlocks(WatchedStore):
    """A store that holds back streams of blocks only, and never those of lists."""

    def _pieces(self, key: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
        return pieces if key.startswith("v1/revocations/") else super()._pieces(key, pieces)


def slow_connection(url: str) -> http.client.HTTPConnection:
    """A connection that takes little at once, so that a response of some megabytes is under way until it is read."""
    connection = connect(url)
    connection.sock = socket.socket()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.sock.settimeout(WAIT_SECONDS)
    connection.sock.connect((connection.host, connection.port))
    return connection


def published(*documents: Document) -> WatchedStore:
    store = HeldBlocks(MemoryStore())
    for each in documents:
        each.publish(store)
    return store


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_revoked_is_gone(document: Document, trust: Path, tmp_path: Path, kind: str) -> None:
    """By address, model or publisher: 410 that nobody may keep, no file, no match; also after a restart."""
    store, paths = published(document), ["/" + key for key in document.blocks]
    with edge_before(store, tmp_path, trust) as edge:
        assert [200] * 3 == [ask(edge.url, path).status for path in paths]
        settle(edge.url)
        revoke(store, listed(document, kind))
        left = 2 if kind == "addresses" else 0
        until(lambda: len(object_files(tmp_path / "cache")) == left)
        reply = ask(edge.url, paths[0])
        assert (410, "no-store") == (reply.status, reply.headers["Cache-Control"])
        assert "detail=revoked" in reply.headers["Cache-Status"]
        assert SIGNER.public.text in reply.body.decode()
        assert left == [ask(edge.url, path).status for path in paths[1:]].count(200)
        if kind != "publishers":
            assert 0 == ask_match(edge.url, document.model.tag, document.addresses).json()["matched"]
    assert left == len(object_files(tmp_path / "cache"))
    asked = len(store.streams)
    with edge_before(store, tmp_path, trust, revocation_poll_seconds=0) as edge:
        assert 410 == ask(edge.url, paths[0]).status
    # Only a publisher is not known before an envelope has come.
    assert (kind == "publishers") == len(store.streams) - asked


def test_a_match_ends_before_a_revoked_block(document: Document, trust: Path, tmp_path: Path) -> None:
    """The blocks before it still count, and those behind it do not."""
    store = published(document)
    revoke(store, listed(document, "addresses", place=1))
    with edge_before(store, tmp_path, trust) as edge:
        until(lambda: ask_match(edge.url, document.model.tag, document.addresses).json()["matched"] == 1)
        assert 200 == ask(edge.url, "/" + next(iter(document.blocks))).status


def test_what_is_taken_back_is_served_again(document: Document, trust: Path, tmp_path: Path) -> None:
    """The next list of the same signer counts in place of the last."""
    store, path = published(document), "/" + next(iter(document.blocks))
    with edge_before(store, tmp_path, trust) as edge:
        revoke(store, listed(document, "addresses"))
        until(lambda: ask(edge.url, path).status == 410)
        revoke(store, listed(document, "nothing", version=2))
        until(lambda: ask(edge.url, path).status == 200)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", [True, False], ids=["hit", "fill"])
def test_a_running_response_is_cut(large: Document, trust: Path, tmp_path: Path, kind: str, *, cached: bool) -> None:
    """Whether it comes from the disk or from a fill: the reader's connection breaks, and nothing is stored."""
    store, (key, data) = published(large), next(iter(large.blocks.items()))
    # Without the scrub, which may find and drop the object a moment before the recall breaks the response off.
    with edge_before(store, tmp_path, trust, scrub_bytes_per_second=0) as edge:
        if cached:
            assert 200 == ask(edge.url, "/" + key).status
            settle(edge.url)
        else:
            store.go.clear()
        with contextlib.closing(slow_connection(edge.url)) as connection:
            connection.request("GET", "/" + key)
            response = connection.getresponse()
            assert (200, len(data)) == (response.status, int(response.headers["Content-Length"]))
            revoke(store, listed(large, kind))
            if cached:
                until(lambda: metric(edge.url, 'kvcdn_edge_dropped_objects_total{harm="revoked"}') == 1)
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                response.read()
        store.go.set()
        settle(edge.url)
        until(lambda: object_files(tmp_path / "cache") == [])
        assert 410 == ask(edge.url, "/" + key).status


@pytest.mark.parametrize("trouble", ["old", "damaged", "huge", "other-signer", "expired", "down", "same-number"])
def test_a_list_that_is_not_to_be_believed_changes_nothing(
    document: Document, trust: Path, tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is known goes on counting, over a restart too, and it is logged once."""
    store, path = published(document), "/" + next(iter(document.blocks))
    revoke(store, listed(document, "addresses", version=1))
    with edge_before(store, tmp_path, trust) as edge:
        until(lambda: ask(edge.url, path).status == 410)
    following, key = listed(document, "nothing", version=2), revocation_key(SIGNER.public, 2)
    match trouble:
        case "old":
            store.create(key, [listed(document, "nothing", version=1).seal(SIGNER)])
        case "damaged":
            store.create(key, [b"not a list"])
        case "huge":
            store.create(key, [bytes(MAX_REVOCATIONS_BYTES + 1)])
        case "other-signer":
            store.create(key, [following.seal(document.key)])
        case "expired":
            store.create(key, [listed(document, "nothing", version=2, seconds=30).seal(SIGNER)])
        case "same-number":
            store.create(key, [listed(document, "models", version=1).seal(SIGNER)])
        case _:
            store.down = True
    with edge_before(store, tmp_path, trust) as edge:
        said = "revocations stay as they are known"
        until(lambda: said in caplog.text)
        time.sleep(0.3)
        store.down = False
        assert 410 == ask(edge.url, path).status
    about_signer = [record for record in caplog.records if said in record.getMessage()]
    # While an origin is down there is one line for each who is asked about.
    assert len(about_signer) == (3 if trouble == "down" else 1)


def test_an_edge_that_ends_while_it_writes_a_list_down_has_written_it(
    document: Document, trust: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted already, and counts after a restart, though nobody has it any more."""
    store, path = published(document), "/" + next(iter(document.blocks))
    revoke(store, listed(document, "addresses"))
    keep, go = KeptLists.keep, threading.Event()

    def late(kept: KeptLists, signer: PublicKey, data: bytes) -> None:
        assert go.wait(WAIT_SECONDS)
        keep(kept, signer, data)

    monkeypatch.setattr(KeptLists, "keep", late)
    with edge_before(store, tmp_path, trust) as edge:
        until(lambda: ask(edge.url, path).status == 410)
        threading.Timer(0.3, go.set).start()
    store.delete(revocation_key(SIGNER.public, 1))
    with edge_before(store, tmp_path, trust) as edge:
        assert 410 == ask(edge.url, path).status


def test_nobody_is_asked_without_a_trust_list(document: Document, tmp_path: Path) -> None:
    """Anybody might have written such a list."""
    store, path = published(document), "/" + next(iter(document.blocks))
    revoke(store, listed(document, "addresses"))
    with edge_before(store, tmp_path, None) as edge:
        time.sleep(0.3)
        assert 200 == ask(edge.url, path).status
    assert [path[1:]] == store.streams


def test_a_strangers_list_is_not_asked_for(document: Document, trust: Path, tmp_path: Path) -> None:
    """Only who is on the trust list may revoke."""
    store, path = published(document), "/" + next(iter(document.blocks))
    trust.write_text(document.key.public.text + "\n", encoding="utf-8")
    revoke(store, listed(document, "addresses"))
    with edge_before(store, tmp_path, trust) as edge:
        until(lambda: revocation_key(document.key.public, 1) in store.streams)
        assert 200 == ask(edge.url, path).status
    assert revocation_key(SIGNER.public, 1) not in store.streams


def test_one_origin_with_a_newer_list_is_enough(document: Document, trust: Path, tmp_path: Path) -> None:
    """The lists of all origins count, whichever is behind or down."""
    first, second, path = published(document), published(document), "/" + next(iter(document.blocks))
    revoke(second, listed(document, "addresses"))
    with edge_in_thread(first, tmp_path / "cache", second, trust_file=trust, revocation_poll_seconds=0.05) as edge:
        until(lambda: ask(edge.url, path).status == 410)


def test_a_chain_leads_to_its_first_revoked_block(document: Document) -> None:
    """Without lists the whole chain does."""
    from kvcdn.edge.fills.revocations import Revoked
    from kvcdn.revocation import Revocations
    from kvcdn.signing import TrustList

    revoked, keys = Revoked(TrustList.of(SIGNER.public)), list(document.blocks)
    assert keys == list(revoked.lead(keys))
    for place in range(len(keys)):
        revoked.adopt(Revocations({SIGNER.public: listed(document, "addresses", place=place)}))
        assert keys[:place] == list(revoked.lead(keys))
    assert not revoked.covers(f"v1/{document.model.tag}/manifests/{Digest(bytes(32))}")


def test_lists_are_handed_on_through_tiers(document: Document, trust: Path, tmp_path: Path) -> None:
    """Folder, edge without a trust list, edge with one: the last honours what the first was given, and a later list too."""
    store = FolderStore(tmp_path / "origin")
    document.publish(store)
    path = "/" + next(iter(document.blocks))
    with (
        running_edge(str(tmp_path / "origin"), tmp_path / "far") as far,
        running_edge(far.url, tmp_path / "near", trust_file=trust, revocation_poll_seconds=0.2) as near,
    ):
        assert 200 == ask(near.url, path).status
        assert store.create(revocation_key(SIGNER.public, 1), [listed(document, "addresses").seal(SIGNER)])
        until(lambda: ask(near.url, path).status == 410)
        assert store.create(revocation_key(SIGNER.public, 2), [listed(document, "nothing", version=2).seal(SIGNER)])
        until(lambda: ask(near.url, path).status == 200)


def test_only_lists_that_are_what_their_name_says_are_handed_on(document: Document, trust: Path, tmp_path: Path) -> None:
    """Not another number's, not another signer's, not junk, not a stranger's where there is a trust list; GET and HEAD only."""
    store, stranger = published(document), SigningKey.generate()
    good, one = listed(document, "addresses").seal(SIGNER), revocation_key(SIGNER.public, 1)
    store.create(one, [good])
    store.create(revocation_key(SIGNER.public, 2), [good])
    store.create(revocation_key(SIGNER.public, 3), [b"junk" * 100])
    strange = revocation_key(stranger.public, 1)
    store.create(strange, [listed(document, "models").seal(stranger)])
    with edge_before(store, tmp_path, trust, revocation_poll_seconds=0) as edge:
        reply = ask(edge.url, f"/{one}")
        assert (200, good) == (reply.status, reply.body)
        assert "immutable" in reply.headers["Cache-Control"]
        assert b"" == ask(edge.url, f"/{one}", "HEAD").body
        assert 405 == ask(edge.url, f"/{one}", "POST", body=b"{}").status
        assert [404, 504] == [ask(edge.url, "/" + revocation_key(SIGNER.public, number)).status for number in (2, 3)]
        assert 404 == ask(edge.url, "/" + revocation_key(SIGNER.public, 9)).status
        assert 404 == ask(edge.url, f"/{strange}").status
        assert 404 == ask(edge.url, f"/{one}0").status
    with edge_before(store, tmp_path / "open", None) as edge:
        assert 200 == ask(edge.url, f"/{strange}").status


def test_sighup_goes_by_the_trust_file_as_it_is_now(document: Document, large: Document, tmp_path: Path) -> None:
    """Who is taken off is served no more, his files go, his response breaks off; who is put on is served, others stay."""
    trust = tmp_path / "trust"
    trust.write_text(f"{large.key.public.text}\n")
    store = FolderStore(tmp_path / "origin")
    document.publish(store)
    large.publish(store)
    small, big = "/" + next(iter(document.blocks)), "/" + next(iter(large.blocks))
    with running_edge(str(tmp_path / "origin"), tmp_path / "cache", trust_file=trust) as edge:
        assert [502, 200] == [ask(edge.url, path).status for path in (small, big)]
        settle(edge.url)
        with contextlib.closing(slow_connection(edge.url)) as connection:
            connection.request("GET", big)
            response = connection.getresponse()
            trust.write_text(f"{document.key.public.text}\n")
            edge.process.send_signal(signal.SIGHUP)
            until(lambda: ask_part(edge.url, big).status == 502)
            until(lambda: ask(edge.url, small).status == 200)
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                response.read()
        until(lambda: metric(edge.url, 'kvcdn_edge_dropped_objects_total{harm="untrusted"}') == 1)
        settle(edge.url)
        assert [next(iter(document.blocks))[-64:]] == [path.name[:64] for path in object_files(tmp_path / "cache")]
        trust.write_text("nonsense\n")
        edge.process.send_signal(signal.SIGHUP)
        until(lambda: "settings are not reloaded" in edge.log())
        assert 200 == ask(edge.url, small).status


def test_sighup_begins_and_ends_to_honour_lists(document: Document, trust: Path, tmp_path: Path) -> None:
    """Of a signer who comes onto the trust list the lists count, also those kept before; of one who leaves they do not."""
    everybody = trust.read_text()
    without = "".join(line for line in everybody.splitlines(keepends=True) if SIGNER.public.text not in line)
    trust.write_text(without)
    store = FolderStore(tmp_path / "origin")
    document.publish(store)
    store.create(revocation_key(SIGNER.public, 1), [listed(document, "addresses").seal(SIGNER)])
    path = "/" + next(iter(document.blocks))
    with running_edge(str(tmp_path / "origin"), tmp_path / "cache", trust_file=trust) as edge:
        assert 200 == ask(edge.url, path).status
        for text, status in ((everybody, 410), (without, 200), (everybody, 410)):
            trust.write_text(text)
            edge.process.send_signal(signal.SIGHUP)
            until(lambda status=status: ask(edge.url, path).status == status)
