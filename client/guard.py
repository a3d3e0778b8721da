"""The guard of prepared caches: whoever runs the model beside one with other ids, masks or positions is told, not misled.

The library takes any cache with any prompt and computes something. A prepared cache remembers the prompt it was made for,
and a hook of torch's own, on the model's body, compares every pass that is given such a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvcdn.errors import UsageError
from kvcdn.model.states import StateLayer

_MARK = "_kvcdn_prompt"
_HINT = "pass prepared.inputs() to generate() as they are, once"


def mark(cache: Cache, token_ids: tuple[int, ...]) -> None:
    """Says that `cache` belongs to the prompt `token_ids`; one of states alone cannot tell how much of it it has seen."""
    if not all(isinstance(layer, StateLayer) for layer in cache.layers):
        setattr(cache, _MARK, token_ids)


def watch(model: PreTrainedModel) -> RemovableHandle:
    """Compares every pass of `model` beside a marked cache, until the handle is removed; passes beside others cost nothing."""
    body: torch.nn.Module = getattr(model, model.base_model_prefix, model)
    return body.register_forward_pre_hook(_check, with_kwargs=True)


def _check(_module: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    cache = named.get("cache") if named.get("cache") is not None else named.get("past_key_values")
    prompt = getattr(cache, _MARK, None)
    if cache is None or prompt is None:
        return
    ids = named.get("input_ids", positional[0] if positional else None)
    if ids is None:
        raise UsageError("a loaded cache belongs to tokens, and the model was given embeddings beside it", hint=_HINT)
    length, count = cache.get_seq_length(), ids.shape[1]
    expected = torch.tensor(prompt[length : length + count], dtype=ids.dtype, device=ids.device)
    if ids.shape[0] and not bool((ids[:, : expected.shape[0]] == expected).all()):
        raise UsageError("the model was given other tokens than those the cache was loaded for", hint=_HINT)
    mask = named.get("attention_mask")
    if mask is not None and not _all_ones(mask, length + count):
        raise UsageError("the model was given a mask that is not of ones for every token of the loaded cache", hint=_HINT)
    positions = named.get("position_ids")
    if positions is not None and not bool((positions == torch.arange(length, length + count, device=positions.device)).all()):
        raise UsageError("the model was given other positions than those the cache was loaded for", hint=_HINT)


def _all_ones(mask: Any, tokens: int) -> bool:
    """Whether this is a mask [rows, tokens] that hides nothing; anything else may hide something."""
    return isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] == tokens and bool((mask == 1).all())  # noqa: PLR2004 - rows and tokens
