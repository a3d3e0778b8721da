"""Places for what comes: within the cap whatever happens, set aside before it is known what comes, and given back."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.edge.disk.eviction import CHARGE_UNIT_BYTES
from kvcdn.edge.disk.storage import DiskCache
from kvcdn.edge.fills import lodging
from kvcdn.edge.fills.arrival import Arrival
from kvcdn.edge.fills.guests import Guests
from kvcdn.edge.fills.lodging import Lodgings
from kvcdn.edge.fills.origins import Origin
from kvcdn.edge.http.target import ObjectName
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document, make_document
from support.edge_process import Reply, ask, disk_bytes, edge_in_thread, object_files, settle
from support.waiting import until


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return [make_document(tokens=1500, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def store(documents: list[Document]) -> MemoryStore:
    store = MemoryStore()
    for document in documents:
        document.publish(store)
    return store


AHEAD = 48 * CHARGE_UNIT_BYTES


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much room is set aside as most objects take, in a cache as small as a test's."""
    monkeypatch.setattr(lodging, "ASIDE_BYTES", AHEAD)
    monkeypatch.setattr(lodging, "ASIDE_SHARE", 2)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_cap_is_hard_under_random_loads(
    documents: list[Document],
    store: MemoryStore,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
) -> None:
    """With many readers at once, files on disk, unfinished ones included, never take more than the capacity.

    So it is with room set aside ahead and without, and where nothing comes that room was set aside for.
    """
    if ahead:
        monkeypatch.setattr(lodging, "ASIDE_BYTES", AHEAD)
        monkeypatch.setattr(lodging, "ASIDE_SHARE", 2)
    missing = [f"v1/{'0' * 32}/manifests/{number:064x}" for number in range(5)]
    objects = {key: data for document in documents for key, data in document.objects.items()}

    def right(reply: Reply, key: str) -> bool:
        return reply.body == objects[key] if key in objects else reply.status == 404

    @settings(max_examples=12, deadline=None)
    @given(seed=st.integers(0, 2**32), capacity=st.integers(1 << 20, 3 << 20))
    def holds(seed: int, capacity: int) -> None:
        cache = tmp_path_factory.mktemp("cap") / "cache"
        plan = random.Random(seed).choices([*objects, *missing], k=60)
        most, finished = [0], threading.Event()

        def measure() -> None:
            while not finished.is_set():
                most.append(disk_bytes(cache))

        with edge_in_thread(store, cache, capacity=capacity) as edge, ThreadPoolExecutor(6) as pool:
            watcher = threading.Thread(target=measure)
            watcher.start()
            results = list(pool.map(lambda key: right(ask(edge.url, f"/{key}"), key), plan))
            finished.set()
            watcher.join()
            settle(edge.url)
            assert [True] * len(plan) == results
            assert max(most) <= capacity
            assert 0 < disk_bytes(cache) <= edge.cache.used <= capacity
            assert len(object_files(cache)) == len(edge.cache)
            until(lambda: edge.cache._eviction.reserved == 0)

    holds()


@pytest.mark.usefixtures("ahead")
def test_a_full_cache_has_room_before_the_next_object_comes(
    documents: list[Document], store: MemoryStore, tmp_path: Path
) -> None:
    """What leaves for the next object is deleted when this one is stored, so that nobody waits for that."""
    with edge_in_thread(store, tmp_path / "cache", capacity=1 << 20) as edge:
        for document in documents:
            for key, data in document.objects.items():
                assert data == ask(edge.url, f"/{key}").body
                settle(edge.url)
                assert edge.cache.used <= edge.cache.capacity - AHEAD
                assert len(object_files(tmp_path / "cache")) == len(edge.cache)
        assert edge.cache.evicted > 0


@pytest.mark.usefixtures("ahead")
def test_what_nobody_waits_for_any_more_leaves_no_room_and_no_file(
    documents: list[Document], store: MemoryStore, tmp_path: Path
) -> None:
    """A call that ends after its caller gave up gives back all that it took."""
    key = next(iter(documents[0].blocks))
    name = ObjectName.from_path(f"/{key}")
    assert name is not None
    begin, begun = threading.Event(), threading.Event()

    def slow() -> Arrival:
        begun.set()
        assert begin.wait(300)
        return Arrival.begin([Origin(store)], name, None, lambda _: None)

    async def give_up(cache: DiskCache) -> None:
        lodgings = Lodgings(cache, Guests(0))
        waiting = asyncio.ensure_future(lodgings.receive(name, slow))
        assert await asyncio.to_thread(begun.wait, 300)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert cache._eviction.reserved > 0
        begin.set()
        await asyncio.to_thread(until, lambda: cache._eviction.reserved == 0)

    cache = DiskCache(tmp_path / "cache", 1 << 20)
    asyncio.run(give_up(cache))
    assert ([], True) == (list((tmp_path / "cache" / "staging").iterdir()), cache.set_aside(1 << 20))
    cache.close()
