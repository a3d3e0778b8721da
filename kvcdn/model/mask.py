"""The mask of a pass behind a prefix, in the model's dtype.

The library hands torch a mask of booleans, which torch turns into numbers anew in every layer: some 5 % of a late pass.
Numbers handed over instead are the very ones that torch makes, so that the bits are the same. That is only done where the
model has one mask, the causal one, for all its layers, and where two short passes have shown that it takes it from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvcdn.layout import Layout
from kvcdn.model.cache import CacheLayer, beside, build_cache, make_layers
from kvcdn.model.configuration import configuration_key
from kvcdn.model.layers import TORCH_DTYPES
from kvcdn.model.place import layer_devices, on_cpu
from kvcdn.model.remembered import Remembered

_TRIED_TOKENS = 4
"""In each of the two passes: what differs in the first row of the second one is seen in the next layer's KV."""

_OTHER_MASKS = ("sliding_window", "attention_chunk_size", "window_size", "use_bidirectional_attention")
"""Settings of models that have another mask than the causal one, in some layers or in all."""

_taken: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def causal_mask(start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """What tokens `start` to `end` see of those before `end`: 0, and minus infinity for those behind, [1, 1, n, end]."""
    mask = torch.full((end - start, end), -torch.inf, dtype=dtype).triu_(start + 1)
    return mask[None, None]


def mask_beside(model: PreTrainedModel, body: Any, layout: Layout, start: int, end: int) -> dict[str, torch.Tensor]:
    """The keyword argument that hands `body` its mask for tokens `start` to `end`; none where the model had better make it."""
    if not start or end - start == 1 or not _is_taken(model, body, layout):
        return {}
    return {"attention_mask": causal_mask(start, end, model.dtype)}


def _is_taken(model: PreTrainedModel, body: Any, layout: Layout) -> bool:
    """Whether `body` computes the same with the mask from here; tried once for a configuration and a version of the library."""
    if not _has_one_mask(model, layout):
        return False
    found = _taken.get(model)
    if found is None:
        memory, key = Remembered("masks"), configuration_key(model)
        known = memory.get(key)
        found = known if isinstance(known, bool) else _computes_the_same(model, body, layout)
        if known is not found:
            memory.put(key, found)
        _taken[model] = found
    return found


def _has_one_mask(model: PreTrainedModel, layout: Layout) -> bool:
    config = model.config.get_text_config(decoder=True)
    return (
        on_cpu(layer_devices(model, layout))
        and model.config._attn_implementation == "sdpa"  # noqa: SLF001 - the library offers no public name
        and all(spec.kind == "kv" and not spec.states for spec in layout.layers)
        and all(TORCH_DTYPES[tensor.dtype] == model.dtype for spec in layout.layers for tensor in spec.tensors)
        and not any(getattr(config, name, None) for name in _OTHER_MASKS)
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
    )


def _computes_the_same(model: PreTrainedModel, body: Any, layout: Layout) -> bool:
    """Whether a pass behind another leaves the same KV with the mask from here and with the model's own."""
    tokens = 2 * _TRIED_TOKENS
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ids = (torch.arange(tokens) * 7 % vocabulary).unsqueeze(0)
    begun = make_layers(layout, _TRIED_TOKENS, layer_devices(model, layout))
    _run(body, model, begun, ids[:, :_TRIED_TOKENS])
    own, ours = ([layer.fork(_TRIED_TOKENS) for layer in begun] for _ in range(2))
    behind = ids[:, _TRIED_TOKENS:]
    _run(body, model, own, behind)
    try:
        _run(body, model, ours, behind, attention_mask=causal_mask(_TRIED_TOKENS, tokens, model.dtype))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False  # it makes something else of a mask than attention
    return all(_same_rows(one, other, tokens) for one, other in zip(own, ours, strict=True))


def _run(body: Callable[..., Any], model: PreTrainedModel, layers: list[CacheLayer], ids: torch.Tensor, **mask: Any) -> None:
    cache = build_cache(model, layers)
    with torch.inference_mode():
        body(input_ids=ids, use_cache=True, **beside(body.forward, cache, ids), **mask)  # type: ignore[attr-defined]


def _same_rows(one: CacheLayer, other: CacheLayer, tokens: int) -> bool:
    pairs = zip(one.rows(0, tokens), other.rows(0, tokens), strict=True)
    return all(torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)) for left, right in pairs)
