"""The disk cache across restarts, crashes and damage: what it keeps, what it drops, and the cap it never exceeds."""

from __future__ import annotations

import http.client
import os
import random
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.digest import Digest, ModelTag
from kvcdn.edge.settings import load_settings
from kvcdn.edge.staging import Room, Staging
from kvcdn.edge.storage import DiskCache
from kvcdn.edge.target import Kind, ObjectName
from kvcdn.errors import UnavailableError, UsageError
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document, make_document
from support.edge_process import WatchedStore, ask, disk_bytes, edge_in_thread, object_files, origin_gets, running_edge, settle


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """Six documents of one block of some 260 kB each, and one of 1.5 blocks."""
    return [make_document(tokens=500, seed=seed) for seed in range(20, 26)] + [make_document(tokens=1500, seed=26)]


@pytest.fixture(scope="module")
def store(documents: list[Document]) -> MemoryStore:
    store = MemoryStore()
    for document in documents:
        document.publish(store)
    return store


def _blocks(documents: list[Document]) -> dict[str, bytes]:
    return {key: data for document in documents for key, data in document.blocks.items()}


def test_a_restart_finds_what_was_stored(documents: list[Document], store: MemoryStore, tmp_path: Path) -> None:
    """Objects and their sizes are there again, and are hits with the same tag and an age that goes on."""
    watched = WatchedStore(store)
    objects = {key: data for document in documents for key, data in document.objects.items()}
    with edge_in_thread(watched, tmp_path / "cache") as edge:
        tags = {key: ask(edge.url, f"/{key}").headers["ETag"] for key in objects}
        settle(edge.url)
        used = edge.cache.used
    watched.streams.clear()
    with edge_in_thread(watched, tmp_path / "cache") as edge:
        assert (len(objects), used) == (len(edge.cache), edge.cache.used)
        for key, data in objects.items():
            reply = ask(edge.url, f"/{key}")
            assert (200, data, tags[key], "kvcdn; hit") == (
                reply.status,
                reply.body,
                reply.headers["ETag"],
                reply.headers["Cache-Status"],
            )
        assert [] == watched.streams


def test_a_smaller_cap_holds_from_the_start(documents: list[Document], store: MemoryStore, tmp_path: Path) -> None:
    """A restart with less capacity trims the oldest before anything is served."""
    with edge_in_thread(store, tmp_path / "cache") as edge:
        for key in _blocks(documents):
            ask(edge.url, f"/{key}")
            time.sleep(0.01)
        last = key
    with edge_in_thread(store, tmp_path / "cache", capacity="1MiB") as edge:
        assert disk_bytes(tmp_path / "cache") <= 1 << 20
        assert 0 < len(edge.cache) < len(_blocks(documents))
        assert edge.cache.size_of(last) is not None


def test_kill_nine_in_the_middle_of_fills_leaves_a_usable_folder(tmp_path: Path) -> None:
    """After SIGKILL under load nothing half-written is found, the next edge counts right and serves right."""
    documents = [make_document(tokens=1024, layers=8, heads=4, dim=64, seed=seed) for seed in range(30, 36)]
    origin, cache = FolderStore(tmp_path / "origin"), tmp_path / "cache"
    for document in documents:
        document.publish(origin)
    blocks = _blocks(documents)

    def hammer(url: str) -> None:
        for key in blocks:
            try:
                ask(url, f"/{key}")
            except (OSError, http.client.HTTPException):
                return

    for pause in (0.02, 0.05, 0.08):
        with running_edge(str(tmp_path / "origin"), cache, capacity="14MB") as edge:
            threads = [threading.Thread(target=hammer, args=(edge.url,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(pause)
            edge.process.kill()
            edge.process.wait()
            for thread in threads:
                thread.join()
    with running_edge(str(tmp_path / "origin"), cache, capacity="14MB") as edge:
        assert [] == list((cache / "staging").iterdir())
        for path in object_files(cache):
            assert path.read_bytes() in blocks.values()
        for key, data in blocks.items():
            assert data == ask(edge.url, f"/{key}").body
        assert disk_bytes(cache) <= 14_000_000


def test_leftovers_and_damage_are_cleared_at_the_start(documents: list[Document], store: MemoryStore, tmp_path: Path) -> None:
    """Stale staging files, empty and truncated objects and symbolic links go; what is not ours is left alone."""
    cache = tmp_path / "cache"
    keys = list(_blocks(documents))[:4]
    with edge_in_thread(store, cache) as edge:
        for key in keys:
            ask(edge.url, f"/{key}")
    files = {path.name[:64]: path for path in object_files(cache)}
    empty, short, link, kept = (files[key.rsplit("/", 1)[1]] for key in keys)
    empty.write_bytes(b"")
    os.truncate(short, short.stat().st_size - 1)
    target = tmp_path / "target"
    link.rename(target)
    link.symlink_to(target)
    (cache / "staging" / "left").write_bytes(b"x" * 1000)
    stranger = cache / "objects" / "00" / "README"
    stranger.write_text("not ours")
    with edge_in_thread(store, cache) as edge:
        assert [kept, stranger] == sorted(object_files(cache), key=lambda path: path.name == "README")
        assert ([], 1) == (list((cache / "staging").iterdir()), len(edge.cache))
        for key in keys:
            assert _blocks(documents)[key] == ask(edge.url, f"/{key}").body


def test_a_file_with_another_header_is_dropped_at_its_first_use(
    documents: list[Document], store: MemoryStore, tmp_path: Path
) -> None:
    """A file of the right size with the wrong envelope is refetched, not served."""
    key, data = next(iter(documents[0].blocks.items()))
    with edge_in_thread(store, tmp_path / "cache") as edge:
        ask(edge.url, f"/{key}")
    (path,) = object_files(tmp_path / "cache")
    path.write_bytes(data[:50] + b"?" + data[51:])
    watched = WatchedStore(store)
    with edge_in_thread(watched, tmp_path / "cache") as edge:
        assert 1 == len(edge.cache)
        assert (data, [key]) == (ask(edge.url, f"/{key}").body, watched.streams)
        settle(edge.url)
        assert data == object_files(tmp_path / "cache")[0].read_bytes()


@pytest.mark.parametrize("harm", ["deleted", "truncated", "emptied", "grown"])
def test_a_file_harmed_under_a_running_edge_is_fetched_again(
    documents: list[Document], store: MemoryStore, tmp_path: Path, harm: str
) -> None:
    """What vanished or changed its size on disk is noticed when it is asked for."""
    key, data = next(iter(documents[0].blocks.items()))
    with edge_in_thread(store, tmp_path / "cache") as edge:
        ask(edge.url, f"/{key}")
        settle(edge.url)
        (path,) = object_files(tmp_path / "cache")
        match harm:
            case "deleted":
                path.unlink()
            case "truncated":
                os.truncate(path, 1000)
            case "emptied":
                os.truncate(path, 0)
            case "grown":
                os.truncate(path, len(data) + 1)
        reply = ask(edge.url, f"/{key}")
        settle(edge.url)
        assert (200, data, "kvcdn; fwd=miss; stored") == (reply.status, reply.body, reply.headers["Cache-Status"])
        assert (1, 2) == (len(object_files(tmp_path / "cache")), origin_gets(edge.url))


def test_the_cap_is_hard_under_random_loads(
    documents: list[Document], store: MemoryStore, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With many readers at once, files on disk, unfinished ones included, never take more than the capacity."""
    objects = {key: data for document in documents for key, data in document.objects.items()}

    @settings(max_examples=12, deadline=None)
    @given(seed=st.integers(0, 2**32), capacity=st.integers(1 << 20, 3 << 20))
    def holds(seed: int, capacity: int) -> None:
        cache = tmp_path_factory.mktemp("cap") / "cache"
        plan = random.Random(seed).choices(list(objects), k=60)
        most, finished = [0], threading.Event()

        def measure() -> None:
            while not finished.is_set():
                most.append(disk_bytes(cache))

        with edge_in_thread(store, cache, capacity=capacity) as edge, ThreadPoolExecutor(6) as pool:
            watcher = threading.Thread(target=measure)
            watcher.start()
            results = list(pool.map(lambda key: ask(edge.url, f"/{key}").body == objects[key], plan))
            finished.set()
            watcher.join()
            settle(edge.url)
            assert [True] * len(plan) == results
            assert max(most) <= capacity
            assert 0 < disk_bytes(cache) <= edge.cache.used <= capacity
            assert len(object_files(cache)) == len(edge.cache)

    holds()


def _name(number: int) -> ObjectName:
    return ObjectName(Kind.BLOCK, ModelTag(bytes(16)), Digest(number.to_bytes(32, "big")))


def _store(cache: DiskCache, room: Room | None) -> None:
    assert room is not None
    staging = Staging.within(room)
    staging.write(bytes(room.size), 0)
    staging.commit()
    cache.commit(room, "etag")


def test_room_promised_to_others_is_free_before_they_write(tmp_path: Path) -> None:
    """A small object evicts a large one; before its own fill begins, another uses the rest of that room."""
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    _store(cache, cache.reserve(_name(1), 1_000_000))
    small = cache.reserve(_name(2), 5000)
    _store(cache, cache.reserve(_name(3), 900_000))
    assert 900_000 == disk_bytes(tmp_path / "cache")
    _store(cache, small)
    assert (905_000, 2) == (disk_bytes(tmp_path / "cache"), len(cache))
    cache.close()


def test_the_folder_is_private(tmp_path: Path) -> None:
    """Folders are 0700, whatever the umask."""
    before = os.umask(0)
    try:
        DiskCache(tmp_path / "a" / "cache", 1 << 20).close()
    finally:
        os.umask(before)
    assert [0o700] * 4 == [
        stat.S_IMODE((tmp_path / "a" / "cache" / name).stat().st_mode) for name in (".", "objects", "objects/7f", "staging")
    ]


def test_two_edges_cannot_share_a_folder(tmp_path: Path) -> None:
    """The second is told who uses it; once the first is gone it may."""
    first = DiskCache(tmp_path / "cache", 1 << 20)
    with pytest.raises(UsageError, match=f"in use by another edge .process {os.getpid()}"):
        DiskCache(tmp_path / "cache", 1 << 20)
    first.close()
    DiskCache(tmp_path / "cache", 1 << 20).close()


def test_a_second_edge_process_on_a_folder_says_why_it_ends(tmp_path: Path) -> None:
    """The error and its hint are on standard error."""
    (tmp_path / "origin").mkdir()
    with (
        running_edge(str(tmp_path / "origin"), tmp_path / "cache") as edge,
        pytest.raises(UnavailableError, match=f"ended with 2: .*in use by another edge .process {edge.pid}.*hint: "),
        running_edge(str(tmp_path / "origin"), tmp_path / "cache"),
    ):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file where a folder should be ends the start with a hint."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(UnavailableError, match="cannot use the cache folder") as caught:
        DiskCache(tmp_path / "file" / "cache", load_settings(None, {"origin": "x"}).capacity)
    assert "cache_dir" in caught.value.hint
