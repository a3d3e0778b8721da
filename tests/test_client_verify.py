"""Verification: it must see what signatures cannot, a trusted publisher whose KV is not this model's of this text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcdn.block import seal_block
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.verify import verify_prefix
from kvcdn.errors import CorruptError, NotFoundError, UntrustedError
from kvcdn.keys import Namespace, PrefixNames, block_key
from kvcdn.model.prefill import ScheduledPrefill, tensor_bytes
from kvcdn.signing import TrustList
from kvcdn.stores.memory import MemoryStore
from support.published import publish_text
from support.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return publish_text(tiny_checkpoint(tmp_path_factory.mktemp("model")), tokens=1300)


def republish(published, change, **producer):
    """The same document by the same trusted publisher, its tensors changed by `change(block, layer, tensor)` first.

    `producer` are fields of who claims to have computed it.
    """
    loaded, store = published.loaded, MemoryStore()
    names = PrefixNames.of(loaded.identity, Namespace.public(), published.token_ids)
    prefill = ScheduledPrefill(loaded.model, loaded.identity.layout, len(published.token_ids))
    for name, block in zip(names.blocks, prefill.run(published.token_ids), strict=True):
        changed = [
            [bytes(tensor_bytes(change(name.index, layer, tensor).contiguous())) for tensor in tensors]
            for layer, tensors in enumerate(block.layers)
        ]
        pieces = seal_block(loaded.identity, name, replace(loaded.producer, **producer), changed, published.key)
        store.create(block_key(loaded.identity.tag, name.address), pieces)
    return store


def test_an_honest_cache_is_sound(published):
    """Equal bytes, equal bits, and a rounding difference to one pass."""
    with published.client() as client:
        found = verify_prefix(client, published.token_ids, greedy=6)
    assert (True, True, True, True, "") == (
        found.loaded_equals_published, found.same_stack, found.bit_identical, found.sound, found.first_difference,
    )  # fmt: skip
    assert (1300, 2) == (found.tokens, found.blocks)
    assert 0 <= found.one_pass.greedy_equal <= found.one_pass.greedy_total == 6
    assert 0 <= found.one_pass.kl_mean < 0.1


POISONS = {
    "one value of one tensor": lambda tensor: torch.cat([tensor[:1] + 1, tensor[1:]]),
    "keys rotated to another position": lambda tensor: tensor.roll(1, dims=0),
    "noise": lambda tensor: tensor + 0.01 * torch.randn_like(tensor),
}


@pytest.mark.parametrize("poison", POISONS)
def test_a_poisoned_cache_is_seen_and_located(published, poison):
    """Signature, hash and AEAD are all right; only recomputing tells."""
    store = republish(
        published,
        lambda block, layer, tensor: POISONS[poison](tensor) if (block, layer) == (1, 2) else tensor,
    )
    with published.client(StoreSource(store)) as client:
        found = verify_prefix(client, published.token_ids, greedy=2)
    assert (True, False, False) == (found.loaded_equals_published, found.bit_identical, found.sound)
    assert "tokens 1024 to 1300, layer 2" in found.first_difference


ELSEWHERE = {
    "rounding": (lambda tensor: tensor * (1 + 3e-3 * torch.randn_like(tensor)), True),
    **{name: (poison, False) for name, poison in POISONS.items()},
}


@pytest.mark.parametrize("difference", ELSEWHERE)
def test_another_stack_is_no_excuse_for_more_than_rounding(published, difference):
    """Which processor computed a block is only said: what is computed elsewhere differs by rounding, and by no more."""
    change, sound = ELSEWHERE[difference]
    changed = republish(
        published, lambda block, layer, tensor: change(tensor) if (block, layer) == (1, 2) else tensor, device="cpu (another)"
    )
    with published.client(StoreSource(changed)) as client:
        found = verify_prefix(client, published.token_ids, greedy=2)
    assert (False, False, sound) == (found.same_stack, found.bit_identical, found.sound)
    assert sound or "layer 2" in found.beyond_rounding


def test_an_honest_republish_is_as_good_as_the_first(published):
    """A new salt, new ciphertext, the same tensors."""
    store = republish(published, lambda block, layer, tensor: tensor)
    with published.client(StoreSource(store)) as client:
        assert verify_prefix(client, published.token_ids, greedy=1).sound


def test_verification_fails_where_asking_would_miss(published):
    """Here a failure is the answer."""
    with published.client() as client, pytest.raises(NotFoundError, match="nothing of this document"):
        verify_prefix(client, published.token_ids[5:900])
    with published.client(trust=TrustList({})) as client, pytest.raises(UntrustedError):
        verify_prefix(client, published.token_ids)
    broken = MemoryStore()
    for info in published.store.list("v1/"):
        broken.create(info.key, [published.store.read(info.key)[:-1]])
    with published.client(StoreSource(broken)) as client, pytest.raises(CorruptError):
        verify_prefix(client, published.token_ids)
