"""The mask of a pass behind a prefix: handed over or made by the model, the KV is the same to the bit."""

from __future__ import annotations

import pytest
import torch

from kvcdn.model import mask
from kvcdn.model.cache import beside, build_cache, make_layer
from kvcdn.model.load import load_model
from kvcdn.model.mask import causal_mask, mask_beside
from kvcdn.model.prefill import ScheduledPrefill
from support.tiny import (
    FULL_ATTENTION_KINDS,
    INDEXED_KINDS,
    MORE_FULL_ATTENTION_KINDS,
    SHARED_KINDS,
    STATE_KINDS,
    WINDOW_KINDS,
    tiny_checkpoint,
)

PASSES = ((0, 64), (64, 128), (128, 135), (135, 136), (136, 700), (700, 702))
"""From the first token on, behind a prefix, short, of one token, and of more rows than columns are before."""


def stock_rows(loaded, ids):
    """K and V of every layer after PASSES in which the model makes its own masks."""
    layers = [make_layer(spec, len(ids), 0, loaded.model.device) for spec in loaded.identity.layout.layers]
    cache = build_cache(loaded.model, layers)
    for start, end in PASSES:
        tokens = torch.tensor([ids[start:end]])
        with torch.inference_mode():
            loaded.model(input_ids=tokens, use_cache=True, **beside(loaded.model.forward, cache, tokens))
    return [tensor.clone() for layer in layers for tensor in layer.rows(0, len(ids))]


@pytest.mark.parametrize("kind", [*FULL_ATTENTION_KINDS, *MORE_FULL_ATTENTION_KINDS])
def test_passes_are_the_same_to_the_bit(tmp_path, kind):
    """With masks from here, passes of many lengths leave the KV that the library leaves by itself."""
    loaded = load_model(str(tiny_checkpoint(tmp_path, kind)))
    ids = torch.randint(2, 500, (PASSES[-1][1],)).tolist()
    prefill = ScheduledPrefill(loaded.model, loaded.identity.layout, len(ids))
    for start, end in PASSES:
        prefill.run_one(ids[start:end], start, lambda _: None)
    ours = [tensor for layer in prefill.rows(len(ids)) for tensor in layer]
    assert all(torch.equal(one, other) for one, other in zip(stock_rows(loaded, ids), ours, strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "phi3", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_models_with_the_causal_mask_alone_get_it(tmp_path, kind, dtype):
    """It is handed over, in the model's dtype, behind a prefix; not for a first pass, nor for a single token."""
    loaded = load_model(str(tiny_checkpoint(tmp_path, kind, dtype=dtype)))
    model, layout = loaded.model, loaded.identity.layout
    body = getattr(model, model.base_model_prefix)
    found = mask_beside(model, body, layout, 8, 12)["attention_mask"]
    assert (1, 1, 4, 12) == found.shape
    assert dtype == found.dtype
    assert {} == mask_beside(model, body, layout, 0, 12)
    assert {} == mask_beside(model, body, layout, 8, 9)


@pytest.mark.parametrize("kind", [*WINDOW_KINDS, *INDEXED_KINDS, *SHARED_KINDS, *STATE_KINDS])
def test_models_with_other_masks_make_their_own(tmp_path, kind):
    """Windows, chunks, indexers and states have other masks, in some layers or in all."""
    loaded = load_model(str(tiny_checkpoint(tmp_path, kind)))
    assert {} == mask_beside(loaded.model, loaded.model, loaded.identity.layout, 8, 12)


def test_a_model_that_makes_something_else_of_it_makes_its_own(tmp_path, monkeypatch):
    """What a model does with a mask is tried before it gets one."""
    loaded = load_model(str(tiny_checkpoint(tmp_path, "llama", intermediate_size=80)))
    monkeypatch.setattr(mask, "causal_mask", lambda start, end, dtype: torch.zeros((1, 1, end - start, end), dtype=dtype))
    assert {} == mask_beside(loaded.model, loaded.model.model, loaded.identity.layout, 8, 12)


def test_the_mask_is_what_torch_makes_of_booleans():
    """Zero for what a token sees, minus infinity for what is behind it."""
    seen = torch.arange(7)[None] <= torch.arange(4, 7)[:, None]
    expected = torch.zeros(3, 7).masked_fill(~seen, -torch.inf)
    assert torch.equal(expected, causal_mask(4, 7, torch.float32)[0, 0])
