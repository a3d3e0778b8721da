"""Removing, retiring, collecting, checking, mending and copying documents: at every kind of store, killed at every write."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcdn.envelope import BLOCK_MAGIC
from kvcdn.errors import CorruptError, NotFoundError, UsageError
from kvcdn.keys import block_key, manifest_key
from kvcdn.origin.upkeep import sweep
from kvcdn.origin.upkeep.addresses import AddressSet
from kvcdn.origin.upkeep.catalog import find_manifest, find_model, find_object, list_published, model_tags
from kvcdn.origin.upkeep.check import Kind, check_origin
from kvcdn.origin.upkeep.collect import collect_garbage
from kvcdn.origin.upkeep.copy import Resigner, copy_documents
from kvcdn.origin.upkeep.remove import remove_documents, retire_model
from kvcdn.origin.upkeep.whole import largest_block, read_header, verify_block
from kvcdn.signing import SigningKey, TrustList
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.http import HttpStore
from kvcdn.stores.memory import MemoryStore
from support.blocks import make_document
from support.library import Library, Watched, keys, small_model
from support.life import KINDS, new_store
from support.web import running_web

SCRIPT = Path(__file__).parent / "support" / "killed.py"

LATER = 2 * 86400


@pytest.fixture(params=KINDS)
def library(request, tmp_path):
    return Library(new_store(request.param, tmp_path, request))


@pytest.fixture
def here():
    """A library in memory, where the kind of store does not matter."""
    return Library(MemoryStore())


def remove(library, *specs):
    infos = [find_manifest(library.store, library.manifest_key(spec)) for spec in specs]
    return remove_documents(library.store, infos)[0]


def damage(store, key, change):
    """Replaces an object by what `change` makes of its bytes."""
    data = change(store.read(key))
    store.delete(key)
    store.create(key, [data])


def flipped(position):
    """One bit changed; a negative position counts from the end."""

    def change(data):
        changed = bytearray(data)
        changed[position] ^= 1
        return bytes(changed)

    return change


# -- rm and retire -----------------------------------------------------------------------------------------------------


def test_removing_a_document_leaves_what_others_share(library):
    """Its manifest goes, and of its blocks those that no other document begins with."""
    library.publish((1, 2, 3), (1, 2, 4))
    removal = remove(library, (1, 2, 3))
    assert (1, 1, 2, 0) == (removal.documents, removal.blocks, removal.blocks_shared, removal.blocks_held)
    assert sorted([library.manifest_key((1, 2, 4)), *library.block_keys((1, 2, 4))]) == sorted(keys(library.store))
    removal = remove(library, (1, 2, 4))
    assert (3, 0) == (removal.blocks, removal.blocks_shared)
    assert [] == keys(library.store)


def test_manifests_go_first_and_blocks_from_the_last(here):
    """So that whatever dies when, no manifest names a block that is gone, and no block lacks those before it."""
    here.publish((1, 2, 3))
    deleted = []
    watched = Watched(here.store, lambda operation, key: deleted.append(key) if operation == "delete" else None)
    remove_documents(watched, [find_manifest(here.store, here.manifest_key((1, 2, 3)))])
    assert [here.manifest_key((1, 2, 3)), *reversed(here.block_keys((1, 2, 3)))] == [k for k in deleted if "/sweeps/" not in k]


def test_a_running_publisher_keeps_its_blocks(here):
    """What it relies on is spared, and said to be."""
    here.publish((1, 2))
    publisher = here.steps((1, 2, 3))
    while next(publisher) != "computing":
        pass
    removal = remove(here, (1, 2))
    assert (0, 2) == (removal.blocks, removal.blocks_held)
    list(publisher)
    assert [] == check_origin(here.store).problems


def test_a_document_that_cannot_be_read_is_removed_by_itself(here):
    """Its blocks cannot be told; others of the model cannot be removed while it is there."""
    here.publish((1, 2), (3,))
    damage(here.store, here.manifest_key((1, 2)), flipped(50))
    before = keys(here.store)
    with pytest.raises(CorruptError, match="none is removed"):
        remove(here, (3,))
    assert before == keys(here.store)
    removal = remove(here, (1, 2))
    assert (1, 0, 1) == (removal.documents, removal.blocks, removal.unreadable)
    assert 1 == remove(here, (3,)).blocks
    assert sorted(here.block_keys((1, 2))) == keys(here.store)


def test_retiring_a_model_leaves_other_models(library):
    """All of one fingerprint goes: documents, shared blocks, orphans."""
    other = Library(library.store, model=small_model(1))
    library.publish((1, 2), (1, 3))
    library.write_blocks((7, 8))
    other.publish((1, 2))
    removal = retire_model(library.store, library.tag)
    assert (2, 5, 0, 0) == (removal.documents, removal.blocks, removal.blocks_shared, removal.blocks_held)
    assert sorted([other.manifest_key((1, 2)), *other.block_keys((1, 2))]) == keys(library.store)
    assert [other.tag] == list(model_tags(library.store))


def test_long_sweeps_are_cut_so_that_publishers_do_not_wait(here, monkeypatch):
    """Each sweep ends in time; the next looks again at what is published."""
    here.publish(*[(n, n) for n in range(20)])
    monkeypatch.setattr("kvcdn.origin.upkeep.lease.SWEEP_SECONDS", -1.0)
    monkeypatch.setattr("kvcdn.origin.upkeep.lease.Sweep.over", property(_worked))
    begun = []
    watched = Watched(here.store, lambda operation, key: begun.append(key) if operation == "create" else None)
    assert 40 == retire_model(watched, here.tag).blocks
    assert 40 / sweep.AT_ONCE == len(begun)


def _worked(one):
    """A sweep that is over after its first deletions."""
    one.asked = getattr(one, "asked", 0) + 1
    return one.asked > 1


# -- the catalog -------------------------------------------------------------------------------------------------------


def test_models_are_found_without_listing_everything(here):
    """Every tag, in order, whatever else lies there; the objects behind a model's first are jumped over."""
    library = here
    libraries = [Library(library.store, model=small_model(n), key=library.key) for n in range(5)]
    for one in libraries:
        one.publish((1,))
    for key in ("v1/0", "v1/doctor/x", "v1/a-file", "v1/f/g", "v2/x", "other"):
        library.store.create(key, [b"x"])
    assert sorted(one.tag for one in libraries) == list(model_tags(library.store))
    found = [listed.manifest.model_name for listed in list_published(library.store)]
    assert [one.model.name for one in sorted(libraries, key=lambda one: one.tag)] == found
    seen = []
    watched = Watched(library.store, lambda operation, _: seen.append(operation))
    assert 5 == len(list(model_tags(watched)))
    assert len(seen) < 2 * (5 + len(["0", "a-file", "doctor"]))


@pytest.mark.parametrize("target", [manifest_key, block_key], ids=["manifest", "block"])
def test_an_object_is_found_without_listing_all(here, target):
    """By its address, the beginning of it, and its key; what is looked at does not grow with the origin."""
    here.publish(*((number,) for number in range(1, 30)))
    key = here.manifest_key((7,)) if target is manifest_key else here.block_keys((7,))[0]
    address = key.rpartition("/")[2]
    for name in (address, address[:16], key):
        seen = []
        watched = Watched(here.store, lambda operation, _, seen=seen: seen.append(operation))
        assert key == find_object(watched, name).key
        assert len(seen) < 10
    with pytest.raises(NotFoundError, match="no object"):
        find_object(here.store, "f" * 64)
    with pytest.raises(NotFoundError, match="more than one object"):
        [find_object(here.store, digit) for digit in "0123456789abcdef"]


def test_listing_goes_on_behind_a_key(here):
    """Pages join without a gap or an overlap, over several models."""
    other = Library(here.store, model=small_model(1))
    here.publish((1,), (2,), (3,))
    other.publish((1,), (2,))
    everything = [listed.info.key for listed in list_published(here.store)]
    assert 5 == len(everything)
    for position, key in enumerate(everything):
        assert everything[position + 1 :] == [listed.info.key for listed in list_published(here.store, after=key)]


def test_documents_and_models_are_found_by_what_people_know(here):
    """By the beginning of an address, by key; by tag, fingerprint and name; what is not one thing is refused."""
    here.publish((1,), (2,))
    address = here.manifest_key((1,)).rpartition("/")[2]
    for target in (address, address[:12], here.manifest_key((1,))):
        assert here.manifest_key((1,)) == find_manifest(here.store, target).key
    for target in ("f" * 64, here.manifest_key((3,)), "v1/x", here.block_keys((1,))[0]):
        with pytest.raises(NotFoundError, match="no document"):
            find_manifest(here.store, target)
    for target in ("", "xyz", "F" * 64, "a" * 65):
        with pytest.raises(UsageError, match="not an address"):
            find_manifest(here.store, target)
    for model in (str(here.tag), str(here.model.fingerprint), here.model.name):
        assert here.tag == find_model(here.store, model)
    for model in ("0" * 32, "0" * 64, "nobody"):
        with pytest.raises(NotFoundError):
            find_model(here.store, model)
    twin = small_model(1)
    Library(here.store, model=type(twin)(twin.fingerprint, twin.layout, here.model.name)).publish((1,))
    with pytest.raises(UsageError, match="2 models"):
        find_model(here.store, here.model.name)


def test_a_packed_set_of_addresses_is_a_set():
    """Duplicates do not count, and membership is exact, also after packing."""
    import random

    rng = random.Random(3)
    addresses = [rng.randbytes(32) for _ in range(5000)]
    packed = AddressSet()
    for _ in range(20):
        packed.add(rng.sample(addresses, 2500))
    packed.add(addresses)
    assert 5000 == len(packed)
    assert all(address in packed for address in sorted(addresses))
    assert not any(rng.randbytes(32) in packed for _ in range(1000))
    assert sum(map(len, packed._buckets)) < 3 * 32 * 5000


# -- gc ----------------------------------------------------------------------------------------------------------------


def test_garbage_is_what_no_document_names(library):
    """Orphans go, documents stay, and a dry run says the same and removes nothing."""
    library.publish((1, 2), (1, 3))
    library.write_blocks((1, 2, 4))
    library.write_blocks((5,))
    before = keys(library.store)
    planned = collect_garbage(library.store, dry_run=True, now=time.time() + LATER)
    assert before == keys(library.store)
    collected = collect_garbage(library.store, now=time.time() + LATER)
    assert (2, 2, 3, 0) == (collected.documents, collected.blocks_removed, collected.blocks_kept, collected.blocks_young)
    for name in ("documents", "blocks_removed", "bytes_freed", "blocks_kept"):
        assert getattr(planned, name) == getattr(collected, name)
    assert set(before) - set(keys(library.store)) == {library.block_keys((1, 2, 4))[2], *library.block_keys((5,))}
    assert [] == check_origin(library.store).problems


def test_young_blocks_stay(here):
    """An interrupted publish can still be taken up."""
    here.write_blocks((1, 2))
    collected = collect_garbage(here.store)
    assert (0, 2) == (collected.blocks_removed, collected.blocks_young)
    assert 2 == collect_garbage(here.store, grace_seconds=0).blocks_removed


def test_expired_documents_go_with_what_only_they_name(library):
    """Shared blocks stay; no grace is needed for what was complete; a date to come is no expiry."""
    library.publish((1, 2), expires=1_700_000_001)
    library.publish((1, 3), expires=int(time.time()) + 1000)
    collected = collect_garbage(library.store)
    assert (1, 1, 1) == (collected.documents_expired, collected.documents, collected.blocks_removed)
    assert sorted([library.manifest_key((1, 3)), *library.block_keys((1, 3))]) == keys(library.store)


def test_a_running_publisher_keeps_old_blocks(here):
    """Whatever the grace period: it may be building on a block that nobody has named for years."""
    here.write_blocks((1, 2))
    publisher = here.steps((1, 2, 3))
    while next(publisher) != "computing":
        pass
    collected = collect_garbage(here.store, grace_seconds=0, now=time.time() + LATER)
    assert (0, 2) == (collected.blocks_removed, collected.blocks_held)
    list(publisher)
    assert [] == check_origin(here.store).problems


def test_a_model_with_an_unreadable_manifest_is_left_alone(here):
    """Its blocks may belong to that manifest. Other models are collected."""
    other = Library(here.store, model=small_model(1))
    for one in (here, other):
        one.publish((1,))
        one.write_blocks((2,))
    damage(here.store, here.manifest_key((1,)), lambda data: data[:-1])
    collected = collect_garbage(here.store, grace_seconds=0)
    assert [str(here.tag)] == [skipped["model_tag"] for skipped in collected.skipped]
    assert 1 == collected.blocks_removed
    assert [str(here.tag)] * 2 == [key.split("/")[1] for key in keys(here.store, "/blocks/") if str(here.tag) in key]


def test_what_dead_processes_left_is_removed(here, monkeypatch):
    """Leases, sweeps and probes, long after they count for anything."""
    here.publish((1,))
    for key in (f"v1/{here.tag}/leases/a", f"v1/{here.tag}/sweeps/b", "v1/doctor/c"):
        here.store.create(key, [b"KVCDNL1\n"])
    assert 0 == collect_garbage(here.store).leftovers
    later = time.time() + 3 * 86400
    monkeypatch.setattr("kvcdn.stores.memory.time.time", lambda: later)
    assert 3 == collect_garbage(here.store, now=later).leftovers
    assert sorted([here.manifest_key((1,)), *here.block_keys((1,))]) == keys(here.store)


def test_a_lease_is_not_removed_by_a_clock_that_is_ahead(here):
    """Leases count by the store's clock: a collector whose own is days ahead leaves a running publisher's in place."""
    publisher = here.steps((1,))
    assert "lease taken" == next(publisher)
    assert 0 == collect_garbage(here.store, now=time.time() + 30 * 86400).leftovers
    assert 1 == len(keys(here.store, "/leases/"))
    assert "published" == list(publisher)[-1]


# -- fsck --------------------------------------------------------------------------------------------------------------

FAULTS = {
    "a manifest's signature": ("manifest", flipped(-1), Kind.MANIFEST_CORRUPT, 4),
    "a manifest cut short": ("manifest", lambda data: data[:-10], Kind.MANIFEST_CORRUPT, 4),
    "an empty manifest": ("manifest", lambda data: b"", Kind.MANIFEST_CORRUPT, 4),
    "a block's header": ("block", flipped(60), Kind.BLOCK_CORRUPT, 4),
    "a block's last byte": ("block", flipped(-1), Kind.BLOCK_CORRUPT, 4),
    "a block cut short": ("block", lambda data: data[:-1], Kind.BLOCK_CORRUPT, 4),
    "a block cut in its header": ("block", lambda data: data[:100], Kind.BLOCK_CORRUPT, 4),
    "an empty block": ("block", lambda data: b"", Kind.BLOCK_CORRUPT, 4),
    "a byte behind a block": ("block", lambda data: data + b"x", Kind.BLOCK_CORRUPT, 4),
    "a missing block": ("block", None, Kind.BLOCK_MISSING, 3),
}


FAULTS_AT = [("memory", fault) for fault in FAULTS] + [("folder", "a block's header"), ("s3", "a missing block")]


@pytest.mark.parametrize(("library", "fault"), FAULTS_AT, indirect=["library"])
def test_damage_is_found_by_kind_and_mended_by_removing(library, fault):
    """The object and the kind; afterwards all is whole, the other document too, and publishing makes anew what is gone."""
    part, change, kind, code = FAULTS[fault]
    library.publish((1, 2, 3), (1, 4))
    library.write_blocks((9,))
    key = library.manifest_key((1, 2, 3)) if part == "manifest" else library.block_keys((1, 2, 3))[1]
    if change:
        damage(library.store, key, change)
    else:
        library.store.delete(key)
    found = check_origin(library.store, repair=True)
    assert [(kind, key, 1)] == [(problem.kind, problem.object, problem.documents) for problem in found.problems]
    assert (code, 2, [library.manifest_key((1, 2, 3))[-64:]]) == (found.exit_code, found.documents, found.documents_damaged)
    assert (1, int(kind is Kind.BLOCK_CORRUPT)) == (found.manifests_removed, found.blocks_removed)
    assert 0 == check_origin(library.store).exit_code
    library.publish((1, 2, 3))
    again = check_origin(library.store)
    assert (0, 2, 1) == (again.exit_code, again.documents, again.orphan_blocks)


def test_objects_under_other_names_are_found(here):
    """A block or a manifest that is sound, but lies where another should."""
    here.publish((1, 2), (3, 4))
    blocks, others = here.block_keys((1, 2)), here.block_keys((3, 4))
    damage(here.store, blocks[0], lambda _: here.store.read(others[0]))
    damage(here.store, here.manifest_key((1, 2)), lambda _: here.store.read(here.manifest_key((3, 4))))
    found = {problem.object: problem for problem in check_origin(here.store).problems}
    assert {blocks[0]: Kind.BLOCK_CORRUPT, here.manifest_key((1, 2)): Kind.MANIFEST_CORRUPT} == {
        key: problem.kind for key, problem in found.items()
    }
    assert all("under this name" in problem.reason for problem in found.values())


def test_a_block_made_anew_no_longer_fits_its_manifest(here):
    """Other salt, other etag: sound, but not what the manifest names. Every document that names it suffers."""
    here.publish((1, 2), (1, 3))
    here.store.delete(here.block_keys((1, 2))[0])
    here.write_blocks((1,))
    found = check_origin(here.store)
    assert [(Kind.BLOCK_MISMATCH, 2)] == [(problem.kind, problem.documents) for problem in found.problems]
    assert "etag" in found.problems[0].reason or "size" in found.problems[0].reason
    assert 4 == found.exit_code


def test_a_quick_check_reads_no_block(here):
    """It finds what is missing or of the wrong length, and says that it looked no further."""
    here.publish((1, 2), (3,), (4,))
    here.store.delete(here.block_keys((1, 2))[1])
    damage(here.store, here.block_keys((3,))[0], lambda data: data[:-1])
    damage(here.store, here.block_keys((4,))[0], flipped(-1))
    read = []
    watched = Watched(here.store, lambda operation, key: read.append(key) if operation in ("read", "stream") else None)
    found = check_origin(watched, read_blocks=False)
    assert [Kind.BLOCK_MISMATCH, Kind.BLOCK_MISSING] == sorted(problem.kind for problem in found.problems)
    assert [] == [key for key in read if "/blocks/" in key]
    assert not found.read_blocks


def test_what_comes_and_goes_meanwhile_is_no_problem(here):
    """A document removed or published during a check is neither missing nor damaged."""
    here.publish((1, 2), (3, 4))
    done = []

    def listen(operation: str, key: str) -> None:
        if operation == "list" and "/manifests/" in key and not done:
            done.append(key)
            here.publish((5, 6))
            remove(here, (1, 2))

    found = check_origin(Watched(here.store, listen))
    assert [] == found.problems


def test_a_removal_between_reading_a_manifest_and_its_blocks_is_no_problem(here):
    """The manifest was read, then all of it went."""
    here.publish((1, 2))
    gone = []

    def listen(operation: str, key: str) -> None:
        if operation == "list" and "/blocks/" in key and not gone:
            gone.append(here.store.read(here.manifest_key((1, 2))))
            remove(here, (1, 2))
            here.store.create(here.manifest_key((1, 2)), gone)
        if operation == "stat" and "/blocks/" in key:
            here.store.delete(here.manifest_key((1, 2)))

    assert [] == check_origin(Watched(here.store, listen)).problems
    assert gone


def test_whole_blocks_of_many_layers_are_read(tmp_path):
    """An envelope of more than a first read; a verified block of real size."""
    document = make_document(tokens=40, layers=200, heads=1, dim=2)
    store = MemoryStore()
    document.publish(store)
    (key,) = document.blocks
    assert len(store.read(key)) > 64 * 1024
    assert read_header(store, key) == verify_block(store, key)
    assert [] == check_origin(store).problems


# -- cp ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [("folder", "s3"), ("s3", "folder"), ("memory", "memory")])
def test_a_copy_holds_the_same_bytes(source, target, tmp_path, request):
    """Between any two kinds; a second run finds everything there and moves nothing."""
    library = Library(new_store(source, tmp_path, request))
    other = Library(library.store, model=small_model(1))
    library.publish((1, 2), (1, 3))
    library.write_blocks((8,))
    other.publish((1,))
    store = new_store(target, tmp_path, request)
    copied = copy_documents(library.store, store)
    assert (3, 0, 4, 1) == (copied.documents, copied.existed, copied.blocks, copied.blocks_existed)
    wanted = [key for key in keys(library.store) if key not in library.block_keys((8,))]
    assert {key: library.store.read(key) for key in wanted} == {key: store.read(key) for key in keys(store)}
    again = copy_documents(library.store, store)
    assert (0, 3, 0, 0) == (again.documents, again.existed, again.blocks, again.bytes)


@pytest.mark.parametrize("target", KINDS)
def test_a_copy_lasts_as_long_as_its_source(here, target, tmp_path, request, monkeypatch):
    """What was made to last longer at the source does so at the target once it is copied again; not the other way round."""
    store = new_store(target, tmp_path, request)
    soon, later = int(time.time()) + 1000, int(time.time()) + 100_000
    here.publish((1, 2), expires=soon)
    assert 1 == copy_documents(here.store, store).documents
    assert 1 == copy_documents(here.store, store).existed
    here.store.delete(here.manifest_key((1, 2)))
    after = time.time() + 10  # not within the second of the first, in which S3 tells times
    with monkeypatch.context() as patch:
        patch.setattr("kvcdn.stores.memory.time.time", lambda: after)
        here.publish((1, 2), expires=later)
    copied = copy_documents(here.store, store)
    assert (1, 0, 0, 2) == (copied.documents, copied.existed, copied.blocks, copied.blocks_existed)
    assert [later] == [listed.manifest.expires for listed in list_published(store)]
    assert 1 == copy_documents(here.store, store).existed
    here.store.delete(here.manifest_key((1, 2)))
    here.publish((1, 2), expires=soon)
    assert 1 == copy_documents(here.store, store).existed
    assert [] == check_origin(store).problems


def test_a_copy_of_one_model(here):
    """Only that one."""
    Library(here.store, model=small_model(1)).publish((1,))
    here.publish((1,))
    store = MemoryStore()
    assert 1 == copy_documents(here.store, store, tag=here.tag).documents
    assert [here.tag] == list(model_tags(store))


def test_damaged_documents_are_not_copied(here):
    """Nothing corrupt or incomplete arrives; the rest does."""
    here.publish((1, 2), (3, 4), (5, 6), (7, 8))
    damage(here.store, here.block_keys((1, 2))[1], flipped(-1))
    here.store.delete(here.block_keys((3, 4))[0])
    damage(here.store, here.manifest_key((5, 6)), flipped(30))
    store = MemoryStore()
    copied = copy_documents(here.store, store)
    bad = sorted(here.manifest_key(spec) for spec in ((1, 2), (3, 4), (5, 6)))
    assert bad == sorted(failure["object"] for failure in copied.damaged)
    found = check_origin(store)
    assert (1, []) == (found.documents, found.problems)


def test_a_document_that_conflicts_with_the_target_is_not_copied(here):
    """The same text published at both places has other bytes: a manifest must not name another's block."""
    here.publish((1, 2), (3,))
    target = Library(MemoryStore(), key=SigningKey.generate())
    target.publish((1, 5))
    copied = copy_documents(here.store, target.store)
    assert [here.manifest_key((1, 2))] == [conflict["object"] for conflict in copied.conflicts]
    assert 1 == copied.documents
    assert [] == check_origin(target.store).problems


def test_copies_are_signed_anew(here):
    """Every object is the new key's and whole, also shared ones; an interrupted copy goes on; the KV is the same."""
    here.publish((1, 2), (1, 3), (4,))
    new, store = SigningKey.generate(), MemoryStore()
    resigner = Resigner(new, TrustList.of(here.key.public))
    store.create(here.block_keys((1, 2))[0], [b"".join(resigner_pieces(here, resigner, here.block_keys((1, 2))[0]))])
    copied = copy_documents(here.store, store, resigner=resigner)
    assert (3, 3, 2) == (copied.documents, copied.blocks, copied.blocks_existed)
    assert [] == check_origin(store).problems
    assert {new.public} == {listed.manifest.publisher for listed in list_published(store)}
    for key in keys(store):
        if "/blocks/" in key:
            size = read_header(store, key).envelope_bytes
            assert new.public == read_header(store, key).publisher
            assert here.store.read(key, size) == store.read(key, size)
    again = MemoryStore()
    copy_documents(here.store, again, resigner=resigner)
    assert {key: store.read(key) for key in keys(store)} == {key: again.read(key) for key in keys(again)}


def resigner_pieces(library, resigner, key):
    """A block as it is signed anew."""
    data = library.store.read(key)
    envelope = resigner.reseal(data, BLOCK_MAGIC, key)
    return [envelope, data[len(envelope) :]]


def test_what_strangers_signed_is_not_signed_anew(here):
    """Neither a stranger's manifest nor one whose block is a stranger's; the rest is copied."""
    stranger = Library(here.store, key=SigningKey.generate())
    stranger.publish((7, 8))
    here.publish((1,), (7, 9))
    store = MemoryStore()
    copied = copy_documents(here.store, store, resigner=Resigner(SigningKey.generate(), TrustList.of(here.key.public)))
    assert {here.manifest_key((7, 8)), here.manifest_key((7, 9))} == {failure["object"] for failure in copied.untrusted}
    assert (1, [here.manifest_key((1,))]) == (copied.documents, [listed.info.key for listed in list_published(store)])


def test_a_source_that_cannot_be_listed_is_refused(here):
    """HTTP has no lists; the hint says what to name instead."""
    with running_web(here.store) as web, pytest.raises(UsageError, match="cannot be listed") as raised:
        copy_documents(HttpStore(web.url), MemoryStore())
    assert "s3://" in raised.value.hint


def test_a_block_larger_than_its_layout_is_not_read():
    """A manifest may claim any size; what its layout cannot fill is refused unread."""
    document = make_document(tokens=1024)
    from kvcdn.manifest import open_manifest

    manifest = open_manifest(document.manifest_bytes, "it")
    limit = largest_block(manifest, manifest.blocks[0])
    assert manifest.blocks[0].size < limit < 3 << 20


# -- killed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["rm", "retire", "gc", "repair", "cp"])
def test_killed_at_every_write(tmp_path, action):
    """SIGKILL before each create and delete in turn: every document left is whole; an end leaves nothing lying about."""
    library = Library(FolderStore(tmp_path / "origin"))
    library.publish((1, 2, 3), (1, 2, 4), (5, 6))
    library.publish((1, 7), expires=1_700_000_001)
    library.write_blocks((8, 9))
    if action == "repair":
        damage(library.store, library.block_keys((1, 2, 3))[1], flipped(-1))
    argument = {"rm": library.manifest_key((1, 2, 3)), "retire": str(library.tag), "cp": str(tmp_path / "source")}.get(
        action, ""
    )
    if action == "cp":
        source = Library(FolderStore(tmp_path / "source"), key=library.key)
        source.publish((3, 4, 5), (6,))
    results = tmp_path / "results"
    results.mkdir()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), action, str(tmp_path / "origin"), str(results), argument],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert "" == done.stderr
    killed, code = map(int, done.stdout.split())
    assert (True, 0) == (killed >= 4, code)
    for number in range(1, killed + 2):
        store = FolderStore(results / f"{number:03}")
        found = check_origin(store, repair=True)
        corrupt = [problem.object for problem in found.problems if problem.kind is Kind.BLOCK_CORRUPT]
        assert corrupt == [problem.object for problem in found.problems]
        assert corrupt == [] or action == "repair"
        assert [] == check_origin(store).problems
    last = FolderStore(results / f"{killed + 1:03}")
    assert [] == keys(last, "/sweeps/") + keys(last, "/leases/")
