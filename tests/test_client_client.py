"""The SDK: right answers from published caches, and the model's own answers, with a reason, from everything else."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TextStreamer

from kvcdn import codec
from kvcdn.client import Client, MissReason
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.sources.transport import EdgeSource
from kvcdn.errors import UnsupportedModelError
from kvcdn.keys import Namespace, PrefixNames, block_key
from kvcdn.model.load import bind_model
from kvcdn.model.place import all_on
from kvcdn.model.tokens import Prompt, encode_text
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.signing import SigningKey, TrustList
from kvcdn.stores.memory import MemoryStore
from support.faults import Fault, faulty_link
from support.published import publish_text
from support.scripted import right_answer, scripted
from support.tiny import TEXT, tiny_checkpoint
from support.web import running_web

QUESTION = "What may a licensee do?"
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Three blocks of a text, in float32, where answers do not hang on rounding."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("llama32"), dtype=torch.float32)
    return publish_text(folder, tokens=2500)


def alone(published, prompt, **options):
    """What the model answers without kvcdn."""
    ids = torch.tensor([prompt.token_ids])
    with torch.inference_mode():
        output = published.loaded.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **{**GREEDY, **options})
    return tuple(output[0, len(prompt.token_ids) :].tolist())


def test_a_question_is_answered_from_the_published_cache(published):
    """All of the document is reused, and the answer is the model's own."""
    with published.client() as client:
        answer = client.ask(published.text, QUESTION, **GREEDY)
        assert alone(published, client.question(published.text, QUESTION)) == answer.token_ids
    report = answer.report
    assert (2500, 3, None) == (report.tokens_reused, report.blocks_reused, report.reason)
    assert report.bytes_fetched == published.result.stored_bytes
    assert report.bytes_raw == published.result.raw_bytes
    assert {"tokenize", "match", "fetch", "first_token", "total"} == set(report.seconds)


def test_prepared_inputs_work_with_stock_generate_and_forward(published):
    """`prepare` hands out ids, mask and cache that belong together."""
    with published.client() as client:
        prompt = client.question(published.text, QUESTION)
        output = published.loaded.model.generate(**client.prepare(prompt).inputs(), **GREEDY)
        assert alone(published, prompt) == tuple(output[0, len(prompt.token_ids) :].tolist())
        prepared = client.prepare(prompt)
        reused = prepared.report.tokens_reused
        assert 2500 == reused == prepared.cache.get_seq_length()


@pytest.mark.parametrize("mode", ["fetch", "both"])
def test_a_cache_leaves_with_its_last_view(published, mode):
    """Without the garbage collector's help, so that its memory serves the next prompt's."""
    with published.client(mode=mode) as client:
        prompt = client.question(published.text, QUESTION)
        client.prepare(prompt)
        gc.collect()
        gc.disable()
        try:
            prepared = client.prepare(prompt)
            layers = [weakref.ref(layer) for layer in prepared.cache.layers]
            assert 2500 == prepared.report.tokens_reused + prepared.report.tokens_computed
            del prepared
            assert [None] * len(layers) == [layer() for layer in layers]
        finally:
            gc.enable()


def test_a_client_has_loaded_what_decodes(published):
    """The first prompt does not wait for a library to be imported."""
    codec._blosc2.cache_clear()
    with published.client():
        assert 1 == codec._blosc2.cache_info().currsize


def test_a_header_that_somebody_else_has_read_is_not_trusted_for_it(published):
    """Headers are read once; whom to trust is asked for every prompt."""
    with published.client() as client:
        assert client.ask(published.text, QUESTION, **GREEDY).report.tokens_reused == 2500
    with published.client(trust=TrustList.of(SigningKey.generate().public)) as stranger:
        answer = stranger.ask(published.text, QUESTION, **GREEDY)
        assert (0, MissReason.UNTRUSTED) == (answer.report.tokens_reused, answer.report.reason)
        assert alone(published, stranger.question(published.text, QUESTION)) == answer.token_ids


LENGTHS = {
    "shorter than a block": (700, 0),
    "a whole block": (1024, 0),
    "one token into the second block": (1025, 1024),
    "all whole blocks": (2048, 1024),
    "into the tail": (2300, 2048),
    "all but one token": (2499, 2048),
    "exactly the document": (2500, 2048),
    "beyond it": (2600, 2048),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_any_prompt_that_starts_like_a_published_one_reuses_its_whole_blocks(published, case):
    """Without a known boundary the whole blocks count, and one token is always left to the model."""
    length, reused = LENGTHS[case]
    token_ids = encode_text(published.loaded.tokenizer, TEXT).token_ids[:length]
    with published.client() as client:
        answer = client.generate(Prompt(token_ids), **GREEDY)
    expected = {1024: 1023, 2048: 2047}.get(length, reused)
    assert expected == answer.report.tokens_reused
    assert alone(published, Prompt(token_ids)) == answer.token_ids


def test_a_prompt_that_is_the_document_leaves_its_last_token_to_the_model(published):
    """With the boundary known, all but one token are reused."""
    with published.client() as client:
        prompt = Prompt(published.token_ids, (2500,))
        answer = client.generate(prompt, **GREEDY)
    assert 2499 == answer.report.tokens_reused
    assert alone(published, prompt) == answer.token_ids


@pytest.mark.parametrize("position", [0, 1, 500, 1023, 1024, 1500, 2047, 2048, 2499])
def test_a_prompt_that_differs_in_one_token_never_gets_a_cache_of_another_text(published, position):
    """Reuse ends at or before the first difference, wherever it is."""
    changed = list(published.token_ids)
    changed[position] = (changed[position] + 1) % 500 + 2
    prompt = Prompt((*changed, 5, 6, 7), (2500,))
    with published.client() as client:
        answer = client.generate(prompt, **GREEDY)
    assert answer.report.tokens_reused == position // 1024 * 1024
    assert alone(published, prompt) == answer.token_ids


def test_chat_messages_find_what_was_published_of_their_opening(tmp_path):
    """A system message published once serves every conversation that starts with it."""
    from kvcdn.model.load import load_model
    from kvcdn.model.tokens import encode_chat

    loaded = load_model(str(tiny_checkpoint(tmp_path, dtype=torch.float32)))
    store, key = MemoryStore(), SigningKey.generate()
    opening = [{"role": "system", "content": TEXT[:6000]}]
    token_ids = encode_chat(loaded.tokenizer, opening, answer_follows=False).token_ids
    Publisher(loaded, store, key).publish(token_ids)
    trust = TrustList.of(key.public)
    with Client(loaded.model, loaded.tokenizer, StoreSource(store), trust=trust, mode="fetch") as client:
        messages = [*opening, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
        answer = client.generate([*messages, {"role": "user", "content": "so?"}], **GREEDY)
    assert len(token_ids) == answer.report.tokens_reused


# -- misses: the answer is the model's own, and the report says why ------------------------------------------------------


def tampered(store, key, position, flip=1):
    """A store in which one bit of one object differs."""
    changed = MemoryStore()
    for info in store.list("v1/"):
        data = bytearray(store.read(info.key))
        if info.key == key:
            data[position] ^= flip
        changed.create(info.key, [bytes(data)])
    return changed


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("position", [0, 9, 40, 900, -1, -2000, -40000])
def test_a_flipped_bit_anywhere_is_a_miss_with_the_blocks_before_it_kept(published, block, position):
    """Magic, length, header, signature, first or last layer: never a wrong answer, and what was good is used."""
    tag = published.loaded.identity.tag
    names = PrefixNames.of(published.loaded.identity, Namespace.public(), published.token_ids).blocks
    store = tampered(published.store, block_key(tag, names[block].address), position)
    with published.client(StoreSource(store)) as client:
        answer = client.ask(published.text, QUESTION, **GREEDY)
        assert alone(published, client.question(published.text, QUESTION)) == answer.token_ids
    assert MissReason.CORRUPT == answer.report.reason
    assert str(names[block].address) in answer.report.detail
    assert 1024 * block == answer.report.tokens_reused


@pytest.mark.parametrize("way", ["store", "edge"])
@pytest.mark.parametrize(
    "change", [lambda data: data + b"x", lambda data: data[:-1], lambda data: data[:100], lambda data: b""]
)
def test_an_object_of_the_wrong_length_is_a_miss(published, change, way):
    """Trailing bytes and truncation, from a store and over HTTP."""
    changed = MemoryStore()
    for info in published.store.list("v1/"):
        changed.create(info.key, [change(published.store.read(info.key))])
    with running_web(changed) as web, published.client(StoreSource(changed) if way == "store" else web.url) as client:
        answer = client.ask(published.text, QUESTION, **GREEDY)
        assert alone(published, client.question(published.text, QUESTION)) == answer.token_ids
    assert answer.report.reason in (MissReason.CORRUPT, MissReason.UNAVAILABLE)
    assert 0 == answer.report.tokens_reused


def test_an_untrusted_publisher_is_a_miss(published):
    """A valid signature of somebody unknown steers nothing."""
    with published.client(trust=TrustList({})) as client:
        answer = client.ask(published.text, QUESTION, **GREEDY)
        assert alone(published, client.question(published.text, QUESTION)) == answer.token_ids
    assert (MissReason.UNTRUSTED, 0) == (answer.report.reason, answer.report.tokens_reused)


def test_another_model_and_another_namespace_find_nothing(published, tmp_path):
    """Same text, other weights or another secret: not published."""
    other = tiny_checkpoint(tmp_path, seed=1, dtype=torch.float32)
    trust = TrustList.of(published.key.public)
    with Client.load(str(other), StoreSource(published.store), trust=trust) as client:
        report = client.ask(published.text, QUESTION, **GREEDY).report
    assert (MissReason.NOT_PUBLISHED, 0) == (report.reason, report.tokens_reused)
    with published.client(namespace=Namespace.private("mine", bytes(32))) as client:
        report = client.ask(published.text, QUESTION, **GREEDY).report
    assert (MissReason.NOT_PUBLISHED, 0) == (report.reason, report.tokens_reused)


def test_another_models_block_under_this_name_is_a_miss(published, tmp_path):
    """A publisher who is trusted, or an origin that mixes objects up, cannot pass one model's KV off as another's."""
    folder = tiny_checkpoint(tmp_path, seed=1, dtype=torch.float32)
    other = publish_text(folder, text=published.text)
    mixed = MemoryStore()
    theirs = [info.key for info in other.store.list("v1/") if "/blocks/" in info.key]
    ours = [info.key for info in published.store.list("v1/") if "/blocks/" in info.key]
    for key, their in zip(ours, theirs, strict=True):
        mixed.create(key, [other.store.read(their)])
    trust = TrustList.of(published.key.public, other.key.public)
    with published.client(StoreSource(mixed), trust=trust) as client:
        answer = client.ask(published.text, QUESTION, **GREEDY)
        assert alone(published, client.question(published.text, QUESTION)) == answer.token_ids
    assert (MissReason.CORRUPT, 0) == (answer.report.reason, answer.report.tokens_reused)


FAULTS = {
    "the match is refused": Fault(when=b"POST /v1/match", answer=b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"),
    "the match is nonsense": Fault(
        when=b"POST /v1/match", answer=b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"matched": 999}'
    ),
    "the match is not HTTP": Fault(when=b"POST /v1/match", answer=b"SSH-2.0-hello\r\n"),
    "the match stalls": Fault(when=b"POST /v1/match", pass_bytes=0, stall=True),
    "a block is refused": Fault(when=b"GET /", answer=b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n"),
    "a block is gone": Fault(when=b"GET /", answer=b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
    "a block is cut in its header": Fault(when=b"GET /", pass_bytes=500),
    "a block is cut in its body": Fault(when=b"GET /", pass_bytes=200_000),
    "a block is reset": Fault(when=b"GET /", pass_bytes=200_000, reset=True),
    "a block stalls": Fault(when=b"GET /", pass_bytes=200_000, stall=True),
}


FINAL = {"a block is refused", "a block is gone", "the match is nonsense", "the match is not HTTP"}
"""What another try at the same edge would not better, or what is no fault of a link."""


@pytest.mark.parametrize("case", FAULTS)
@pytest.mark.parametrize("way", ["streaming", "prepared"])
def test_a_failing_link_is_a_miss_and_the_answer_stays_right(published, case, way):
    """Whatever the link does, and whenever, the answer is what the model would say alone."""
    with running_web(published.store) as web, faulty_link(web.port) as link:
        link.inject(FAULTS[case], times=1000)
        with published.client(EdgeSource(link.url, stall_seconds=0.5 if "stall" in case else 15.0)) as client:
            prompt = client.question(published.text, QUESTION)
            if way == "streaming":
                answer = client.generate(prompt, **GREEDY)
                tokens, report = answer.token_ids, answer.report
            else:
                prepared = client.prepare(prompt)
                output = published.loaded.model.generate(**prepared.inputs(), **GREEDY)
                tokens, report = tuple(output[0, len(prompt.token_ids) :].tolist()), prepared.report
    assert link.pending < 1000
    assert alone(published, prompt) == tokens
    # An edge that breaks off again and again, but brings something each time, brings all of it in the end.
    assert report.reason in (MissReason.UNAVAILABLE, MissReason.NOT_PUBLISHED) or report.tokens_reused == 2500
    assert report.tokens_reused in (0, 1024, 2048, 2500)


@pytest.mark.parametrize("case", [case for case in FAULTS if case not in FINAL])
def test_a_link_that_fails_once_is_no_miss(published, case):
    """What fails once is tried again, from where it broke off, and everything is reused."""
    with running_web(published.store) as web, faulty_link(web.port) as link:
        link.inject(FAULTS[case])
        with published.client(EdgeSource(link.url, stall_seconds=5.0 if "stall" in case else 15.0)) as client:
            report = client.prepare(client.question(published.text, QUESTION)).report
    assert 0 == link.pending
    assert (2500, None) == (report.tokens_reused, report.reason)
    assert report.bytes_fetched == published.result.stored_bytes


def test_an_edge_that_is_not_there_is_a_miss(published):
    """A closed port costs a connection attempt and nothing else."""
    with published.client("http://127.0.0.1:9") as client:
        answer = client.ask(published.text, QUESTION, **GREEDY)
    assert (MissReason.UNAVAILABLE, 0) == (answer.report.reason, answer.report.tokens_reused)
    assert alone(published, client.question(published.text, QUESTION)) == answer.token_ids


@pytest.mark.filterwarnings("ignore")
def test_an_unsupported_model_is_a_miss_by_name(published):
    """A model whose cache we cannot carry answers by itself."""
    config = AutoConfig.for_model(
        "gemma3_text", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(published.loaded.tokenizer), eos_token_id=1, bos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.config._name_or_path = published.loaded.model.config._name_or_path
    client = Client(model, published.loaded.tokenizer, StoreSource(published.store), trust=TrustList.of(published.key.public))
    answer = client.ask("some text", QUESTION, **GREEDY)
    assert MissReason.UNSUPPORTED_MODEL == answer.report.reason
    assert 1 <= len(answer.token_ids) <= 8


class Packed(torch.Tensor):
    """A weight that is made of several tensors, as libraries of quantisation make them in place (torchao, quanto)."""

    def __tensor_flatten__(self):
        return ["codes", "scales"], None


def with_packed_weights(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.data.as_subclass(Packed), requires_grad=False)
    return model


def quantised_by_torch(model):
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8).eval()


@pytest.mark.parametrize(("quantise", "named"), [(with_packed_weights, "Packed"), (quantised_by_torch, "quantised in memory")])
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_was_quantised_in_memory_is_refused_by_name(published, quantise, named):
    """Its checkpoint does not say so: it would have the cache of other weights, or publish its own under their name."""
    model = quantise(copy.deepcopy(published.loaded.model))
    with pytest.raises(UnsupportedModelError, match=named):
        bind_model(model, published.loaded.tokenizer)
    with Client(model, published.loaded.tokenizer, StoreSource(published.store), trust=published.trust) as client:
        answer = client.ask(published.text[:300], QUESTION, **GREEDY)
        prompt = client.question(published.text[:300], QUESTION)
    assert MissReason.UNSUPPORTED_MODEL == answer.report.reason
    ids = torch.tensor([prompt.token_ids])
    with torch.inference_mode():
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert tuple(output[0, len(prompt.token_ids) :].tolist()) == answer.token_ids


# -- what the SDK owns -------------------------------------------------------------------------------------------------


def test_a_streamer_sees_the_answer_once(published, capsys):
    """Streaming output works, on a hit and after a failed fetch."""
    tokenizer = published.loaded.tokenizer
    for trust in (None, TrustList({})):
        with published.client(**({} if trust is None else {"trust": trust})) as client:
            answer = client.ask(published.text, QUESTION, **GREEDY, streamer=TextStreamer(tokenizer, skip_prompt=True))
        assert tokenizer.decode(answer.token_ids) == capsys.readouterr().out.rstrip("\n")


def test_prompts_at_the_same_time_do_not_disturb_each_other(published):
    """Several threads on one client."""
    from concurrent.futures import ThreadPoolExecutor

    questions = [f"Question {number}?" for number in range(4)]
    with published.client() as client, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda question: client.ask(published.text, question, **GREEDY), questions))
        expected = [alone(published, client.question(published.text, question)) for question in questions]
    assert expected == [answer.token_ids for answer in answers]
    assert [2500] * 4 == [answer.report.tokens_reused for answer in answers]


def test_seconds_saved_is_unknown_until_the_speed_is_known(published):
    """A saving is claimed only against a measured prefill."""
    with published.client() as client:
        assert client.ask(published.text, QUESTION, **GREEDY).report.seconds_saved is None
        client.generate(Prompt(tuple(range(2, 700))), **GREEDY)
        assert client.ask(published.text, QUESTION, **GREEDY).report.seconds_saved is not None


# -- a fetch that is stopped --------------------------------------------------------------------------------------------


def silent_behind(published, key, count):
    """A server of all objects that says no more of `key` than `count` bytes, and of the others everything."""

    def answer(number, head, client):
        path = head.split(b" ")[1].decode().removeprefix("/")
        if path == "v1/match":
            body = b'{"matched": 3}'
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            return True
        whole = right_answer(head, published.store.read(path))
        if path != key:
            client.sendall(whole)
            return True
        client.sendall(whole[:count])
        return bool(client.recv(1))

    return scripted(answer)


@pytest.mark.parametrize("count", [0, 5000, 200_000])
@pytest.mark.parametrize("block", [0, 2])
def test_a_fetch_that_is_closed_does_not_wait_for_a_silent_edge(published, count, block):
    """Another thread's read is woken, although the edge may be silent for ten minutes more."""
    from kvcdn.client.loading.fetch import PrefixFetch

    identity = published.loaded.identity
    names = PrefixNames.of(identity, Namespace.public(), published.token_ids).blocks
    with silent_behind(published, block_key(identity.tag, names[block].address), count) as server:
        source = EdgeSource(server.url, stall_seconds=600)
        fetch = PrefixFetch(
            source,
            identity,
            names,
            length=2500,
            capacity=2600,
            devices=all_on("cpu", identity.layout),
            trust=TrustList.of(published.key.public),
        )
        threading.Event().wait(0.2)
        fetch.close()
        assert [False] * len(fetch._threads) == [thread.is_alive() for thread in fetch._threads]
        source.close()


def test_a_failed_fetch_does_not_wait_for_a_silent_edge(published):
    """One block is corrupt, the one before it silent: what was whole is kept, and the model prefills."""
    identity = published.loaded.identity
    names = PrefixNames.of(identity, Namespace.public(), published.token_ids).blocks
    broken = tampered(published.store, block_key(identity.tag, names[2].address), -1)
    changed = dataclasses.replace(published, store=broken)
    with (
        silent_behind(changed, block_key(identity.tag, names[1].address), 200_000) as server,
        published.client(EdgeSource(server.url, stall_seconds=600)) as client,
    ):
        prompt = client.question(published.text, QUESTION)
        answer = client.generate(prompt, **GREEDY)
    assert alone(published, prompt) == answer.token_ids
    assert (1024, MissReason.CORRUPT) == (answer.report.tokens_reused, answer.report.reason)
