"""The disk cache across restarts, crashes and damage: what it keeps, what it drops, and the cap it never exceeds."""

from __future__ import annotations

import http.client
import os
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest

from kvcdn.digest import Digest, ModelTag
from kvcdn.edge.disk.eviction import charge
from kvcdn.edge.disk.index import FileIndex
from kvcdn.edge.disk.staging import Room, Staging
from kvcdn.edge.disk.storage import DiskCache, Harm
from kvcdn.edge.http.target import Kind, ObjectName
from kvcdn.edge.settings import load_settings
from kvcdn.errors import UnavailableError, UsageError
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document, make_document
from support.edge_process import (
    WatchedStore,
    ask,
    disk_bytes,
    edge_in_thread,
    metric,
    object_files,
    origin_gets,
    running_edge,
    settle,
)


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
    # Without an index the folder is walked; with it, the same is found out when somebody asks.
    for file in cache.glob("index*"):
        file.unlink()
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
    with edge_in_thread(watched, tmp_path / "cache", scrub_bytes_per_second=0) as edge:
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


def _index_files(cache: Path) -> list[Path]:
    return sorted(cache.glob("index*"))


@pytest.mark.parametrize("harm", ["missing", "emptied", "garbage", "truncated", "another boot", "a folder"])
def test_a_start_without_a_sound_index_walks_the_folder(
    documents: list[Document], store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """Whatever became of the index, every object is found again; the start after that believes the new one."""
    cache = tmp_path / "cache"
    objects = _blocks(documents)
    with edge_in_thread(store, cache) as edge:
        for key in objects:
            ask(edge.url, f"/{key}")
        settle(edge.url)
    if harm == "another boot":
        # A power failure: the index was in use, and the boot is another one.
        index = FileIndex(cache / "index")
        assert index.load() is not None
        monkeypatch.setattr("kvcdn.edge.disk.index._boot_id", lambda: "the next boot")
    index_file = cache / "index"
    match harm:
        case "missing":
            index_file.unlink()
        case "emptied":
            index_file.write_bytes(b"")
        case "garbage":
            index_file.write_bytes(b"x" * 5000)
        case "truncated":
            os.truncate(index_file, index_file.stat().st_size - 4096)
        case "a folder":
            index_file.unlink()
            index_file.mkdir()
    for _ in range(2):
        first = DiskCache(cache, 1 << 30)
        assert set(objects) == set(first.snapshot())
        assert sum(charge(len(data)) for data in objects.values()) == first.used
        first.close()


def test_an_index_that_names_what_is_gone_costs_a_refill(documents: list[Document], store: MemoryStore, tmp_path: Path) -> None:
    """Files deleted, emptied or turned into links between two runs are found out when somebody asks, and counted."""
    cache = tmp_path / "cache"
    keys = list(_blocks(documents))[:3]
    with edge_in_thread(store, cache) as edge:
        for key in keys:
            ask(edge.url, f"/{key}")
        settle(edge.url)
    files = {path.name[:64]: path for path in object_files(cache)}
    gone, empty, link = (files[key[-64:]] for key in keys)
    gone.unlink()
    empty.write_bytes(b"")
    link.rename(tmp_path / "target")
    link.symlink_to(tmp_path / "target")
    with edge_in_thread(store, cache, scrub_bytes_per_second=0) as edge:  # a scrub would find it out before anybody asks
        assert 3 == len(edge.cache)
        for key in keys:
            assert _blocks(documents)[key] == ask(edge.url, f"/{key}").body
        settle(edge.url)
        assert {Harm.VANISHED: 2, Harm.RESIZED: 1} == dict(edge.cache.dropped)
        assert 2 == metric(edge.url, 'kvcdn_edge_dropped_objects_total{harm="vanished"}')
        assert 3 == len(object_files(cache))


def test_the_index_knows_every_file_whenever_the_process_dies(tmp_path: Path) -> None:
    """A copy of the folder between any two steps of storing and evicting is taken over without a file left over."""
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    copies = []

    def copy() -> None:
        copies.append(shutil.copytree(tmp_path / "cache", tmp_path / f"copy-{len(copies)}"))

    rename, unlink = Path.rename, Path.unlink

    def renaming(self: Path, target: Path) -> Path:
        copy()
        done = rename(self, target)
        copy()
        return done

    def unlinking(self: Path, missing_ok: bool = False) -> None:
        copy()
        unlink(self, missing_ok)
        copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", renaming)
        patch.setattr(Path, "unlink", unlinking)
        for number in range(4):
            _store(cache, cache.reserve(_name(number), 500_000))
    assert len(copies) >= 12
    for folder in copies:
        taken = DiskCache(folder, 1 << 20)
        assert [] == list((folder / "staging").iterdir())
        found = object_files(folder)
        assert {f"{path.name[:64]}" for path in found} <= {key[-64:] for key in taken.snapshot()}
        assert sum(path.stat().st_size for path in found) <= taken.used <= 1 << 20
        taken.close()
    cache.close()


def test_nothing_is_stored_behind_a_closed_index(tmp_path: Path) -> None:
    """A fill that a slow disk makes durable after the end of the cache leaves no file that the next one does not know."""
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    room = cache.reserve(_name(1), 1000)
    staging = Staging.within(room)
    staging.write(bytes(1000), 0)
    cache.close()
    with pytest.raises(OSError, match="closed"):
        staging.commit()
    staging.discard()
    assert 0 == disk_bytes(tmp_path / "cache")
