"""Progressive documents: a lossy prefix, and beside it what makes it exact."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from kvcdn.block import open_header
from kvcdn.client import MissReason
from kvcdn.client.loading.coarse import CoarseRows
from kvcdn.client.loading.fetch import PrefixFetch
from kvcdn.client.loading.match import PublishedPrefix
from kvcdn.client.loading.report import Refining
from kvcdn.client.network.link import LinkEstimate
from kvcdn.client.planning.quality import Offer, choose
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.verify import verify_prefix
from kvcdn.edge.launch import launch_edge
from kvcdn.errors import CorruptError, UsageError
from kvcdn.keys import COARSE_OF, Namespace, PrefixNames, block_key, manifest_key
from kvcdn.manifest import open_manifest
from kvcdn.model.place import all_on
from kvcdn.model.prefill import ScheduledPrefill
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.local import LocalStore
from kvcdn.stores.memory import MemoryStore
from support.command import kvcdn
from support.faults import Fault, faulty_link
from support.published import publish_text
from support.tiny import TEXT, tiny_checkpoint

GREEDY = {"max_new_tokens": 4, "do_sample": False}

COARSE = ("int4", "tc-low")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A text of two blocks, published progressively in two precisions, and exactly at another origin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("publisher")))
        found = publish_text(tiny_checkpoint(tmp_path_factory.mktemp("refined")), tokens=1100)
        store = MemoryStore()
        publisher = Publisher(found.loaded, store, found.key)
        found.exact, found.store = found.store, store
        found.results = {name: publisher.publish(found.token_ids, precision=name, progressive=True) for name in COARSE}
        yield found


def names_in(published, precision):
    identity = replace(published.loaded.identity, precision=precision)
    return PrefixNames.of(identity, Namespace.public(), published.token_ids)


def keys_in(published, precision):
    return [block_key(published.loaded.identity.tag, block.address) for block in names_in(published, precision).blocks]


def header_of(store, key):
    return open_header(store.read(key), "block")


def without(store, *gone):
    """A copy of a store that lacks some objects."""
    copy = MemoryStore()
    for info in store.list("v1/"):
        if info.key not in gone:
            copy.create(info.key, [store.read(info.key)])
    return copy


def rows_of(cache, tokens):
    return [layer.rows(0, tokens) for layer in cache.layers]


def exact_rows(published):
    prefill = ScheduledPrefill(published.loaded.model, published.loaded.identity.layout, 1100)
    for _ in prefill.run(published.token_ids):
        pass
    return prefill.rows(1100)


def same(ours, theirs):
    return all(torch.equal(*pair) for pair in zip(chain(*ours), chain(*theirs), strict=True))


@pytest.mark.parametrize("precision", COARSE)
def test_a_refinement_is_a_document_that_names_what_it_refines(published, precision):
    """Its blocks hold no more than exact ones, have no certificate, and each names the etag of a coarse block.

    Where the coarse numbers are no help, as are those of tc-low to a random model's, exact ones are stored.
    """
    result = published.results[precision]
    refinement = names_in(published, f"{precision}+")
    key = manifest_key(published.loaded.identity.tag, refinement.manifest_address)
    manifest = open_manifest(published.store.read(key), "manifest")
    assert (f"{precision}+", None) == (manifest.precision, manifest.certificate)
    assert result.refinement == {
        "address": str(manifest.address),
        "precision": f"{precision}+",
        "stored_bytes": manifest.stored_bytes,
    }
    segments = [one for key in keys_in(published, f"{precision}+") for one in header_of(published.store, key).segments]
    exact = [one for key in keys_in(published, "native") for one in header_of(published.exact, key).segments]
    assert all(ours.length <= theirs.length for ours, theirs in zip(segments, exact, strict=True))
    assert ("rest" in {part.codec for one in segments for part in one.parts}) == (precision == "int4")
    for coarse, rest in zip(keys_in(published, precision), keys_in(published, f"{precision}+"), strict=True):
        assert header_of(published.store, coarse).etag == header_of(published.store, rest).coarse


@pytest.mark.parametrize("precision", COARSE)
def test_coarse_and_refinement_together_are_exact(published, precision):
    """To the bit: what the publisher computed, and what the exact document holds."""
    with published.client(precision=f"{precision}+", local_store=None) as client:
        prepared = client.prepare(client.question(published.text, "Why?"))
        assert (1100, f"{precision}+", None) == (
            prepared.report.tokens_reused, prepared.report.precision, prepared.report.reason
        )  # fmt: skip
        assert same(rows_of(prepared.cache, 1100), exact_rows(published))
        found = verify_prefix(client, published.token_ids, greedy=2)
    assert (True, True, None) == (found.loaded_equals_published, found.bit_identical, found.certificate)
    both = published.results[precision]
    assert both.stored_bytes + both.refinement["stored_bytes"] == prepared.report.bytes_fetched


def test_who_asks_for_exact_kv_gets_no_coarse_one(published):
    """Nor is a refinement alone of use: without its coarse blocks it is a miss."""
    with published.client(local_store=None) as client:
        report = client.ask(published.text, "Why?", **GREEDY).report
    assert (0, MissReason.NOT_PUBLISHED, "native") == (report.tokens_reused, report.reason, report.precision)
    alone = without(published.store, *keys_in(published, "int4"))
    with published.client(StoreSource(alone), precision="int4+", local_store=None) as client:
        report = client.ask(published.text, "Why?", **GREEDY).report
    assert (0, MissReason.NOT_PUBLISHED) == (report.tokens_reused, report.reason)


def test_other_coarse_blocks_are_found_out(published):
    """Coarse blocks that were removed and made anew have other etags: a refinement is of those that it names."""
    other = without(published.store, *keys_in(published, "int4"))
    publisher = Publisher(published.loaded, other, published.key)
    publisher.publish(published.token_ids, precision="int4")
    with published.client(StoreSource(other), precision="int4+", local_store=None) as client:
        report = client.ask(published.text, "Why?", **GREEDY).report
    assert (0, MissReason.CORRUPT) == (report.tokens_reused, report.reason)
    assert "refines block" in report.detail
    with pytest.raises(CorruptError, match="was replaced"):
        publisher.publish(published.token_ids, precision="int4", progressive=True)


def test_publishing_again_does_nothing(published):
    """And a refinement can be added to what is published, or completed."""
    publisher = Publisher(published.loaded, published.store, published.key)
    again = publisher.publish(published.token_ids, precision="int4", progressive=True)
    assert ("exists", 0) == (again.status, again.blocks_uploaded)
    assert again.refinement == published.results["int4"].refinement
    first, _ = keys_in(published, "int4+")
    partly = without(published.store, first)
    mended = Publisher(published.loaded, partly, published.key).publish(published.token_ids, precision="int4", progressive=True)
    assert ("repaired", 1) == (mended.status, mended.blocks_uploaded)
    with published.client(StoreSource(partly), precision="int4+", local_store=None) as client:
        assert client.ask(published.text, "Why?", **GREEDY).report.tokens_reused == 1100


def test_what_cannot_be_progressive(published):
    """Exact KV has no coarse part, and refinements are not published by themselves."""
    publisher = Publisher(published.loaded, MemoryStore(), published.key)
    with pytest.raises(UsageError, match="no coarse part"):
        publisher.publish(published.token_ids, progressive=True)
    for precision in COARSE_OF:
        with pytest.raises(UsageError, match="is published beside"):
            publisher.publish(published.token_ids, precision=precision)


# -- clients that begin on what is there first ----------------------------------------------------------------------------


SLOW = LinkEstimate(0.01, 20_000.0, 5)
"""A link on which exact KV of 1,100 tokens of the tiny model takes seconds longer than coarse KV."""


class SlowSource(StoreSource):
    """A store that says of itself that it is slow: what plans go by, without the waiting."""

    def link(self):
        return SLOW

    def session(self, limit_s=None, tally=None):
        found = super().session(limit_s, tally)
        found.link = self.link
        return found


@pytest.fixture
def local(tmp_path):
    folder = tmp_path / "local"
    return LocalStore(folder, 10**9)


def progressive(published, local, source=None, **options):
    options.setdefault("precision", "int4")
    source = SlowSource(published.store) if source is None else source
    return published.client(source, local_store=local, progressive=True, **options)


def ask(published, client):
    prompt = client.question(published.text, "Why?")
    return client.prepare(prompt)


def test_a_slow_link_brings_coarse_kv_first(published, local):
    """And exact KV to the local store, from where the next prompt has it: the very bits, asking nobody."""
    with progressive(published, local) as client:
        first = ask(published, client)
        assert ("int4", 1100, 1100) == (first.report.precision, first.report.tokens_reused, first.report.tokens_coarse)
        assert not same(rows_of(first.cache, 1100), exact_rows(published))
        assert first.report.plan["quality"]["precision"] == "int4"
        client.refiner.wait()
        assert (Refining.KEPT, "") == (first.report.refinement, first.report.refinement_detail)
    for options in ({"precision": "int4+,int4"}, {"precision": "int4+"}):
        with published.client(StoreSource(MemoryStore()), local_store=local, **options) as client:
            again = ask(published, client)
            assert ("int4+", 1100, 0) == (again.report.precision, again.report.tokens_local, again.report.tokens_coarse)
            assert same(rows_of(again.cache, 1100), exact_rows(published))


def test_a_fast_link_brings_exact_kv(published, local):
    """Where coarse KV would be hardly sooner, or nothing is known of the link, nothing coarse is begun with."""
    for link in (LinkEstimate(0.0001, 1e12, 5), LinkEstimate()):
        source = SlowSource(published.store)
        source.link = lambda link=link: link
        with progressive(published, local, source) as client:
            found = ask(published, client)
        assert ("int4+", 0, None) == (found.report.precision, found.report.tokens_coarse, found.report.refinement)
        assert same(rows_of(found.cache, 1100), exact_rows(published))


def test_a_bound_on_coarse_kv_holds(published, local):
    """By the certificate, before anything is decoded: exact KV is taken, however slow; with none, it is a miss."""
    with progressive(published, local, max_kl=0.0) as client:
        report = ask(published, client).report
    assert ("int4+", 1100, 0) == (report.precision, report.tokens_reused, report.tokens_coarse)
    coarse_only = without(published.store, *keys_in(published, "int4+"))
    other = LocalStore(local.folder.parent / "other", 10**9)
    with progressive(published, other, SlowSource(coarse_only), max_kl=0.0) as client:
        report = ask(published, client).report
    assert (0, MissReason.QUALITY) == (report.tokens_reused, report.reason)


def test_exact_readers_do_not_meet_what_is_coarse(published, local):
    """In the store of the same host, while it is not refined."""
    coarse_only = without(published.store, *keys_in(published, "int4+"))
    with progressive(published, local, SlowSource(coarse_only)) as client:
        report = ask(published, client).report
        client.refiner.wait()
        assert (Refining.FAILED, 1100) == (report.refinement, report.tokens_coarse)
        assert "nothing is published that makes" in report.refinement_detail
    for options in ({}, {"precision": "int4+"}):
        with published.client(StoreSource(MemoryStore()), local_store=local, **options) as client:
            found = ask(published, client).report
            assert (0, MissReason.NOT_PUBLISHED) == (found.tokens_reused, found.reason)


def test_exact_kv_from_elsewhere_refines_as_well(published, local):
    """Where no refinement is published, but the exact document is, and exact KV is accepted."""
    both = without(published.store, *keys_in(published, "int4+"))
    for info in published.exact.list("v1/"):
        both.create(info.key, [published.exact.read(info.key)])
    with progressive(published, local, SlowSource(both), precision="native,int4") as client:
        report = ask(published, client).report
        client.refiner.wait()
    assert ("int4", Refining.KEPT) == (report.precision, report.refinement)
    with published.client(StoreSource(MemoryStore()), local_store=local) as client:
        again = ask(published, client)
    assert ("native", 1100) == (again.report.precision, again.report.tokens_local)
    assert same(rows_of(again.cache, 1100), exact_rows(published))


def test_damage_in_the_middle_of_a_refinement(published, local):
    """Leaves the coarse prefix as it was, and nothing that could pass for exact; a sound source then refines it."""
    _, last = keys_in(published, "int4+")
    damaged = without(published.store, last)
    data = bytearray(published.store.read(last))
    data[-20] ^= 1
    damaged.create(last, [bytes(data)])
    with progressive(published, local, SlowSource(damaged)) as client:
        report = ask(published, client).report
        client.refiner.wait()
        assert (Refining.FAILED, 1100) == (report.refinement, report.tokens_coarse)
        assert "hash does not match" in report.refinement_detail
    with published.client(StoreSource(MemoryStore()), local_store=local, precision="int4+") as client:
        assert ask(published, client).report.tokens_reused == 0
    with progressive(published, local) as client:
        again = ask(published, client).report
        client.refiner.wait()
    assert ("int4", 1100, Refining.KEPT) == (again.precision, again.tokens_local, again.refinement)


def test_coarse_rows_that_were_written_over_are_not_refined_into_exact_ones(published):
    """They are found out by the digest of the exact rows, and nothing is believed of who says where they came from."""
    identity = replace(published.loaded.identity, precision="int4+")
    names = names_in(published, "int4+")
    etags = {
        name.address: header_of(published.store, key).etag
        for name, key in zip(names_in(published, "int4").blocks, keys_in(published, "int4"), strict=True)
    }
    with published.client(precision="int4", local_store=None) as client:
        coarse = rows_of(ask(published, client).cache, 1100)
    # By a last place, with which the part still decodes; by other rows, with which it may not even do that.
    nearly = [[(tensor.view(torch.int16) ^ 1).view(tensor.dtype) for tensor in tensors] for tensors in coarse]
    for wrong, says in ((nearly, "not the exact ones"), (exact_rows(published), "block ")):
        rows = CoarseRows(etags, lambda layer, start, end, wrong=wrong: [tensor[start:end] for tensor in wrong[layer]])
        where = {"length": 1100, "capacity": 1100, "devices": all_on("cpu", identity.layout), "trust": published.trust}
        fetch = PrefixFetch(StoreSource(published.store), identity, names.blocks, **where, coarse=rows)
        with pytest.raises(CorruptError, match=says):
            fetch.wait()
        fetch.close()


def test_a_prefix_in_memory_becomes_exact(published, local):
    """Questions say which quality they had: coarse until the exact KV is here, exact from then on."""
    with progressive(published, local) as client, client.prefix(published.text) as prefix:
        before = prefix.ask("Why?", **GREEDY).report
        assert prefix.report.refinement in (Refining.PENDING, Refining.KEPT)
        client.refiner.wait()
        after = prefix.prepare(client.question(published.text, "Why?"))
    # Whether the first question came before the exact KV is a matter of time; that it says so is not.
    assert before.tokens_coarse == (before.tokens_kept if before.precision == "int4" else 0)
    assert ("int4+", 0) == (after.report.precision, after.report.tokens_coarse)
    assert same(rows_of(after.cache, 1100), exact_rows(published))


def test_a_client_that_closes_gives_up(published, local):
    """Without waiting for what is under way; its report says so, and what is coarse stays coarse."""
    begun, go_on = threading.Event(), threading.Event()

    class Held(MemoryStore):
        """Holds a refinement's bytes back."""

        def _find(self, key, span):
            if key in refining:
                begun.set()
                go_on.wait()
            return super()._find(key, span)

    store, refining = Held(), set(keys_in(published, "int4+"))
    for info in published.store.list("v1/"):
        store.create(info.key, [published.store.read(info.key)])
    with progressive(published, local, SlowSource(store)) as client:
        report = ask(published, client).report
        assert report.refinement is Refining.PENDING
        begun.wait()
    assert (Refining.FAILED, 1100) == (report.refinement, report.tokens_coarse)
    go_on.set()


def test_what_progressive_clients_need(published, local):
    """A lossy precision that is accepted, and a store to refine into."""
    with pytest.raises(UsageError, match="no coarse part"):
        progressive(published, local, precision="native")
    with pytest.raises(UsageError, match="no local store"):
        progressive(published, None)


# -- the choice ------------------------------------------------------------------------------------------------------------


def offer(published, precision, count=2, seconds=None):
    names = names_in(published, precision)
    return Offer(replace(published.loaded.identity, precision=precision), PublishedPrefix(names.blocks[:count]), seconds)


@pytest.mark.parametrize(
    ("exact", "coarse", "chosen"),
    [(1.0, 0.5, "int4"), (1.0, 0.9, "native"), (0.1, 0.1, "native"), (None, None, "native"), (math.inf, 0.5, "int4")],
)
def test_the_choice_is_by_time(published, exact, coarse, chosen):
    """Coarse KV is begun with where it is there much sooner, whichever is named first."""
    offers = [offer(published, "int4", seconds=coarse), offer(published, "native", seconds=exact)]
    for order in (offers, offers[::-1]):
        assert chosen == choose(order).offer.identity.precision


def test_a_longer_prefix_is_worth_more_than_quality(published):
    """As without progressive: what goes farthest is taken."""
    assert choose([offer(published, "native", 1, 0.1), offer(published, "int4", 2, 9.0)]).offer.identity.precision == "int4"
    assert choose([offer(published, "native", 2, 9.0), offer(published, "int4", 1, 0.1)]).offer.identity.precision == "native"


# -- from end to end -------------------------------------------------------------------------------------------------------


class Served:
    """A document that was published progressively by the program, and an edge's process behind a link."""

    def __init__(self, folder, home, link):
        self.folder, self.home, self.link = folder, home, link

    def words(self, *more):
        """Of a question whose asker takes the link for a slow one."""
        links = self.home / "xdg_cache_home" / "kvcdn" / "links.json"
        links.parent.mkdir(parents=True, exist_ok=True)
        links.write_text(json.dumps({self.link.url: {"latency_s": 0.01, "bytes_per_s": 1000.0}}))
        where = () if "--origin" in more else ("--edge", self.link.url)
        words = ("ask", self.folder / "document", "Why?", "--model", self.folder / "model", *where, *more)
        return [*words, "--mode", "fetch", "--max-tokens", "2", "--json"]

    def ask(self, local, *more):
        return kvcdn(*self.words(*more), home=self.home, KVCDN_LOCAL=str(local)).json

    def without_source(self, local):
        return self.ask(local, "--precision", "int4+", "--origin", self.folder / "nothing")["report"]

    def fault(self, **what):
        """In the middle of the last block of the refinement."""
        store = FolderStore(self.folder / "origin")
        blocks = [(header_of(store, info.key), info) for info in store.list("v1/") if "/blocks/" in info.key]
        _, last = max((header.start, info) for header, info in blocks if header.precision == "int4+")
        return Fault(when=f"GET /{last.key}".encode(), pass_bytes=last.size // 2, **what)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    home, origin, model = folder / "home", folder / "origin", tiny_checkpoint(folder / "model")
    (folder / "document").write_text(TEXT[:6000])
    (folder / "nothing").mkdir()
    words = ("--model", model, "--origin", origin, "--precision", "int4", "--progressive", "--json")
    published = kvcdn("publish", folder / "document", *words, home=home)
    assert ("int4+", 2) == (published.json["refinement"]["precision"], published.json["blocks"])
    with launch_edge(origin=str(origin), cache_dir=folder / "edge") as edge, faulty_link(edge.port) as link:
        yield Served(folder, home, link)


def test_publish_serve_ask_and_refine(served, tmp_path):
    """publish --progressive, an edge that knows nothing of it, ask --progressive over a link that is said to be slow."""
    first = served.ask(tmp_path, "--precision", "int4", "--progressive")["report"]
    assert ("int4", first["tokens_reused"], "kept") == (first["precision"], first["tokens_coarse"], first["refinement"])
    again = served.without_source(tmp_path)
    assert ("int4+", 0, 0) == (again["precision"], again["tokens_coarse"], again["bytes_fetched"])
    assert first["tokens_reused"] == again["tokens_local"] > 0


def test_a_cut_in_the_middle_of_a_refinement_is_mended(served, tmp_path):
    """By asking for the rest, as of any block."""
    served.link.inject(served.fault(reset=True))
    report = served.ask(tmp_path, "--precision", "int4", "--progressive")["report"]
    assert (0, "int4", "kept") == (served.link.pending, report["precision"], report["refinement"])
    assert report["tokens_reused"] == served.without_source(tmp_path)["tokens_local"]


def test_a_process_that_is_killed_in_the_middle_of_a_refinement(served, tmp_path):
    """Leaves the coarse prefix, and nothing that could pass for exact; the next process refines it."""
    served.link.inject(served.fault(stall=True), times=1000)
    program, more = Path(sys.executable).with_name("kvcdn"), ("--precision", "int4", "--progressive")
    homes = {name: str(served.home / name.lower()) for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    environment = {**os.environ, **homes, "KVCDN_LOCAL": str(tmp_path)}
    child = subprocess.Popen([program, *served.words(*more)], stdout=subprocess.PIPE, env=environment)
    while served.link.pending == 1000 and child.poll() is None:
        time.sleep(0.01)
    child.kill()
    said, _ = child.communicate()
    served.link.inject(Fault(), times=0)
    assert (b"", -signal.SIGKILL) == (said, child.returncode)
    report = served.without_source(tmp_path)
    assert (0, "not-published") == (report["tokens_reused"], report["reason"])
    report = served.ask(tmp_path, *more)["report"]
    assert ("int4", report["tokens_reused"], "kept") == (report["precision"], report["tokens_local"], report["refinement"])
    assert report["tokens_local"] == report["tokens_coarse"] == served.without_source(tmp_path)["tokens_local"] > 0
