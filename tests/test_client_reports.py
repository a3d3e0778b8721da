"""Wrong answers from cached KV that users of engines and libraries have reported, replayed: each is the model's own here.

Where a report names a fault that another test replays as well, that one is where it belongs; the numbers are those of the
projects' trackers.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvcdn.client import Client, MissReason
from kvcdn.client.sources.stored import StoreSource
from kvcdn.errors import UsageError
from kvcdn.keys import Namespace, PrefixNames, block_key
from kvcdn.model.cache import beside
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


def own(model, prompt, **options):
    """What the model writes by itself, with further options."""
    ids = torch.tensor([prompt.token_ids])
    torch.manual_seed(7)
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY | options)
    return tuple(output[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("kind", ["llama", "deepseek_v32"])
@pytest.mark.parametrize("removed", [0, 5, TOKENS, TOKENS + 500])
def test_a_cache_that_is_cut_back_holds_what_is_left(tmp_path, kind, removed):
    """transformers 47433: of a cut by more than there was, stale tokens were left; a cut of nothing is none."""
    published = publish(tmp_path / "model", kind)
    model, prompt = published.loaded.model, asked(published)
    with published.client() as client:
        cache = client.prepare(prompt).cache
        cache.crop(-removed)
        left = max(TOKENS - removed, 0)
        assert left == cache.get_seq_length()
        ids = torch.tensor([prompt.token_ids[left:]])
        with torch.inference_mode():
            ours = model(input_ids=ids, **beside(model.forward, cache, ids)).logits[0, -1]
            theirs = model(input_ids=torch.tensor([prompt.token_ids])).logits[0, -1]
    assert (ours - theirs).norm() <= 1e-3 * theirs.norm()


@pytest.mark.parametrize(
    "given", ["the last token below the whole mask", "the whole below a short mask", "no mask", "all but one"]
)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_ids_and_mask_of_different_lengths_are_right_or_refused(tmp_path, kind, given):
    """transformers 36151 and 47597: positions were counted from the wrong one of them, without a word."""
    published = publish(tmp_path / "model", kind)
    model, prompt = published.loaded.model, asked(published)
    with published.client() as client:
        inputs = client.prepare(prompt).inputs()
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        changed = {
            "the last token below the whole mask": {"input_ids": ids[:, -1:]},
            "the whole below a short mask": {"attention_mask": mask[:, -len(QUESTION) :]},
            "no mask": {"attention_mask": None},
            "all but one": {"input_ids": ids[:, 1:]},
        }[given]
        try:
            output = model.generate(**inputs | changed, **GREEDY)
        except (UsageError, ValueError, IndexError, RuntimeError):
            assert given != "no mask"
            return
    assert alone(model, prompt) == tuple(output[0, -GREEDY["max_new_tokens"] :].tolist())


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_prompt_that_is_shorter_than_what_is_kept(tmp_path, kind):
    """llama.cpp 1585: what had been stored behind the prompt's end was read with it."""
    published = publish(tmp_path / "model", kind)
    model, ids = published.loaded.model, published.token_ids
    with published.client() as client, client.prefix(Prompt(ids, (TOKENS,))) as prefix:
        for tokens in (TOKENS, TOKENS - 1, BLOCK + 1, BLOCK, 10, 1):
            prompt = Prompt(ids[:tokens], (TOKENS,) if tokens == TOKENS else ())
            assert (
                alone(model, prompt)
                == prefix.generate(prompt, **GREEDY).token_ids
                == client.generate(prompt, **GREEDY).token_ids
            )


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_document_of_few_tokens(tmp_path, tokens):
    """mlx-examples 977: the unused room of a cache was saved and read as if it were tokens."""
    published = publish_text(tiny_checkpoint(tmp_path / "model", dtype=torch.float32, strength=3), tokens=tokens)
    with published.client() as client:
        answer = client.generate(asked(published), **GREEDY)
        assert (tokens, alone(published.loaded.model, asked(published))) == (answer.report.tokens_reused, answer.token_ids)


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_a_prompt_that_leaves_the_document_in_its_last_block_has_the_blocks_before(tmp_path, kind):
    """vLLM 57610: with windows nothing at all was found then."""
    published = publish(tmp_path / "model", kind)
    prompt = Prompt((*published.token_ids[:-5], *QUESTION), (TOKENS,))
    with published.client() as client:
        answer = client.generate(prompt, **GREEDY)
    assert (2 * BLOCK, alone(published.loaded.model, prompt)) == (answer.report.tokens_reused, answer.token_ids)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "qwen3_next"])
def test_documents_that_part_within_a_block_are_kept_apart(tmp_path, kind):
    """Mooncake 4153: answers came from another request's document where the two shared half a block."""
    published = publish(tmp_path / "model", kind)
    model, ids = published.loaded.model, published.token_ids
    other = (*ids[: BLOCK + 30], *reversed(ids[BLOCK + 30 :]))
    Publisher(published.loaded, published.store, published.key).publish(other)
    store = LocalStore(tmp_path / "local", capacity=10**9)
    with published.client(local_store=store) as client:
        for _ in range(2):
            for document in (ids, other):
                prompt = Prompt((*document, *QUESTION), (TOKENS,))
                answer = client.generate(prompt, **GREEDY)
                assert answer.report.tokens_reused >= TOKENS - 1
                assert alone(model, prompt) == answer.token_ids


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 3.0}, {"no_repeat_ngram_size": 1}, {"do_sample": True, "top_k": 5}],
    ids=["penalty", "repetitions", "sampled"],
)
def test_what_was_loaded_counts_for_penalties_and_draws(published, options):
    """oMLX 960, lattice 387, mstar 280: penalties knew only the tokens that had been computed."""
    model, prompt = published.loaded.model, asked(published)
    expected = own(model, prompt, **options)
    with published.client() as client, client.prefix(Prompt(published.token_ids, (TOKENS,))) as prefix:
        for generate in (client.generate, prefix.generate):
            torch.manual_seed(7)
            answer = generate(prompt, **GREEDY | options)
            assert (TOKENS, expected) == (answer.report.tokens_reused, answer.token_ids)


def test_nothing_is_said_of_the_logits_of_loaded_tokens(published):
    """vLLM 3251, 3914 and 42019: logits of the prompt were those of other tokens, or of other requests."""
    model, prompt = published.loaded.model, asked(published)
    with published.client() as client:
        with pytest.raises(UsageError, match="says nothing of tokens that were loaded"):
            client.generate(prompt, **GREEDY, output_logits=True, return_dict_in_generate=True)
        cache = client.prepare(prompt).cache
        ids = torch.tensor([prompt.token_ids])
        with torch.inference_mode():
            ours = model(input_ids=ids[:, TOKENS:], **beside(model.forward, cache, ids[:, TOKENS:])).logits
            theirs = model(input_ids=ids).logits[:, TOKENS:]
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= 1e-3 * theirs.norm()


def test_tokens_of_the_prompt_that_pad_elsewhere_are_read(tmp_path):
    """transformers 18104 and 25790: what pads, or ends, was left out where it stood in the text."""
    checkpoint = tiny_checkpoint(tmp_path / "model", dtype=torch.float32, strength=3)
    loaded, store, key = load_model(str(checkpoint)), MemoryStore(), SigningKey.generate()
    document = (1, 1, *range(2, 70), 1, 0, 1, *range(70, 100))
    Publisher(loaded, store, key).publish(document)
    prompt = Prompt((*document, 1, 9, 1), (len(document),))
    with Client(loaded.model, loaded.tokenizer, StoreSource(store), trust=TrustList.of(key.public), mode="fetch") as client:
        answer = client.generate(prompt, **GREEDY)
        assert (len(document), alone(loaded.model, prompt)) == (answer.report.tokens_reused, answer.token_ids)
        inputs = client.prepare(prompt).inputs() | {"attention_mask": None}
        try:
            # Without a mask the library takes what pads for padding, which the guard sees.
            output = loaded.model.generate(**inputs, **GREEDY, pad_token_id=1, eos_token_id=5)
        except UsageError:
            return
    assert alone(loaded.model, prompt) == tuple(output[0, len(prompt.token_ids) :].tolist())


def test_tensors_padded_on_the_left_are_right_behind_the_first_token(published):
    """TransformerLens 1617: the mask was used for the first token only, and later ones drifted."""
    model, prompt = published.loaded.model, asked(published)
    padded = {
        "input_ids": torch.tensor([[1] * 7 + list(prompt.token_ids)]),
        "attention_mask": torch.tensor([[0] * 7 + [1] * len(prompt.token_ids)]),
    }
    with published.client() as client:
        answer = client.generate(padded, do_sample=False, max_new_tokens=20)
    assert 2 * BLOCK == answer.report.tokens_reused
    assert own(model, prompt, max_new_tokens=20)[: len(answer.token_ids)] == answer.token_ids


def test_an_indexer_remembers_what_was_restored(tmp_path):
    """mesh-llm 1901: its keys were not saved, so that the next turn saw nothing of the conversation."""
    published = publish(tmp_path / "model", "deepseek_v32")
    model, prompt = published.loaded.model, asked(published)
    with published.client() as client, client.prefix(Prompt(published.token_ids, (TOKENS,))) as prefix:
        for _ in range(3):
            answer = prefix.generate(prompt, **GREEDY)
            assert (TOKENS, alone(model, prompt)) == (answer.report.tokens_kept, answer.token_ids)
            prompt = Prompt((*prompt.token_ids, *answer.token_ids, 11, 12))


def test_a_batch_of_what_is_published_and_what_is_not(published):
    """ssd 23: beside a row that had hit the cache, others read rows that were not theirs."""
    model, ids = published.loaded.model, published.token_ids
    prompts = [asked(published), Prompt(tuple(reversed(ids))), Prompt(ids[:BLOCK]), Prompt((5,))]
    with published.client() as client:
        answers = client.generate_batch(prompts, **GREEDY)
    assert [alone(model, prompt) for prompt in prompts] == [answer.token_ids for answer in answers]
