"""A store as a source: few requests, bounded memory, and readers that can be stopped although a store cannot."""

from __future__ import annotations

import random
import threading

import pytest

from kvcdn.client.sources import stored
from kvcdn.client.sources.stored import StoreSource
from kvcdn.errors import CorruptError, UnavailableError
from kvcdn.store import STREAM_CHUNK_BYTES
from kvcdn.stores import open_store
from kvcdn.stores.memory import MemoryStore
from support.waiting import WAIT_SECONDS

KEY = "v1/object"
SIZE = 9 * STREAM_CHUNK_BYTES + 12_345
DATA = random.Random(5).randbytes(SIZE)


class WatchedStore(MemoryStore):
    """A store that notes its reads, and that can fall silent or fail behind some piece."""

    def __init__(self):
        super().__init__()
        self.create(KEY, [DATA])
        self.reads = []
        self.pieces = 0
        self.silent_after = None
        self.fails_after = None
        self.go = threading.Event()

    def stream(self, key, start=0, length=None):
        self.reads.append((start, length))
        return self._watched(super().stream(key, start, length))

    def _watched(self, pieces):
        for number, piece in enumerate(pieces):
            if number == self.silent_after:
                self.go.wait(WAIT_SECONDS)
            if number == self.fails_after:
                raise UnavailableError("the bucket is on fire")
            self.pieces += 1
            yield piece


def read(reader, count, ahead=1 << 40):
    return bytes(reader.read_exact(count, ahead))


def test_a_block_is_one_request():
    """However small the pieces in which it is read."""
    store = WatchedStore()
    reader = StoreSource(store).open(KEY, ranged=False)
    assert DATA == b"".join(read(reader, min(100_000, SIZE - at)) for at in range(0, SIZE, 100_000))
    assert reader.at_end()
    reader.close()
    assert [(0, None)] == store.reads


def test_a_stream_runs_only_some_pieces_ahead():
    """Who reads slowly does not fill the memory."""
    store = WatchedStore()
    reader = StoreSource(store).open(KEY, ranged=False)
    read(reader, 1)
    for _ in range(100):
        if store.pieces > stored.AHEAD_PIECES:
            break
        threading.Event().wait(0.01)
    threading.Event().wait(0.05)
    assert store.pieces <= stored.AHEAD_PIECES + 1
    reader.close()


def test_ranges_are_as_large_as_is_wanted_and_fair():
    """A few requests a block where all of it is wanted; smaller ones where many readers share the memory."""
    store = WatchedStore()
    session = StoreSource(store).session()
    reader = session.open(KEY, ranged=True)
    assert DATA == b"".join(read(reader, min(100_000, SIZE - at)) for at in range(0, SIZE, 100_000))
    reader.close()
    assert [(0, stored.LARGEST_RANGE_BYTES), (stored.LARGEST_RANGE_BYTES, stored.LARGEST_RANGE_BYTES)] == store.reads
    store.reads.clear()
    readers = [session.open(KEY, ranged=True) for _ in range(200)]
    assert DATA[:10] == read(readers[-1], 10)
    for one in readers:
        one.close()
    reader = session.open(KEY, ranged=True)
    assert DATA[:10] == read(reader, 10)
    reader.close()
    (_, many), (_, alone) = store.reads
    assert (True, stored.LARGEST_RANGE_BYTES) == (1 << 20 <= many < 2 << 20, alone)


def test_only_what_is_wanted_is_read():
    """What is passed over is not asked for."""
    store = WatchedStore()
    reader = StoreSource(store).open(KEY, ranged=True)
    assert DATA[:1000] == read(reader, 1000, 1000)
    assert 0 == reader.skip(5_000_000)
    assert DATA[5_001_000:5_003_000] == read(reader, 2000, 2000)
    reader.close()
    assert [(0, 1000), (5_001_000, 2000)] == store.reads


@pytest.mark.parametrize("ranged", [False, True])
def test_bytes_behind_the_end_are_noticed(ranged):
    """And an object that ends too soon."""
    reader = StoreSource(WatchedStore()).open(KEY, ranged=ranged)
    read(reader, 100_000)
    read(reader, SIZE - 100_005)
    assert not reader.at_end()
    with pytest.raises(CorruptError):
        read(reader, 6)
    reader.close()


@pytest.mark.parametrize("ranged", [False, True])
def test_what_a_store_raises_reaches_the_reader(ranged):
    """In its place: what came before it is read."""
    store = WatchedStore()
    store.fails_after = 2
    reader = StoreSource(store).open(KEY, ranged=ranged)
    assert DATA[: 2 * STREAM_CHUNK_BYTES] == read(reader, 2 * STREAM_CHUNK_BYTES)
    with pytest.raises(UnavailableError, match="on fire"):
        read(reader, 1)
    reader.close()


@pytest.mark.parametrize("ranged", [False, True])
@pytest.mark.parametrize("who", ["reader", "session"])
def test_a_reader_of_a_silent_store_is_stopped(ranged, who):
    """At once, although the store's own read cannot be."""
    store = WatchedStore()
    store.silent_after = 1
    session = StoreSource(store).session()
    reader = session.open(KEY, ranged=ranged)
    timer = threading.Timer(0.1, (reader if who == "reader" else session).abort)
    timer.start()
    with pytest.raises(UnavailableError, match="stopped"):
        read(reader, SIZE)
    timer.join()
    reader.close()
    store.go.set()


def test_a_silent_store_is_given_up_at_the_limit():
    """The caller's."""
    store = WatchedStore()
    store.silent_after = 0
    with pytest.raises(UnavailableError, match="within"):
        StoreSource(store).session(0.1).read(KEY, SIZE)
    store.go.set()


def test_no_thread_is_left_behind():
    """Neither by readers that were read to the end nor by those that were not."""
    before = set(threading.enumerate())
    source = StoreSource(WatchedStore())
    for count in (0, 1, SIZE):
        for ranged in (False, True):
            reader = source.open(KEY, ranged=ranged)
            if count:
                read(reader, count)
            reader.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_SECONDS)
    assert set() == set(threading.enumerate()) - before


def test_a_bucket_is_read_in_one_request_a_block(s3_server, monkeypatch):
    """Of a real S3 server, whose requests are billed elsewhere."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    store = open_store(s3_server.url("stored"))
    store.create(KEY, [DATA])
    opened = []
    inner = store._open
    monkeypatch.setattr(store, "_open", lambda *arguments: opened.append(arguments) or inner(*arguments))
    source = StoreSource(store)
    reader = source.open(KEY, ranged=False)
    assert DATA == b"".join(read(reader, min(1 << 20, SIZE - at)) for at in range(0, SIZE, 1 << 20))
    reader.close()
    assert 1 == len(opened)
    assert source.link().bytes_per_s > 0
