"""Wrong answers from cached KV that users of engines and libraries have reported, replayed: each is the model's own here.

Where a report names a fault that another test replays as well, that one is where it belongs; the numbers are those of the
projects' trackers.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvcdn.client import Client, MissReason
from kvcdn.client.sources.transport import StoreSource
from kvcdn.errors import UsageError
from kvcdn.keys import Namespace, PrefixNames, block_key
from kvcdn.model.load import load_model
from kvcdn.model.tokens import Prompt
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.signing import SigningKey, TrustList
from kvcdn.stores.local import LocalStore
from kvcdn.stores.memory import MemoryStore
from support.lora import tiny_adapter
from support.published import BLOCK, QUESTION, asked, publish_text, short_blocks
from support.tiny import TEXT, tiny_checkpoint

TOKENS = 2 * 64 + 20
GREEDY = {"max_new_tokens": 5, "do_sample": False}


pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    with short_blocks():
        return publish_text(tiny_checkpoint(tmp_path_factory.mktemp("model"), dtype=torch.float32), tokens=TOKENS)


def publish(folder, kind):
    """In float32. With few heads many scores of an indexer are exactly 0, and which of equals it takes is not said."""
    more = {"index_n_heads": 16} if kind == "deepseek_v32" else {}
    return publish_text(tiny_checkpoint(folder, kind, dtype=torch.float32, **more), tokens=TOKENS)


def alone(model, prompt):
    """What the model writes by itself."""
    ids = torch.tensor([prompt.token_ids])
    return tuple(model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0, ids.shape[1] :].tolist())


def tokenized(published):
    return tuple(published.loaded.tokenizer(TEXT)["input_ids"])


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("kept", [False, True])
def test_the_same_prompt_four_times_is_answered_the_same(tmp_path, kind, kept):
    """kvcached 446: of a model with windows the third answer was another; ramblr 176: the second one ran away."""
    published = publish(tmp_path / "model", kind)
    store = LocalStore(tmp_path / "store") if kept else None
    prompt = asked(published)
    expected = alone(published.loaded.model, prompt)
    end = published.loaded.identity.layout.document_end(TOKENS)
    with published.client(local_store=store) as client, client.prefix(Prompt(published.token_ids, (TOKENS,))) as prefix:
        for _ in range(4):
            answer = client.generate(prompt, **GREEDY)
            assert (expected, end) == (answer.token_ids, answer.report.tokens_reused)
            assert expected == prefix.generate(prompt, **GREEDY).token_ids


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v32"])
def test_a_prompt_that_is_cached_as_a_whole_reads_its_last_token_once(tmp_path, kind):
    """Rapid-MLX 1124: it was counted twice where a window had turned; mistral.rs 1376: nothing was left to read."""
    published = publish(tmp_path / "model", kind)
    with published.client() as client, client.prefix(Prompt(published.token_ids, (TOKENS,))) as prefix:
        for tokens in (TOKENS, TOKENS - 1, 2 * BLOCK, 2 * BLOCK - 1):
            prompt = Prompt(published.token_ids[:tokens], (tokens,))
            expected = alone(published.loaded.model, prompt)
            assert expected == client.generate(prompt, **GREEDY).token_ids
            assert expected == prefix.generate(prompt, **GREEDY).token_ids


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_another_adapter_under_the_same_name_finds_nothing(tmp_path):
    """vLLM 30931: the prefixes of an adapter were found by another one that was loaded under its name."""
    folder = tiny_checkpoint(tmp_path / "model", dtype=torch.float32)
    one, two = (tiny_adapter(tmp_path / name, folder, seed=seed) for name, seed in (("one", 1), ("two", 2)))
    store, key = MemoryStore(), SigningKey.generate()
    loaded = load_model(str(folder), adapters=[one])
    ids = tuple(loaded.tokenizer(TEXT)["input_ids"][:TOKENS])
    Publisher(loaded, store, key).publish(ids)
    from peft import PeftModel

    wrapper = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(two), adapter_name="mine").eval()
    options = {"checkpoint": str(folder), "adapters": {"mine": two}, "trust": TrustList.of(key.public), "mode": "fetch"}
    prompt = Prompt((*ids, *QUESTION), (TOKENS,))
    with Client(wrapper, loaded.tokenizer, StoreSource(store), **options) as client:
        answer = client.generate(prompt, **GREEDY)
        assert (0, MissReason.NOT_PUBLISHED) == (answer.report.tokens_reused, answer.report.reason)
        assert alone(wrapper, prompt) == answer.token_ids
        # And in place: the first one's weights, too, are not those of the folder that is known.
        wrapper.load_adapter(str(one), adapter_name="other")
        wrapper.set_adapter("other")
        answer = client.generate(prompt, **GREEDY)
        assert (0, MissReason.UNSUPPORTED_MODEL) == (answer.report.tokens_reused, answer.report.reason)


def test_a_namespace_that_looks_like_another_models_finds_nothing(tmp_path, published):
    """SGLang 24638: a request could name its own key so that it met the blocks of an adapter."""
    identity = published.loaded.identity
    crafted = [str(identity.fingerprint), str(identity.tag), "public", ""]
    names = [PrefixNames.of(identity, Namespace.public(), published.token_ids)]
    for secret in crafted:
        name = PrefixNames.of(identity, Namespace.private("public", secret.encode().ljust(32, b"0")), published.token_ids)
        names.append(name)
    addresses = [{block.address for block in name.blocks} | {name.manifest_address} for name in names]
    assert sum(map(len, addresses)) == len(set().union(*addresses))


def test_a_block_under_the_name_of_another_is_not_taken_for_it(published):
    """OpenVINO GenAI 3722, LMCache 3301 and 4086: with equal hashes the KV of another text was used without a word."""
    other = tuple(reversed(published.token_ids))
    store = MemoryStore()
    for info in published.store.list("v1/"):
        store.create(info.key, [published.store.read(info.key)])
    Publisher(published.loaded, store, published.key).publish(other)
    tag = published.loaded.identity.tag
    ours, theirs = (PrefixNames.of(published.loaded.identity, Namespace.public(), ids) for ids in (published.token_ids, other))
    for mine, its in zip(ours.blocks, theirs.blocks, strict=True):
        store.delete(block_key(tag, mine.address))
        store.create(block_key(tag, mine.address), [store.read(block_key(tag, its.address))])
    with published.client(StoreSource(store)) as client:
        answer = client.generate(asked(published), **GREEDY)
    assert (0, MissReason.CORRUPT) == (answer.report.tokens_reused, answer.report.reason)
    assert alone(published.loaded.model, asked(published)) == answer.token_ids


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v32"])
@pytest.mark.parametrize("leaves", [BLOCK - 7, BLOCK + 9, 2 * BLOCK + 3])
def test_a_kept_prefix_that_ends_within_a_block_is_continued_from_elsewhere(tmp_path, kind, leaves):
    """LMCache 2206: what was here up to the middle of a chunk and what was loaded of it were mixed."""
    published = publish(tmp_path / "model", kind)
    ids = published.token_ids
    shorter = ids[:leaves]
    Publisher(published.loaded, published.store, published.key).publish(shorter)
    with published.client(local_store=LocalStore(tmp_path / "store")) as client:
        client.generate(Prompt((*shorter, *QUESTION), (leaves,)), **GREEDY)
    with published.client(local_store=LocalStore(tmp_path / "store")) as client:
        for prompt in (asked(published), Prompt((*ids[: leaves + 5], *QUESTION), (leaves,))):
            answer = client.generate(prompt, **GREEDY)
            assert answer.report.tokens_reused
            assert alone(published.loaded.model, prompt) == answer.token_ids


def test_weights_that_are_trained_on_find_nothing_of_before(tmp_path):
    """AReaL 421: between two updates of the weights, answers came from the KV of the old ones."""
    published = publish_text(tiny_checkpoint(tmp_path, dtype=torch.float32), tokens=TOKENS)
    model, prompt = published.loaded.model, asked(published)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with published.client(vouched=False) as client, client.prefix(Prompt(published.token_ids, (TOKENS,))) as prefix:
        assert TOKENS == client.generate(prompt, **GREEDY).report.tokens_reused
        for _ in range(2):
            model.train()
            model(input_ids=torch.tensor([prompt.token_ids]), labels=torch.tensor([prompt.token_ids])).loss.backward()
            optimizer.step()
            model.eval()
            for answer in (client.generate(prompt, **GREEDY), prefix.generate(prompt, **GREEDY)):
                assert 0 == answer.report.tokens_reused
                assert alone(model, prompt) == answer.token_ids


def test_other_inputs_than_tokens_are_not_mixed_with_a_cache(published):
    """SGLang 2151, LMCache 4086: images have one token; vLLM 56655: so have embeddings. A cache knows neither."""
    body = published.loaded.model.model
    with published.client() as client:
        prepared = client.prepare(asked(published))
        inputs = prepared.inputs()
        inputs["input_ids"] = inputs["input_ids"][:, TOKENS:]
        for name in ("pixel_values", "input_features", "token_type_ids"):
            with pytest.raises(UsageError, match=f"the model was given {name} beside it"):
                body(**inputs, **{name: torch.ones(1, len(QUESTION), dtype=torch.long)})
        body(**inputs, token_type_ids=torch.zeros(1, len(QUESTION), dtype=torch.long))
        for name in ("pixel_values", "inputs_embeds"):
            with pytest.raises(UsageError, match=name):
                client.generate(asked(published), **{name: torch.zeros(1, 3)})


def test_several_questions_behind_one_cache_in_a_batch_are_each_answered(published):
    """transformers 34232: a cache that was repeated for a batch of prompts of different lengths gave wrong answers."""
    questions = ((5, 6), QUESTION, (9,), tuple(range(20, 50)))
    prompts = [Prompt((*published.token_ids, *question), (TOKENS,)) for question in questions]
    with published.client() as client:
        answers = client.generate_batch(prompts, **GREEDY)
    end = published.loaded.model.generation_config.eos_token_id
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = alone(published.loaded.model, prompt)
        assert expected[: expected.index(end) + 1 if end in expected else None] == answer.token_ids


def test_the_text_of_a_question_may_merge_with_the_document(published):
    """SGLang 4175 among others: what is equal as text is compared as tokens, which may run across the border."""
    tokenizer, text = published.loaded.tokenizer, published.text
    with published.client() as client:
        for behind in ("", "s", " and", "\n", "\n\n", "  ", "\u0301", "\U0001f600"):
            prompt = client.encode(text + behind)
            assert tuple(tokenizer(text + behind)["input_ids"]) == prompt.token_ids
            answer = client.generate(text + behind, **GREEDY)
            assert answer.report.tokens_reused <= len(prompt.token_ids) - 1
            assert alone(published.loaded.model, prompt) == answer.token_ids
