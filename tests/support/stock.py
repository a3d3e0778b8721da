"""The same model without kvcdn: transformers' own cache on the publisher's schedule, and continuations to compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from kvcdn.model.cache import beside
from kvcdn.model.load import LoadedModel


def stock_cache(loaded: LoadedModel, token_ids: Sequence[int], blocks: int, length: int) -> Cache:
    """The library's cache after `blocks` passes over the front of `token_ids`, cut back to `length` tokens."""
    cache = DynamicCache(config=loaded.model.config)
    step = loaded.identity.layout.block_tokens
    passed = min(blocks * step, len(token_ids))
    if passed > length:
        cache.activate_past_recording()
    with torch.inference_mode():
        for start in range(0, passed, step):
            ids = torch.tensor([list(token_ids[start : min(start + step, passed)])])
            loaded.model(input_ids=ids, use_cache=True, **beside(loaded.model.forward, cache, ids))
    if passed > length:
        cache.crop(length - passed)
    return cache


def continued(loaded: LoadedModel, cache: Cache, token_ids: Sequence[int], steps: int) -> list[torch.Tensor]:
    """Logits of one pass over `token_ids`, and of `steps` greedy tokens after it, one at a time."""
    ids, logits = torch.tensor([list(token_ids)]), []
    with torch.inference_mode():
        for _ in range(steps + 1):
            output = loaded.model(input_ids=ids, use_cache=True, **beside(loaded.model.forward, cache, ids))
            logits.append(output.logits)
            ids = output.logits[:, -1:].argmax(-1)
    return logits
