"""Places for what comes: within the cap whatever happens, set aside before it is known what comes, and given back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import random
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.edge.disk.eviction import CHARGE_UNIT_BYTES, Eviction, charge
from kvcdn.edge.disk.staging import MEMORY_BYTES, Memory, Room, Staging
from kvcdn.edge.disk.storage import DiskCache
from kvcdn.edge.fills import lodging
from kvcdn.edge.fills.arrival import Arrival
from kvcdn.edge.fills.fill import Fill
from kvcdn.edge.fills.guests import Guests
from kvcdn.edge.fills.lodging import Lodgings
from kvcdn.edge.fills.origins import Origin, Origins
from kvcdn.edge.fills.revocations import Revoked
from kvcdn.edge.http.outcome import Reason, Refusal
from kvcdn.edge.http.target import ObjectName
from kvcdn.edge.reads import fetch
from kvcdn.edge.reads.fetch import Fetcher
from kvcdn.edge.telemetry.metrics import Metrics
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


def test_nothing_leaves_for_the_next_object_where_this_one_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file would stay until another object is, though it is counted no more."""
    capacity = 1 << 20
    monkeypatch.setattr(lodging, "ASIDE_BYTES", capacity)
    monkeypatch.setattr(lodging, "ASIDE_SHARE", 1)
    document, store = make_document(tokens=600, layers=16, heads=8), MemoryStore()
    document.publish(store)
    larger = next(key for key, data in document.blocks.items() if len(data) > capacity)
    with edge_in_thread(store, tmp_path / "cache", capacity=capacity) as edge:
        for key in (document.manifest_key, larger):
            assert document.objects[key] == ask(edge.url, f"/{key}").body
            settle(edge.url)
            assert (1, 0) == (len(edge.cache), edge.cache.evicted)
            assert 0 < disk_bytes(tmp_path / "cache") <= edge.cache.used


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


class Interrupted:
    """Awaits a coroutine, and cancels what it awaits at one of its stops, as a task that is cancelled there does."""

    def __init__(self, inner: Coroutine[Any, Any, None], stop: int) -> None:
        self.inner, self.stop, self.stops = inner, stop, 0

    def __await__(self) -> Generator[Any, Any, None]:
        step: Callable[[], Any] = partial(self.inner.send, None)
        while True:
            try:
                awaited = step()
            except StopIteration:
                return
            self.stops += 1
            if self.stops == self.stop and awaited is None:
                step = partial(self.inner.throw, asyncio.CancelledError())
                continue
            if self.stops == self.stop:
                awaited.cancel()
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001 - all that its task is told
                step = partial(self.inner.throw, error)
            else:
                step = partial(self.inner.send, None)


PLACES = ("set aside", "reserved", "guest", "passing", "full disk", "damaged", "revoked")


@pytest.mark.parametrize("place", PLACES)
def test_a_fill_that_is_cancelled_anywhere_leaves_no_room_and_no_file(
    documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """At each of its stops in turn, until one fill has more of them than are tried, and comes to its end."""
    monkeypatch.setattr(lodging, "ASIDE_SHARE", 2 if place == "set aside" else 1 << 40)
    key, data = next(iter(documents[0].blocks.items()))
    store = MemoryStore()
    store.create(key, [data[:-1] + bytes([data[-1] ^ 1]) if place == "damaged" else data])
    name = ObjectName.from_path(f"/{key}")
    assert name is not None
    full = OSError(errno.ENOSPC, "full")

    def refuse(_: Room) -> Staging:
        raise full

    if place == "full disk":
        monkeypatch.setattr(Staging, "within", refuse)

    async def fill_all(cache: DiskCache) -> int:
        fetcher = Fetcher(Origins([store]), cache, Revoked(None, None), Metrics())
        fetcher._guests.limit = cache.capacity // 2
        monkeypatch.setattr(fetcher, "_keeps", lambda _: place != "guest")
        monkeypatch.setattr(fetcher, "_sources", lambda _: (Origin(store, authority=place != "guest"),))
        stop = 0
        while True:
            stop += 1
            fill = Fill(name, 300)
            if place == "revoked":
                fill.cut(Refusal(Reason.REVOKED, ""))
            running = Interrupted(fetcher._run(fill), stop)
            with contextlib.suppress(asyncio.CancelledError):
                await running
            del fill
            await asyncio.to_thread(until, partial(_nothing_taken, cache._eviction, fetcher._guests, fetcher._lodgings._memory))
            cache.remove([key])
            cache.delete_removed()
            fetcher._guests.drop(lambda _: True)
            assert fetcher._guests._taken == 0
            if running.stops < stop:
                return stop

    cache = DiskCache(tmp_path / "cache", (1 << 20) if place != "passing" else 1 << 16)
    stops = asyncio.run(fill_all(cache))
    assert stops > 2
    gc.collect()
    assert [] == list((tmp_path / "cache" / "staging").iterdir())
    assert [] == object_files(tmp_path / "cache")
    cache.close()


def _nothing_taken(eviction: Eviction, guests: Guests, memory: Memory) -> bool:
    """But by guests that are here."""
    held = sum(charge(guest.fill.size) for guest in list(guests._held.values()))
    return (0, held, MEMORY_BYTES) == (eviction.reserved, guests._taken, memory._left)


class Calls:
    """Stands in for threads: calls run, and their ends are told, when a test says so, in any order; or there are no threads."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.waiting: list[tuple[asyncio.Future[Any], Callable[[], Any]]] = []
        self.ended: list[Callable[[], None]] = []

    def begin(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._rng.random() < 0.1:
            future.set_exception(RuntimeError("can't start new thread"))
        else:
            self.waiting.append((future, partial(function, *args)))
        return future

    def run(self) -> None:
        """Runs a call, if one waits."""
        if self.waiting:
            future, call = self.waiting.pop(self._rng.randrange(len(self.waiting)))
            try:
                self.ended.append(partial(future.set_result, call()))
            except Exception as error:  # noqa: BLE001 - every end of a call is its caller's to see
                self.ended.append(partial(future.set_exception, error))

    def tell(self) -> None:
        """Tells of the end of a call, if one has ended."""
        if self.ended:
            self.ended.pop(self._rng.randrange(len(self.ended)))()


async def _fill_in_some_order(
    names: list[ObjectName], calls: Calls, fetcher: Fetcher, cache: DiskCache, rng: random.Random
) -> None:
    """Until no fill runs and no call is out."""
    running: list[tuple[Fill, asyncio.Task[None]]] = []
    for _ in range(rng.randrange(60)):
        match rng.randrange(8):
            case 0 | 1:
                fill = Fill(rng.choice(names), 300)
                running.append((fill, asyncio.create_task(fetcher._run(fill))))
            case 2 if running:
                rng.choice(running)[1].cancel()
            case 3 if running:
                rng.choice(running)[0].cut(Refusal(Reason.REVOKED, ""))
            case 4 if running:
                rng.choice(running)[0].wanted = False
            case 5 | 6:
                calls.run()
            case _:
                calls.tell()
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        assert cache.used + cache._eviction.reserved <= cache.capacity
    while not all(task.done() for _, task in running) or calls.waiting or calls.ended:
        calls.run()
        calls.tell()
        await asyncio.sleep(0)
    for _ in range(3):  # what is called back when a call or task has ended
        await asyncio.sleep(0)


@pytest.mark.parametrize("ahead", [False, True])
def test_whatever_ends_when_all_room_is_back_at_once(
    documents: list[Document], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Fills that are cut, disowned and cancelled, threads that end before, after or never begin: in every order the same.

    The cap holds at each step, and nothing is waited for: when no fill runs and no call is out, no room is.
    """
    monkeypatch.setattr(lodging, "ASIDE_BYTES", AHEAD)
    monkeypatch.setattr(lodging, "ASIDE_SHARE", 2 if ahead else 1 << 40)
    store = MemoryStore()
    for document in documents[:2]:
        document.publish(store)
    damaged, data = next(iter(documents[2].blocks.items()))
    store.create(damaged, [data[:-1] + bytes([data[-1] ^ 1])])
    keys = [key for document in documents[:3] for key in document.objects]
    names = [name for key in keys if (name := ObjectName.from_path(f"/{key}"))]

    async def live(rng: random.Random, cache: DiskCache) -> None:
        calls = Calls(rng)
        monkeypatch.setattr(lodging, "begin_in_thread", calls.begin)
        monkeypatch.setattr(fetch, "begin_in_thread", calls.begin)
        fetcher = Fetcher(Origins([store]), cache, Revoked(None, None), Metrics())
        fetcher._guests.limit = cache.capacity // 2
        monkeypatch.setattr(fetcher, "_keeps", lambda _: rng.random() < 0.7)
        monkeypatch.setattr(fetcher, "_sources", lambda _: (Origin(store, authority=rng.random() < 0.7),))
        await _fill_in_some_order(names, calls, fetcher, cache, rng)
        gc.collect()
        assert _nothing_taken(cache._eviction, fetcher._guests, fetcher._lodgings._memory)
        fetcher._guests.drop(lambda _: True)
        cache.delete_removed()

    @settings(max_examples=25, deadline=None)
    @given(rng=st.randoms(use_true_random=False))
    def holds(rng: random.Random) -> None:
        folder = tmp_path_factory.mktemp("order")
        cache = DiskCache(folder, 1 << 20)
        asyncio.run(live(rng, cache))
        assert [] == list((folder / "staging").iterdir())
        files = object_files(folder)
        assert (len(files), cache.used) == (len(cache), sum(charge(path.stat().st_size) for path in files))
        cache.close()

    holds()
