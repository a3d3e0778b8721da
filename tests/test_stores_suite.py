"""What every store owes (kvcdn.store.BlobStore), held against all: memory, a folder, a real S3 server, HTTP for reading."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.errors import NotFoundError, UsageError
from kvcdn.store import MAX_KEY_CHARACTERS, STREAM_CHUNK_BYTES, BlobStore, check_key
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.http import HttpStore
from kvcdn.stores.memory import MemoryStore
from kvcdn.stores.s3 import MULTIPART_BYTES, S3Store
from support.seaweed import S3Server
from support.web import running_web

KEY = "v1/0011/blocks/ab/abcd"
WRITABLE = ("memory", "folder", "s3")

HOSTILE_KEYS = (
    "",
    "/",
    "/etc/passwd",
    "..",
    "../x",
    "a/../../x",
    "a/..",
    "./a",
    "a/./b",
    "a//b",
    "a/",
    "/a",
    ".tmp/x",
    "a/.hidden",
    "a\x00b",
    "a\nb",
    "a b",
    "a\\b",
    "a?b",
    "a#b",
    "a%2e%2e/b",
    "C:\\x",
    "ä",
    "a\u202eb",
    "\ud800",
    "a" * (MAX_KEY_CHARACTERS + 1),
)


@dataclass(frozen=True)
class Pair:
    """A store that can be written, and one that reads the same objects; the same one but for HTTP."""

    writer: BlobStore
    reader: BlobStore


@contextlib.contextmanager
def opened(kind: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A fresh, empty pair of the given kind."""
    if kind == "memory":
        store: BlobStore = MemoryStore()
    elif kind == "s3":
        store = s3_store(request.getfixturevalue("s3_server"), request.getfixturevalue("monkeypatch"))
    else:
        store = FolderStore(folder / "objects")
    if kind != "http":
        yield Pair(store, store)
        return
    with running_web(store) as web:
        yield Pair(store, HttpStore(web.url))


def s3_store(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """A store under a prefix of its own."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return S3Store(server.bucket, uuid.uuid4().hex, endpoint=server.endpoint, region=server.region)


@pytest.fixture(params=[*WRITABLE, "http"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with opened(request.param, tmp_path, request) as found:
        yield found


@pytest.fixture(params=WRITABLE)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    with opened(request.param, tmp_path, request) as found:
        yield found.writer


def test_round_trip(pair: Pair):
    """The pieces come back joined, whole and in a stream, with their size and a sensible age."""
    before = time.time()
    assert pair.writer.create(KEY, [b"one", b"", b"two"])
    info = pair.reader.stat(KEY)
    assert info is not None
    assert (KEY, 6) == (info.key, info.size)
    assert before - 5 < info.modified < time.time() + 5
    assert b"onetwo" == pair.reader.read(KEY)
    assert b"onetwo" == b"".join(pair.reader.stream(KEY))


@pytest.mark.parametrize("pieces", [[], [b""], [b"", b""]], ids=["none", "one", "two"])
def test_empty_object(pair: Pair, pieces: list[bytes]):
    """An object may be empty: it is there, and every range of it is empty."""
    assert pair.writer.create(KEY, pieces)
    info = pair.reader.stat(KEY)
    assert info is not None
    assert 0 == info.size
    assert b"" == pair.reader.read(KEY)
    assert b"" == pair.reader.read(KEY, 3, 4)
    assert [] == list(pair.reader.stream(KEY))


def test_missing_object(pair: Pair):
    """Nothing is there before it is created: None for stat, NotFoundError for the others, at the call and naming the key."""
    assert pair.reader.stat(KEY) is None
    for start, length in ((0, None), (0, 0), (5, 7)):
        with pytest.raises(NotFoundError, match="abcd"):
            pair.reader.read(KEY, start, length)
        with pytest.raises(NotFoundError, match="abcd"):
            pair.reader.stream(KEY, start, length)


def test_parent_of_an_object_is_no_object(pair: Pair):
    """The first parts of a key are not an object."""
    pair.writer.create("a/b/c", [b"x"])
    assert pair.reader.stat("a/b") is None
    assert pair.reader.stat("a/b/c/d") is None
    with pytest.raises(NotFoundError):
        pair.reader.read("a/b")


def test_create_never_overwrites(store: BlobStore):
    """A second create says False, whatever its bytes, and leaves the first object's bytes alone."""
    assert store.create(KEY, [b"first"])
    assert not store.create(KEY, [b"second, and longer"])
    assert not store.create(KEY, [b"first"])
    assert b"first" == store.read(KEY)


def test_one_winner_of_a_race(store: BlobStore):
    """Of 16 threads that create one key with different bytes exactly one wins, and its bytes are what is read."""
    barrier = threading.Barrier(16)
    won: dict[int, bool] = {}

    def race(number: int) -> None:
        payload = [bytes([number]) * 50_000] * 4
        barrier.wait()
        won[number] = store.create(KEY, payload)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [number for number, success in won.items() if success]
    assert 16 == len(won)
    assert 1 == len(winners)
    assert bytes(winners) * 200_000 == store.read(KEY)
    assert [KEY] == [info.key for info in store.list("")]


def test_ranges(pair: Pair):
    """Any range is the slice of the object that Python would take, whole and in a stream."""
    data = random.Random(1).randbytes(3_000)
    pair.writer.create(KEY, [data[:1_000], data[1_000:]])
    near = st.integers(0, 3_100) | st.sampled_from([0, 1, 2_999, 3_000, 3_001, 2**40])

    @settings(max_examples=80, deadline=None)
    @given(start=near, length=st.none() | near)
    def check(start: int, length: int | None) -> None:
        expected = data[start:] if length is None else data[start : start + length]
        assert expected == pair.reader.read(KEY, start, length)
        assert expected == b"".join(pair.reader.stream(KEY, start, length))

    check()


@pytest.mark.parametrize(("start", "length"), [(-1, None), (0, -1), (-5, 5)])
def test_negative_ranges(pair: Pair, start: int, length: int | None):
    """A negative start or length is a caller's mistake, not the end of the object."""
    pair.writer.create(KEY, [b"data"])
    with pytest.raises(UsageError, match="negative"):
        pair.reader.read(KEY, start, length)
    with pytest.raises(UsageError, match="negative"):
        pair.reader.stream(KEY, start, length)


def test_large_object(pair: Pair):
    """An object above the multipart limit arrives unharmed, in pieces of bounded size; any part of it can be read."""
    chunk = random.Random(2).randbytes(1 << 20)
    pieces = [bytes([i]) + chunk for i in range(MULTIPART_BYTES // len(chunk) + 1)]
    whole = b"".join(pieces)
    assert len(whole) > MULTIPART_BYTES
    assert pair.writer.create(KEY, pieces)
    received = bytearray()
    for piece in pair.reader.stream(KEY):
        assert 0 < len(piece) <= STREAM_CHUNK_BYTES
        received += piece
    assert whole == received
    middle = len(whole) // 2
    assert whole[middle : middle + 3_000_000] == pair.reader.read(KEY, middle, 3_000_000)
    assert not pair.writer.create(KEY, pieces)


@pytest.mark.parametrize("key", HOSTILE_KEYS, ids=repr)
def test_hostile_keys(pair: Pair, key: str):
    """A key that could leave the store, or that some store cannot hold, is refused by every method."""
    calls = (
        lambda: pair.reader.stat(key),
        lambda: pair.reader.read(key),
        lambda: pair.reader.stream(key),
        lambda: pair.reader.stream(key, 0, 0),
        lambda: pair.writer.create(key, [b"x"]),
        lambda: pair.reader.create(key, [b"x"]),
        lambda: pair.reader.delete(key),
    )
    for call in calls:
        with pytest.raises(UsageError):
            call()


def test_longest_key(pair: Pair):
    """The longest key that is allowed works everywhere."""
    key = "/".join(["k" * 127] * 4)
    assert MAX_KEY_CHARACTERS == len(key) + 1
    assert pair.writer.create(key + "k", [b"x"])
    assert b"x" == pair.reader.read(key + "k")
    assert [key + "k"] == [info.key for info in pair.writer.list("k")]


def test_list_in_key_order(store: BlobStore):
    """List gives every object once, with its size, ordered by key as a whole: `a-b` and `a.b` before `a/b`."""
    keys = [
        "a/b",
        "a/c/d",
        "a-b",
        "a.b/c",
        "ab",
        "ab2/x",
        "v1/0/blocks/00/00a",
        "v1/0/blocks/ff/ffa",
        "v1/0/manifests/00",
        "Z",
        "_",
    ]
    for size, key in enumerate(keys):
        assert store.create(key, [b"x" * size])
    found = list(store.list(""))
    assert sorted(keys) == [info.key for info in found]
    assert {key: size for size, key in enumerate(keys)} == {info.key: info.size for info in found}
    for prefix in (
        "a",
        "a/",
        "a/b",
        "ab",
        "v1/0/blocks/",
        "v1/0/blocks/0",
        "v1/0/m",
        "v1",
        "nothing",
        "a/b/",
        "../",
        "/",
        "a\x00",
    ):
        expected = sorted(key for key in keys if key.startswith(prefix))
        assert expected == [info.key for info in store.list(prefix)], prefix
        for after in (*keys, "a", "a/~", "v1/0/~", "v1/0/blocks/00", "~", ""):
            assert [key for key in expected if key > after] == [info.key for info in store.list(prefix, after)], (prefix, after)


def test_list_many(store: BlobStore):
    """More objects than a server returns at once."""
    for number in range(120):
        store.create(f"m/{number % 7}/{number:04}", [b"x"])
    assert sorted(f"m/{n % 7}/{n:04}" for n in range(120)) == [info.key for info in store.list("m/")]
    first = next(iter(store.list("m/")))
    assert "m/0/0000" == first.key


def test_list_of_an_empty_store(store: BlobStore):
    """A store in which nothing was created holds nothing."""
    assert [] == list(store.list(""))
    assert [] == list(store.list("v1/"))


def test_delete(store: BlobStore):
    """What is deleted is gone, twice is no error, neighbours stay, and the key is free again."""
    store.create(KEY, [b"old"])
    store.create(KEY + "e", [b"neighbour"])
    store.delete(KEY)
    store.delete(KEY)
    store.delete("never/was")
    assert store.stat(KEY) is None
    assert [KEY + "e"] == [info.key for info in store.list("")]
    assert store.create(KEY, [b"new"])
    assert b"new" == store.read(KEY)


def test_deleting_a_folder_of_objects_does_nothing(store: BlobStore):
    """Deleting what is only the first part of keys leaves the objects under it."""
    store.create("a/b/c", [b"x"])
    store.delete("a/b")
    store.delete("a/b/c/d")
    assert b"x" == store.read("a/b/c")


def test_stream_closed_early(pair: Pair):
    """A reader may leave at any time, before the first piece too; the store goes on working and nothing is left open."""
    data = random.Random(3).randbytes(3 * STREAM_CHUNK_BYTES)
    pair.writer.create(KEY, [data])
    for pieces_read in (0, 1, 2):
        stream = pair.reader.stream(KEY)
        received = b"".join(next(stream) for _ in range(pieces_read))
        stream.close()
        assert data.startswith(received)
        assert [] == list(stream)
    for start, length in ((0, 0), (len(data), None), (len(data) + 1, 5)):
        pair.reader.stream(KEY, start, length).close()
    abandoned = pair.reader.stream(KEY)
    del abandoned
    gc.collect()
    assert data == pair.reader.read(KEY)


def test_object_deleted_while_streamed(tmp_path: Path):
    """A reader in mid-stream of a folder store gets all bytes of an object that is deleted meanwhile."""
    store = FolderStore(tmp_path / "objects")
    data = random.Random(4).randbytes(2 * STREAM_CHUNK_BYTES + 17)
    store.create(KEY, [data])
    stream = store.stream(KEY)
    first = next(stream)
    store.delete(KEY)
    assert data == first + b"".join(stream)


def test_readers_and_writers_at_once(pair: Pair):
    """Readers that watch while objects are created see each one whole or not at all."""
    keys = [f"w/{number}" for number in range(12)]
    faults: list[str] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for number, key in enumerate(keys):
                info = pair.reader.stat(key)
                if info is not None and (info.size != 300_000 or pair.reader.read(key) != bytes([number]) * 300_000):
                    faults.append(key)

    watchers = [threading.Thread(target=watch) for _ in range(3)]
    for thread in watchers:
        thread.start()
    for number, key in enumerate(keys):
        assert pair.writer.create(key, [bytes([number]) * 100_000] * 3)
    done.set()
    for thread in watchers:
        thread.join()
    assert [] == faults


def test_url_and_repr(pair: Pair):
    """A store says where it is."""
    assert pair.reader.url.split(":")[0] in ("memory", "file", "s3", "http")
    assert pair.reader.url.removeprefix("file://") in repr(pair.reader) or pair.reader.url == "memory:"


@given(st.text(max_size=40))
def test_checked_keys_are_safe(text: str):
    """Whatever check_key lets through is relative, without dots that climb, and survives as a path and as a URL path."""
    try:
        key = check_key(text)
    except UsageError:
        return
    parts = key.split("/")
    assert all(part and not part.startswith(".") for part in parts)
    assert key.isascii()
    assert key.isprintable()
    assert "%" not in key
