"""Which models are supported, and what their caches look like: found by asking the library, and by one token."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcdn.errors import UnsupportedModelError
from kvcdn.layout import MAX_STATE_DIMENSIONS, MAX_WINDOW, STATE_NAMES, LayerSpec, Layout, StateSpec, TensorSpec
from kvcdn.model.cache import output_cache
from kvcdn.model.continuation import require_continuation
from kvcdn.model.layers import DTYPE_NAMES, LibraryDummyLayer, LibraryIndexedLayer
from kvcdn.model.place import device_of, note_devices
from kvcdn.model.states import LibraryHybridLayer, LibraryHybridWindowLayer, LibraryStateLayer

_CACHE_DIMENSIONS = 4
"""[batch, heads, tokens, dim]."""

_REFUSED = {"moshi": "its cache has a window that its attention mask lacks, so that passes behind it differ from one pass"}
"""Models that the library itself runs otherwise in several passes than in one, found by `make test-kinds`."""

_KINDS: dict[type, str] = {
    DynamicLayer: "kv",
    DynamicSlidingWindowLayer: "window",
    LibraryIndexedLayer: "indexed",
    LibraryDummyLayer: "none",
    LibraryStateLayer: "none",
    LibraryHybridLayer: "kv",
    LibraryHybridWindowLayer: "window",
}
"""The library's layers that are supported, by exact class: a subclass keeps something more."""


def probe_layout(model: PreTrainedModel) -> Layout:
    """What `model`'s cache looks like, found by running it on one token. Raises UnsupportedModelError, naming the kind."""
    require_supported(model)
    with torch.inference_mode():
        token = torch.zeros((1, 1), dtype=torch.long, device=device_of(model))
        try:
            cache = output_cache(model(input_ids=token, use_cache=True))
        except (ValueError, TypeError, AttributeError) as error:
            raise UnsupportedModelError(f"{model.config.model_type} does not run on a single token: {error}") from None
    if type(cache) is not DynamicCache:
        raise UnsupportedModelError(f"{model.config.model_type} keeps a {type(cache).__name__}, no cache of known layers")
    note_devices(model, cache)
    layout = Layout(tuple(_layer_spec(index, layer, model) for index, layer in enumerate(cache.layers)))
    require_continuation(model, layout)
    return layout


def require_supported(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError unless all cache layers are of known kinds and no token's KV depends on later ones."""
    config = model.config.get_text_config(decoder=True)
    kind = model.config.model_type
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is an encoder-decoder model; its cross-attention cache is not supported")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all") or getattr(config, "is_causal", True) is False:
        raise UnsupportedModelError(f"{kind} reads in both directions: the KV of a token depends on the text behind it")
    if kind in _REFUSED:
        raise UnsupportedModelError(f"{kind}: {_REFUSED[kind]}")
    try:
        layers = DynamicCache(config=model.config).layers
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModelError(f"transformers cannot make a cache for {kind}: {error!r}") from None
    for index, layer in enumerate(layers):
        _layer_kind(index, layer, model)


def _layer_kind(index: int, layer: Any, model: PreTrainedModel) -> str:
    kind = _KINDS.get(type(layer))
    if kind is None:
        raise UnsupportedModelError(
            f"{model.config.model_type}: layer {index} keeps a {type(layer).__name__} in its cache; supported are full"
            " attention, sliding windows, indexed attention, linear attention, and layers that share another's KV"
        )
    return kind


def _layer_spec(index: int, layer: Any, model: PreTrainedModel) -> LayerSpec:
    kind = _layer_kind(index, layer, model)
    where = f"{model.config.model_type}: layer {index}"
    states = _state_specs(layer, where)
    if type(layer) is LibraryDummyLayer or (states and not getattr(layer, "is_initialized", False)):
        return LayerSpec("none", (), states=states)
    if not getattr(layer, "is_initialized", False):
        raise UnsupportedModelError(f"{where} keeps nothing, although its configuration says that it does")
    window = layer.sliding_window if kind == "window" else None
    if window is not None and not 2 <= window <= MAX_WINDOW:  # noqa: PLR2004 - FORMAT.md 2.3
        raise UnsupportedModelError(f"{where} has a window of {window} tokens; supported are 2 to {MAX_WINDOW}")
    found = [("k", layer.keys), ("v", layer.values)]
    if kind == "indexed":
        if layer.indexer_position_ids is not None:
            raise UnsupportedModelError(f"{where} keeps positions for its indexer, which no block carries")
        # A layer that attends by another's choice has no indexer.
        kind = "indexed" if layer.is_indexer_initialized else "kv"
        found += [("i", layer.indexer_keys.unsqueeze(1))] if layer.is_indexer_initialized else []
    tensors = []
    for name, tensor in found:
        if tensor.ndim != _CACHE_DIMENSIONS or tensor.shape[0] != 1 or tensor.shape[2] != 1 or tensor.dtype not in DTYPE_NAMES:
            raise UnsupportedModelError(f"{where} keeps {name} as {tuple(tensor.shape)} {tensor.dtype}")
        tensors.append((name, tensor.shape[1], tensor.shape[3], DTYPE_NAMES[tensor.dtype]))
    return LayerSpec(kind, tuple(TensorSpec(*tensor) for tensor in tensors), window, states)


def _state_specs(layer: Any, where: str) -> tuple[StateSpec, ...]:
    found = [
        (f"{kind}{index}", tensor)
        for kind, attribute in (("c", "conv_states"), ("r", "recurrent_states"))
        for index, tensor in getattr(layer, attribute, {}).items()
        if tensor is not None
    ]
    for name, tensor in found:
        dimensions = tensor.ndim - 1
        if (
            name not in STATE_NAMES
            or tensor.shape[0] != 1
            or not 1 <= dimensions <= MAX_STATE_DIMENSIONS
            or tensor.dtype not in DTYPE_NAMES
        ):
            raise UnsupportedModelError(f"{where} keeps a state {name} as {tuple(tensor.shape)} {tensor.dtype}")
    return tuple(StateSpec(name, tuple(tensor.shape[1:]), DTYPE_NAMES[tensor.dtype]) for name, tensor in found)
