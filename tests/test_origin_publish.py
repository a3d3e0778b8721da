"""Publishing: blocks first, manifest last, nothing twice, nothing half."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch

from kvcdn.block import open_header
from kvcdn.digest import hash_bytes
from kvcdn.errors import CorruptError, UnavailableError, UntrustedError, UsageError
from kvcdn.journal import journal_key, open_entry
from kvcdn.keys import Namespace, PrefixNames, block_key
from kvcdn.manifest import open_manifest
from kvcdn.model.load import load_model
from kvcdn.model.tokens import encode_text
from kvcdn.origin.publishing.estimate import estimate_publish
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.origin.publishing.run import Run
from kvcdn.origin.upkeep.catalog import list_published
from kvcdn.origin.upkeep.check import check_origin
from kvcdn.origin.upkeep.collect import collect_garbage
from kvcdn.origin.upkeep.journal_check import Shelf, check_journal
from kvcdn.origin.upkeep.lease import read_lease
from kvcdn.origin.upkeep.references import References
from kvcdn.signing import SigningKey, TrustList
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.published import publish_text
from support.tiny import TEXT
from support.waiting import WAIT_SECONDS


@pytest.fixture(scope="module")
def loaded(tiny_llama):
    return load_model(str(tiny_llama))


@pytest.fixture(scope="module")
def token_ids(loaded):
    return encode_text(loaded.tokenizer, TEXT).token_ids[:2500]


class Interrupted(MemoryStore):
    """A store whose writes fail after the first `allowed`, and that remembers the order of its keys. Leases do not count."""

    def __init__(self, allowed: int) -> None:
        super().__init__()
        self.allowed = allowed
        self.created: list[str] = []
        self._counting = threading.Lock()

    def create(self, key, pieces):
        if "/leases/" in key:
            return super().create(key, pieces)
        with self._counting:
            if len(self.created) >= self.allowed:
                raise UnavailableError("the disk is full")
            self.created.append(key)
        return super().create(key, pieces)


def everything(store):
    return {info.key: store.read(info.key) for info in store.list("v1/")}


def test_blocks_come_first_and_the_manifest_last(loaded, token_ids):
    """A manifest that exists is complete."""
    store = Interrupted(allowed=100)
    result = Publisher(loaded, store, SigningKey.generate()).publish(token_ids, label="a text")
    kinds = [next(kind for kind in key.split("/") if kind.isalpha() and len(kind) > 2) for key in store.created]
    # The journal's entry is made while the last blocks are written, and the manifest behind all.
    assert (["blocks", "blocks", "blocks", "journal"], "manifests") == (sorted(kinds[:-1]), kinds[-1])
    manifest = open_manifest(store.read(store.created[-1]), "manifest")
    assert (2500, "a text", 3) == (manifest.tokens, manifest.label, len(manifest.blocks))
    sizes = [len(store.read(key)) for key in store.created if "/blocks/" in key]
    assert sorted(sizes) == sorted(block.size for block in manifest.blocks)  # two are written at once
    assert sum(sizes) == result.uploaded_bytes == result.stored_bytes


def test_a_last_block_that_another_was_faster_with_is_named_as_it_is(loaded, token_ids):
    """The manifest was sealed, and the journal told, before that was known: both are done anew."""
    store, key = MemoryStore(), SigningKey.generate()
    other = MemoryStore()
    Publisher(loaded, other, key).publish(token_ids)
    last = PrefixNames.of(loaded.identity, Namespace.public(), token_ids).blocks[-1]
    place = block_key(loaded.identity.tag, last.address)
    create = store.create

    def beaten(wanted, pieces):
        if wanted == place:
            create(wanted, [other.read(wanted)])
        return create(wanted, pieces)

    store.create = beaten
    result = Publisher(loaded, store, key).publish(token_ids)
    ((at, data),) = ((each, data) for each, data in everything(store).items() if "/manifests/" in each)
    manifest = open_manifest(data, at)
    assert open_header(other.read(place), "block").etag == manifest.blocks[-1].etag
    assert 2 == result.blocks_uploaded
    entries = [open_entry(store.read(journal_key(number)), number, "entry") for number in (1, 2)]
    assert hash_bytes(data) == entries[1].deed.etag != entries[0].deed.etag


def test_a_second_run_uploads_nothing(loaded, token_ids):
    """The same text under the same model and key is done already."""
    store, key = MemoryStore(), SigningKey.generate()
    first = Publisher(loaded, store, key).publish(token_ids)
    before = everything(store)
    second = Publisher(loaded, store, key).publish(token_ids)
    assert ("published", "exists") == (first.status, second.status)
    assert (0, 0, 0) == (second.blocks_uploaded, second.uploaded_bytes, second.tokens_computed)
    assert before == everything(store)


def test_a_lease_lists_all_blocks_until_the_manifest_is_there(loaded, token_ids):
    """Whoever deletes meanwhile knows what this run relies on; afterwards no lease is left, also where publishing fails."""
    store = Interrupted(allowed=100)
    create, held = store.create, []

    def watched(key, pieces):
        held.append([read_lease(store.read(info.key), info.key) for info in store.list("v1/") if "/leases/" in info.key])
        return create(key, pieces)

    store.create = watched
    Publisher(loaded, store, SigningKey.generate()).publish(token_ids)
    names = PrefixNames.of(loaded.identity, Namespace.public(), token_ids)
    addresses = {name.address for name in names.blocks}
    assert [[], *[[addresses]] * 5] == held
    assert [] == [key for key in everything(store) if "/leases/" in key]
    store = Interrupted(allowed=1)
    with pytest.raises(UnavailableError):
        Publisher(loaded, store, SigningKey.generate()).publish(token_ids)
    assert [] == [key for key in everything(store) if "/leases/" in key]


@pytest.mark.parametrize("allowed", [0, 1, 2, 3, 4])
def test_an_interrupted_run_leaves_no_manifest_and_the_next_one_resumes(loaded, token_ids, allowed):
    """Whatever was whole is used; the result is that of an undisturbed run, to the bit of the tensors."""
    store, key = Interrupted(allowed), SigningKey.generate()
    with pytest.raises(UnavailableError, match="disk is full"):
        Publisher(loaded, store, key).publish(token_ids)
    assert [] == [key for key in everything(store) if "/manifests/" in key]
    assert allowed == len(everything(store))
    there = [key for key in everything(store) if "/blocks/" in key]
    names = PrefixNames.of(loaded.identity, Namespace.public(), token_ids).blocks
    leading = list(itertools.takewhile(lambda name: any(str(name.address) in key for key in there), names))
    store.allowed = 100
    result = Publisher(loaded, store, key).publish(token_ids)
    assert "published" == result.status
    assert len(names) - len(there) <= result.blocks_uploaded <= len(names) - len(leading)
    assert (leading[-1].end if leading else 0) == result.tokens_loaded
    undisturbed = MemoryStore()
    Publisher(loaded, undisturbed, key).publish(token_ids)
    assert raw_digests(loaded, undisturbed, token_ids) == raw_digests(loaded, store, token_ids)


def raw_digests(loaded, store, token_ids):
    """The tensors of every block, opened."""
    from kvcdn.block import open_header, open_segment
    from kvcdn.seal import ObjectKeys

    opened = []
    for name in PrefixNames.of(loaded.identity, Namespace.public(), token_ids).blocks:
        data = store.read(block_key(loaded.identity.tag, name.address))
        header = open_header(data, "block")
        for segment in header.segments:
            outs = [bytearray(part.raw_bytes) for part in segment.parts]
            begin = header.envelope_bytes + segment.offset
            views = [memoryview(out) for out in outs]
            keys = ObjectKeys(name.content_key, header.salt)
            open_segment(header, keys, segment.layer, data[begin : begin + segment.length], bytearray(), views)
            opened.extend(bytes(out) for out in outs)
    return opened


@pytest.mark.parametrize("lost", [0, 2])
def test_blocks_lost_under_a_manifest_are_made_again(loaded, token_ids, lost):
    """A second run does not call a document published that nobody can read."""
    store, key = MemoryStore(), SigningKey.generate()
    Publisher(loaded, store, key).publish(token_ids)
    name = PrefixNames.of(loaded.identity, Namespace.public(), token_ids).blocks[lost]
    store.delete(block_key(loaded.identity.tag, name.address))
    result = Publisher(loaded, store, key).publish(token_ids)
    assert "repaired" == result.status
    manifest_name = next(info.key for info in store.list("v1/") if "/manifests/" in info.key)
    manifest = open_manifest(store.read(manifest_name), "manifest")
    blocks = [block_key(loaded.identity.tag, block.address) for block in manifest.blocks]
    assert [len(store.read(block)) for block in blocks] == [block.size for block in manifest.blocks]
    assert "exists" == Publisher(loaded, store, key).publish(token_ids).status


@pytest.mark.parametrize(
    ("existing", "wanted", "renewed"),
    [
        (-10, None, True),
        (-10, 100, True),
        (50, 100, True),
        (95, 100, False),
        (200, 100, False),
        (100, None, True),
        (None, 100, False),
        (None, None, False),
    ],
)
def test_a_document_lasts_as_long_as_who_published_it_last_wants(loaded, token_ids, existing, wanted, renewed):
    """One that has expired, or will too soon, has its manifest made anew, of the same blocks; a tenth less is near enough."""
    store, key = MemoryStore(), SigningKey.generate()
    publisher = Publisher(loaded, store, key)
    hour, now = 3600, int(time.time())
    first = publisher.publish(token_ids[:600], label="a", expires=existing and now + hour * existing)
    before = everything(store)
    result = publisher.publish(token_ids[:600], expires=wanted and now + hour * wanted)
    assert ("renewed" if renewed else "exists", first.address, 0) == (result.status, result.address, result.blocks_uploaded)
    changed = {name for name, data in everything(store).items() if before.get(name) != data}
    manifest_name = next(name for name in before if "/manifests/" in name)
    assert ({manifest_name, journal_key(2)} if renewed else set()) == changed
    manifest = open_manifest(store.read(manifest_name), "manifest")
    lasts = wanted if renewed else existing
    assert (lasts and now + hour * lasts, "a") == (manifest.expires, manifest.label)
    assert [] == check_origin(store).problems
    shelf = Shelf()
    assert [] == check_journal(store, TrustList({key.public: "me"}), follow=shelf.follow).findings
    compared = shelf.compare(store, time.time())
    assert ([], []) == (compared.unrecorded, compared.returned)


class DeletesNothing(MemoryStore):
    """As a bucket whose publishers may delete leases only."""

    def delete(self, key):
        if "/manifests/" in key:
            raise UnavailableError(f"deleting {key}: the server answered 403 AccessDenied")
        super().delete(key)


def test_who_may_not_delete_leaves_a_document_while_it_lasts(loaded, token_ids):
    """Once it has expired, that is told: gc would take away what was said to be there."""
    store = DeletesNothing()
    publisher = Publisher(loaded, store, SigningKey.generate())
    publisher.publish(token_ids[:600], expires=int(time.time()) + 1000)
    publisher.publish(token_ids[:700], expires=int(time.time()) - 10)
    assert "exists" == publisher.publish(token_ids[:600]).status
    with pytest.raises(UnavailableError, match="403"):
        publisher.publish(token_ids[:700])
    assert [] == check_origin(store).problems


def test_a_document_that_expired_is_published_again_beside_gc(loaded, token_ids, monkeypatch):
    """gc that has seen the old manifest does not take the new one, nor one that a publisher is about to make anew."""
    store, key = MemoryStore(), SigningKey.generate()
    publisher = Publisher(loaded, store, key)
    publisher.publish(token_ids[:600], expires=int(time.time()) - 10)
    read = References.read

    def read_and_wait(references, **options):
        read(references, **options)
        assert "renewed" == publisher.publish(token_ids[:600], expires=int(time.time()) + 1000).status

    monkeypatch.setattr(References, "read", read_and_wait)
    collected = collect_garbage(store)
    assert (0, 0) == (collected.documents_expired, collected.blocks_removed)
    assert (1, []) == (len(list(list_published(store))), check_origin(store).problems)


def test_a_longer_document_shares_the_blocks_of_its_beginning(loaded, token_ids):
    """Shared prefixes are shared objects, computed once."""
    store, key = MemoryStore(), SigningKey.generate()
    Publisher(loaded, store, key).publish(token_ids[:2048])
    result = Publisher(loaded, store, key).publish(token_ids)
    assert (2048, 452, 1) == (result.tokens_loaded, result.tokens_computed, result.blocks_uploaded)


class Counted(MemoryStore):
    """A store that counts the bytes that are read of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0

    def read(self, key, start=0, length=None):
        data = super().read(key, start, length)
        if "/blocks/" in key:
            self.read_bytes += len(data)
        return data


def exact(loaded, store, key, token_ids):
    """The KV that readers of a published document have, decoded from its blocks."""
    names = PrefixNames.of(loaded.identity, Namespace.public(), token_ids)
    run = Run(loaded, store, key, TrustList.of(key.public), names, lambda _: None)
    assert run.is_complete()
    return run.compute(token_ids)


def same(ones, others):
    return all(torch.equal(a, b) for one, other in zip(ones, others, strict=True) for a, b in zip(one, other, strict=True))


def test_a_prompt_that_many_documents_begin_with_is_kept_in_memory(loaded, token_ids):
    """It is computed once and never loaded; what is written is what a publisher writes who has it not, to the bit."""
    store, key = Counted(), SigningKey.generate()
    publisher = Publisher(loaded, store, key)
    prompt, rest = token_ids[:1100], token_ids[1100:]
    documents = [prompt + rest[:700], prompt + rest[700:]]
    results = [publisher.publish(document) for document in documents]
    assert [(0, 1800), (1024, 776)] == [(result.tokens_loaded, result.tokens_computed) for result in results]
    assert store.read_bytes <= 64 * 1024 < results[0].stored_bytes // 2
    for document in documents:
        other = MemoryStore()
        Publisher(loaded, other, key).publish(document)
        assert same(exact(loaded, store, key, document), exact(loaded, other, key, document))


class Met(MemoryStore):
    """A store in which the reads of blocks wait until two are there."""

    def __init__(self) -> None:
        super().__init__()
        self.meeting: threading.Barrier | None = None

    def read(self, key, start=0, length=None):
        if self.meeting and "/blocks/" in key:
            self.meeting.wait(WAIT_SECONDS)
        return super().read(key, start, length)


def test_blocks_are_loaded_two_at_once(loaded, token_ids):
    """One waits for the origin while another is decoded."""
    store, key = Met(), SigningKey.generate()
    Publisher(loaded, store, key).publish(token_ids[:2048])
    store.meeting = threading.Barrier(2)
    assert 2048 == Publisher(loaded, store, key).publish(token_ids).tokens_loaded


def test_what_is_kept_is_what_lies_at_the_origin(loaded, token_ids):
    """A block that was made anew by somebody else is loaded; one that is gone is computed; another namespace has its own."""
    store, key = Counted(), SigningKey.generate()
    publisher = Publisher(loaded, store, key)
    publisher.publish(token_ids[:1200])
    (first, *_) = PrefixNames.of(loaded.identity, Namespace.public(), token_ids).blocks
    store.delete(block_key(loaded.identity.tag, first.address))
    assert 0 == publisher.publish(token_ids[:1300]).tokens_loaded
    store.delete(block_key(loaded.identity.tag, first.address))
    Publisher(loaded, store, key).publish(token_ids[:1024])
    store.read_bytes = 0
    again = publisher.publish(token_ids[:1400])
    assert (1024, True) == (again.tokens_loaded, store.read_bytes > again.raw_bytes // 2)
    private = Publisher(loaded, store, key, namespace=Namespace.private("mine", bytes(32)))
    private.kept = publisher.kept
    assert 0 == private.publish(token_ids[:1400]).tokens_loaded


def test_what_is_kept_is_built_upon_only_where_it_is_whole_and_trusted(loaded, token_ids):
    """An object that was cut at the origin is named, as in https://github.com/restic/restic/issues/3023.

    Whoever hands memory on to a publisher with another trust list hands no trust on.
    """
    store, key = MemoryStore(), SigningKey.generate()
    publisher = Publisher(loaded, store, key)
    publisher.publish(token_ids[:1100])
    stranger = Publisher(loaded, store, SigningKey.generate())
    stranger.kept = publisher.kept
    with pytest.raises(UntrustedError, match=key.public.text):
        stranger.publish(token_ids[:1200])
    (first, *_) = PrefixNames.of(loaded.identity, Namespace.public(), token_ids).blocks
    name = block_key(loaded.identity.tag, first.address)
    data = store.read(name)
    store.delete(name)
    store.create(name, [data[:-1]])
    with pytest.raises(CorruptError, match=str(first.address)):
        publisher.publish(token_ids[:1200])


def test_a_namespace_shares_nothing_with_the_public(loaded, token_ids):
    """A private document has other names, and its own copies."""
    store, key = MemoryStore(), SigningKey.generate()
    Publisher(loaded, store, key).publish(token_ids)
    public = set(everything(store))
    result = Publisher(loaded, store, key, namespace=Namespace.private("mine", bytes(32))).publish(token_ids)
    assert 3 == result.blocks_uploaded
    assert 2 * len(public) == len(everything(store))


def test_blocks_of_a_stranger_are_not_built_upon(loaded, token_ids):
    """Who got in first with an untrusted key cannot slip tensors into our documents."""
    store = MemoryStore()
    stranger, me = SigningKey.generate(), SigningKey.generate()
    Publisher(loaded, store, stranger).publish(token_ids[:1024])
    with pytest.raises(UntrustedError, match=stranger.public.text):
        Publisher(loaded, store, me).publish(token_ids)
    result = Publisher(loaded, store, me, trust=TrustList.of(stranger.public)).publish(token_ids)
    assert 1024 == result.tokens_loaded


def test_a_damaged_block_at_the_origin_is_named(loaded, token_ids, tmp_path):
    """Resuming over rot says which object to remove."""
    store, key = FolderStore(tmp_path), SigningKey.generate()
    Publisher(loaded, store, key).publish(token_ids[:1024])
    name = next(info.key for info in store.list("v1/") if "/blocks/" in info.key)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=name.rsplit("/", 1)[-1]):
        Publisher(loaded, store, key).publish(token_ids)


def test_a_document_beyond_the_models_positions_is_refused(loaded):
    """Nothing is computed, nothing is written."""
    store = MemoryStore()
    with pytest.raises(UsageError, match="reads at most 8,192"):
        Publisher(loaded, store, SigningKey.generate()).publish([5] * 8193)
    assert {} == everything(store)


def test_progress_tells_tokens_and_bytes(loaded, token_ids):
    """Long work shows where it is: never backwards, and at the end all of it."""
    seen = []
    result = Publisher(loaded, MemoryStore(), SigningKey.generate()).publish(token_ids, progress=seen.append)
    assert sorted(step.tokens_done for step in seen) == [step.tokens_done for step in seen]
    assert (2500, 2500, result.uploaded_bytes) == (seen[-1].tokens_done, seen[-1].tokens_total, seen[-1].bytes_stored)


def test_an_estimate_comes_close_and_writes_nothing(tiny_llama, loaded, token_ids):
    """--dry-run measures one block for real."""
    published = publish_text(tiny_llama, tokens=2500)
    estimate = estimate_publish(loaded, published.token_ids, Namespace.public())
    assert estimate.raw_bytes == published.result.raw_bytes
    assert abs(estimate.stored_bytes - published.result.stored_bytes) < 0.05 * published.result.stored_bytes
    expected = estimate.stored_bytes / estimate.tokens * estimate.tokens_per_second
    assert abs(estimate.break_even_bytes_per_second - expected) < 0.01 * expected
