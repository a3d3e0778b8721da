"""Which models are supported, and what their caches look like: found by asking the library, and by one token."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcdn.errors import UnsupportedModelError
from kvcdn.layout import MAX_STATE_DIMENSIONS, MAX_WINDOW, STATE_NAMES, LayerSpec, Layout, StateSpec, TensorSpec
from kvcdn.model.cache import beside, output_cache
from kvcdn.model.layers import DTYPE_NAMES, LibraryDummyLayer, LibraryIndexedLayer
from kvcdn.model.place import device_of, note_devices
from kvcdn.model.states import LibraryHybridLayer, LibraryHybridWindowLayer, LibraryStateLayer

_CACHE_DIMENSIONS = 4
"""[batch, heads, tokens, dim]."""

_REFUSED = {"moshi": "its cache has a window that its attention mask lacks, so that passes behind it differ from one pass"}
"""Models that the library itself runs otherwise in several passes than in one, found by `make test-kinds`."""

_PROBED_TOKENS = 12

_HUGE = 1e30

_SAME_STATE = 0.1
"""Relative difference of states that differ by rounding only: in bf16 some 0.01; a pass that began anew is wholly different."""

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
    if layout.state_bytes:
        _require_continuation(model)
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
    for rope in _rope_types(config):
        if rope in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"{kind} uses {rope} rope: its keys depend on the length of the whole prompt, not on the prefix"
            )


def _layer_kind(index: int, layer: Any, model: PreTrainedModel) -> str:
    kind = _KINDS.get(type(layer))
    if kind is None:
        raise UnsupportedModelError(
            f"{model.config.model_type}: layer {index} keeps a {type(layer).__name__} in its cache; supported are full"
            " attention, sliding windows, indexed attention, linear attention, and layers that share another's KV"
        )
    return kind


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(entry.get("rope_type", entry.get("type", "default"))) for entry in [parameters, *nested]}


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


def _first_state(cache: Any) -> torch.Tensor | None:
    """The first recurrent state of the first layer that has one: no other state has a part in what it is fed."""
    states = (state for layer in cache.layers for state in getattr(layer, "recurrent_states", {}).values())
    return next((state for state in states if state is not None), None)


def _spoil_first_state(cache: Any) -> None:
    state = _first_state(cache)
    if state is not None:
        # Far too large: what is left of it after a pass is seen, however fast it decays.
        state.fill_(_HUGE)


def _same_first_state(cache: Any, other: Any) -> bool:
    state, spoilt = _first_state(cache), _first_state(other)
    return state is not None and spoilt is not None and torch.equal(state, spoilt)


def _require_continuation(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError unless a pass behind a state continues it: some kernels begin anew, without a word."""
    config = model.config.get_text_config(decoder=True)
    ids = (torch.arange(_PROBED_TOKENS, device=device_of(model)) * 7 % config.vocab_size).unsqueeze(0)
    with torch.inference_mode():
        once = output_cache(model(input_ids=ids, use_cache=True))
        begun, spoilt = (output_cache(model(input_ids=ids[:, :-2], use_cache=True)) for _ in range(2))
        _spoil_first_state(spoilt)
        for cache in (begun, spoilt):
            model(input_ids=ids[:, -2:], use_cache=True, **beside(model.forward, cache, ids[:, -2:]))
    if _same_first_state(begun, spoilt):
        raise UnsupportedModelError(
            f"{model.config.model_type}: its linear attention begins anew when it reads several tokens behind a state"
        )
    for index, (expected, got) in enumerate(zip(once.layers, begun.layers, strict=True)):
        pairs = [
            (state, getattr(got, attribute)[number])
            for attribute in ("conv_states", "recurrent_states")
            for number, state in getattr(expected, attribute, {}).items()
            if state is not None
        ]
        for whole, parts in pairs:
            if not (whole.float() - parts.float()).norm() <= _SAME_STATE * whole.float().norm() + 1e-6:  # NaN is refused, too
                raise UnsupportedModelError(
                    f"{model.config.model_type}: layer {index} does not continue from a state when it reads several tokens"
                )
