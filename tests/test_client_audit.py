"""The audit: a trusted publisher who puts the KV of another text under a right address is found out, and not trusted again."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvcdn.block import seal_block
from kvcdn.client import MissReason
from kvcdn.client.sources.stored import StoreSource
from kvcdn.errors import UnavailableError, UsageError
from kvcdn.keyring import distrust_path, distrust_publisher, forgive_publisher, load_distrust, trust_publisher
from kvcdn.keys import Namespace, PrefixNames, block_key
from kvcdn.model.prefill import ScheduledPrefill, tensor_bytes
from kvcdn.signing import SigningKey, TrustList
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.command import kvcdn
from support.published import BLOCK, asked, publish_text, short_blocks
from support.tiny import tiny_checkpoint

TOKENS = 3 * 64 + 20
GREEDY = {"max_new_tokens": 4, "do_sample": False}


pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    with short_blocks():
        return publish_text(tiny_checkpoint(tmp_path_factory.mktemp("model")), tokens=TOKENS)


def names_of(published):
    return PrefixNames.of(published.loaded.identity, Namespace.public(), published.token_ids).blocks


def forged(published, index, changed_tokens=None, store=None):
    """The published blocks, of which one holds the KV of other tokens: sealed with the right keys, signed by the publisher."""
    loaded, ids = published.loaded, list(published.token_ids)
    name = names_of(published)[index]
    positions = range(name.start, name.end) if changed_tokens is None else changed_tokens
    for position in positions:
        ids[position] = (ids[position] + 7) % 700 + 2
    blocks = list(ScheduledPrefill(loaded.model, loaded.identity.layout, TOKENS).run(ids[: name.end]))
    layers = [[bytes(tensor_bytes(tensor.contiguous())) for tensor in tensors] for tensors in blocks[index].layers]
    store = store or MemoryStore()
    key = block_key(loaded.identity.tag, name.address)
    store.create(key, seal_block(loaded.identity, name, loaded.producer, layers, published.key))
    for info in published.store.list("v1/"):
        store.create(info.key, [published.store.read(info.key)])
    return store


def alone(published, prompt):
    ids = torch.tensor([prompt.token_ids])
    output = published.loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    return tuple(output[0, ids.shape[1] :].tolist())


def always(monkeypatch, index):
    """The chance falls on block `index`."""
    monkeypatch.setattr("kvcdn.client.trust.gate.choose_blocks", lambda blocks, count: [blocks[index]])


def test_an_honest_cache_passes_to_the_bit(published, monkeypatch):
    """Each block, the short last one too, recomputed on the publisher's own stack."""
    for index in range(4):
        always(monkeypatch, index)
        with published.client(audit=1.0) as client:
            report = client.generate(asked(published), **GREEDY).report
        assert (TOKENS, None) == (report.tokens_reused, report.reason)
        assert (True, True, str(names_of(published)[index].address)) == (
            report.audit.passed, report.audit.identical, report.audit.block,
        )  # fmt: skip
        assert 0 < report.seconds["audit"]
        assert report.to_json()["audit"]["start"] == BLOCK * index


@pytest.mark.parametrize("way", ["generate", "prepare"])
@pytest.mark.parametrize("index", [1, 2, 3])
def test_a_block_of_another_text_is_found_and_its_publisher_distrusted(published, monkeypatch, index, way):
    """The block is named, the answer is the model's own, and from now on nothing of this publisher is loaded, by anyone."""
    store = forged(published, index)
    always(monkeypatch, index)
    with published.client(StoreSource(store), audit=1.0) as client:
        report = (
            client.generate(asked(published), **GREEDY).report if way == "generate" else client.prepare(asked(published)).report
        )
        assert (0, MissReason.MISMATCH) == (report.tokens_reused, report.reason)
        address = str(names_of(published)[index].address)
        assert address in report.detail
        assert (False, address) == (report.audit.passed, report.audit.block)
        answer = client.generate(asked(published), **GREEDY)
        assert alone(published, asked(published)) == answer.token_ids
        assert (0, MissReason.UNTRUSTED) == (answer.report.tokens_reused, answer.report.reason)
    # Another process of the same user, which never audits.
    with published.client() as client:
        report = client.generate(asked(published), **GREEDY).report
        assert (0, MissReason.UNTRUSTED) == (report.tokens_reused, report.reason)
        assert address in report.detail
    assert [published.key.public] == list(load_distrust())
    assert forgive_publisher(published.key.public)
    with published.client() as client:
        assert TOKENS == client.generate(asked(published), **GREEDY).report.tokens_reused


def test_one_token_of_another_text_is_found(published, monkeypatch):
    """An audit looks at every token, not at most of them."""
    always(monkeypatch, 1)
    with published.client(StoreSource(forged(published, 1, [100])), audit=1.0) as client:
        assert MissReason.MISMATCH == client.generate(asked(published), **GREEDY).report.reason


def test_an_honest_block_behind_a_forged_one_is_not_blamed(published, monkeypatch):
    """A block is recomputed from those before it, so that the first wrong one is looked for before anyone is blamed."""
    thief = dataclasses.replace(published, key=SigningKey.generate())
    always(monkeypatch, 3)
    trust = TrustList.of(published.key.public, thief.key.public)
    with published.client(StoreSource(forged(thief, 1)), audit=1.0, trust=trust) as client:
        client._supply.gate._canary.vouch({(thief.key.public, "native")})
        report = client.generate(asked(published), **GREEDY).report
    assert (3 * BLOCK, False) == (report.audit.start, report.audit.passed)
    assert str(names_of(published)[1].address) in report.detail
    assert [thief.key.public] == list(load_distrust())


@pytest.mark.parametrize("vouched", [True, False])
def test_a_first_block_of_another_text(published, vouched):
    """The canary covers it at the first meeting; later only an audit does, and without one it goes unseen."""
    with published.client(StoreSource(forged(published, 0)), vouched=vouched) as client:
        report = client.generate(asked(published), **GREEDY).report
    assert (MissReason.MISMATCH if not vouched else None) == report.reason
    # A canary alone does not say who is wrong, the model in memory or the publisher.
    assert {} == load_distrust()


def test_audits_come_as_often_as_asked(published):
    """Never at 0, always at 1, about half of the time at 0.5."""
    counts = {}
    for audit in (0.0, 0.5, 1.0):
        with published.client(audit=audit) as client:
            counts[audit] = sum(client.prepare(asked(published)).report.audit is not None for _ in range(16))
    assert 0 == counts[0.0]
    assert 16 == counts[1.0]
    assert 1 <= counts[0.5] <= 15
    with pytest.raises(UsageError, match="probability"):
        published.client(audit=1.5)


def test_windows_leave_only_blocks_that_can_be_recomputed(tmp_path):
    """Where all layers have windows, the blocks behind the first one that was read have what they need; it has not."""
    published = publish_text(tiny_checkpoint(tmp_path, "mistral-window"), tokens=TOKENS)
    with published.client(audit=1.0, vouched=False) as client:
        seen = {client.prepare(asked(published)).report.audit for _ in range(6)}
    assert {None} != seen
    for audited in seen:
        assert (True, 2 * BLOCK) <= (audited.passed, audited.start)


# -- commands --------------------------------------------------------------------------------------------------------------


def test_verify_audits_blocks_of_a_document(published, tmp_path, monkeypatch):
    """Honest blocks pass; a forged one ends with exit code 4, and its publisher stays refused until forgiven."""
    document, trust = tmp_path / "document.txt", tmp_path / "trust"
    document.write_text(published.text)
    trust.write_text(f"{published.key.public.text} tester\n")
    trust_publisher(published.key.public, "tester")
    model = published.loaded.model.config._name_or_path
    for name, index in (("honest", None), ("forged", 2)):
        store = FolderStore(tmp_path / name)
        if index is not None:
            forged(published, index, store=store)
        for info in published.store.list("v1/"):
            store.create(info.key, [published.store.read(info.key)])
    ran = kvcdn("verify", document, "--model", model, "--origin", tmp_path / "honest", "--audit", 2, "--json")
    assert (0, True, 4, 2) == (ran.code, ran.json["sound"], ran.json["blocks"], len(ran.json["audited"]))
    assert [True, True] == [one["identical"] for one in ran.json["audited"]]
    ran = kvcdn("verify", document, "--model", model, "--origin", tmp_path / "forged", "--audit", 99)
    assert (4, 2) == (ran.code, ran.out.count("NOT what this model computes"))  # the block behind it is led astray
    assert "kvcdn trust forgive" in ran.complaint
    (row,) = kvcdn("trust", "ls", "--json").json["publishers"]
    assert (published.key.public.text, True) == (row["public_key"], row["listed"])
    assert str(names_of(published)[2].address) in row["refused"]
    assert "refused" in kvcdn("trust", "ls").out
    assert 0 == kvcdn("trust", "forgive", published.key.public.text).code
    assert 3 == kvcdn("trust", "forgive", published.key.public.text).code
    assert kvcdn("trust", "ls", "--json").json["publishers"][0]["refused"] is None


# -- the list of distrust --------------------------------------------------------------------------------------------------


def test_distrust_is_written_down_and_taken_back():
    """A line a publisher, with when and why; forgiving one leaves the others."""
    first, second = SigningKey.generate().public, SigningKey.generate().public
    distrust_publisher(first, "audit of block # 1\nfailed")
    distrust_publisher(second, "another")
    assert {first, second} == set(load_distrust())
    assert "audit of block 1" in load_distrust()[first].replace("\n", " ")
    assert forgive_publisher(first)
    assert not forgive_publisher(first)
    assert [second] == list(load_distrust())


def test_distrust_that_cannot_be_read_is_not_forgotten(published):
    """A damaged list is an error, not an empty one."""
    distrust_path().parent.mkdir(parents=True)
    distrust_path().write_text("ed25519:12 nonsense\n")
    with pytest.raises(UsageError, match="line 1"):
        published.client()


def test_distrust_that_cannot_be_written_holds_here(published, monkeypatch):
    """Without a place to write, this client still refuses, and says that others do not."""

    def refuse(*_):
        raise UnavailableError("no room")

    monkeypatch.setattr("kvcdn.client.trust.audit.distrust_publisher", refuse)
    always(monkeypatch, 2)
    with published.client(StoreSource(forged(published, 2)), audit=1.0) as client:
        assert "no room" in client.generate(asked(published), **GREEDY).report.detail
        assert MissReason.UNTRUSTED == client.generate(asked(published), **GREEDY).report.reason
