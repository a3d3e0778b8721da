"""Lossy precisions from end to end: published, measured, certified, found only by who asks, refused where too far off."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch

from kvcdn.block import open_header
from kvcdn.certificate import Certificate
from kvcdn.client import MissReason
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.verify import verify_prefix
from kvcdn.codecs.choice import STEPS
from kvcdn.errors import QualityError, UsageError
from kvcdn.keys import PRECISION_NATIVE, TRANSFORMED, Namespace, PrefixNames, block_key, read_precisions
from kvcdn.manifest import open_manifest
from kvcdn.model import bases
from kvcdn.model.prefill import ScheduledPrefill
from kvcdn.model.quality import Judge
from kvcdn.model.shelf import Shelf
from kvcdn.origin.publishing.estimate import estimate_publish
from kvcdn.origin.publishing.lossy import LADDER, Encoders
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.paths import data_dir
from kvcdn.stores.memory import MemoryStore
from support.published import publish_text
from support.tiny import tiny_checkpoint

GREEDY = {"max_new_tokens": 4, "do_sample": False}

LOSSY = ("int8", "int4", "tc-high", "tc-low", "tc-least")

GRIDS = ("int8", "int4")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A text of two blocks, in several precisions at one origin, and the basis on the publisher's own shelf."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("publisher")))
        yield publish_in_all(tmp_path_factory.mktemp("lossy"))


def publish_in_all(folder):
    found = publish_text(tiny_checkpoint(folder), tokens=1100)
    publisher = Publisher(found.loaded, found.store, found.key)
    found.results = {"native": found.result} | {name: publisher.publish(found.token_ids, precision=name) for name in LOSSY}
    return found


@pytest.fixture(autouse=True)
def _no_bases_in_memory(monkeypatch):
    """Each test is a process that has not met the model before."""
    monkeypatch.setattr(bases, "_known", {})


def names_in(published, precision):
    identity = replace(published.loaded.identity, precision=precision)
    return PrefixNames.of(identity, Namespace.public(), published.token_ids)


def manifest_in(published, precision):
    address = published.results[precision].address
    key = next(info.key for info in published.store.list("v1/") if info.key.endswith(f"manifests/{address}"))
    return open_manifest(published.store.read(key), "manifest")


def test_fewer_bits_are_fewer_bytes(published):
    """And each precision lies under addresses of its own."""
    ratios = {name: published.results[name].ratio for name in ("native", *LOSSY)}
    assert ratios["native"] > ratios["int8"] > ratios["int4"]
    assert ratios["native"] > ratios["tc-high"] > ratios["tc-low"] > ratios["tc-least"]
    addresses = {block.address for name in ("native", *LOSSY) for block in names_in(published, name).blocks}
    assert len(addresses) == 12


@pytest.mark.parametrize("precision", LOSSY)
def test_the_certificate_is_in_manifest_and_blocks(published, precision):
    """Signed with them; native objects have none."""
    manifest = manifest_in(published, precision)
    assert manifest.certificate is not None
    assert published.results[precision].certificate == manifest.certificate.to_json()
    assert (precision, 256, 32) == (manifest.precision, manifest.certificate.continuation, manifest.certificate.greedy_total)
    for name in names_in(published, precision).blocks:
        header = open_header(published.store.read(block_key(published.loaded.identity.tag, name.address)), "block")
        assert manifest.certificate == header.certificate
        assert ("quant" if precision in GRIDS else "tc") in {
            part.codec for segment in header.segments for part in segment.parts
        }
    assert manifest_in(published, "native").certificate is None


@pytest.mark.parametrize("precision", LOSSY)
def test_readers_get_what_was_measured(published, precision):
    """Loading gives the very bits that the publisher decoded, and measuring again gives the very certificate."""
    with published.client(precision=precision) as client:
        found = verify_prefix(client, published.token_ids, greedy=2)
    assert (precision, True, True, False) == (
        found.precision, found.loaded_equals_published, found.sound, found.bit_identical
    )  # fmt: skip
    assert found.certificate == found.measured == published.results[precision].certificate


def test_nobody_gets_lossy_by_accident(published):
    """By default a reader takes exact KV only, also where lossy KV is all there is."""
    lossy_only = MemoryStore()
    Publisher(published.loaded, lossy_only, published.key).publish(published.token_ids, precision="int8")
    with published.client(StoreSource(lossy_only)) as client:
        report = client.generate(published.text, **GREEDY).report
    assert (0, MissReason.NOT_PUBLISHED, "native") == (report.tokens_reused, report.reason, report.precision)


@pytest.mark.parametrize(
    ("accepted", "given"), [("int8", "int8"), ("int4,native", "int4"), (["native", "int8"], "native"), ("native", "native")]
)
def test_the_first_accepted_precision_is_taken(published, accepted, given):
    """In the reader's order, and the report says which it was."""
    with published.client(precision=accepted) as client:
        report = client.ask(published.text, "Why?", **GREEDY).report
    assert (given, 1100, None) == (report.precision, report.tokens_reused, report.reason)
    assert published.results[given].stored_bytes == report.bytes_fetched


def test_a_longer_prefix_is_preferred(published):
    """The second choice is taken where the first lacks the document's end."""
    store = MemoryStore()
    publisher = Publisher(published.loaded, store, published.key)
    publisher.publish(published.token_ids[:1024], precision="int4")
    publisher.publish(published.token_ids)
    with published.client(StoreSource(store), precision=("int4", "native")) as client:
        report = client.ask(published.text, "Why?", **GREEDY).report
    assert ("native", 1100) == (report.precision, report.tokens_reused)


def test_worse_than_the_reader_accepts_is_a_miss(published):
    """The certificate is checked before anything is decoded, and the model prefills."""
    with published.client(precision="int4", max_kl=0.0) as client:
        report = client.ask(published.text, "Why?", **GREEDY).report
        assert (0, MissReason.QUALITY) == (report.tokens_reused, report.reason)
        assert "you accept a mean KL of 0 at most" in report.detail
        with pytest.raises(QualityError):
            verify_prefix(client, published.token_ids)
    certificate = Certificate(**published.results["int4"].certificate)
    with published.client(precision="int4", max_kl=certificate.kl_mean / 1e9) as client:
        assert client.ask(published.text, "Why?", **GREEDY).report.reason is None


def test_a_bound_steps_precision_up(published):
    """What is not good enough is not written: the next finer precision is, or the exact KV."""
    kl = {name: published.results[name].certificate["kl_mean"] for name in GRIDS}
    assert kl["int8"] < kl["int4"]
    for bound, given in ((kl["int4"], "int4"), (kl["int4"] - 1, "int8"), (0, "native")):
        store = MemoryStore()
        publisher = Publisher(published.loaded, store, published.key)
        result = publisher.publish(published.token_ids, precision="int4", max_kl=bound / 1e9)
        assert (given, "published") == (result.precision, result.status)
        headers = [open_header(store.read(info.key), "block") for info in store.list("v1/") if "/blocks/" in info.key]
        assert {given} == {header.precision for header in headers}


@pytest.mark.parametrize("precision", LOSSY)
def test_precisions_step_up_to_native(precision):
    """From any of them, and of the transform codec each has a smaller step than the one before."""
    tried = [precision]
    while tried[-1] in LADDER:
        tried.append(LADDER[tried[-1]])
    assert PRECISION_NATIVE == tried[-1]
    steps = [STEPS[name] for name in tried if name in STEPS]
    assert steps == sorted(set(steps), reverse=True)
    if precision == TRANSFORMED[-1]:
        assert tried == [*reversed(TRANSFORMED), PRECISION_NATIVE]


def test_publishing_again_does_nothing(published):
    """A lossy publish is idempotent, and blocks that are there are kept."""
    publisher = Publisher(published.loaded, published.store, published.key)
    again = publisher.publish(published.token_ids, precision="int8")
    assert ("exists", 0) == (again.status, again.blocks_uploaded)
    longer = publisher.publish((*published.token_ids[:1024], *published.token_ids[:40]), precision="int8")
    assert ("published", 1, 1024) == (longer.status, longer.blocks_uploaded, longer.tokens_loaded)


def test_exact_ends(published):
    """The first tokens, which all others read, and the last, which the answer reads most, are the exact ones."""
    loaded, tokens = published.loaded, published.token_ids
    exact = ScheduledPrefill(loaded.model, loaded.identity.layout, len(tokens))
    for _ in exact.run(tokens):
        pass
    with published.client(precision="int4") as client:
        cache = client.prepare(client.question(published.text, "Why?")).cache
    for layer, tensors in zip(cache.layers, exact.rows(len(tokens)), strict=True):
        for ours, theirs in zip(layer.rows(0, len(tokens)), tensors, strict=True):
            assert torch.equal(ours[:4], theirs[:4])
            assert torch.equal(ours[-16:], theirs[-16:])
            assert not torch.equal(ours[4:-16], theirs[4:-16])


def test_an_encoder_does_not_know_what_is_measured(published):
    """Documents that differ in the tail alone have the same exponents: certificates are of tokens that no exponent has seen."""
    loaded = published.loaded
    found = []
    for shift in (0, 1):
        tokens = (*published.token_ids[:844], *published.token_ids[844 - shift : 1100 - shift])
        prefill = ScheduledPrefill(loaded.model, loaded.identity.layout, len(tokens))
        for _ in prefill.run(tokens):
            pass
        found.append(Encoders(loaded, tokens, prefill.rows(len(tokens))).of("tc-low").exponents)
    for ours, theirs in zip(*(chain.from_iterable(one) for one in found), strict=True):
        assert (1100,) == ours.shape
        assert len(set(ours.tolist())) > 1
        assert ours.tolist() == theirs.tolist()


def test_recomputing_differs_by_rounding(published):
    """The other schedule's passes do not fall on the same tiles of a processor's matrix units: noise is never nothing."""
    assert all(published.results[name].certificate["kl_recompute"] > 0 for name in LOSSY)


def test_short_documents(published):
    """Too short to measure on: refused; a little longer: certified over half of it."""
    publisher = Publisher(published.loaded, MemoryStore(), published.key)
    with pytest.raises(UsageError, match="too short to measure"):
        publisher.publish(published.token_ids[:15], precision="int8")
    assert publisher.publish(published.token_ids[:40], precision="int8").certificate["continuation"] == 20


def test_estimates_know_the_precision(published):
    """Without measuring or writing anything."""
    ratios = [
        estimate_publish(published.loaded, published.token_ids, Namespace.public(), name).ratio for name in ("native", *LOSSY)
    ]
    assert ratios[:3] == sorted(ratios[:3], reverse=True)
    assert abs(ratios[2] - published.results["int4"].ratio) < 0.05
    # Rows of a random model are read alike, which those of a real one are not: the estimate is near all the same.
    for found, precision in zip(ratios[3:], LOSSY[2:], strict=True):
        assert 0.8 < found / published.results[precision].ratio < 1.25


def test_the_judge_knows_exact_from_wrong(published):
    """The exact KV is at distance zero; keys of another position are far away."""
    loaded, tokens = published.loaded, published.token_ids[:300]
    prefill = ScheduledPrefill(loaded.model, loaded.identity.layout, len(tokens))
    for _ in prefill.run(tokens):
        pass
    exact = prefill.rows(len(tokens))
    judge = Judge(loaded, tokens, exact)
    assert (0.0, 1.0) == (judge.divergence(exact).mean, judge.divergence(exact).top1)
    wrong = [tuple(tensor.roll(1, 0) for tensor in layer) for layer in exact]
    assert judge.divergence(wrong).mean > 10 * judge.recompute > 0


@pytest.mark.parametrize("value", ["int9", "", "int8,int8", ()])
def test_precisions_are_a_closed_set(value):
    """A misspelt one is an error, not a miss."""
    with pytest.raises(UsageError):
        read_precisions(value)


def test_the_basis_is_a_document(published):
    """Published with the first that needs it, once; readers fetch it from where the blocks come from, and keep it."""
    manifests = [open_manifest(published.store.read(i.key), "m") for i in published.store.list("v1/") if "/manifests/" in i.key]
    (carrier,) = [manifest for manifest in manifests if manifest.label.startswith("basis ")]
    block = names_in(published, "tc-low").blocks[0]
    header = open_header(published.store.read(block_key(published.loaded.identity.tag, block.address)), "block")
    assert carrier.label == f"basis {str(header.basis.digest)[:12]}"
    shelf = Shelf(published.loaded.identity.tag, published.loaded.identity.layout)
    assert shelf.get(header.basis) is None
    with published.client(precision="tc-low") as client:
        assert client.ask(published.text, "Why?", **GREEDY).report.tokens_reused == 1100
    assert shelf.get(header.basis).name == header.basis


def test_without_its_basis_a_document_is_a_miss(published):
    """Typed, and the model prefills; so is a basis by somebody who is not trusted."""
    without = MemoryStore()
    address = next(
        str(manifest.blocks[0].address)
        for info in published.store.list("v1/")
        if "/manifests/" in info.key and (manifest := open_manifest(published.store.read(info.key), "m")).label
    )
    for info in published.store.list("v1/"):
        if address not in info.key:
            without.create(info.key, [published.store.read(info.key)])
    with published.client(StoreSource(without), precision="tc-low") as client:
        report = client.ask(published.text, "Why?", **GREEDY).report
    assert (0, MissReason.NOT_PUBLISHED) == (report.tokens_reused, report.reason)


def test_a_damaged_shelf_is_of_no_use(published, tmp_path):
    """Bytes that are not those of the name are fetched again."""
    block = names_in(published, "tc-low").blocks[0]
    name = open_header(published.store.read(block_key(published.loaded.identity.tag, block.address)), "block").basis
    with published.client(precision="tc-low") as client:
        client.ask(published.text, "Why?", **GREEDY)
    (path,) = data_dir().glob(f"bases/*/{name.digest}")
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    shelf = Shelf(published.loaded.identity.tag, published.loaded.identity.layout)
    assert shelf.get(name) is None
    assert shelf.latest() is None
    bases._known.clear()
    with published.client(precision="tc-low") as client:
        assert client.ask(published.text, "Why?", **GREEDY).report.tokens_reused == 1100
    assert shelf.latest().name == name
