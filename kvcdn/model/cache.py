"""The adapter to transformers' cache: made of our layers, passed under the name the library's version has for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvcdn.layout import LayerSpec, Layout
from kvcdn.model.layers import GROWTH_TOKENS, EmptyLayer, IndexedLayer, TokenMajorLayer, WindowLayer
from kvcdn.model.states import HybridLayer, HybridWindowLayer, StateLayer, WithStates

__all__ = [
    "GROWTH_TOKENS",
    "CacheLayer",
    "beside",
    "build_cache",
    "cache_argument",
    "make_layer",
    "make_layers",
    "output_cache",
]

_CPU = torch.device("cpu")

CacheLayer = TokenMajorLayer | EmptyLayer | StateLayer

_HYBRIDS: dict[str, type[HybridLayer | HybridWindowLayer]] = {"kv": HybridLayer, "window": HybridWindowLayer}

_CLASSES: dict[str, type[TokenMajorLayer]] = {"kv": TokenMajorLayer, "window": WindowLayer, "indexed": IndexedLayer}


def make_layer(
    spec: LayerSpec,
    capacity: int,
    length: int,
    device: torch.device,
    wait: Callable[[], None] | None = None,
    *,
    first: int = 0,
    storage: list[torch.Tensor] | None = None,
) -> CacheLayer:
    """A layer of the kind `spec`, with room for tokens `first` to `capacity`, in `storage` where that is given.

    For `length` tokens its states are there, too, to be filled.
    """
    if not spec.states:
        if spec.kind == "none":
            return EmptyLayer()
        return _CLASSES[spec.kind](spec, capacity, length, device, wait, first=first, storage=storage)
    if spec.kind == "none":
        layer: StateLayer | HybridLayer | HybridWindowLayer = StateLayer(spec, device, wait)
    else:
        layer = _HYBRIDS[spec.kind](spec, capacity, length, device, wait, first=first, storage=storage)
    if length:
        layer.state_places()
    return layer


def make_layers(layout: Layout, capacity: int, devices: Sequence[torch.device]) -> list[CacheLayer]:
    """New layers of `layout`, each on its device, with room for `capacity` tokens and none in them."""
    return [make_layer(spec, capacity, 0, device) for spec, device in zip(layout.layers, devices, strict=True)]


def tensors_in(layer: CacheLayer) -> list[torch.Tensor]:
    """All memory of a layer."""
    rows = layer.storage if isinstance(layer, TokenMajorLayer) else []
    return [*rows, *layer.state_places()] if isinstance(layer, WithStates) else rows


def device_in(layer: CacheLayer) -> torch.device:
    """Where a layer lies; one that keeps nothing lies on the CPU as well as anywhere."""
    return layer.home if isinstance(layer, StateLayer) else getattr(layer, "device", _CPU) or _CPU


def build_cache(model: PreTrainedModel, layers: Iterable[CacheLayer]) -> Cache:
    """A DynamicCache of `model` that consists of `layers`."""
    cache = DynamicCache(config=model.config)
    cache.layers[:] = layers
    return cache


def cache_argument(function: Callable[..., Any]) -> str:
    """The name under which `function` takes a cache: `cache` from transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def beside(forward: Callable[..., Any], cache: Cache, ids: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments for a pass of `forward` over `ids`, [1, n], behind what `cache` holds: the cache, and positions.

    Positions are said as generate() says them: some models (Bamba) count from 0 in every pass otherwise.
    """
    arguments: dict[str, Any] = {cache_argument(forward): cache}
    if (
        any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
        and "position_ids" in inspect.signature(forward).parameters
    ):
        start = cache.get_seq_length()
        arguments["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device).unsqueeze(0)
    return arguments


def output_cache(output: Any) -> Cache:
    """The cache in a model's output, under either name."""
    cache = getattr(output, "cache", None)
    return getattr(output, "past_key_values", None) if cache is None else cache
