"""The adapter to transformers' cache classes: a layer that stores tokens the way blocks do, has spare room, and can wait.

transformers' own DynamicLayer concatenates, which copies the whole cache at every decoded token; and it must be full
before the model runs. This layer is allocated once, with room for what will be decoded, and may be handed to the model
before its bytes are there: `update`, which the model calls when it reaches the layer, waits for them. Memory is token-
major ([tokens, heads, dim], FORMAT.md 2.3), so a block decodes straight into place; the model sees the usual [1, heads,
tokens, dim] as a transposed view, and computes the same bits from it.

There is a class for each kind of layer in FORMAT.md 2.3, to the model the library's own: `TokenMajorLayer` for `kv`,
`WindowLayer` for `window`, `EmptyLayer` for `none`. `make_layer` chooses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvcdn.errors import UnsupportedModelError
from kvcdn.layout import MAX_WINDOW, LayerSpec, Layout, TensorSpec

GROWTH_TOKENS = 256
"""Room added whenever a layer is full: a copy of the cache every 256 decoded tokens instead of every one."""

_CACHE_DIMENSIONS = 4
"""[batch, heads, tokens, dim]."""

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


_DummyLayer: Any = getattr(cache_utils, "DummyLayer", object)
"""The library's layer for what keeps nothing; older versions have none, and no models that need it."""

_KINDS: dict[type, str] = {DynamicLayer: "kv", DynamicSlidingWindowLayer: "window", _DummyLayer: "none"}
"""The library's layers that are supported, by exact class: a subclass keeps something more."""


class TokenMajorLayer(DynamicLayer):  # type: ignore[misc] # transformers is untyped here
    """One layer's K and V, [capacity, heads, dim] each, of which tokens up to `length` are, or will be, valid.

    The storage begins at token `first`, which is 0 except in layers with a window. `wait` is called before the tensors are
    first used; it returns when they are filled, or raises.
    """

    def __init__(
        self,
        spec: LayerSpec,
        capacity: int,
        length: int,
        device: torch.device,
        wait: Callable[[], None] | None = None,
        *,
        first: int = 0,
        **library: Any,
    ) -> None:
        super().__init__(**library)
        self.device = device
        self.first = first
        self.storage = [
            torch.empty(tensor.shape(capacity - first), dtype=TORCH_DTYPES[tensor.dtype], device=device)
            for tensor in spec.tensors
        ]
        self.is_initialized = True
        self._wait = wait
        self._show(length)

    def rows(self, start: int, end: int) -> list[torch.Tensor]:
        """The places of tokens `start` to `end` of K and V, [n, heads, dim], none of them before `first`."""
        if start < self.first:
            raise RuntimeError(f"tokens from {start} are asked of a cache layer that holds them from {self.first} on")
        return [tensor[start - self.first : end - self.first] for tensor in self.storage]

    def _views(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in self.rows(start, end))
        return key, value

    def _show(self, length: int) -> None:
        self._shown = self._views(0, length)
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
        """Appends [1, heads, n, dim] states and returns what attention reads of K and V, [1, heads, length + n, dim]."""
        self.settle()
        if not self._owns_views():
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        if end - self.first > self.storage[0].shape[0]:
            self._grow(length, end + GROWTH_TOKENS)
        for tensor, states in zip(self.rows(length, end), (key_states, value_states), strict=True):
            tensor.copy_(states[0].transpose(0, 1))
        self._show(end)
        return self._views(self._first_needed(length), end)

    def _first_needed(self, length: int) -> int:  # noqa: ARG002 - of use in layers with a window
        """The first token that one behind `length` tokens reads."""
        return 0

    def _owns_views(self) -> bool:
        """False once the library has replaced the tensors (beams, batches): from then on this is a layer of the library's."""
        return self.keys is self._shown[0] and self.values is self._shown[1]

    def _grow(self, length: int, capacity: int) -> None:
        """Makes room for tokens up to `capacity`, and lets go of those that can no longer be needed."""
        first = self._first_kept(length)
        grown = [tensor.new_empty((capacity - first, *tensor.shape[1:])) for tensor in self.storage]
        for old, new in zip(self.rows(first, length), grown, strict=True):
            new[: length - first].copy_(old)
        self.storage, self.first = grown, first

    def _first_kept(self, length: int) -> int:  # noqa: ARG002 - of use in layers with a window
        return self.first

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


class WindowLayer(TokenMajorLayer, DynamicSlidingWindowLayer):  # type: ignore[misc] # transformers is untyped here
    """A layer whose tokens read `window` tokens, their own included. The model sees the last `window` - 1 before each pass.

    The storage keeps every row it was given or has computed, until it must grow: a publisher needs all rows of a pass, and a
    reader may cut the cache back, which the library's own layer allows only where it was told in advance.
    """

    _sliding_window_tensor: torch.Tensor

    def __init__(self, spec: LayerSpec, *args: Any, **options: Any) -> None:
        self._spec = spec
        super().__init__(spec, *args, sliding_window=spec.window, **options)
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def _first_needed(self, length: int) -> int:
        return self._spec.first_needed(length)

    def _first_kept(self, length: int) -> int:
        return self.first if self._records_past() else self._first_needed(length)

    def _records_past(self) -> bool:
        """Whether the library announced that it will cut the cache back; it then expects to find all rows in `keys`."""
        return getattr(self, "record_past", False)

    def _show(self, length: int) -> None:
        # The library tells the position and the mask from this count, as `keys` do not have all tokens.
        self.cumulative_length = length
        needed = self._first_needed(length)
        self._shown = self._views(min(needed, self.first) if self._records_past() else needed, length)
        self.keys, self.values = self._shown

    def activate_past_recording(self) -> None:
        """As the library's: rows are kept until the next `crop`."""
        super().activate_past_recording()
        if self._owns_views():
            self._show(self.cumulative_length)


class EmptyLayer(_DummyLayer):  # type: ignore[misc] # transformers is untyped here
    """A layer that keeps nothing: it reads the KV of another, or has no attention."""

    first = 0

    def rows(self, start: int, end: int) -> list[torch.Tensor]:  # noqa: ARG002 - as other layers have it
        """No tensors."""
        return []

    def declare(self, length: int) -> None:
        """Nothing to declare."""


CacheLayer = TokenMajorLayer | EmptyLayer


def make_layer(
    spec: LayerSpec,
    capacity: int,
    length: int,
    device: torch.device,
    wait: Callable[[], None] | None = None,
    *,
    first: int = 0,
) -> CacheLayer:
    """A layer of the kind `spec`, with room for tokens `first` to `capacity`."""
    if spec.kind == "none":
        return EmptyLayer()
    kind = WindowLayer if spec.kind == "window" else TokenMajorLayer
    return kind(spec, capacity, length, device, wait, first=first)


def build_cache(model: PreTrainedModel, layers: Iterable[CacheLayer]) -> Cache:
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
    """Raises UnsupportedModelError unless all cache layers are of known kinds and no token's KV depends on later ones."""
    config = model.config.get_text_config(decoder=True)
    kind = model.config.model_type
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is an encoder-decoder model; its cross-attention cache is not supported")
    if getattr(model, "peft_config", None):
        raise UnsupportedModelError(
            "the model carries adapters (peft), which its checkpoint's fingerprint does not cover",
            hint="merge the adapter (merge_and_unload) and save the result as a checkpoint of its own",
        )
    if getattr(config, "use_bidirectional_attention", None) in (True, "all") or getattr(config, "is_causal", True) is False:
        raise UnsupportedModelError(f"{kind} reads in both directions: the KV of a token depends on the text behind it")
    for index, layer in enumerate(DynamicCache(config=model.config).layers):
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
            " attention, sliding windows, and layers that share another's KV"
        )
    return kind


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(entry.get("rope_type", entry.get("type", "default"))) for entry in [parameters, *nested]}


def _layer_spec(index: int, layer: Any, model: PreTrainedModel) -> LayerSpec:
    kind = _layer_kind(index, layer, model)
    where = f"{model.config.model_type}: layer {index}"
    if kind == "none":
        return LayerSpec(kind, ())
    if not layer.is_initialized:
        raise UnsupportedModelError(f"{where} keeps nothing, although its configuration says that it does")
    window = layer.sliding_window if kind == "window" else None
    if window is not None and not 2 <= window <= MAX_WINDOW:  # noqa: PLR2004 - FORMAT.md 2.3
        raise UnsupportedModelError(f"{where} has a window of {window} tokens; supported are 2 to {MAX_WINDOW}")
    tensors = []
    for name, tensor in (("k", layer.keys), ("v", layer.values)):
        if tensor.ndim != _CACHE_DIMENSIONS or tensor.shape[0] != 1 or tensor.shape[2] != 1 or tensor.dtype not in DTYPE_NAMES:
            raise UnsupportedModelError(f"{where} keeps {name} as {tuple(tensor.shape)} {tensor.dtype}")
        tensors.append((name, tensor.shape[1], tensor.shape[3], DTYPE_NAMES[tensor.dtype]))
    return LayerSpec(kind, tuple(TensorSpec(*tensor) for tensor in tensors), window)
