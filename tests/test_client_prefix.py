"""Several prompts on one cache: questions on a prefix, a conversation, a batch. Each answer is the model's own."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvcdn.client import MissReason
from kvcdn.client.sources.stored import StoreSource
from kvcdn.errors import UsageError
from kvcdn.model.load import load_model
from kvcdn.model.tokens import Prompt, encode_chat
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.signing import SigningKey, TrustList
from kvcdn.stores.memory import MemoryStore
from support.published import BLOCK, QUESTION, Published, publish_text, short_blocks
from support.tiny import INDEXED_KINDS, SHARED_KINDS, STATE_KINDS, TEXT, WINDOW_KINDS, tiny_checkpoint

TOKENS = 2 * 64 + 20
GREEDY = {"max_new_tokens": 5, "do_sample": False}
KINDS = ("llama", "gemma3n_text", "deepseek_v32")


pytestmark = pytest.mark.usefixtures("short_blocks")


def publish(tmp_path_factory, kind):
    with short_blocks():
        # With few heads many scores of an indexer are exactly 0, and which of equals it takes is not said.
        more = {"index_n_heads": 16} if kind in INDEXED_KINDS else {}
        folder = tmp_path_factory.mktemp(kind)
        return publish_text(tiny_checkpoint(folder, kind, dtype=torch.float32, strength=2, **more), tokens=TOKENS)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return publish(tmp_path_factory, "llama")


def alone(published, token_ids, **options):
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        output = published.loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY | options)
    return tuple(output[0, ids.shape[1] :].tolist())


def bytes_read(store):
    """Counts what is read of `store` from now on."""
    counted = []
    read = store.read

    def reading(*arguments):
        data = read(*arguments)
        counted.append(len(data))
        return data

    store.read = reading
    return counted


# -- one prefix --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_questions_on_a_prefix_get_the_answers_of_the_client(tmp_path_factory, kind):
    """Loaded once, and as often asked as one likes, by several threads at the same time; no question disturbs another."""
    published = publish(tmp_path_factory, kind)
    questions = ["so?", "What may a licensee do?", "why", "How long?"]
    with published.client() as client:
        expected = [client.ask(published.text, question, **GREEDY).token_ids for question in questions]
        counted = bytes_read(published.store)
        with client.prefix(published.text) as prefix:
            once = sum(counted)
            kept = [[rows.clone() for rows in layer.rows(layer.first, TOKENS)] for layer in prefix._layers]
            assert (TOKENS, None) == (prefix.report.tokens_reused, prefix.report.reason)
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda question: prefix.ask(question, **GREEDY), questions * 3))
            assert expected * 3 == [answer.token_ids for answer in answers]
            assert {(TOKENS, TOKENS)} == {(one.report.tokens_reused, one.report.tokens_kept) for one in answers}
            assert once == sum(counted)
            for layer, before in zip(prefix._layers, kept, strict=True):
                assert all(torch.equal(*pair) for pair in zip(layer.rows(layer.first, TOKENS), before, strict=True))


def test_a_prefix_answers_in_every_form(published):
    """Whole prompts, streams, beams, prepared inputs; and prompts that leave it early."""
    with published.client() as client, client.prefix(published.text) as prefix:
        prompt = client.question(published.text, "so?")
        expected = alone(published, prompt.token_ids)
        assert expected == prefix.generate(prompt, **GREEDY).token_ids
        stream = prefix.stream_answer("so?", **GREEDY)
        assert prefix.ask("so?", **GREEDY).text == "".join(stream)
        assert expected == stream.answer.token_ids
        output = published.loaded.model.generate(**prefix.prepare(prompt).inputs(), **GREEDY)
        assert expected == tuple(output[0, len(prompt.token_ids) :].tolist())
        beams = prefix.ask("so?", **GREEDY, num_beams=3, num_return_sequences=2)
        assert 1 == len(beams.others)
        for length in (1, 40, TOKENS - 1, TOKENS):
            early = Prompt((*published.token_ids[:length], 7, 8, 9))
            answer = prefix.generate(early, **GREEDY)
            assert (length, alone(published, early.token_ids)) == (answer.report.tokens_reused, answer.token_ids)
        inside = prefix.generate(Prompt(published.token_ids[:50]), **GREEDY)
        assert (49, alone(published, published.token_ids[:50])) == (inside.report.tokens_reused, inside.token_ids)
        other = prefix.generate(Prompt((9, 9, 9)), **GREEDY)
        assert (0, MissReason.REFUSED) == (other.report.tokens_reused, other.report.reason)
        assert alone(published, (9, 9, 9)) == other.token_ids
    closed = prefix.ask("so?", **GREEDY)
    assert (0, expected) == (closed.report.tokens_reused, closed.token_ids)


def test_what_is_not_published_is_computed_once(published):
    """A miss, a half, or a publisher whom nobody trusts: the questions share what was computed here."""
    with published.client(trust=TrustList({})) as client, client.prefix(published.text) as prefix:
        assert (0, MissReason.UNTRUSTED) == (prefix.report.tokens_reused, prefix.report.reason)
        answer = prefix.ask("so?", **GREEDY)
        assert TOKENS == answer.report.tokens_kept
        assert alone(published, client.question(published.text, "so?").token_ids) == answer.token_ids
    with published.client() as client:
        longer = published.text + " And more that nobody has published, to be read here."
        with client.prefix(longer) as prefix:
            assert 2 * BLOCK == prefix.report.tokens_reused
            answer = prefix.ask("so?", **GREEDY)
        assert len(prefix.token_ids) < answer.report.tokens_total
        assert alone(published, client.question(longer, "so?").token_ids) == answer.token_ids


def test_a_prompt_that_leaves_windows_early_is_read_anew(tmp_path_factory):
    """The windows of a shorter prefix were not loaded; the answer is right all the same."""
    published = publish(tmp_path_factory, "mistral-window")
    with published.client() as client, client.prefix(published.text) as prefix:
        prompt = Prompt((*published.token_ids[:40], 7, 8, 9))
        answer = prefix.generate(prompt, **GREEDY)
        assert alone(published, prompt.token_ids) == answer.token_ids
        assert MissReason.REFUSED == answer.report.reason or 40 == answer.report.tokens_reused


def test_a_model_that_changes_makes_a_prefix_worthless(tmp_path_factory):
    """Its tensors are not this model's any more."""
    published = publish(tmp_path_factory, "qwen2")
    with published.client() as client, client.prefix(published.text) as prefix:
        published.loaded.model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
        answer = prefix.ask("so?", **GREEDY)
        assert (0, MissReason.MISMATCH) == (answer.report.tokens_reused, answer.report.reason)
        assert alone(published, client.question(published.text, "so?").token_ids) == answer.token_ids


def test_a_prefix_of_messages_and_of_tokens(tmp_path):
    """A chat's opening, or tokens of one's own."""
    loaded = load_model(str(tiny_checkpoint(tmp_path, dtype=torch.float32)))
    store, key = MemoryStore(), SigningKey.generate()
    opening = [{"role": "system", "content": TEXT[:500]}]
    token_ids = encode_chat(loaded.tokenizer, opening, answer_follows=False).token_ids
    result = Publisher(loaded, store, key).publish(token_ids)
    published = Published(loaded, store, key, TEXT[:500], token_ids, result)
    with published.client() as client:
        with client.prefix(opening) as prefix:
            answer = prefix.ask("so?", **GREEDY)
            assert (len(token_ids), len(token_ids)) == (prefix.report.tokens_reused, answer.report.tokens_kept)
        assert client.ask(opening, "so?", **GREEDY).token_ids == answer.token_ids
        with client.prefix(Prompt(token_ids)) as prefix:
            assert len(token_ids) == prefix.report.tokens_reused == prefix.report.tokens_total
            with pytest.raises(UsageError, match="no form for questions"):
                prefix.ask("so?")
            answer = prefix.generate(Prompt((*token_ids, 5)), **GREEDY)
            assert (len(token_ids), alone(published, (*token_ids, 5))) == (answer.report.tokens_kept, answer.token_ids)


# -- conversations -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return publish_opening(tmp_path_factory, "llama")


def publish_opening(tmp_path_factory, kind):
    """A system message published, in blocks of 64 tokens."""
    with short_blocks():
        loaded = load_model(str(tiny_checkpoint(tmp_path_factory.mktemp(kind), kind, dtype=torch.float32)))
        store, key = MemoryStore(), SigningKey.generate()
        token_ids = encode_chat(loaded.tokenizer, [{"role": "system", "content": TEXT[:500]}], answer_follows=False).token_ids
        return Published(loaded, store, key, TEXT[:500], token_ids, Publisher(loaded, store, key).publish(token_ids))


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_reads_only_what_is_new(tmp_path_factory, kind):
    """Each turn is the model's own on the whole chat, and reuses the turns before as far as their tokens are kept."""
    published = publish_opening(tmp_path_factory, kind)
    with published.client() as client:
        talk = client.conversation(published.text)
        for turn, text in enumerate(["hello there", "go on", "and then?"]):
            prompt = encode_chat(
                published.loaded.tokenizer, [*talk.messages, {"role": "user", "content": text}], answer_follows=True
            )
            answer = talk.say(text, **GREEDY)
            assert alone(published, prompt.token_ids) == answer.token_ids
            if turn:
                assert len(published.token_ids) < answer.report.tokens_kept == answer.report.tokens_reused
                assert answer.report.tokens_total - answer.report.tokens_reused < 60
            else:
                assert (len(published.token_ids), 0) == (answer.report.tokens_reused, answer.report.tokens_kept)
        assert ["system", "user", "assistant", "user", "assistant", "user", "assistant"] == [m["role"] for m in talk.messages]
        assert answer.text == talk.messages[-1]["content"]


def test_a_template_that_rewrites_answers_is_followed(chat, monkeypatch):
    """Tokens are compared: what the template writes otherwise than the model did is read again."""
    template = chat.loaded.tokenizer.chat_template.replace("message['content'] }}", "message['content'] | trim | upper }}")
    monkeypatch.setattr(chat.loaded.tokenizer, "chat_template", template)
    with chat.client() as client:
        talk = client.conversation([{"role": "system", "content": "be brief"}])
        first = talk.say("hello", **GREEDY)
        prompt = encode_chat(chat.loaded.tokenizer, [*talk.messages, {"role": "user", "content": "go on"}], answer_follows=True)
        second = talk.say("go on", **GREEDY)
        assert alone(chat, prompt.token_ids) == second.token_ids
        assert first.report.tokens_total <= second.report.tokens_kept < first.report.tokens_total + 5


def test_conversations_stream_stop_fail_and_are_closed(chat):
    """A turn that is left early is kept as far as it was written; one that raises never was; a closed one loads again."""
    with chat.client() as client:
        talk = client.conversation(chat.text)
        stream = talk.stream("hello", max_new_tokens=3000, do_sample=False, eos_token_id=-1)
        for _ in stream:
            break
        said = talk.messages[-1]
        assert ("assistant", stream.answer.text) == (said["role"], said["content"])
        before = talk.messages

        def fail(*_):
            raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough"):
            talk.say("go on", **GREEDY, stopping_criteria=[fail])
        with pytest.raises(UsageError, match="one answer"):
            talk.say("go on", num_beams=2)
        assert before == talk.messages
        for _ in range(2):
            prompt = encode_chat(chat.loaded.tokenizer, [*talk.messages, {"role": "user", "content": "x"}], answer_follows=True)
            answer = talk.say("x", **GREEDY)
            assert alone(chat, prompt.token_ids) == answer.token_ids
            talk.close()


def test_turns_of_one_conversation_wait_for_each_other(chat):
    """From several threads: each adds its turn whole."""
    with chat.client() as client:
        talk = client.conversation()
        threads = [threading.Thread(target=talk.say, args=(f"number {n}",), kwargs=GREEDY) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ["user", "assistant"] * 4 == [message["role"] for message in talk.messages]


# -- batches -------------------------------------------------------------------------------------------------------------


BATCHED = (
    "llama", "deepseek_v3", "qwen3_moe", "gpt2", "phi", *WINDOW_KINDS, *INDEXED_KINDS, *SHARED_KINDS, *STATE_KINDS,
)  # fmt: skip


@pytest.mark.parametrize("kind", BATCHED)
def test_a_batch_gives_each_prompt_the_answer_it_gets_alone(tmp_path_factory, kind):
    """Rows of different lengths, loaded to different lengths, or not at all; the end of each is where it should be."""
    published = publish(tmp_path_factory, kind)
    ids = published.token_ids
    prompts = [
        Prompt((*ids, 17, 4, 250), (TOKENS,)),
        Prompt((*ids, 9, 33, 8, 7, 6, 5, 4, 3, 2), (TOKENS,)),
        Prompt((*ids[:100], 9, 9, 9)),
        Prompt((*ids, 5), (TOKENS,)),
    ]
    with published.client() as client:
        answers = client.generate_batch(prompts, **GREEDY, pad_token_id=1)
        assert [alone(published, prompt.token_ids) for prompt in prompts] == [answer.token_ids for answer in answers]
        reused = [answer.report.tokens_reused for answer in answers]
        if kind in STATE_KINDS:  # the third leaves the document where no states are
            assert [TOKENS - 1, TOKENS - 1, 0, TOKENS - 1] == reused
        assert all(0 < one < len(prompt.token_ids) for one, prompt in zip(reused, prompts, strict=True) if one)
        with_a_miss = client.generate_batch([prompts[0], Prompt((7, 8, 9))], **GREEDY, pad_token_id=1)
        assert [alone(published, prompts[0].token_ids), alone(published, (7, 8, 9))] == [a.token_ids for a in with_a_miss]


def test_many_questions_on_a_prefix(published):
    """In one run, each with its own copy; ends of sequences are where they end."""
    questions = ["so?", "What may a licensee do?", "why"]
    options = GREEDY | {"eos_token_id": list(range(2, 300)), "pad_token_id": 1, "max_new_tokens": 8}
    with published.client() as client, client.prefix(published.text) as prefix:
        answers = prefix.ask_many(questions, **options)
        prompts = [client.question(published.text, question) for question in questions]
        assert [alone(published, prompt.token_ids, **options) for prompt in prompts] == [one.token_ids for one in answers]
        # The longest question decides: what others have loaded beyond it is read again.
        longest = max(len(prompt.token_ids) for prompt in prompts)
        assert [TOKENS - longest + len(prompt.token_ids) for prompt in prompts] == [one.report.tokens_kept for one in answers]
        again = prefix.ask_many(questions[:1], **options)
        assert answers[0].token_ids == again[0].token_ids
        with pytest.raises(UsageError, match="one sequence a prompt"):
            prefix.ask_many(questions, num_beams=2)
        with pytest.raises(UsageError, match="at least one"):
            prefix.ask_many([])


def test_a_batch_of_nothing_loaded_is_the_models_own(published):
    """Without a cache there is nothing to be misplaced."""
    with published.client(StoreSource(MemoryStore())) as client:
        prompts = [Prompt((5, 6, 7)), Prompt((7, 8, 9, 10, 11))]
        answers = client.generate_batch(prompts, **GREEDY, pad_token_id=1)
    assert [alone(published, prompt.token_ids) for prompt in prompts] == [answer.token_ids for answer in answers]


def test_a_filler_that_the_model_does_not_know_is_not_read(published):
    """A token that was added to the tokenizer alone: another one fills the rows of a batch."""
    tokenizer = copy.deepcopy(published.loaded.tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert tokenizer.pad_token_id >= published.loaded.model.get_input_embeddings().num_embeddings
    prompts = [Prompt((*published.token_ids, *QUESTION), (len(published.token_ids),)), Prompt(published.token_ids[:50])]
    with published.client() as client:
        expected = [answer.token_ids for answer in client.generate_batch(prompts, **GREEDY)]
        client.tokenizer = tokenizer
        assert expected == [answer.token_ids for answer in client.generate_batch(prompts, **GREEDY)]
