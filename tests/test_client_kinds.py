"""Every kind of cache, from publisher to model: a fetched prefix continues exactly as the model's own would, to the bit."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvcdn.block import open_header
from kvcdn.client import Client
from kvcdn.client.loading import delivery
from kvcdn.client.loading.report import MissReason
from kvcdn.client.sources import readers
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.sources.transport import EdgeSource
from kvcdn.client.verify import verify_prefix
from kvcdn.keys import Namespace, PrefixNames, block_key, manifest_key
from kvcdn.model.cache import cache_argument
from kvcdn.model.tokens import Prompt
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.stores.memory import MemoryStore
from support.published import BLOCK, QUESTION, asked, publish_text, short_blocks
from support.stock import continued, stock_cache
from support.tiny import (
    FULL_ATTENTION_KINDS,
    INDEXED_KINDS,
    MORE_FULL_ATTENTION_KINDS,
    REFUSED_STATE_KINDS,
    ROOT,
    SHARED_KINDS,
    STATE_KINDS,
    WINDOW_KINDS,
    tiny_checkpoint,
)
from support.web import running_web

TOKENS = 3 * BLOCK + 20
STEPS = 3

PROMPTS = {
    "the document and a question": (TOKENS, TOKENS, 4),
    "two blocks and something else": (2 * BLOCK + 30, 2 * BLOCK, 2),
    "one block and something else": (BLOCK, BLOCK, 1),
}
"""Leading tokens of the document in the prompt; tokens to be reused; passes that made them."""


pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Threads that share the work of so small a model mostly wait for each other. The bits are the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


KINDS = FULL_ATTENTION_KINDS + MORE_FULL_ATTENTION_KINDS + WINDOW_KINDS + INDEXED_KINDS + SHARED_KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_fetched_prefix_continues_to_the_bit(tmp_path, kind):
    """Published, fetched, and continued by a question and several tokens, at several lengths; and streamed to generate()."""
    published = publish_text(tiny_checkpoint(tmp_path, kind, dtype=torch.float32), tokens=TOKENS)
    loaded, ids = published.loaded, published.token_ids
    with published.client() as client:
        for leading, reused, blocks in PROMPTS.values():
            prompt = Prompt((*ids[:leading], *QUESTION), (TOKENS,))
            prepared = client.prepare(prompt)
            assert (reused, None) == (prepared.report.tokens_reused, prepared.report.reason if leading == TOKENS else None)
            ours = continued(loaded, prepared.cache, prompt.token_ids[reused:], STEPS)
            theirs = continued(loaded, stock_cache(loaded, ids, blocks, reused), prompt.token_ids[reused:], STEPS)
            assert all(torch.equal(expected, got) for expected, got in zip(theirs, ours, strict=True))
        # The document itself: its last token is left to the model, so that the caches are cut back by one.
        prepared = client.prepare(Prompt(ids, (TOKENS,)))
        assert TOKENS - 1 == prepared.report.tokens_reused
        ours = continued(loaded, prepared.cache, ids[-1:], STEPS)
        theirs = continued(loaded, stock_cache(loaded, ids, 4, TOKENS - 1), ids[-1:], STEPS)
        assert all(torch.equal(expected, got) for expected, got in zip(theirs, ours, strict=True))
        # Layers that are awaited while generate() runs.
        prompt = Prompt((*ids, *QUESTION), (TOKENS,))
        answer = client.generate(prompt, max_new_tokens=STEPS, do_sample=False)
        whole, stock = torch.tensor([prompt.token_ids]), stock_cache(loaded, ids, 4, TOKENS)
        inputs = {"input_ids": whole, "attention_mask": torch.ones_like(whole), cache_argument(loaded.model.forward): stock}
        expected = loaded.model.generate(**inputs, max_new_tokens=STEPS, do_sample=False)
        assert tuple(expected[0, whole.shape[1] :].tolist()) == answer.token_ids
        assert (TOKENS, None) == (answer.report.tokens_reused, answer.report.reason)


def test_the_list_of_models_has_no_faults_and_all_that_is_tried_here():
    """docs/models.md comes from a longer suite, `make test-kinds`; what this one carries is carried there."""
    lines = (ROOT / "docs" / "models.md").read_text("utf-8").splitlines()
    results = {cells[1].strip(" `"): cells[2].strip() for cells in (line.split("|") for line in lines) if len(cells) > 3}
    tried = {kind for kind in (*KINDS, *STATE_KINDS) if "-window" not in kind}
    assert {} == {kind: results.get(kind) for kind in tried if results.get(kind) != "to the bit"}
    assert dict.fromkeys(REFUSED_STATE_KINDS, "refused") == {kind: results.get(kind) for kind in REFUSED_STATE_KINDS}
    assert "FAULT" not in results.values()


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
@pytest.mark.parametrize("where", ["embed_tokens", "layers.0", "all"])
def test_a_model_that_is_offloaded_answers_the_same(tmp_path, kind, where):
    """Whose weights lie on disk, or none of which are in memory: they are brought for every pass, to where the cache is."""
    folder = tiny_checkpoint(tmp_path / "model", kind, dtype=torch.float32, strength=2)
    published = publish_text(folder, tokens=TOKENS)
    layers = published.loaded.model.config.num_hidden_layers
    names = ["embed_tokens", *(f"layers.{index}" for index in range(layers)), "norm", "rotary_emb"]
    places = {"lm_head": "cpu", **{f"model.{name}": "disk" if where in (name, "all") else "cpu" for name in names}}
    offload = {"device_map": places, "offload_folder": str(tmp_path / "offloaded"), "dtype": "auto"}
    parted = AutoModelForCausalLM.from_pretrained(folder, **offload).eval()
    assert ("cpu" if where == "layers.0" else "meta") == parted.device.type
    prompt, ids = asked(published), torch.tensor([asked(published).token_ids])
    options = {"max_new_tokens": STEPS, "do_sample": False}
    alone = published.loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
    source = StoreSource(published.store)
    with Client(parted, published.loaded.tokenizer, source, trust=published.trust, mode="fetch") as client:
        answers = [client.generate(prompt, **options), *client.generate_batch([prompt, prompt], **options)]
        assert [tuple(alone.tolist())] * 3 == [answer.token_ids for answer in answers]
        end = published.loaded.identity.layout.document_end(TOKENS)
        assert [end] * 3 == [answer.report.tokens_reused for answer in answers]


@pytest.fixture(scope="module")
def alternating(tmp_path_factory):
    """A model of windows of 32 tokens, full attention, and layers that share: each kind there is, in blocks of 64."""
    with short_blocks():
        return publish_text(
            tiny_checkpoint(tmp_path_factory.mktemp("model"), "gemma3n_text", dtype=torch.float32), tokens=TOKENS
        )


class CountingStore(MemoryStore):
    """A copy of a store that counts the bytes read of each object."""

    def __init__(self, of):
        super().__init__()
        self.counts = {}
        for info in of.list("v1/"):
            self.create(info.key, [of.read(info.key)])

    def read(self, key, *args, **options):
        data = super().read(key, *args, **options)
        self._count(key, data)
        return data

    def stream(self, key, *args, **options):
        return (self._count(key, piece) for piece in super().stream(key, *args, **options))

    def _count(self, key, data):
        self.counts[key] = self.counts.get(key, 0) + len(data)
        return data


def block_keys(published):
    identity = published.loaded.identity
    names = PrefixNames.of(identity, Namespace.public(), published.token_ids)
    return [block_key(identity.tag, name.address) for name in names.blocks]


def same_as_stock(published, prepared):
    """Whether a prepared prompt on the whole document continues as the library's own cache does."""
    theirs = stock_cache(published.loaded, published.token_ids, 4, TOKENS)
    pairs = zip(*(continued(published.loaded, cache, QUESTION, STEPS) for cache in (theirs, prepared.cache)), strict=True)
    return all(torch.equal(expected, got) for expected, got in pairs)


def test_of_windows_only_the_reach_is_read(alternating, monkeypatch):
    """What no window reaches is passed over: not received, and the result is the same to the bit."""
    monkeypatch.setattr(delivery, "SKIPPED_BYTES", 1)
    store = CountingStore(alternating.store)
    with alternating.client(StoreSource(store)) as client:
        prepared = client.prepare(asked(alternating))
    report, specs = prepared.report, alternating.loaded.identity.layout.layers
    assert sum(store.counts.values()) == report.bytes_fetched
    needed = 0
    for index, key in enumerate(block_keys(alternating)):
        header = open_header(alternating.store.read(key), "block")
        end = min((index + 1) * BLOCK, TOKENS)
        wanted = [segment for segment, spec in zip(header.segments, specs, strict=True) if end > spec.first_needed(TOKENS)]
        needed += header.envelope_bytes + sum(segment.length for segment in wanted)
    assert needed <= report.bytes_fetched < 0.8 * alternating.result.stored_bytes
    # Two windows of 31 rows and a layer of all, each 2 x 2 x 16 floats a row.
    assert (2 * 31 + TOKENS) * 256 == report.bytes_raw
    assert [128, 0, 128] == [layer.first for layer in prepared.cache.layers[:3]]
    assert [TOKENS] * 3 == [layer.get_seq_length() for layer in prepared.cache.layers[:3]]
    assert same_as_stock(alternating, prepared)


@pytest.mark.parametrize("skipped", [1, 1 << 30])
def test_what_is_passed_over_is_passed_over_by_http_too(alternating, monkeypatch, skipped):
    """In ranges where that is worth a request, by reading on where it is not."""
    monkeypatch.setattr(delivery, "SKIPPED_BYTES", skipped)
    monkeypatch.setattr(readers, "RANGE_BYTES", 5000)
    with running_web(alternating.store) as web, alternating.client(EdgeSource(web.url)) as client:
        prepared = client.prepare(asked(alternating))
        ranged = {path for method, path, headers in web.requests if method == "GET" and "Range" in headers}
    assert ranged == ({f"/{key}" for key in block_keys(alternating)[:2]} if skipped == 1 else set())
    assert same_as_stock(alternating, prepared)


def test_blocks_that_no_window_reaches_are_not_asked_for(tmp_path):
    """Where all layers have windows, a prefix costs its last blocks, however long it is."""
    published = publish_text(tiny_checkpoint(tmp_path, "mistral-window", dtype=torch.float32), tokens=TOKENS)
    store = CountingStore(published.store)
    with published.client(StoreSource(store)) as client:
        prepared = client.prepare(asked(published))
    assert set(block_keys(published)[1:]) == set(store.counts)
    assert (TOKENS, 4, None) == (prepared.report.tokens_reused, prepared.report.blocks_reused, prepared.report.reason)
    assert same_as_stock(published, prepared)


@pytest.mark.parametrize(("broken", "reused"), [(3, 3 * BLOCK), (2, 0), (0, 0)])
def test_after_a_failure_only_what_has_its_windows_is_used(alternating, broken, reused):
    """A shorter prefix has its windows elsewhere: it is kept where they were read, and prefilled where they were not."""
    store, key = CountingStore(alternating.store), block_keys(alternating)[broken]
    data = bytearray(store.read(key))
    header = open_header(data, "block")
    # In the layer of full attention, of which every block is read.
    data[header.envelope_bytes + header.segments[1].offset] ^= 1
    store.delete(key)
    store.create(key, [bytes(data)])
    prompt = asked(alternating)
    with alternating.client(StoreSource(store)) as client:
        answer = client.generate(prompt, max_new_tokens=STEPS, do_sample=False)
    assert (reused, MissReason.CORRUPT) == (answer.report.tokens_reused, answer.report.reason)
    ids = torch.tensor([prompt.token_ids])
    alone = alternating.loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS, do_sample=False)
    assert tuple(alone[0, ids.shape[1] :].tolist()) == answer.token_ids


def test_verification_reads_every_row(alternating):
    """Also those that no reader of the whole document would: another prefix needs them."""
    store = CountingStore(alternating.store)
    with alternating.client(StoreSource(store)) as client:
        found = verify_prefix(client, alternating.token_ids, greedy=3)
    assert (True, True, "") == (found.sound, found.bit_identical, found.first_difference)
    assert alternating.result.stored_bytes == sum(store.counts[key] for key in block_keys(alternating))


def test_publishing_goes_on_behind_blocks_that_exist(alternating):
    """Loaded rows and computed ones make the blocks that computing alone made."""
    store, identity = CountingStore(alternating.store), alternating.loaded.identity
    names = PrefixNames.of(identity, Namespace.public(), alternating.token_ids)
    for key in (*block_keys(alternating)[2:], manifest_key(identity.tag, names.manifest_address)):
        store.delete(key)
    result = Publisher(alternating.loaded, store, alternating.key).publish(alternating.token_ids)
    assert (2 * BLOCK, TOKENS - 2 * BLOCK) == (result.tokens_loaded, result.tokens_computed)
    with alternating.client(StoreSource(store)) as client:
        assert verify_prefix(client, alternating.token_ids, greedy=1).bit_identical
