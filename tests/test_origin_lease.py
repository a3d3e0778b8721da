"""Publishers and deleters at once, in every order, with deaths at any moment: no manifest ever names a block that is gone."""

from __future__ import annotations

import random
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcdn.digest import Digest
from kvcdn.errors import CorruptError, UnavailableError
from kvcdn.manifest import open_manifest
from kvcdn.origin.upkeep import lease as leases
from kvcdn.origin.upkeep.catalog import find_manifest
from kvcdn.origin.upkeep.check import check_origin
from kvcdn.origin.upkeep.collect import collect_garbage
from kvcdn.origin.upkeep.copy import copy_documents
from kvcdn.origin.upkeep.lease import LEASE_MAGIC, Lease, Sweep, lease_prefix, read_lease
from kvcdn.origin.upkeep.remove import remove_documents, retire_model
from kvcdn.signing import SigningKey
from kvcdn.stores.memory import MemoryStore
from support.library import Library, Watched, in_order, keys

KEY = SigningKey.generate()

SPECS = [(1,), (1, 1), (1, 2), (1, 1, 1), (1, 1, 2), (2, 1)]
"""A small forest: most share their beginnings."""

DELETIONS = ("rm", "retire", "gc", "cp", "repair")

LATER = 2 * 86400
"""Blocks look older than any grace period to a collector in two days' time; leases go by the store's clock."""


class Killed(BaseException):
    """The process is dead: nothing of it goes on, no handler has an effect."""


class World:
    """A store, publishers at work, and a deleter between whose operations the publishers take steps."""

    def __init__(self, schedule: list[int], kill_at: int) -> None:
        self.store = MemoryStore()
        self.library = Library(self.store, key=KEY)
        self.publishers = []
        self._schedule = iter(schedule)
        self._kill_at = kill_at

    def listen(self, operation: str, key: str) -> None:
        self._kill_at -= 1
        if self._kill_at <= 0:
            raise Killed
        self._step(next(self._schedule, 0))
        if operation == "delete" and "/blocks/" in key:
            assert Digest.parse(key[-64:], key) not in self.named(), "a block was deleted that a manifest names"

    def _step(self, number: int) -> None:
        """The number says which publisher takes how many steps."""
        for _ in range(number // 4):
            if self.publishers:
                publisher = self.publishers[number % len(self.publishers)]
                if next(publisher, None) is None:
                    self.publishers.remove(publisher)

    def named(self) -> set[Digest]:
        found = [open_manifest(self.store.read(key), key) for key in keys(self.store, "/manifests/")]
        return {block.address for manifest in found for block in manifest.blocks}

    def act(self, action: str, choice: int) -> None:
        watched = Watched(self.store, self.listen)
        published = keys(self.store, "/manifests/")
        try:
            if action == "rm" and published:
                remove_documents(watched, [find_manifest(self.store, published[choice % len(published)])])
            elif action == "retire":
                retire_model(watched, self.library.tag)
            elif action == "gc":
                collect_garbage(watched, now=time.time() + LATER)
            elif action == "repair":
                check_origin(watched, repair=True)
            elif action == "cp":
                other = Library(MemoryStore(), key=KEY)
                other.publish(SPECS[choice % len(SPECS)])
                copy_documents(other.store, watched)
        except Killed:
            self._kill_at = 1 << 30
            for key in keys(self.store, "/sweeps/"):  # their time passes
                self.store.delete(key)

    def require_whole(self) -> None:
        assert [] == check_origin(self.store).problems


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    begun=st.lists(st.tuples(st.sampled_from(SPECS), st.integers(0, 14)), max_size=5),
    actions=st.lists(st.tuples(st.sampled_from(DELETIONS), st.integers(0, 5)), min_size=1, max_size=3),
    schedule=st.lists(st.integers(0, 31), max_size=80),
    kill_at=st.one_of(st.just(1 << 30), st.integers(1, 60)),
    orphans=st.sampled_from([None, *SPECS]),
)
def test_no_manifest_names_a_block_that_is_gone(monkeypatch, begun, actions, schedule, kill_at, orphans):
    """Whatever publishes, removes, collects, copies, repairs or dies in whatever order: every document is whole."""
    with in_order(monkeypatch):
        world = World(schedule, kill_at)
        if orphans:
            world.library.write_blocks(orphans)
        for spec, steps in begun:
            publisher = world.library.steps(spec)
            if all(next(publisher, None) for _ in range(steps)):
                world.publishers.append(publisher)
        for action, choice in actions:
            world.act(action, choice)
            world.require_whole()
        for publisher in world.publishers:  # sweeps are over: each comes to its end
            for _ in publisher:
                pass
        world.require_whole()


def test_the_property_would_notice_a_missing_lease(monkeypatch):
    """Without leases the same interleavings do damage: the test above is not blind."""
    monkeypatch.setattr(Sweep, "held", lambda self: set())
    with in_order(monkeypatch):
        world = World([], 1 << 30)
        world.library.write_blocks((1, 2))
        publisher = world.library.steps((1, 2))
        while next(publisher) != "before the manifest":
            pass
        world.act("gc", 0)
        list(publisher)
    assert ["block-missing"] * 2 == [str(problem.kind) for problem in check_origin(world.store).problems]


def test_a_publisher_waits_for_a_sweep(monkeypatch):
    """A lease is entered only once no sweep is on."""
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.01)
    store, library = MemoryStore(), Library(MemoryStore())
    lease = Lease(store, library.tag, [])
    sweep = Sweep(store, library.tag)
    with sweep:
        lease.take()
        assert lease.blocked()
    assert not lease.blocked()
    lease.release()
    assert [] == keys(store)


def asleep(monkeypatch, seconds: float) -> None:
    """As after the machine has slept for so long: one clock of Linux goes on meanwhile, the other stands still."""
    real = time.clock_gettime
    shifted = {time.CLOCK_BOOTTIME: seconds}
    monkeypatch.setattr(time, "clock_gettime", lambda which: real(which) + shifted.get(which, 0.0))


def test_a_dead_sweep_is_not_waited_for(monkeypatch):
    """A deleter that was killed holds publishers up for its time, and no longer."""
    store, library = MemoryStore(), Library(MemoryStore())
    Sweep(store, library.tag).__enter__()
    lease = Lease(store, library.tag, [])
    lease.take()
    assert lease.blocked()
    asleep(monkeypatch, leases.SWEEP_DEAD_SECONDS + 1)
    assert not lease.blocked()


def test_an_old_lease_does_not_count_and_its_owner_knows(monkeypatch):
    """A publisher that took too long fails rather than name blocks that may be gone."""
    store, library = MemoryStore(), Library(MemoryStore())
    names = library.names((1, 2))
    lease = Lease(store, library.tag, [name.address for name in names.blocks])
    lease.take()
    lease.require()
    with Sweep(store, library.tag) as sweep:
        assert {name.address for name in names.blocks} == sweep.held()
    monkeypatch.setattr(leases, "LEASE_SECONDS", -1.0)
    with Sweep(store, library.tag) as sweep:
        assert set() == sweep.held()
    monkeypatch.setattr(leases, "LEASE_USABLE_SECONDS", -1.0)
    with pytest.raises(UnavailableError, match="may be gone"):
        lease.require()


@pytest.mark.skipif(sys.platform != "linux", reason="one of Linux's clocks goes on while a machine sleeps")
def test_a_machine_that_slept_relies_on_nothing(monkeypatch):
    """Neither a publisher on blocks that its lease does not protect any more, nor a deleter on what it has read before.

    After https://github.com/restic/restic/issues/3126 and https://github.com/restic/restic/pull/4374.
    """
    store, library = MemoryStore(), Library(MemoryStore())
    lease = Lease(store, library.tag, [])
    lease.take()
    with Sweep(store, library.tag) as sweep:
        asleep(monkeypatch, leases.SWEEP_SECONDS + 1)
        assert sweep.over
    lease.require()
    asleep(monkeypatch, leases.LEASE_SECONDS)
    with pytest.raises(UnavailableError, match="may be gone"):
        lease.require()


def test_an_unreadable_lease_stops_deleting():
    """What it protects is not known, so nothing may go; the error names it."""
    store = MemoryStore()
    library = Library(store)
    library.publish((1, 2))
    before = keys(store, "/blocks/")
    store.create(lease_prefix(library.tag) + "feed", [LEASE_MAGIC + b"short"])
    with pytest.raises(CorruptError, match="leases/feed"):
        remove_documents(store, [find_manifest(store, library.manifest_key((1, 2)))])
    assert before == keys(store, "/blocks/")
    assert [] == keys(store, "/sweeps/")


@pytest.mark.parametrize("data", [b"", b"KVCDNL1\n" + bytes(31), b"KVCDNX1\n" + bytes(32), LEASE_MAGIC + bytes(32 * 4097)])
def test_leases_are_read_strictly(data):
    """Another magic, a broken address, too many addresses: refused."""
    with pytest.raises(CorruptError, match="not a lease"):
        read_lease(data, "it")


def test_leases_hold_what_format_says():
    """FORMAT.md 8: a magic and the addresses."""
    addresses = [Digest(random.Random(n).randbytes(32)) for n in range(3)]
    store, library = MemoryStore(), Library(MemoryStore())
    Lease(store, library.tag, addresses).take()
    (key,) = keys(store)
    assert b"KVCDNL1\n" + b"".join(addresses) == store.read(key)
    assert set(addresses) == read_lease(store.read(key), key)


@pytest.mark.parametrize("waits", [True, False])
def test_a_publisher_that_begins_in_mid_sweep(monkeypatch, waits):
    """It waits, and makes anew what goes; one that did not wait would name blocks that are gone."""
    if not waits:
        monkeypatch.setattr(Lease, "blocked", lambda self: False)
    store = MemoryStore()
    library = Library(store)
    library.write_blocks((1, 2))
    publisher = library.steps((1, 2))
    said = []

    def listen(operation: str, key: str) -> None:
        if operation == "delete" and "/blocks/" in key and not said:
            said.extend(next(publisher, "") for _ in range(6))

    with in_order(monkeypatch):
        collect_garbage(Watched(store, listen), now=time.time() + LATER)
    assert ("waiting" in said) == waits
    list(publisher)
    assert ([] if waits else ["block-missing"] * 2) == [str(problem.kind) for problem in check_origin(store).problems]
