"""Fills: one per object however many ask, nothing served or stored that fails a check, and an origin in trouble."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kvcdn.edge.http.outcome import REMEMBERED_SECONDS, Reason
from kvcdn.envelope import PREAMBLE_BYTES
from kvcdn.signing import SigningKey
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.http import HttpStore
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document, make_document
from support.edge_process import (
    WatchedStore,
    ask,
    ask_part,
    connect,
    disk_bytes,
    edge_in_thread,
    exchange,
    metric,
    object_files,
    origin_gets,
    running_edge,
    settle,
)
from support.site import kept_urls
from support.waiting import WAIT_SECONDS, until
from support.web import running_web

READERS = 64


@pytest.fixture(scope="module")
def document() -> Document:
    return make_document(tokens=1500)


def _first(document: Document) -> tuple[str, bytes]:
    return next(iter(document.blocks.items()))


def _published(document: Document) -> WatchedStore:
    store = WatchedStore(MemoryStore())
    document.publish(store)
    return store


def test_many_cold_requests_are_one_origin_request(document: Document, tmp_path: Path) -> None:
    """Whole objects, ranges and HEAD for one object, all at once: the origin is asked once, and all are answered."""
    store = _published(document)
    key, data = _first(document)
    store.go.clear()
    with edge_in_thread(store, tmp_path / "cache") as edge, ThreadPoolExecutor(READERS) as pool:

        def read(number: int) -> bool:
            match number % 4:
                case 0:
                    return ask(edge.url, f"/{key}", "HEAD").headers["Content-Length"] == str(len(data))
                case 1:
                    return ask(edge.url, f"/{key}", headers={"Range": "bytes=100-199999"}).body == data[100:200000]
                case _:
                    return ask(edge.url, f"/{key}").body == data

        replies = [pool.submit(read, number) for number in range(READERS)]
        assert store.streaming.wait(WAIT_SECONDS)
        time.sleep(0.2)
        store.go.set()
        assert [True] * READERS == [reply.result(WAIT_SECONDS) for reply in replies]
        assert [key] == store.streams
        assert 1 == origin_gets(edge.url)
        assert 1 == metric(edge.url, 'kvcdn_edge_requests_total{cache="miss",route="object",status="200"}') + metric(
            edge.url, 'kvcdn_edge_requests_total{cache="miss",route="object",status="206"}'
        )


def test_sixty_four_cold_requests_of_a_process_are_one_origin_request(document: Document, tmp_path: Path) -> None:
    """The same against a real edge process before a folder."""
    document.publish(FolderStore(tmp_path / "origin"))
    key, data = _first(document)
    with running_edge(str(tmp_path / "origin"), tmp_path / "cache") as edge, ThreadPoolExecutor(READERS) as pool:
        bodies = list(pool.map(lambda _: ask(edge.url, f"/{key}").body, range(READERS)))
        assert [True] * READERS == [body == data for body in bodies]
        assert 1 == origin_gets(edge.url)


def test_a_fill_outlives_the_reader_that_began_it(document: Document, tmp_path: Path) -> None:
    """The first reader leaves; the object is stored all the same, and the next is a hit."""
    store = _published(document)
    key, data = _first(document)
    store.go.clear()
    with edge_in_thread(store, tmp_path / "cache") as edge:
        connection = connect(edge.url)
        connection.request("GET", f"/{key}")
        assert store.streaming.wait(WAIT_SECONDS)
        connection.close()
        time.sleep(0.1)
        store.go.set()
        until(lambda: len(edge.cache))
        reply = ask(edge.url, f"/{key}")
        assert (data, "kvcdn; hit", [key]) == (reply.body, reply.headers["Cache-Status"], store.streams)


def test_objects_fill_beside_each_other(document: Document, tmp_path: Path) -> None:
    """One object that hangs at the origin does not hold up another, nor a hit."""
    store = _published(document)
    key, other = list(document.objects)[:2]
    store.go.clear()
    with edge_in_thread(store, tmp_path / "cache") as edge:
        hanging = threading.Thread(target=ask, args=(edge.url, f"/{key}"))
        hanging.start()
        assert store.streaming.wait(WAIT_SECONDS)
        late = threading.Timer(0.3, store.go.set)
        late.start()
        assert 200 == ask(edge.url, "/healthz").status
        assert document.objects[other] == ask(edge.url, f"/{other}").body
        hanging.join()
        late.join()


def _flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def _envelope_bytes(data: bytes) -> int:
    return PREAMBLE_BYTES + int.from_bytes(data[8:12], "little") + 64


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "magic": lambda data: _flip(data, 0),
    "header length": lambda data: _flip(data, 8),
    "huge header length": lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:],
    "header": lambda data: _flip(data, 200),
    "signature": lambda data: _flip(data, _envelope_bytes(data) - 1),
    "first segment": lambda data: _flip(data, _envelope_bytes(data) + 5),
    "last byte": lambda data: _flip(data, len(data) - 1),
    "truncated in a segment": lambda data: data[:-1],
    "truncated at a segment's end": lambda data: data[: (len(data) + _envelope_bytes(data)) // 2],
    "truncated behind the envelope": lambda data: data[: _envelope_bytes(data)],
    "truncated in the header": lambda data: data[:100],
    "truncated in the preamble": lambda data: data[:7],
    "empty": lambda _: b"",
    "trailing": lambda data: data + b"x",
    "doubled": lambda data: data + data,
}


BEHIND_THE_ENVELOPE = {
    "first segment",
    "last byte",
    "truncated in a segment",
    "truncated at a segment's end",
    "truncated behind the envelope",
    "trailing",
    "doubled",
}
"""Damage that shows when readers have the envelope already."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_neither_served_nor_stored(
    document: Document, tmp_path: Path, damage: str, memory_clock: list[float]
) -> None:
    """Wherever the damage lies: no wrong byte, no whole object, an empty disk, a count, and 502 in one line if not a cut."""
    key, data = _first(document)
    store = WatchedStore(MemoryStore())
    store.create(key, [DAMAGE[damage](data)])
    with edge_in_thread(store, tmp_path / "cache") as edge:
        if damage in BEHIND_THE_ENVELOPE:
            cut = ask_part(edge.url, f"/{key}")
            assert (200, str(len(data)), True) == (cut.status, cut.headers["Content-Length"], data.startswith(cut.body))
            assert len(cut.body) < len(data) or damage in ("trailing", "doubled")
            settle(edge.url)
        for _ in range(2):
            reply = ask(edge.url, f"/{key}")
            assert (502, "no-store") == (reply.status, reply.headers["Cache-Control"])
            assert "corrupt" in reply.headers["Cache-Status"]
            assert (1, True) == (reply.body.count(b"\n"), len(reply.body) < 400)
        assert (0, []) == (disk_bytes(tmp_path / "cache"), object_files(tmp_path / "cache"))
        assert (1.0, 0) == (metric(edge.url, 'kvcdn_edge_fills_total{outcome="corrupt"}'), edge.cache.used)
        # Twice, because it could have been the link's fault.
        assert [key, key] == store.streams


@pytest.mark.parametrize("damage", ["magic", "header", "signature", "truncated in the header", "empty", "trailing", "doubled"])
def test_a_damaged_manifest_is_neither_served_nor_stored(document: Document, tmp_path: Path, damage: str) -> None:
    """As for blocks."""
    store = MemoryStore()
    store.create(document.manifest_key, [DAMAGE[damage](document.manifest_bytes)])
    with edge_in_thread(store, tmp_path / "cache") as edge:
        assert 502 == ask(edge.url, f"/{document.manifest_key}").status
        assert 0 == disk_bytes(tmp_path / "cache")


def test_another_object_under_a_name_is_refused(document: Document, tmp_path: Path) -> None:
    """A valid block under another block's key, a manifest as a block, a block of another model: all are wrong objects."""
    (first, _), (second, other) = list(document.blocks.items())[:2]
    tag = str(document.model.tag)
    foreign = first.replace(tag, "0" * 32)
    store = MemoryStore()
    store.create(first, [other])
    store.create(second, [document.manifest_bytes])
    store.create(foreign, [document.blocks[first]])
    store.create(document.manifest_key, [other])
    with edge_in_thread(store, tmp_path / "cache") as edge:
        for key in (first, second, foreign, document.manifest_key):
            assert 502 == ask(edge.url, f"/{key}").status
        assert 0 == disk_bytes(tmp_path / "cache")


def test_an_object_repaired_at_the_origin_is_found(document: Document, tmp_path: Path, memory_clock: list[float]) -> None:
    """The memory of a corrupt object is short."""
    key, data = _first(document)
    store = MemoryStore()
    store.create(key, [data[:-1]])
    with edge_in_thread(store, tmp_path / "cache") as edge:
        assert len(ask_part(edge.url, f"/{key}").body) < len(data)
        settle(edge.url)
        assert 502 == ask(edge.url, f"/{key}").status
        store.delete(key)
        store.create(key, [data])
        assert 502 == ask(edge.url, f"/{key}").status
        memory_clock[0] = REMEMBERED_SECONDS[Reason.CORRUPT]
        assert data == ask(edge.url, f"/{key}").body


def test_untrusted_publishers_are_refused_where_there_is_a_list(document: Document, tmp_path: Path) -> None:
    """With a trust file only the publishers on it get in; without one any valid signature does."""
    store = _published(document)
    key, data = _first(document)
    for line, status in ((document.key.public.text, 200), (SigningKey.generate().public.text, 502)):
        trust = tmp_path / f"trust-{status}"
        trust.write_text(f"# publishers\n{line} somebody\n", encoding="utf-8")
        with edge_in_thread(store, tmp_path / f"cache-{status}", trust_file=trust) as edge:
            for path in (key, document.manifest_key):
                assert status == ask(edge.url, f"/{path}").status
            settle(edge.url)
            assert (status == 200) == bool(object_files(tmp_path / f"cache-{status}"))
            assert (0.0 if status == 200 else 2.0) == metric(edge.url, 'kvcdn_edge_fills_total{outcome="untrusted"}')
    # What an edge without a list stored is not served by one with a list.
    with edge_in_thread(store, tmp_path / "cache-200", trust_file=tmp_path / "trust-502") as edge:
        reply = ask(edge.url, f"/{key}")
        assert (502, False) == (reply.status, data in reply.body)


def test_what_is_missing_is_remembered_briefly_and_found_once_published(
    document: Document, tmp_path: Path, memory_clock: list[float]
) -> None:
    """404 for some seconds without asking again, then the object."""
    store = WatchedStore(MemoryStore())
    key, data = _first(document)
    with edge_in_thread(store, tmp_path / "cache") as edge:
        statuses = [ask(edge.url, f"/{key}").status for _ in range(5)]
        assert ([404] * 5, [key]) == (statuses, store.streams)
        assert "no-store" == ask(edge.url, f"/{key}").headers["Cache-Control"]
        store.create(key, [data])
        assert 404 == ask(edge.url, f"/{key}").status
        memory_clock[0] = REMEMBERED_SECONDS[Reason.NOT_FOUND]
        assert data == ask(edge.url, f"/{key}").body


def test_a_down_origin_does_not_take_the_cache_with_it(document: Document, tmp_path: Path, memory_clock: list[float]) -> None:
    """Hits go on; misses are a 504 with a reason; once the origin is back so are they."""
    store = _published(document)
    (key, data), (other, _) = list(document.blocks.items())[:2]
    with edge_in_thread(store, tmp_path / "cache") as edge:
        ask(edge.url, f"/{key}")
        store.down = True
        assert data == ask(edge.url, f"/{key}").body
        failed = ask(edge.url, f"/{other}")
        assert (504, "no-store", True) == (failed.status, failed.headers["Cache-Control"], b"out of reach" in failed.body)
        assert "origin-unavailable" in failed.headers["Cache-Status"]
        store.down = False
        memory_clock[0] = REMEMBERED_SECONDS[Reason.ORIGIN_UNAVAILABLE]
        assert 200 == ask(edge.url, f"/{other}").status


def test_an_origin_that_breaks_in_mid_object_leaves_nothing(document: Document, tmp_path: Path) -> None:
    """Half an object is no object: the connection breaks, the disk is empty, then 504, and in the end a clean second try."""
    store = _published(document)
    key, data = _first(document)
    store.go.clear()
    with edge_in_thread(store, tmp_path / "cache") as edge, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(ask_part, edge.url, f"/{key}")
        assert store.streaming.wait(WAIT_SECONDS)
        store.down = True
        store.go.set()
        part = reply.result(WAIT_SECONDS)
        assert (200, True) == (part.status, data.startswith(part.body))
        assert len(part.body) < len(data)
        assert 504 == ask(edge.url, f"/{key}").status
        assert (0, 0) == (disk_bytes(tmp_path / "cache"), edge.cache.used)
        store.down = False
        until(lambda: ask(edge.url, f"/{key}").status != 504)
        assert data == ask(edge.url, f"/{key}").body


def test_an_object_larger_than_the_cache_passes_through(tmp_path: Path) -> None:
    """It is checked, served by range and as a whole, and not stored; nobody loses a place for it."""
    document = make_document(tokens=1024, layers=4, heads=4, dim=64, seed=3)
    large, data = _first(document)
    small = make_document(tokens=300, seed=4)
    store = _published(document)
    small.publish(store)
    key, little = _first(small)
    assert len(data) > 2_000_000
    with edge_in_thread(store, tmp_path / "cache", capacity="1MiB") as edge:
        assert little == ask(edge.url, f"/{key}").body
        for _ in range(2):
            reply = ask(edge.url, f"/{large}", headers={"Range": "bytes=1000-1999999"})
            assert (206, data[1000:2000000], "kvcdn; fwd=miss") == (reply.status, reply.body, reply.headers["Cache-Status"])
            settle(edge.url)
        assert data == ask(edge.url, f"/{large}").body
        assert "kvcdn; hit" == ask(edge.url, f"/{key}").headers["Cache-Status"]
        assert 1 == len(object_files(tmp_path / "cache"))


def test_a_full_disk_is_a_clean_refusal(document: Document, tmp_path: Path) -> None:
    """Where no file can grow beyond 64 KiB, blocks get a 503 and leave nothing; what fits is still stored and served."""
    document.publish(FolderStore(tmp_path / "origin"))
    key, _ = _first(document)
    with running_edge(str(tmp_path / "origin"), tmp_path / "cache") as edge:
        resource.prlimit(edge.pid, resource.RLIMIT_FSIZE, (65536, 65536))
        for _ in range(2):
            reply = ask(edge.url, f"/{key}")
            assert (503, "no-store", True) == (reply.status, reply.headers["Cache-Control"], b"disk is full" in reply.body)
        assert 0 == disk_bytes(tmp_path / "cache")
        assert document.manifest_bytes == ask(edge.url, f"/{document.manifest_key}").body
        settle(edge.url)
        assert "kvcdn; hit" == ask(edge.url, f"/{document.manifest_key}").headers["Cache-Status"]


@contextlib.contextmanager
def _small_disk(folder: Path, size: str):
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs privileges that this machine does not give")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_a_disk_smaller_than_the_capacity_makes_room(tmp_path: Path) -> None:
    """On a real full disk the oldest objects leave, so that new ones are stored though the cap allows more."""
    documents = [make_document(tokens=1024, seed=seed) for seed in range(10, 16)]
    store = MemoryStore()
    for document in documents:
        document.publish(store)
    # Without the scrub, which may have a file open that leaves for another: the disk has its room back when it is closed.
    given = {"capacity": "1GB", "scrub_bytes_per_second": 0}
    with _small_disk(tmp_path / "disk", "2m"), edge_in_thread(store, tmp_path / "disk" / "cache", **given) as edge:
        for document in documents:
            key, data = _first(document)
            for expected in ("kvcdn; fwd=miss; stored", "kvcdn; hit"):
                reply = ask(edge.url, f"/{key}")
                settle(edge.url)
                assert (200, data, expected) == (reply.status, reply.body, reply.headers["Cache-Status"])
        assert edge.cache.evicted > 0


def test_an_evicted_object_is_served_to_its_end(tmp_path: Path) -> None:
    """A slow reader keeps its object while others push it out of the cache."""
    document = make_document(tokens=1024, layers=8, heads=4, dim=64, seed=5)
    large, data = _first(document)
    store = _published(document)
    others = [make_document(tokens=1024, layers=8, heads=4, dim=64, seed=seed) for seed in (6, 7)]
    for other in others:
        other.publish(store)
    with edge_in_thread(store, tmp_path / "cache", capacity="8MiB") as edge:
        connection = connect(edge.url)
        connection.request("GET", f"/{large}")
        response = connection.getresponse()
        head = response.read(1000)
        for other in others:
            ask(edge.url, f"/{_first(other)[0]}")
        assert edge.cache.size_of(large) is None
        assert data == head + response.read()
        connection.close()


def test_one_connection_fills_and_hits_in_turn(document: Document, tmp_path: Path) -> None:
    """Keep-alive holds through misses, hits and refusals."""
    store = _published(document)
    key, data = _first(document)
    with edge_in_thread(store, tmp_path / "cache") as edge, contextlib.closing(connect(edge.url)) as connection:
        paths = [f"/{key}", "/nothing", f"/{key}", f"/v1/{'0' * 32}/manifests/{'0' * 64}", f"/{key}"]
        assert [200, 404, 200, 404, 200] == [exchange(connection, path).status for path in paths]
        assert data == exchange(connection, f"/{key}").body


def test_tiers_that_lead_back_to_themselves_are_found_out(tmp_path: Path) -> None:
    """A request that comes by an edge a second time is refused at once, and the first is told that the origin is not there."""
    with (
        kept_urls(1) as (upper,),
        running_edge(upper, tmp_path / "lower") as lower,
        running_edge(lower.url, tmp_path / "upper", listen=upper.removeprefix("http://")) as edge,
    ):
        assert edge.url == upper
        assert 504 == ask(lower.url, f"/v1/{'0' * 32}/manifests/{'0' * 64}").status
        assert metric(lower.url, 'kvcdn_edge_requests_total{cache="refused",route="circle",status="508"}')


def test_hops_are_bounded_and_nothing_else_is_passed_on(document: Document, tmp_path: Path) -> None:
    """Names of nine edges are one too many; what else stands in the field is no reason, and does not go further."""
    name = "1.1 kvcdn-0123456789abcdef"
    path = f"/{document.manifest_key}"
    with running_web(_published(document)) as web, running_edge(web.url, tmp_path / "cache") as edge:
        assert 508 == ask(edge.url, path, headers={"Via": ", ".join([name] * 9)}).status
        assert [] == web.requests
        assert document.manifest_bytes == ask(edge.url, path, headers={"Via": f"1.0 proxy (a stranger), {name}"}).body
        ((_, _, headers),) = web.requests
        assert re.fullmatch(r"1\.1 kvcdn-0123456789abcdef, 1\.1 kvcdn-[0-9a-f]{16}", headers["Via"])


@pytest.mark.parametrize("cached", [False, True])
def test_a_reader_that_stops_reading_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """A client that takes nothing for the stall time loses its connection, and with it the open file, on whatever way."""
    monkeypatch.setattr("kvcdn.edge.http.sendfile.SWEEP_SECONDS", 0.1)

    def cut_after(seconds: float) -> None:
        for module in ("http.sendfile", "http.sending", "answers.front"):
            monkeypatch.setattr(f"kvcdn.edge.{module}.STALL_SECONDS", seconds)

    document = make_document(tokens=1024, layers=32, heads=4, dim=64)
    key, data = _first(document)
    with edge_in_thread(_published(document), tmp_path / "cache") as edge:
        if cached:
            ask(edge.url, f"/{key}")
            settle(edge.url)
        cut_after(0.3)
        connection = connect(edge.url)
        connection.request("GET", f"/{key}")
        response = connection.getresponse()
        until(lambda: metric(edge.url, 'kvcdn_edge_request_seconds_count{route="object"}') != cached)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
        connection.close()
        cut_after(WAIT_SECONDS)  # a busy reader may pause
        assert data == ask(edge.url, f"/{key}").body


def test_a_file_cut_while_it_is_sent_ends_the_connection(tmp_path: Path) -> None:
    """A short body is never passed off as whole; the object is dropped and fetched again."""
    document = make_document(tokens=1024, layers=32, heads=4, dim=64)
    key, data = _first(document)
    with edge_in_thread(_published(document), tmp_path / "cache") as edge:
        ask(edge.url, f"/{key}")
        settle(edge.url)
        connection = connect(edge.url)
        connection.request("GET", f"/{key}")
        response = connection.getresponse()
        response.read(1000)
        os.truncate(object_files(tmp_path / "cache")[0], 100_000)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
        connection.close()
        assert (data, 2) == (ask(edge.url, f"/{key}").body, origin_gets(edge.url))


def test_an_origin_that_drips_is_given_up(document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill has an end in time, whatever the origin does."""
    monkeypatch.setattr("kvcdn.edge.fills.arrival.FILL_SECONDS", -1.0)
    monkeypatch.setattr("kvcdn.edge.fills.arrival.SLOWEST_BYTES_PER_SECOND", 10**9)
    key, _ = _first(document)
    with edge_in_thread(_published(document), tmp_path / "cache") as edge:
        assert 200 == ask_part(edge.url, f"/{key}").status
        reply = ask(edge.url, f"/{key}")
        assert (504, True) == (reply.status, b"takes too long" in reply.body)
        assert 0 == disk_bytes(tmp_path / "cache")


def test_more_fills_than_can_wait_are_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """503 with Retry-After for what would only queue up; what was begun is finished."""
    monkeypatch.setattr("kvcdn.edge.reads.fetch.WAITING_FILLS", 2)
    document = make_document(tokens=2500, seed=9)
    store = _published(document)
    store.go.clear()
    with edge_in_thread(store, tmp_path / "cache") as edge, ThreadPoolExecutor(2) as pool:
        keys = list(document.blocks)
        begun = [pool.submit(ask, edge.url, f"/{key}") for key in keys[:2]]
        until(lambda: len(store.streams) == 2)
        refused = ask(edge.url, f"/{keys[2]}")
        assert (503, "1", "no-store") == (refused.status, refused.headers["Retry-After"], refused.headers["Cache-Control"])
        store.go.set()
        assert [200, 200] == [reply.result(WAIT_SECONDS).status for reply in begun]
        settle(edge.url)
        assert 200 == ask(edge.url, f"/{keys[2]}").status


def test_fills_beyond_the_places_wait_their_turn(tmp_path: Path) -> None:
    """Twelve objects at once: at most eight are asked of the origin together, and all come."""
    documents = [make_document(tokens=100, seed=seed) for seed in range(50, 62)]
    store = WatchedStore(MemoryStore())
    for document in documents:
        document.publish(store)
    store.go.clear()
    with edge_in_thread(store, tmp_path / "cache") as edge, ThreadPoolExecutor(12) as pool:
        replies = [pool.submit(ask, edge.url, f"/{_first(document)[0]}") for document in documents]
        until(lambda: len(store.streams) >= 8)
        time.sleep(0.3)
        assert 8 == len(store.streams)
        store.go.set()
        assert [_first(document)[1] for document in documents] == [reply.result(WAIT_SECONDS).body for reply in replies]


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_with_every_disk_full_objects_pass_through_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the cache's disk nor that for temporary files takes it: readers have it all the same, within limits."""
    document = make_document(tokens=1024, layers=4, heads=4, dim=64, seed=3)
    key, data = _first(document)
    store = _published(document)
    with _small_disk(tmp_path / "disk", "1m"):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
        with edge_in_thread(store, tmp_path / "disk" / "cache", capacity="1GB") as edge:
            for _ in range(3):
                reply = ask(edge.url, f"/{key}")
                assert (200, data, "kvcdn; fwd=miss") == (reply.status, reply.body, reply.headers["Cache-Status"])
                settle(edge.url)
            assert 0 == disk_bytes(tmp_path / "disk" / "cache")
        monkeypatch.setattr("kvcdn.edge.disk.staging.MEMORY_BYTES", len(data) - 1)
        with edge_in_thread(store, tmp_path / "disk" / "cache", capacity="1GB") as edge:
            reply = ask(edge.url, f"/{key}")
            assert (503, True) == (reply.status, b"disk is full" in reply.body)


def test_a_fill_that_hangs_has_a_successor(document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The origin's first answer never goes on. Who asks once that is too old begins another fill; who waited is cut off."""
    monkeypatch.setattr("kvcdn.edge.fills.fill_lock.GRACE_SECONDS", 0.2)
    # Long enough for a busy machine to begin.
    monkeypatch.setattr("kvcdn.edge.fills.arrival.FILL_SECONDS", 2.0)
    monkeypatch.setattr("kvcdn.edge.fills.arrival.SLOWEST_BYTES_PER_SECOND", 10**9)
    monkeypatch.setattr("kvcdn.edge.reads.fetch.STOP_SECONDS", 0.5)
    key, data = _first(document)
    store = _published(document)
    store.go.clear()
    with edge_in_thread(store, tmp_path / "cache") as edge, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask_part, edge.url, f"/{key}")
        assert store.streaming.wait(WAIT_SECONDS)
        part = waiting.result(WAIT_SECONDS)
        assert (200, True) == (part.status, data.startswith(part.body))
        assert len(part.body) < len(data)
        # The second stream is not held back; the first one still hangs.
        monkeypatch.setattr("kvcdn.edge.fills.arrival.FILL_SECONDS", 30)
        late = threading.Timer(0.5, store.go.set)
        late.start()
        assert data == ask(edge.url, f"/{key}").body
        assert [key, key] == store.streams
        late.join()


@pytest.mark.parametrize("gone", ["staging", "objects", "objects/*"])
def test_folders_that_vanish_are_made_again(document: Document, tmp_path: Path, gone: str) -> None:
    """Somebody cleans up under a running edge: the next fill is stored as ever."""
    store = _published(document)
    keys = list(document.objects)
    cache = tmp_path / "cache"
    with edge_in_thread(store, cache) as edge:
        ask(edge.url, f"/{keys[0]}")
        settle(edge.url)
        for folder in cache.glob(gone):
            shutil.rmtree(folder)
        for key in keys:
            assert document.objects[key] == ask(edge.url, f"/{key}").body
        settle(edge.url)
        assert sorted(key[-64:] for key in keys) == sorted(path.name[:64] for path in object_files(cache))


LENGTHS: dict[str, Callable[[int], int]] = {
    "one byte more": lambda size: size + 1,
    "far more": lambda size: size + (1 << 40),
    "one byte less": lambda size: size - 1,
    "half": lambda size: size // 2,
}


@pytest.mark.parametrize("kind", ["block", "manifest"])
@pytest.mark.parametrize("announced", LENGTHS)
def test_an_origin_that_announces_another_length_is_found_out_at_once(
    document: Document, tmp_path: Path, announced: str, kind: str
) -> None:
    """The envelope tells: 502 and no broken body, no range asked for, nothing waited for; the next origin has the object.

    The server keeps the connection open behind what it sends.
    """
    key, data = _first(document) if kind == "block" else (document.manifest_key, document.manifest_bytes)
    store = MemoryStore()
    document.publish(store)
    with running_web(store) as web:
        web.bend = lambda answer: replace(
            answer, headers={**answer.headers, "Content-Length": str(LENGTHS[announced](len(answer.body)))}
        )
        with edge_in_thread(HttpStore(web.url), tmp_path / "one") as edge:
            reply = ask(edge.url, f"/{key}")
            assert (502, True) == (reply.status, "corrupt" in reply.headers["Cache-Status"])
            assert (0, 0) == (disk_bytes(tmp_path / "one"), edge.cache.used)
        assert [None, None] == [headers.get("Range") for _, _, headers in web.requests]
        with edge_in_thread(HttpStore(web.url), tmp_path / "two", store) as edge:
            assert (200, data) == ((reply := ask(edge.url, f"/{key}")).status, reply.body)
            settle(edge.url)
            assert 1 == len(object_files(tmp_path / "two"))


def test_a_file_of_another_length_in_a_folder_is_no_object(document: Document, tmp_path: Path) -> None:
    """As over HTTP: 502 before readers were promised anything."""
    key, data = _first(document)
    FolderStore(tmp_path / "longer").create(key, [data, b"x"])
    FolderStore(tmp_path / "shorter").create(key, [data[:-1]])
    for folder in ("longer", "shorter"):
        with edge_in_thread(FolderStore(tmp_path / folder), tmp_path / f"cache-{folder}") as edge:
            assert 502 == ask(edge.url, f"/{key}").status
            assert 0 == disk_bytes(tmp_path / f"cache-{folder}")
