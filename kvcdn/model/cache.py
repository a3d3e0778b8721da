"""The adapter to transformers' cache classes: a layer that stores tokens the way blocks do, has spare room, and can wait.

transformers' own DynamicLayer concatenates, which copies the whole cache at every decoded token; and it must be full
before the model runs. This layer is allocated once, with room for what will be decoded, and may be handed to the model
before its bytes are there: `update`, which the model calls when it reaches the layer, waits for them. Memory is token-
major ([tokens, heads, dim], FORMAT.md 2.3), so a block decodes straight into place; the model sees the usual [1, heads,
tokens, dim] as a transposed view, and computes the same bits from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvcdn.errors import UnsupportedModelError
from kvcdn.layout import LayerSpec, Layout, TensorSpec

GROWTH_TOKENS = 256
"""Room added whenever a layer is full: a copy of the cache every 256 decoded tokens instead of every one."""

_CACHE_DIMENSIONS = 4
"""[batch, heads, tokens, dim]."""

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class TokenMajorLayer(DynamicLayer):  # type: ignore[misc] # transformers is untyped here
    """One layer's K and V, [capacity, heads, dim] each, of which the first `length` tokens are, or will be, valid.

    `wait` is called before the tensors are first used; it returns when they are filled, or raises.
    """

    def __init__(
        self, spec: LayerSpec, capacity: int, length: int, device: torch.device, wait: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self.device = device
        self.storage = [
            torch.empty(tensor.shape(capacity), dtype=TORCH_DTYPES[tensor.dtype], device=device) for tensor in spec.tensors
        ]
        self.is_initialized = True
        self._wait = wait
        self._show(length)

    def _show(self, length: int) -> None:
        self._shown = tuple(tensor[:length].transpose(0, 1).unsqueeze(0) for tensor in self.storage)
        self.keys, self.values = self._shown

    def declare(self, length: int) -> None:
        """Says that the first `length` tokens of the storage are valid: whoever filled them has finished."""
        self._wait = None
        self._show(length)

    def settle(self) -> None:
        """Waits until the tensors hold their bytes. Raises what the filler raised."""
        if self._wait is not None:
            self._wait()
            self._wait = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [1, heads, n, dim] states and returns all [1, heads, length + n, dim] of K and V."""
        self.settle()
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        if not self._owns_views():
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        if end > self.storage[0].shape[0]:
            self._grow(length, end + GROWTH_TOKENS)
        for tensor, states in zip(self.storage, (key_states, value_states), strict=True):
            tensor[length:end] = states[0].transpose(0, 1)
        self._show(end)
        return self.keys, self.values

    def _owns_views(self) -> bool:
        """False once the library has replaced the tensors (beams, batches): from then on this is a plain DynamicLayer."""
        return self.keys is self._shown[0] and self.values is self._shown[1]

    def _grow(self, length: int, capacity: int) -> None:
        grown = [tensor.new_empty((capacity, *tensor.shape[1:])) for tensor in self.storage]
        for old, new in zip(self.storage, grown, strict=True):
            new[:length] = old[:length]
        self.storage = grown

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` tokens; their room is used again."""
        self.settle()
        if self._owns_views() and tokens_to_remove <= 0:
            self._show(max(self.get_seq_length() + tokens_to_remove, 0))
        else:
            super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.settle()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.settle()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.settle()
        super().batch_select_indices(indices)


def build_cache(model: PreTrainedModel, layers: Iterable[TokenMajorLayer]) -> Cache:
    """A DynamicCache of `model` that consists of `layers`."""
    cache = DynamicCache(config=model.config)
    cache.layers[:] = layers
    return cache


def cache_argument(function: Callable[..., Any]) -> str:
    """The name under which `function` takes a cache: `cache` from transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def output_cache(output: Any) -> Cache:
    """The cache in a model's output, under either name."""
    cache = getattr(output, "cache", None)
    return output.past_key_values if cache is None else cache


def probe_layout(model: PreTrainedModel) -> Layout:
    """What `model`'s cache looks like, found by running it on one token. Raises UnsupportedModelError, naming the kind."""
    require_supported(model)
    with torch.inference_mode():
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        cache = output_cache(model(input_ids=token, use_cache=True))
    layers = [_layer_spec(index, layer, model) for index, layer in enumerate(cache.layers)]
    return Layout(tuple(layers))


def require_supported(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError unless every cache layer is plain full attention and positions are independent of length."""
    kind = model.config.model_type
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is an encoder-decoder model; its cross-attention cache is not supported")
    if getattr(model, "peft_config", None):
        raise UnsupportedModelError(
            "the model carries adapters (peft), which its checkpoint's fingerprint does not cover",
            hint="merge the adapter (merge_and_unload) and save the result as a checkpoint of its own",
        )
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) is not DynamicLayer:
            raise UnsupportedModelError(
                f"{kind} keeps a {type(layer).__name__} in its cache; only full attention is supported so far"
            )
    for rope in _rope_types(model.config.get_text_config(decoder=True)):
        if rope in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"{kind} uses {rope} rope: its keys depend on the length of the whole prompt, not on the prefix"
            )


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(entry.get("rope_type", entry.get("type", "default"))) for entry in [parameters, *nested]}


def _layer_spec(index: int, layer: Any, model: PreTrainedModel) -> LayerSpec:
    kind = model.config.model_type
    if type(layer) is not DynamicLayer or not layer.is_initialized:
        raise UnsupportedModelError(
            f"{kind}: layer {index} keeps a {type(layer).__name__}; only full attention is supported so far"
        )
    tensors = []
    for name, tensor in (("k", layer.keys), ("v", layer.values)):
        if tensor.ndim != _CACHE_DIMENSIONS or tensor.shape[0] != 1 or tensor.shape[2] != 1 or tensor.dtype not in DTYPE_NAMES:
            raise UnsupportedModelError(f"{kind}: layer {index} keeps {name} as {tuple(tensor.shape)} {tensor.dtype}")
        tensors.append((name, tensor.shape[1], tensor.shape[3], DTYPE_NAMES[tensor.dtype]))
    return LayerSpec("kv", tuple(TensorSpec(*tensor) for tensor in tensors))
