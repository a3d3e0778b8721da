"""Models that keep states: a prefix that ends at a checkpoint continues to the bit, and no other prefix is used."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvcdn import layout
from kvcdn.block import open_header
from kvcdn.client.loading.report import MissReason
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.verify import verify_prefix
from kvcdn.errors import UnsupportedModelError, UsageError
from kvcdn.keys import Namespace, PrefixNames, block_key, manifest_key
from kvcdn.model.probe import probe_layout
from kvcdn.model.tokens import Prompt
from kvcdn.origin.publishing.estimate import estimate_publish
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.stores.memory import MemoryStore
from support.published import publish_text
from support.stock import continued, stock_cache
from support.tiny import REFUSED_STATE_KINDS, STATE_KINDS, tiny_checkpoint, tiny_tokenizer

BLOCK = 64
TOKENS = 5 * BLOCK + 20
STEPS = 3
QUESTION = (17, 4, 250, 9, 33)

PROMPTS = {
    "the document and a question": (TOKENS, QUESTION, TOKENS - 1),
    "the document itself": (TOKENS, (), TOKENS - 1),
    "four blocks and something else": (4 * BLOCK + 30, QUESTION, 4 * BLOCK),
    "three blocks and something else": (3 * BLOCK + 30, QUESTION, 2 * BLOCK),
    "two blocks and nothing else": (2 * BLOCK, (), 0),
    "one block and something else": (BLOCK, QUESTION, 0),
}
"""Leading tokens of the document in the prompt, what follows them, and tokens to be reused."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(layout, "MAX_BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(layout, "CHECKPOINT_BLOCKS", 2)


def same(expected, got):
    return all(torch.equal(theirs, ours) for theirs, ours in zip(expected, got, strict=True))


def stock(loaded, ids, reused):
    """The library's cache on the publisher's schedule: of all of the document that is published, or of whole blocks."""
    return stock_cache(loaded, ids[:reused], TOKENS, reused) if reused else DynamicCache(config=loaded.model.config)


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_a_fetched_prefix_continues_to_the_bit(tmp_path, kind):
    """Published, verified, fetched, and continued by a question and several tokens, at several lengths; and by generate()."""
    published = publish_text(tiny_checkpoint(tmp_path, kind, dtype=torch.float32), tokens=TOKENS)
    loaded, ids = published.loaded, published.token_ids
    assert (TOKENS, TOKENS - 1) == (len(ids), published.result.tokens)
    with published.client() as client:
        for leading, behind, reused in PROMPTS.values():
            prompt = Prompt((*ids[:leading], *behind), (TOKENS,))
            prepared = client.prepare(prompt)
            assert reused == prepared.report.tokens_reused
            cache = DynamicCache(config=loaded.model.config) if prepared.cache is None else prepared.cache
            rest = prompt.token_ids[reused:]
            assert same(continued(loaded, stock(loaded, ids, reused), rest, STEPS), continued(loaded, cache, rest, STEPS))
        prompt = Prompt((*ids, *QUESTION), (TOKENS,))
        answer = client.generate(prompt, max_new_tokens=STEPS, do_sample=False)
        logits = continued(loaded, stock(loaded, ids, TOKENS - 1), prompt.token_ids[TOKENS - 1 :], STEPS - 1)
        assert tuple(int(step[0, -1].argmax()) for step in logits) == answer.token_ids
        assert (TOKENS - 1, None) == (answer.report.tokens_reused, answer.report.reason)
        found = verify_prefix(client, ids, greedy=2)
        assert (True, True, True) == (found.sound, found.bit_identical, found.loaded_equals_published)


@pytest.mark.parametrize("kind", ["bamba", "qwen3_next", "llama"])
def test_passes_count_positions_from_the_beginning(tmp_path, kind):
    """Bamba counts from 0 in every pass that is not told its positions: its blocks would be another text's, without a word."""
    weak, strong = tmp_path / "weak", tmp_path / "strong"
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(weak, kind, dtype=torch.float32))
    with torch.no_grad():
        for tensor in model.parameters():
            # Attention of random weights hardly sees positions.
            tensor.mul_(2 if tensor.dim() > 1 else 1)
    model.save_pretrained(strong)
    tiny_tokenizer(strong)
    published = publish_text(strong, tokens=TOKENS)
    prompt = (*published.token_ids, *QUESTION)
    with published.client() as client, torch.inference_mode():
        prepared = client.prepare(Prompt(prompt, (TOKENS,)))
        reused = prepared.report.tokens_reused
        ours = continued(published.loaded, prepared.cache, prompt[reused:], 0)[0]
        once = published.loaded.model(input_ids=torch.tensor([prompt])).logits[:, reused:]
    assert reused >= TOKENS - 1
    assert (once - ours).norm() < 1e-4 * once.norm()


@pytest.mark.parametrize("kind", REFUSED_STATE_KINDS)
def test_what_begins_anew_behind_a_state_is_refused(tmp_path, kind):
    """The library's Mamba of the first kind forgets its state when it reads several tokens: wrong without a word."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path, kind, dtype=torch.bfloat16)).eval()
    with pytest.raises(UnsupportedModelError, match=f"{kind}: its linear attention begins anew"):
        probe_layout(model)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A model of linear attention, and full attention in its last layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "MAX_BLOCK_TOKENS", BLOCK)
        patch.setattr(layout, "CHECKPOINT_BLOCKS", 2)
        folder = tmp_path_factory.mktemp("model")
        return publish_text(tiny_checkpoint(folder, "qwen3_next", dtype=torch.float32), tokens=TOKENS)


def block_keys(published):
    identity = published.loaded.identity
    names = PrefixNames.of(identity, Namespace.public(), published.token_ids[: TOKENS - 1])
    return identity.tag, names, [block_key(identity.tag, name.address) for name in names.blocks]


def copied(published):
    store = MemoryStore()
    for info in published.store.list("v1/"):
        store.create(info.key, [published.store.read(info.key)])
    return store


def test_states_are_stored_at_checkpoints_and_only_the_last_is_read(hybrid, monkeypatch):
    """Every second block here, and the last; of the others a reader passes over the states, and of these over the earlier."""
    monkeypatch.setattr("kvcdn.client.loading.delivery.SKIPPED_BYTES", 1)
    _, _, keys = block_keys(hybrid)
    headers = [open_header(hybrid.store.read(key), "block") for key in keys]
    assert [0, 2, 0, 2, 0, 2] == [len(header.segments[0].parts) for header in headers]
    assert [2] * 6 == [len(header.segments[3].parts) for header in headers]
    assert sum(header.raw_bytes for header in headers) == hybrid.result.raw_bytes
    with hybrid.client() as client:
        report = client.prepare(Prompt((*hybrid.token_ids, *QUESTION), (TOKENS,))).report
    spec = hybrid.loaded.identity.layout
    assert spec.needed_bytes(TOKENS - 1) == report.bytes_raw == (TOKENS - 1) * spec.bytes_per_token + spec.state_bytes
    needed = sum(header.envelope_bytes + header.segments[3].length for header in headers)
    needed += sum(segment.length for segment in headers[-1].segments[:3])
    assert needed <= report.bytes_fetched < hybrid.result.stored_bytes - 2 * spec.state_bytes // 2


@pytest.mark.parametrize("gone", [1, 2, 3, 5])
def test_publishing_goes_on_behind_a_checkpoint(hybrid, gone):
    """Blocks behind the last checkpoint are computed again; what results is what computing alone made."""
    tag, names, keys = block_keys(hybrid)
    store = copied(hybrid)
    for key in (*keys[gone:], manifest_key(tag, names.manifest_address)):
        store.delete(key)
    result = Publisher(hybrid.loaded, store, hybrid.key).publish(hybrid.token_ids)
    assert (gone // 2 * 2 * BLOCK, 6 - gone) == (result.tokens_loaded, result.blocks_uploaded)
    with hybrid.client(StoreSource(store)) as client:
        assert verify_prefix(client, hybrid.token_ids, greedy=1).bit_identical


@pytest.mark.parametrize("broken", range(6))
def test_after_a_failure_nothing_is_used_without_its_state(hybrid, broken):
    """The states are those of the last block: whatever else is missing, the model prefills."""
    _, _, keys = block_keys(hybrid)
    store = copied(hybrid)
    data = bytearray(store.read(keys[broken]))
    header = open_header(data, "block")
    data[header.envelope_bytes + header.segments[3].offset] ^= 1
    store.delete(keys[broken])
    store.create(keys[broken], [bytes(data)])
    prompt = Prompt((*hybrid.token_ids, *QUESTION), (TOKENS,))
    with hybrid.client(StoreSource(store)) as client:
        answer = client.generate(prompt, max_new_tokens=STEPS, do_sample=False)
    assert (0, MissReason.CORRUPT) == (answer.report.tokens_reused, answer.report.reason)
    ids = torch.tensor([prompt.token_ids])
    alone = hybrid.loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS, do_sample=False)
    assert tuple(alone[0, ids.shape[1] :].tolist()) == answer.token_ids


@pytest.mark.parametrize(("tokens", "end"), [(1, 0), (2, 1), (64, 63), (65, 63), (66, 65), (129, 128), (193, 191), (257, 256)])
def test_a_document_ends_where_its_states_are(hybrid, tokens, end):
    """One token before its end, or two where that is the end of a whole block that is no checkpoint."""
    assert end == hybrid.loaded.identity.layout.document_end(tokens)


def test_a_document_of_whole_blocks_is_found(hybrid):
    """Where the end falls on a block without states, publisher and reader agree on the token before."""
    store, ids = MemoryStore(), hybrid.token_ids[: 3 * BLOCK + 1]
    assert 3 * BLOCK - 1 == Publisher(hybrid.loaded, store, hybrid.key).publish(ids).tokens
    with hybrid.client(StoreSource(store)) as client:
        report = client.prepare(Prompt((*ids, *QUESTION), (len(ids),))).report
    assert (3 * BLOCK - 1, None) == (report.tokens_reused, report.reason)


def test_the_end_of_a_shorter_document_is_found_behind_checkpoints(hybrid):
    """A chat that left a document behind: its earlier end is better than the checkpoint before."""
    store, short = MemoryStore(), 3 * BLOCK + 10
    for end in (short, TOKENS):
        Publisher(hybrid.loaded, store, hybrid.key).publish(hybrid.token_ids[:end])
    _, _, keys = block_keys(hybrid)
    for key in keys[3:]:
        store.delete(key)
    with hybrid.client(StoreSource(store)) as client:
        report = client.prepare(Prompt((*hybrid.token_ids, *QUESTION), (short, TOKENS))).report
    assert (short - 1, None) == (report.tokens_reused, report.detail or None)


def test_a_single_token_is_too_short(hybrid):
    """There would be nothing before its end."""
    with pytest.raises(UsageError, match="too short"):
        Publisher(hybrid.loaded, MemoryStore(), hybrid.key).publish(hybrid.token_ids[:1])


def test_an_estimate_counts_the_states(hybrid):
    """What would be stored is what is stored, but for how well it compresses."""
    estimate = estimate_publish(hybrid.loaded, hybrid.token_ids, Namespace.public())
    assert (hybrid.result.raw_bytes, TOKENS - 1) == (estimate.raw_bytes, estimate.tokens)


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "mamba2"])
def test_what_cannot_be_cut_back_is_loaded_anew(tmp_path, kind):
    """Prefixes and conversations load for every question; beams copy states; batches are refused, not misplaced."""
    published = publish_text(tiny_checkpoint(tmp_path, kind, dtype=torch.float32), tokens=TOKENS)
    prompt = Prompt((*published.token_ids, *QUESTION), (TOKENS,))
    ids = torch.tensor([prompt.token_ids])
    with published.client() as client:
        for options in ({}, {"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}):
            given = {"max_new_tokens": STEPS, "do_sample": False, **options}
            alone = published.loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **given)
            answer = client.generate(prompt, **given)
            assert tuple(alone[0, ids.shape[1] :].tolist()) == answer.token_ids
            assert TOKENS - 1 == answer.report.tokens_reused
        with client.prefix(Prompt(published.token_ids, (TOKENS,))) as prefix:
            for _ in range(2):
                answer = prefix.generate(prompt, max_new_tokens=STEPS, do_sample=False)
                assert TOKENS - 1 == answer.report.tokens_reused
        conversation = client.conversation("Be brief.")
        assert conversation.say("Why?", max_new_tokens=STEPS, do_sample=False).token_ids
        assert conversation.say("How?", max_new_tokens=STEPS, do_sample=False).token_ids


def test_a_wrong_state_is_seen(hybrid):
    """The mistake that these tests look for: one number of one state changes what follows."""
    loaded, ids = hybrid.loaded, hybrid.token_ids
    right, wrong = (stock(loaded, ids, TOKENS - 1) for _ in range(2))
    with torch.inference_mode():
        wrong.layers[0].recurrent_states[0][0, 0, 0, 0] += 1e-3
    assert not same(continued(loaded, right, QUESTION, 1), continued(loaded, wrong, QUESTION, 1))
