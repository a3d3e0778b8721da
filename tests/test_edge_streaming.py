"""Read while write: readers get an object while it comes, never a byte that is not proven; and origins that take turns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.block import SegmentVerifier, open_header
from kvcdn.edge.disk.storage import Harm
from kvcdn.errors import CorruptError, UnavailableError
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document, make_document
from support.edge_process import (
    WatchedStore,
    ask,
    begin,
    connect,
    disk_bytes,
    edge_in_thread,
    metric,
    object_files,
    settle,
    what_comes,
)
from support.waiting import WAIT_SECONDS, until


class SteppedStore(WatchedStore):
    """Streams stop at each of `stops` until `step` is called once more; `fail_at` breaks the first stream there."""

    def __init__(self, inner: MemoryStore, stops: tuple[int, ...] = (), fail_at: int | None = None) -> None:
        super().__init__(inner)
        self.stops, self.fail_at = stops, fail_at
        self.starts: list[int] = []
        self._steps = threading.Semaphore(0)

    def step(self) -> None:
        self._steps.release()

    def stream(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        self.streams.append(key)
        self.starts.append(start)
        self._refuse_if_down(key)
        return self._stepped(self.inner.read(key, start), start, self.fail_at if len(self.streams) == 1 else None)

    def _stepped(self, data: bytes, start: int, fail_at: int | None) -> Iterator[bytes]:
        position = start
        for stop in (*self.stops, start + len(data)):
            if stop <= position or (start and stop in self.stops):
                continue
            yield data[position - start : stop - start]
            position = stop
            if fail_at is not None and position >= fail_at:
                raise UnavailableError("the link broke")
            if stop in self.stops:
                self._steps.acquire(timeout=WAIT_SECONDS)


@pytest.fixture(scope="module")
def document() -> Document:
    """One block of eight segments of some 64 kB."""
    return make_document(tokens=1024, layers=8, heads=2, dim=16)


def _block(document: Document) -> tuple[str, bytes, list[int]]:
    """Key, bytes, and the ends of its segments."""
    key, data = next(iter(document.blocks.items()))
    header = open_header(data, "block")
    return key, data, [header.envelope_bytes + segment.offset + segment.length for segment in header.segments]


def _published(document: Document) -> MemoryStore:
    store = MemoryStore()
    document.publish(store)
    return store


def test_readers_get_what_is_proven_while_the_rest_is_on_its_way(document: Document, tmp_path: Path) -> None:
    """A leader and a follower have three whole segments and not a byte of the half one; then everything."""
    key, data, ends = _block(document)
    store = SteppedStore(_published(document), stops=(ends[2] + 100,))
    with edge_in_thread(store, tmp_path / "cache") as edge:
        connections = [connect(edge.url) for _ in range(2)]
        replies = []
        for connection in connections:
            connection.request("GET", f"/{key}")
            replies.append(connection.getresponse())
        for reply in replies:
            assert data[: ends[2]] == reply.read(ends[2])
            with pytest.raises(TimeoutError):
                _read_soon(reply)
        assert 1 == metric(edge.url, "kvcdn_edge_fills_running")
        part = ask(edge.url, f"/{key}", headers={"Range": f"bytes={ends[0]}-{ends[1] - 1}"})
        assert (206, data[ends[0] : ends[1]]) == (part.status, part.body)
        assert str(len(data)) == ask(edge.url, f"/{key}", "HEAD").headers["Content-Length"]
        store.step()
        again = ask(edge.url, f"/{key}")
        assert (data, [key]) == (again.body, store.streams)
        for connection in connections:
            connection.close()


def _read_soon(reply) -> None:
    """Raises TimeoutError unless a byte comes within a fifth of a second."""
    sock = reply.fp.raw._sock
    sock.settimeout(0.2)
    try:
        sock.recv(1)
    finally:
        sock.settimeout(WAIT_SECONDS)


def test_ranges_ahead_of_a_fill_wait_for_it(document: Document, tmp_path: Path) -> None:
    """S3-style readers of all parts of a cold object at once: one origin request, every part right."""
    key, data, ends = _block(document)
    store = SteppedStore(_published(document), stops=(ends[1],))
    part = 50_000
    with edge_in_thread(store, tmp_path / "cache") as edge, ThreadPoolExecutor(12) as pool:
        starts = range(0, len(data), part)
        parts = [
            pool.submit(ask, edge.url, f"/{key}", headers={"Range": f"bytes={start}-{start + part - 1}"}) for start in starts
        ]
        time.sleep(0.2)
        store.step()
        assert data == b"".join(reply.result(WAIT_SECONDS).body for reply in parts)
        assert [key] == store.streams


def test_a_reader_that_leaves_or_dawdles_holds_up_nobody(document: Document, tmp_path: Path) -> None:
    """One leaves in mid-fill, one stops reading: a third has the object, and it is stored."""
    key, data, ends = _block(document)
    store = SteppedStore(_published(document), stops=(ends[0],))
    with edge_in_thread(store, tmp_path / "cache") as edge:
        leaving, dawdling = connect(edge.url), connect(edge.url)
        for connection in (leaving, dawdling):
            connection.request("GET", f"/{key}")
            connection.getresponse().read(10)
        leaving.close()
        store.step()
        assert data == ask(edge.url, f"/{key}").body
        settle(edge.url)
        assert [data] == [path.read_bytes() for path in object_files(tmp_path / "cache")]
        dawdling.close()


def test_damage_half_way_cuts_every_reader_before_it(document: Document, tmp_path: Path) -> None:
    """Whoever reads has the segments before the damaged one, an aborted connection, and nothing else; nothing is stored."""
    key, data, ends = _block(document)
    store = MemoryStore()
    store.create(key, [data[: ends[4] + 7] + b"?" + data[ends[4] + 8 :]])
    stepped = SteppedStore(store, stops=(ends[4],))
    with edge_in_thread(stepped, tmp_path / "cache") as edge, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(contextlib.closing(connect(edge.url))) for _ in range(4)]
        begun = [begin(connection, f"/{key}") for connection in connections]
        stepped.step()
        assert [data[: ends[4]]] * 4 == [what_comes(response) for response in begun]
        small = ask(edge.url, f"/{key}", headers={"Range": f"bytes={ends[5]}-{ends[5] + 9}"})
        assert 502 == small.status
        settle(edge.url)
        assert 0 == disk_bytes(tmp_path / "cache")


@pytest.mark.parametrize("where", ["segment's end", "within a segment", "within the last"])
def test_a_broken_body_is_taken_up_again_at_the_frontier(document: Document, tmp_path: Path, where: str) -> None:
    """The same origin is asked for what is not proven yet; readers notice nothing."""
    key, data, ends = _block(document)
    stop = {"segment's end": ends[3], "within a segment": ends[3] + 999, "within the last": len(data) - 1}[where]
    store = SteppedStore(_published(document), stops=(stop,), fail_at=stop)
    with edge_in_thread(store, tmp_path / "cache") as edge:
        assert data == ask(edge.url, f"/{key}").body
        settle(edge.url)
        assert [0, ends[-2] if where == "within the last" else ends[3]] == store.starts
        assert 1 == metric(edge.url, "kvcdn_edge_fill_resumes_total")
        assert data == object_files(tmp_path / "cache")[0].read_bytes()


@pytest.mark.parametrize("trouble", ["missing", "down", "breaks", "damaged", "truncated", "another object"])
def test_the_next_origin_mends_what_the_first_cannot_give(document: Document, tmp_path: Path, trouble: str) -> None:
    """Whatever is wrong with the first origin, and wherever in the object: readers have the right bytes, in one response."""
    key, data, ends = _block(document)
    inner = MemoryStore()
    first = SteppedStore(inner, stops=(ends[2] + 5,), fail_at=ends[2] if trouble == "breaks" else None)
    first.step()
    first.down = trouble == "down"
    bodies = {
        "breaks": data,
        "damaged": data[: ends[3]] + bytes(100) + data[ends[3] + 100 :],
        "truncated": data[: ends[2] + 10],
        "another object": next(iter(make_document(tokens=1024, layers=8, heads=2, dim=16, seed=7).blocks.values())),
    }
    if trouble in bodies:
        inner.create(key, [bodies[trouble]])
    second = SteppedStore(_published(document))
    with edge_in_thread(first, tmp_path / "cache", second) as edge:
        assert (200, data) == ((reply := ask(edge.url, f"/{key}")).status, reply.body)
        assert [key] == second.streams
        expected = {"breaks": ends[2], "damaged": ends[3], "truncated": ends[2]}
        assert [expected.get(trouble, 0)] == second.starts


def test_only_when_every_origin_lacks_it_an_object_is_missing(document: Document, tmp_path: Path) -> None:
    """404 where all say so; while one is down it is not known, which is a 504."""
    key, _, _ = _block(document)
    first, second = WatchedStore(MemoryStore()), WatchedStore(MemoryStore())
    with edge_in_thread(first, tmp_path / "cache", second) as edge:
        assert 404 == ask(edge.url, f"/{key}").status
        second.down = True
        other = key[:-1] + ("0" if key[-1] != "0" else "1")
        assert 504 == ask(edge.url, f"/{other}").status


def test_a_down_origin_is_not_asked_every_time(document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After three failures it rests: later objects come from the second origin at once; when it is back it is used again."""
    monkeypatch.setattr("kvcdn.edge.fills.breaker.FIRST_REST_SECONDS", 1000.0)
    monkeypatch.setattr("kvcdn.edge.fills.breaker.LONGEST_REST_SECONDS", 1000.0)
    first, second = WatchedStore(MemoryStore()), WatchedStore(MemoryStore())
    documents = [make_document(tokens=40, seed=seed) for seed in range(60, 72)]
    for one in documents:
        one.publish(first)
        one.publish(second)
    first.down = True
    with edge_in_thread(first, tmp_path / "cache", second) as edge:
        for one in documents[:8]:
            assert one.manifest_bytes == ask(edge.url, f"/{one.manifest_key}").body
        assert 3 == len(first.streams)
        assert 0 == metric(edge.url, 'kvcdn_edge_origin_up{origin="0"}')
        first.down = False
        edge.origins.each[0]._breaker._until = 0.0  # its rest is over

        def up() -> float:
            for one in documents[8:]:
                ask(edge.url, f"/{one.manifest_key}")
                edge.cache.drop_key(one.manifest_key, Harm.DAMAGED, "the test asks again")
            return metric(edge.url, 'kvcdn_edge_origin_up{origin="0"}')

        until(up)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_frontier_is_always_at_a_proven_end(document: Document, data: st.DataObject) -> None:
    """However a block is cut into pieces, wherever a byte is flipped, `verified` covers no byte that is not right."""
    _, good, ends = _block(document)
    envelope = open_header(good, "block").envelope_bytes
    flipped = data.draw(st.integers(envelope, len(good) - 1))
    bad = good[:flipped] + bytes([good[flipped] ^ 1]) + good[flipped + 1 :]
    lengths = data.draw(st.lists(st.integers(1000, 200_000), min_size=1, max_size=5))
    verifier = SegmentVerifier(open_header(bad, "block"))
    position = 0
    with contextlib.suppress(CorruptError):
        while position < len(bad):
            length = lengths[position % len(lengths)]
            verifier.update(bad[position : position + length])
            position = min(position + length, len(bad))
            assert verifier.verified in (0, envelope, *ends)
            assert verifier.verified <= position
    assert verifier.verified <= flipped
    # The rest, right this time, from the frontier.
    verifier.restart()
    verifier.update(good[verifier.verified :])
    verifier.finish()
    assert len(good) == verifier.verified


@pytest.mark.parametrize("place", ["envelope", "segment"])
def test_damage_on_the_link_is_asked_for_once_more(document: Document, tmp_path: Path, place: str) -> None:
    """One origin, one flipped bit on the way: readers get the right bytes, from the frontier on of a second answer."""
    key, data, ends = _block(document)
    flipped = 100 if place == "envelope" else ends[4] - 10

    class Noisy(SteppedStore):
        def _stepped(self, data: bytes, start: int, fail_at: int | None) -> Iterator[bytes]:
            if len(self.streams) == 1:
                data = data[:flipped] + bytes([data[flipped] ^ 1]) + data[flipped + 1 :]
            return super()._stepped(data, start, fail_at)

    store = Noisy(_published(document))
    with edge_in_thread(store, tmp_path / "cache") as edge:
        assert (200, data) == ((reply := ask(edge.url, f"/{key}")).status, reply.body)
        assert [0, 0 if place == "envelope" else ends[3]] == store.starts
