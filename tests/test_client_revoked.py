"""Revoked: a client uses nothing that a trusted signer has taken back, wherever it lies, and goes on prefilling."""

from __future__ import annotations

import pytest
import torch

from kvcdn.client import MissReason
from kvcdn.keyring import keep_revocations, load_revocations
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.origin.upkeep.catalog import list_published
from kvcdn.origin.upkeep.revocation import Targets, change_revocations, document_addresses
from kvcdn.revocation import revocation_key
from kvcdn.signing import SigningKey, TrustList
from support.published import BLOCK, publish_text
from support.tiny import tiny_checkpoint

TOKENS = 2 * 64 + 20

KEY, STRANGER = SigningKey.generate(), SigningKey.generate()


pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.fixture
def published(tmp_path):
    published = publish_text(tiny_checkpoint(tmp_path, "llama", dtype=torch.float32), tokens=TOKENS)
    published.key = KEY
    for info in list(published.store.list("v1/")):
        published.store.delete(info.key)
    for tokens in (BLOCK, TOKENS):
        Publisher(published.loaded, published.store, KEY).publish(published.token_ids[:tokens])
    return published


def reuse(published, source=None, **options):
    with published.client(source, **options) as client:
        report = client.generate(published.text + " And so on.", max_new_tokens=1, do_sample=False).report
    return report.tokens_reused, report.reason


@pytest.mark.parametrize("what", ["document", "publisher", "model"])
def test_what_is_revoked_is_a_miss(published, what) -> None:
    """Of a document its own blocks, of a publisher and a model all; undone, it is as before; a stranger's list says nothing."""
    before = reuse(published)
    assert before[0] >= 2 * BLOCK
    (tag,) = {listed.manifest.tag for listed in list_published(published.store)}
    long = [listed.info for listed in list_published(published.store) if listed.manifest.tokens == TOKENS]
    targets = {
        "document": Targets(addresses=document_addresses(published.store, long)),
        "publisher": Targets(publishers=frozenset((KEY.public,))),
        "model": Targets(models=frozenset((tag,))),
    }[what]
    change_revocations(published.store, STRANGER, targets)
    assert before == reuse(published)
    change_revocations(published.store, KEY, targets)
    expected = (BLOCK if what == "document" else 0, MissReason.REVOKED)
    assert expected == reuse(published)
    assert 1 == load_revocations().version(KEY.public)
    change_revocations(published.store, KEY, targets, undo=True)
    assert before == reuse(published)


def test_a_host_goes_on_where_the_list_is_withheld(published) -> None:
    """A source that shows the first list again, or none, takes nothing back."""
    change_revocations(published.store, KEY, Targets())
    _, second = change_revocations(published.store, KEY, Targets(publishers=frozenset((KEY.public,))))
    assert (0, MissReason.REVOKED) == reuse(published)
    published.store.delete(revocation_key(KEY.public, 2))
    assert (0, MissReason.REVOKED) == reuse(published)
    keep_revocations(second)
    with published.client(trust=TrustList.of(KEY.public, STRANGER.public)) as client:
        assert {KEY.public} == set(client._supply.gate.revoked.current().publishers)


def test_a_damaged_list_is_told_and_changes_nothing(published) -> None:
    """What lies in a list's place and is none is a problem of its signer's; the caches are used as before."""
    before = reuse(published)
    published.store.create(revocation_key(KEY.public, 1), [b"not a list"])
    with published.client() as client:
        assert (
            before[0] == client.generate(published.text + " And so on.", max_new_tokens=1, do_sample=False).report.tokens_reused
        )
        assert {KEY.public} == set(client._supply.gate.revoked.problems)
