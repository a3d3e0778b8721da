"""The scrub: what rots or vanishes on disk is found within its rate, dropped, and filled again; what is sound stays."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcdn.edge.settings import load_settings
from kvcdn.errors import UsageError
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document, make_document
from support.edge_process import ask, edge_in_thread, metric, object_files, origin_gets, running_edge, settle


@pytest.fixture(scope="module")
def document() -> Document:
    """Two blocks, of some 520 and 250 kB, and a manifest."""
    return make_document(tokens=1500)


def _found(url: str, finding: str) -> float:
    return metric(url, f'kvcdn_edge_scrubbed_objects_total{{finding="{finding}"}}')


def _await(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _flip(path: Path, position: int) -> None:
    """Changes one bit, and nothing that a folder listing shows."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_rot_behind_a_running_edge_is_found_and_mended(document: Document, tmp_path: Path) -> None:
    """Bits flip in a block's last segment and in a manifest: both go, are logged once, and come from the origin again."""
    document.publish(FolderStore(tmp_path / "origin"))
    key, data = next(iter(document.blocks.items()))
    with running_edge(str(tmp_path / "origin"), tmp_path / "cache", scrub_bytes_per_second="20MB") as edge:
        for name in document.objects:
            ask(edge.url, f"/{name}")
        settle(edge.url)
        files = {path.name[:64]: path for path in object_files(tmp_path / "cache")}
        _await(lambda: _found(edge.url, "sound") >= 3)
        rotten = [files[key.rsplit("/", 1)[1]], files[document.manifest_key.rsplit("/", 1)[1]]]
        _flip(rotten[0], len(data) - 1)
        _flip(rotten[1], 200)
        _await(lambda: _found(edge.url, "damaged") == 2)
        assert [False, False] == [path.exists() for path in rotten]
        assert 3 == origin_gets(edge.url)
        for name, expected in document.objects.items():
            assert expected == ask(edge.url, f"/{name}").body
        assert 5 == origin_gets(edge.url)
        sound = _found(edge.url, "sound")
        _await(lambda: _found(edge.url, "sound") >= sound + 3)
        assert 2 == _found(edge.url, "damaged")
        assert 2 == edge.log().count("the scrub found it damaged")


def test_rot_is_kept_aside_where_there_is_room_for_it(document: Document, tmp_path: Path) -> None:
    """In quarantine, as it rotted, within its part of the cap, the oldest leaving first; also after a restart."""
    document.publish(FolderStore(tmp_path / "origin"))
    cache, keys = tmp_path / "cache", list(document.blocks)
    large, small = (document.blocks[key] for key in keys)
    given = {"scrub_bytes_per_second": "50MB", "quarantine": "600kB", "capacity": "10MB"}

    def rot(url: str, key: str, count: float) -> bytes:
        ask(url, f"/{key}")
        settle(url)
        path = next(path for path in object_files(cache) if path.name.startswith(key[-64:]))
        _flip(path, 100_000)
        rotten = path.read_bytes()
        _await(lambda: _found(url, "damaged") == count)
        return rotten

    def aside() -> dict[str, bytes]:
        return {path.name[:64]: path.read_bytes() for path in (cache / "quarantine").iterdir()}

    with running_edge(str(tmp_path / "origin"), cache, **given) as edge:
        first = rot(edge.url, keys[0], 1)
        assert {keys[0][-64:]: first} == aside()
        second = rot(edge.url, keys[1], 2)
        assert {keys[1][-64:]: second} == aside()
        assert len(small) <= metric(edge.url, "kvcdn_edge_quarantine_bytes") < len(small) + 4096
        assert 9_400_000 == metric(edge.url, "kvcdn_edge_cache_capacity_bytes")
        assert large == ask(edge.url, f"/{keys[0]}").body
    with running_edge(str(tmp_path / "origin"), cache, **given) as edge:
        assert {keys[1][-64:]: second} == aside()
    with running_edge(str(tmp_path / "origin"), cache, capacity="10MB") as edge:
        assert {} == aside()
        assert 10_000_000 == metric(edge.url, "kvcdn_edge_cache_capacity_bytes")


def test_what_vanished_is_forgotten(document: Document, tmp_path: Path) -> None:
    """A file that an operator deleted is no longer counted, without anybody asking for it."""
    store = MemoryStore()
    document.publish(store)
    with edge_in_thread(store, tmp_path / "cache", scrub_bytes_per_second="20MB") as edge:
        for name in document.objects:
            ask(edge.url, f"/{name}")
        settle(edge.url)
        object_files(tmp_path / "cache")[0].unlink()
        _await(lambda: _found(edge.url, "gone") == 1)
        assert 2 == len(edge.cache)
        assert 0 == _found(edge.url, "damaged")


def test_the_rate_holds(document: Document, tmp_path: Path) -> None:
    """No more is read than the rate allows, and not nothing; an edge that scrubs can stop."""
    store = MemoryStore()
    document.publish(store)
    started = time.monotonic()
    with edge_in_thread(store, tmp_path / "cache", scrub_bytes_per_second=200_000) as edge:
        for name in document.objects:
            ask(edge.url, f"/{name}")
        settle(edge.url)
        _await(lambda: metric(edge.url, "kvcdn_edge_scrubbed_bytes_total") > 0, 120.0)
        read = metric(edge.url, "kvcdn_edge_scrubbed_bytes_total")
        assert read <= 200_000 * (time.monotonic() - started)


def test_a_scrub_may_be_off(document: Document, tmp_path: Path) -> None:
    """With a rate of 0 nothing is read."""
    store = MemoryStore()
    document.publish(store)
    with edge_in_thread(store, tmp_path / "cache", scrub_bytes_per_second=0) as edge:
        ask(edge.url, f"/{document.manifest_key}")
        settle(edge.url)
        time.sleep(0.3)
        assert 0 == metric(edge.url, "kvcdn_edge_scrubbed_bytes_total")


def test_a_rate_is_a_size() -> None:
    """Units are read, nonsense is refused by name."""
    assert 5_000_000 == load_settings(None, {"origin": "x", "scrub_bytes_per_second": "5MB"}).scrub_bytes_per_second
    with pytest.raises(UsageError, match="scrub_bytes_per_second"):
        load_settings(None, {"origin": "x", "scrub_bytes_per_second": -1})
