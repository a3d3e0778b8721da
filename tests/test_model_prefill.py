"""Prefill on the schedule: a block's bits depend on the tokens before its end and on nothing else."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvcdn.model.cache import cache_argument
from kvcdn.model.load import load_model
from kvcdn.model.prefill import ScheduledPrefill, tensor_bytes
from support.tiny import FULL_ATTENTION_KINDS, tiny_checkpoint


def all_bytes(loaded, token_ids):
    blocks = ScheduledPrefill(loaded.model, loaded.identity.layout, len(token_ids)).run(token_ids)
    return [[bytes(tensor_bytes(tensor)) for layer in block.layers for tensor in layer] for block in blocks]


@pytest.mark.parametrize("kind", FULL_ATTENTION_KINDS)
def test_a_block_is_the_same_alone_and_as_part_of_more(tmp_path, kind):
    """What follows a block does not reach back into it, and a second run repeats the first to the bit."""
    loaded = load_model(str(tiny_checkpoint(tmp_path, kind)))
    ids = torch.randint(2, 500, (2300,)).tolist()
    whole = all_bytes(loaded, ids)
    assert 3 == len(whole)
    assert whole == all_bytes(loaded, ids)
    assert whole[:2] == all_bytes(loaded, ids[:2048])


def test_the_number_of_threads_does_not_matter(tiny_llama):
    """One thread and two compute the same bits."""
    loaded = load_model(str(tiny_llama))
    ids = torch.randint(2, 500, (1500,)).tolist()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = all_bytes(loaded, ids)
        torch.set_num_threads(2)
        assert one == all_bytes(loaded, ids)
    finally:
        torch.set_num_threads(threads)


def test_the_schedule_is_stock_forward_passes_over_blocks(tiny_llama):
    """Anybody can repeat it with transformers alone."""
    loaded = load_model(str(tiny_llama))
    ids = torch.randint(2, 500, (1500,)).tolist()
    cache = DynamicCache(config=loaded.model.config)
    with torch.inference_mode():
        for start in range(0, len(ids), 1024):
            passed = torch.tensor([ids[start : start + 1024]])
            loaded.model(input_ids=passed, **{cache_argument(loaded.model.forward): cache})
    blocks = list(ScheduledPrefill(loaded.model, loaded.identity.layout, len(ids)).run(ids))
    for index, layer in enumerate(cache.layers):
        for number, expected in enumerate((layer.keys, layer.values)):
            ours = torch.cat([block.layers[index][number] for block in blocks])
            assert torch.equal(expected[0].transpose(0, 1), ours)
