"""The rest of a prompt: how far a cache goes along with it, and what is computed behind that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvcdn.model.cache import GROWTH_TOKENS, CacheLayer, beside, build_cache, make_layers
from kvcdn.model.place import device_of, layer_devices

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from kvcdn.model.load import LoadedModel


def reaches(loaded: LoadedModel, layers: Sequence[CacheLayer], length: int) -> bool:
    """Whether `layers` hold all rows that a token behind the first `length` reads; of states nobody knows."""
    specs = loaded.identity.layout.layers
    if loaded.identity.layout.state_bytes:
        return False
    return all(layer.first <= spec.first_needed(length) for layer, spec in zip(layers, specs, strict=True))


def completed(
    loaded: LoadedModel, cache: Cache | None, token_ids: Sequence[int], tokens: int, start: int | None = None
) -> list[CacheLayer]:
    """The layers of `cache`, or new ones, with the rest of the first `tokens` tokens computed behind what they hold.

    That is `start` tokens, where a cache of states alone cannot tell.
    """
    model, layout = loaded.model, loaded.identity.layout
    if cache is None:
        capacity = len(token_ids) + GROWTH_TOKENS
        cache = build_cache(model, make_layers(layout, capacity, layer_devices(model, layout)))
    body = getattr(model, model.base_model_prefix, model)
    with torch.inference_mode():
        start = (cache.get_seq_length() if tokens else 0) if start is None else start
        while start < tokens:
            end = min(start - start % layout.block_tokens + layout.block_tokens, tokens)
            ids = torch.tensor([list(token_ids[start:end])], dtype=torch.long, device=device_of(model))
            body(input_ids=ids, use_cache=True, **beside(body.forward, cache, ids))
            start = end
    layers: list[CacheLayer] = list(cache.layers)
    return layers
