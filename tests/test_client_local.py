"""The local store in the client: the same answers, without a request, whoever fetched it and whatever became of the files."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from kvcdn.client import Client, MissReason
from kvcdn.client.loading import local
from kvcdn.client.loading.fetch import PrefixFetch
from kvcdn.client.loading.local import FetchedPrefix, LocalPrefix, LocalPrefixes
from kvcdn.client.sources.stored import StoreSource
from kvcdn.keys import Chain, Namespace, PrefixNames, block_key
from kvcdn.model.cache import build_cache
from kvcdn.model.place import all_on
from kvcdn.model.speed import Pass, remember_passes
from kvcdn.model.tokens import Prompt, encode_chat
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.signing import TrustList
from kvcdn.stores.local import LocalStore
from kvcdn.stores.memory import MemoryStore
from support.command import kvcdn
from support.library import small_model
from support.local_agents import QUESTION as AGENTS_QUESTION
from support.local_agents import TOKENS as AGENTS_TOKENS
from support.published import BLOCK, QUESTION, publish_text, short_blocks
from support.stock import continued, stock_cache
from support.tiny import TEXT, tiny_checkpoint
from support.waiting import WAIT_SECONDS
from support.web import running_web

TOKENS = 3 * BLOCK + 20
STEPS = 3
GREEDY = {"max_new_tokens": 8, "do_sample": False}

KINDS = ("llama", "deepseek_v3", "deepseek_v32", "mistral-window", "gpt_oss", "gemma3n_text")
"""Full attention, latents, an indexer, windows in all layers and in some, layers that share."""


pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Three blocks of 64 tokens and a tail."""
    with short_blocks():
        return publish_text(tiny_checkpoint(tmp_path_factory.mktemp("llama"), dtype=torch.float32), tokens=TOKENS)


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "local", 10**9)


class CountingSource(StoreSource):
    """A source that counts what it is asked."""

    def __init__(self, store):
        super().__init__(store)
        self.sessions = []

    def session(self, limit_s=None):
        """A session that counts."""
        session = super().session(limit_s)
        session.match, session.open = Mock(side_effect=session.match), Mock(side_effect=session.open)
        self.sessions.append(session)
        return session

    @property
    def asked(self):
        """How many requests were made for blocks: revocations are asked for now and then, whatever is here."""
        opened = [call for session in self.sessions for call in session.open.call_args_list if "/blocks/" in call.args[0]]
        return sum(session.match.call_count for session in self.sessions) + len(opened)


def keep(published, store, leading=TOKENS, boundary=TOKENS):
    """Fetches and keeps the document, as one process would for others; returns the answer."""
    with published.client(local_store=store) as client:
        return client.generate(asked(published, leading, boundary), **GREEDY)


def asked(published, leading=TOKENS, boundary=TOKENS):
    return Prompt((*published.token_ids[:leading], *QUESTION), (boundary,))


def alone(published, prompt):
    ids = torch.tensor([prompt.token_ids])
    output = published.loaded.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY)
    return tuple(output[0, ids.shape[1] :].tolist())


def same_as_stock(published, prepared, leading=TOKENS, blocks=4):
    reused = prepared.report.tokens_reused
    rest = asked(published, leading).token_ids[reused:]
    theirs = continued(published.loaded, stock_cache(published.loaded, published.token_ids, blocks, reused), rest, STEPS)
    ours = continued(published.loaded, prepared.cache, rest, STEPS)
    return all(torch.equal(expected, got) for expected, got in zip(theirs, ours, strict=True))


def files(store):
    return list((store.folder / "prefixes").iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapped_prefix_continues_to_the_bit(tmp_path, store, kind):
    """Every kind of layer: kept by one client, mapped by another that has no source, continued by several tokens."""
    published = publish_text(tiny_checkpoint(tmp_path / "model", kind, dtype=torch.float32), tokens=TOKENS)
    fetched = keep(published, store)
    assert 0 == fetched.report.tokens_local
    source = CountingSource(MemoryStore())
    with published.client(source, local_store=store) as client:
        prepared = client.prepare(asked(published))
        assert (TOKENS, TOKENS, 4, 0, None) == tuple(
            getattr(prepared.report, name)
            for name in ("tokens_local", "tokens_reused", "blocks_reused", "bytes_fetched", "reason")
        )
        assert same_as_stock(published, prepared)
        assert fetched.token_ids == client.generate(asked(published), **GREEDY).token_ids
        # The document itself: its last token is the model's.
        prepared = client.prepare(Prompt(published.token_ids, (TOKENS,)))
        assert TOKENS - 1 == prepared.report.tokens_local
        ours = continued(published.loaded, prepared.cache, published.token_ids[-1:], STEPS)
        stock = stock_cache(published.loaded, published.token_ids, 4, TOKENS - 1)
        theirs = continued(published.loaded, stock, published.token_ids[-1:], STEPS)
        assert all(torch.equal(expected, got) for expected, got in zip(theirs, ours, strict=True))
    assert 0 == source.asked
    # A prompt that leaves the document: from the store where it has the rows, from the source where windows lie elsewhere.
    with published.client(local_store=store) as client:
        prepared = client.prepare(asked(published, 2 * BLOCK + 30))
        assert 2 * BLOCK == prepared.report.tokens_reused
        windows = any(spec.window for spec in published.loaded.identity.layout.layers)
        assert (0 if windows else 2 * BLOCK) == prepared.report.tokens_local
        assert same_as_stock(published, prepared, 2 * BLOCK + 30, 2)
    with published.client(source, local_store=store) as client:
        prepared = client.prepare(asked(published))
        assert TOKENS == prepared.report.tokens_local
        assert same_as_stock(published, prepared)


def test_a_chat_on_a_kept_opening_asks_nobody_unless_there_may_be_much_more(tmp_path, store):
    """A message of less than a block is not worth a round trip; one of more is."""
    published = publish_text(tiny_checkpoint(tmp_path / "model", dtype=torch.float32), tokens=TOKENS)
    opening = [{"role": "system", "content": TEXT[:600]}]
    ids = encode_chat(published.loaded.tokenizer, opening, answer_follows=False).token_ids
    Publisher(published.loaded, published.store, published.key).publish(ids)
    source = CountingSource(published.store)
    with published.client(source, local_store=store) as client:
        short = [*opening, {"role": "user", "content": "so?"}]
        client.generate(short, **GREEDY)
        client.close()
        before = source.asked
        report = client.generate(short, **GREEDY).report
        assert (len(ids), None, before) == (report.tokens_local, report.reason, source.asked)
        report = client.generate([*opening, {"role": "user", "content": TEXT[:1500]}], **GREEDY).report
        assert (len(ids), None) == (report.tokens_local, report.reason)
        assert source.asked > before


SUFFICES = {
    "the document, to its end": (130, (130,), 140, True),
    "its whole blocks without the tail": (128, (130,), 140, False),
    "all whole blocks, where no end is known": (128, (), 140, True),
    "not all whole blocks": (64, (), 140, False),
    "the document, and a long message behind it": (130, (130, 194), 200, False),
    "the document, and a short message behind it": (130, (130, 193), 200, True),
    "an end that lies behind the prompt": (128, (500,), 140, True),
}


@pytest.mark.parametrize("case", SUFFICES)
def test_a_source_is_asked_where_it_may_have_what_is_worth_it(case):
    """The rule, case by case."""
    held, boundaries, tokens, enough = SUFFICES[case]
    chain = Chain(small_model(), Namespace.public(), [5] * tokens)
    assert enough == LocalPrefix(chain.prefix(held).blocks, held, [], {}, bytes).suffices(chain, boundaries)


@pytest.mark.parametrize("kind", ["llama", "gemma3n_text"])
def test_of_a_longer_prefix_only_the_rest_is_fetched(tmp_path, store, kind):
    """What is here is its beginning, where it has the rows; the whole is kept, and serves both from then on."""
    published = publish_text(tiny_checkpoint(tmp_path / "model", kind, dtype=torch.float32), tokens=TOKENS)
    keep(published, store, 2 * BLOCK + 30, 2 * BLOCK)
    with published.client(local_store=store) as client:
        prepared = client.prepare(asked(published))
        report = prepared.report
        assert (TOKENS, 4, None) == (report.tokens_reused, report.blocks_reused, report.reason)
        assert same_as_stock(published, prepared)
    assert 2 * BLOCK == report.tokens_local
    identity = published.loaded.identity
    names = PrefixNames.of(identity, Namespace.public(), published.token_ids).blocks
    rest = sum(published.store.stat(block_key(identity.tag, name.address)).size for name in names[2:])
    assert 0 < report.bytes_fetched <= rest
    assert max(len(one.header.blocks) for one in store.stored()) == 4
    with published.client(StoreSource(MemoryStore()), local_store=store) as client:
        for leading, blocks in ((TOKENS, 4), (2 * BLOCK + 30, 2)):
            boundary = TOKENS if blocks == 4 else 2 * BLOCK
            prepared = client.prepare(asked(published, leading, boundary))
            assert prepared.report.tokens_local == prepared.report.tokens_reused == boundary
            assert same_as_stock(published, prepared, leading, blocks)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_lossy_prefix_is_kept_and_found_by_who_accepts_it(published, store, monkeypatch, precision):
    """Decoded, under its own names: nobody gets it who wants exact KV, or better, and the exact one is preferred."""
    monkeypatch.undo()
    whole = publish_text(Path(published.loaded.model.config._name_or_path), tokens=1300)
    Publisher(whole.loaded, whole.store, whole.key).publish(whole.token_ids, precision=precision)
    prompt = Prompt((*whole.token_ids, *QUESTION), (1300,))

    def load(source=None, **options):
        with whole.client(source, local_store=store, **options) as client:
            prepared = client.prepare(prompt)
        rows = [layer.rows(0, 1300) for layer in prepared.cache.layers] if prepared.cache else []
        return prepared.report, rows

    first, fetched = load(precision=precision)
    again, mapped = load(StoreSource(MemoryStore()), precision=precision)
    assert (0, 1300, precision) == (first.tokens_local, again.tokens_local, again.precision)
    assert all(torch.equal(*pair) for rows in zip(fetched, mapped, strict=True) for pair in zip(*rows, strict=True))
    assert load(StoreSource(MemoryStore()))[0].tokens_reused == 0
    refused, _ = load(StoreSource(MemoryStore()), precision=precision, max_kl=0.0)
    assert (0, True) == (refused.tokens_reused, "mean KL" in refused.local_refused)
    exact, _ = load(precision=(precision, "native"))
    assert (precision, 1300) == (exact.precision, exact.tokens_local)
    load()
    exact, _ = load(StoreSource(MemoryStore()), precision=(precision, "native"))
    assert ("native", 1300) == (exact.precision, exact.tokens_local)


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2"])
def test_a_model_with_states_is_fetched_each_time(tmp_path, store, kind):
    """A prefix file has no place for states: such models do without the store."""
    published = publish_text(tiny_checkpoint(tmp_path / "model", kind, dtype=torch.float32), tokens=TOKENS)
    answers = [keep(published, store) for _ in range(2)]
    assert [0, 0] == [answer.report.tokens_local for answer in answers]
    assert 0 < answers[1].report.tokens_reused
    assert answers[0].token_ids == answers[1].token_ids
    assert [] == store.stored()


def test_a_rest_that_does_not_come_leaves_what_is_here(published, store):
    """Whatever becomes of the rest, the beginning is used: broken off, or damaged at the source."""
    keep(published, store, 2 * BLOCK + 30, 2 * BLOCK)
    names = Chain(published.loaded.identity, Namespace.public(), published.token_ids).prefix(TOKENS).blocks
    broken = MemoryStore()
    for info in published.store.list("v1/"):
        data = bytearray(published.store.read(info.key))
        if str(names[2].address) in info.key:
            data[-9] ^= 1
        broken.create(info.key, [bytes(data)])
    with published.client(StoreSource(broken), local_store=store) as client:
        answer = client.generate(asked(published), **GREEDY)
    report = answer.report
    assert (2 * BLOCK, 2 * BLOCK, MissReason.CORRUPT) == (report.tokens_reused, report.tokens_local, report.reason)
    assert alone(published, asked(published)) == answer.token_ids
    assert [2] == [len(one.header.blocks) for one in store.stored()]


def test_where_the_rest_is_computed_what_is_here_is_used(published, store):
    """The plan may find that the model had better read the rest itself; the beginning is here all the same."""
    keep(published, store, 2 * BLOCK + 30, 2 * BLOCK)
    # What a clock measured of so small a model might as well say that reading all is sooner than what is behind the beginning.
    whole = TOKENS + len(QUESTION)
    remember_passes(published.loaded, [Pass(0, whole, 1.0)], sort="prompts")
    remember_passes(published.loaded, [Pass(2 * BLOCK, whole, 0.3)], sort="rests")
    with published.client(local_store=store, mode="auto") as client:
        answer = client.generate(asked(published), **GREEDY)
        assert answer.report.tokens_local >= 2 * BLOCK
        assert alone(published, asked(published)) == answer.token_ids


def test_a_source_that_is_down_leaves_what_is_here(published, store):
    """Part of the document is here, the rest cannot be had: used, and the reason told."""
    keep(published, store, 2 * BLOCK + 30, 2 * BLOCK)
    with published.client("http://127.0.0.1:9", local_store=store) as client:
        answer = client.generate(asked(published), **GREEDY)
    report = answer.report
    assert (2 * BLOCK, 2 * BLOCK, MissReason.UNAVAILABLE) == (report.tokens_reused, report.tokens_local, report.reason)
    assert alone(published, asked(published)) == answer.token_ids


@pytest.mark.parametrize("where", ["the header", "an envelope", "the first row", "the last row", "the length"])
def test_a_damaged_file_is_removed_and_fetched_anew(published, store, where):
    """Whatever was damaged, the answer is right, and the next one is local again."""
    keep(published, store)
    [path] = files(store)
    file = store.stored()[0].header
    places = [place for layer in file.places(published.loaded.identity.layout) for place in layer]
    position = {
        "the header": 30,
        "an envelope": len(file.encoded) + file.blocks[0].envelope + 200,
        "the first row": places[0].offset,
        "the last row": places[-1].span(0, TOKENS).stop - 1,
        "the length": path.stat().st_size - 1,
    }[where]
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data[:position] if where == "the length" else data)
    with published.client("http://127.0.0.1:9", local_store=LocalStore(store.folder)) as client:
        answer = client.generate(asked(published), **GREEDY)
        assert (0, MissReason.UNAVAILABLE) == (answer.report.tokens_local, answer.report.reason)
        assert alone(published, asked(published)) == answer.token_ids
    assert [] == files(store)
    assert 0 == keep(published, store).report.tokens_local
    assert TOKENS == keep(published, store).report.tokens_local


def test_what_one_trust_list_let_in_is_nothing_to_another(published, store):
    """Also in the process that has checked it already; and it stays for those who trust the publisher."""
    keep(published, store)
    assert TOKENS == keep(published, store).report.tokens_local
    with published.client(trust=TrustList({}), local_store=store) as client:
        answer = client.generate(asked(published), **GREEDY)
    assert (0, 0, MissReason.UNTRUSTED) == (answer.report.tokens_reused, answer.report.tokens_local, answer.report.reason)
    assert alone(published, asked(published)) == answer.token_ids
    assert TOKENS == keep(published, store).report.tokens_local


def test_another_model_and_another_namespace_find_nothing(published, store, tmp_path):
    """Names depend on both, here as at an origin."""
    keep(published, store)
    source = StoreSource(MemoryStore())
    with published.client(source, local_store=store, namespace=Namespace.private("mine", bytes(32))) as client:
        assert 0 == client.generate(asked(published), **GREEDY).report.tokens_reused
    other = tiny_checkpoint(tmp_path / "other", seed=1, dtype=torch.float32)
    with Client.load(str(other), source, trust=TrustList.of(published.key.public), local_store=store) as client:
        assert 0 == client.generate(asked(published), **GREEDY).report.tokens_reused


def test_a_store_that_others_can_get_at_is_not_used(published, store):
    """Neither read nor written; the answer comes from the source, and the report says why."""
    keep(published, store)
    store.folder.chmod(0o755)
    report = keep(published, store).report
    assert (TOKENS, 0, None) == (report.tokens_reused, report.tokens_local, report.reason)
    assert "open to other users" in report.local_refused
    store.folder.chmod(0o700)
    assert TOKENS == keep(published, store).report.tokens_local


def test_what_a_model_writes_is_its_own(published, store):
    """One session cuts its cache back and goes elsewhere, over rows of the prefix; others and the file do not see it."""
    keep(published, store)
    before = files(store)[0].read_bytes()
    chain = Chain(published.loaded.identity, Namespace.public(), asked(published).token_ids)
    first = LocalPrefixes(store).find(chain, (TOKENS,), published.trust, all_on("cpu", chain.model.layout))
    with published.client(local_store=store) as client:
        second = client.prepare(asked(published))
        for layer in first.layers:
            layer.crop(BLOCK - TOKENS)
        continued(published.loaded, build_cache(published.loaded.model, first.layers), range(2, 2 + 2 * BLOCK), STEPS)
        assert [3 * BLOCK + STEPS] * 3 == [layer.get_seq_length() for layer in first.layers]
        assert same_as_stock(published, second)
        assert same_as_stock(published, client.prepare(asked(published)))
    assert before == files(store)[0].read_bytes()


def test_decoding_goes_on_in_the_shared_pages(published, store):
    """Layers that are mapped stay where they are: each session would otherwise have the prefix for itself."""
    keep(published, store)
    with published.client(local_store=store) as client:
        prepared = client.prepare(asked(published))
        before = [tensor.data_ptr() for layer in prepared.cache.layers for tensor in layer.storage]
        assert same_as_stock(published, prepared)
        assert before == [tensor.data_ptr() for layer in prepared.cache.layers for tensor in layer.storage]


def test_sessions_in_threads_share_one_file(published, store):
    """Many at once on one client, each with its own continuation."""
    keep(published, store)
    prompts = [Prompt((*published.token_ids, number, *QUESTION), (TOKENS,)) for number in range(2, 8)]
    with published.client(StoreSource(MemoryStore()), local_store=store) as client, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: client.generate(prompt, **GREEDY), prompts))
    assert [TOKENS] * 6 == [answer.report.tokens_local for answer in answers]
    assert [alone(published, prompt) for prompt in prompts] == [answer.token_ids for answer in answers]


def test_a_session_outgrows_the_room_and_outlives_the_file(published, store, monkeypatch):
    """Room that is used up is a copy, and a cleared file stays with whoever has mapped it."""
    monkeypatch.setattr(local, "ROOM_TOKENS", 3)
    keep(published, store)
    with published.client(StoreSource(MemoryStore()), local_store=store) as client:
        prepared = client.prepare(asked(published))
        assert 1 == store.clear()[0]
        assert same_as_stock(published, prepared)
        assert 0 == client.prepare(asked(published)).report.tokens_local


def test_a_prompt_that_ends_with_the_document_keeps_what_it_does_not_write_over(published, store):
    """The model reads the last token itself, over the published row: the blocks before it are kept."""
    with published.client(local_store=store) as client:
        client.generate(Prompt(published.token_ids, (TOKENS,)), **GREEDY)
    assert [3] == [len(one.header.blocks) for one in store.stored()]


def test_rows_that_were_changed_in_memory_are_not_kept(published, store):
    """Keeping checks what it wrote against what the publisher signed: a race with the model is lost, not hidden."""
    prefix = _fetched(published)
    prefix.rows[1][0][BLOCK, 0, 0] += 1
    prefixes = LocalPrefixes(store)
    assert not prefixes.keep(prefix).result()
    assert [] == files(store)
    assert prefixes.keep(_fetched(published)).result()
    prefixes.close()


def _fetched(published):
    identity, trust = published.loaded.identity, TrustList.of(published.key.public)
    blocks = Chain(identity, Namespace.public(), published.token_ids).prefix(TOKENS).blocks
    where = {"length": TOKENS, "capacity": TOKENS + 9, "devices": all_on("cpu", identity.layout), "trust": trust}
    fetch = PrefixFetch(StoreSource(published.store), identity, blocks, **where)
    prefix = FetchedPrefix.of(fetch, identity, blocks, trust)
    fetch.wait()
    return prefix


def test_keeping_waits_behind_a_model_that_is_about_to_run(published, store, monkeypatch):
    """Who prepares inputs is going to use them at once; `close` does not wait for the delay, but for the file."""
    monkeypatch.setattr(local, "BEHIND_SECONDS", 60.0)
    with published.client(local_store=store) as client:
        client.prepare(asked(published))
        assert [] == store.stored()
    assert 1 == len(store.stored())


def test_few_prefixes_wait_to_be_kept(published, store, monkeypatch):
    """Waiting ones hold their memory: beyond a handful they are not kept, and nobody waits but `close`."""
    free, prefixes, fetched = threading.Event(), LocalPrefixes(store), _fetched(published)
    monkeypatch.setattr(local, "_write", lambda *_: free.wait(WAIT_SECONDS))
    futures = [prefixes.keep(fetched) for _ in range(local.MAX_WAITING + 2)]
    assert [None, None] == futures[local.MAX_WAITING :]
    free.set()
    prefixes.close()
    assert all(future.done() for future in futures[: local.MAX_WAITING])


def test_twenty_processes_at_once(published, store):
    """Six that are cold: all fetch, one keeps. Twenty that are warm: all map, and share the pages that they do not write to."""
    text, gone = store.folder.parent / "document.txt", "http://127.0.0.1:9"
    text.write_text(published.text, "utf-8")
    with running_web(published.store) as web:
        lines = _agents(published, text, store, f"{web.url}=6", f"{gone}=20")
    with published.client() as client:
        prompt = client.question(published.text, AGENTS_QUESTION)
        expected = list(client.generate(prompt, max_new_tokens=AGENTS_TOKENS, do_sample=False).token_ids)
    assert [expected] * 26 == [line["tokens"] for line in lines]
    assert 1 == len(files(store))
    warm = [line for line in lines if line["url"] == gone]
    assert [TOKENS] * 20 == [line["local"] for line in warm]
    layers = published.loaded.identity.layout.layers
    rows, tensors = TOKENS * published.loaded.identity.layout.bytes_per_token, sum(len(spec.tensors) for spec in layers)
    assert all(line["mapped"]["Rss"] >= rows for line in warm)
    # A tensor's last page, and at most one behind it.
    assert max(line["mapped"]["Anonymous"] for line in warm) <= 2 * tensors * mmap.PAGESIZE


def _agents(published, text: Path, store: LocalStore, *agents: str):
    """The lines of the agents, `URL=COUNT` each; blocks are short in their processes too."""
    program = Path(__file__).parent / "support" / "local_agents.py"
    small = f"import kvcdn.layout as layout, runpy; layout.MAX_BLOCK_TOKENS = {BLOCK}"
    checkpoint = published.loaded.model.config._name_or_path
    arguments = [checkpoint, str(text), str(store.folder), published.key.public.text, *agents]
    paths = os.pathsep.join([str(program.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", f"{small}; runpy.run_path({str(program)!r}, run_name='__main__')", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_commands_use_list_and_clear_the_store(published, store, tmp_path, monkeypatch):
    """ask keeps and finds, --no-local does neither; `kvcdn cache` shows what is there, and removes it, by model or all."""
    from kvcdn.keyring import trust_publisher
    from kvcdn.stores.folder import FolderStore

    monkeypatch.setenv("KVCDN_LOCAL", str(store.folder))
    trust_publisher(published.key.public, "the publisher")
    origin, text = FolderStore(tmp_path / "origin"), tmp_path / "document.txt"
    text.write_text(published.text, "utf-8")
    Publisher(published.loaded, origin, published.key).publish(published.token_ids)
    model = published.loaded.model.config._name_or_path
    ask = (
        "ask",
        text,
        "What?",
        "--model",
        model,
        "--origin",
        tmp_path / "origin",
        "--mode",
        "fetch",
        "--max-tokens",
        "2",
        "--json",
    )
    assert 0 == kvcdn(*ask, "--no-local").json["report"]["tokens_local"]
    assert [] == kvcdn("cache", "ls", "--json").json["prefixes"]
    assert [0, TOKENS] == [kvcdn(*ask).json["report"]["tokens_local"] for _ in range(2)]
    assert 0 == kvcdn(*ask, "--no-local").json["report"]["tokens_local"]
    listed = kvcdn("cache", "ls", "--json").json
    [entry] = listed["prefixes"]
    identity = published.loaded.identity
    assert (str(store.folder), str(identity.tag), identity.name, TOKENS, 4) == (
        listed["folder"], *(entry[name] for name in ("model", "model_name", "tokens", "blocks"))
    )  # fmt: skip
    assert str(identity.tag) in kvcdn("cache", "ls", "--model", identity.name).out
    assert 3 == kvcdn("cache", "clear", "--model", "another").code
    ran = kvcdn("cache", "clear", "--model", str(identity.fingerprint), "--json")
    assert (0, 1) == (ran.code, ran.json["removed"])
    assert "removed 0 prefixes" in kvcdn("cache", "clear").out
    store.folder.chmod(0o777)
    ran = kvcdn("cache", "ls")
    assert (2, True) == (ran.code, "chmod 700" in ran.complaint)


def test_the_cache_commands_need_no_torch(tmp_path):
    """Looking into the store and clearing it starts in no time."""
    program = "import sys, kvcdn.cli.main, kvcdn.stores.local; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert set() == {module.split(".")[0] for module in done.stdout.split()} & {"torch", "numpy", "blosc2", "transformers"}
