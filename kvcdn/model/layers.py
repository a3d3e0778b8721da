"""The layers of a cache: they store tokens the way blocks do, have spare room, and can wait.

transformers' own DynamicLayer concatenates, which copies the whole cache at every decoded token; and it must be full
before the model runs. These layers are allocated once, with room for what will be decoded, and may be handed to the model
before their bytes are there: `update`, which the model calls when it reaches the layer, waits for them. Memory is token-
major ([tokens, heads, dim], FORMAT.md 2.3), so a block decodes straight into place; the model sees the usual [1, heads,
tokens, dim] as a transposed view, and computes the same bits from it. On a CPU attention reads that view at half the speed of
memory that is contiguous by head, so there a layer moves once, when decoding has begun; but one that lies in pages which other
processes share stays there, since a hundred sessions on one prefix would otherwise hold it a hundred times.

There is a class for each kind of layer in FORMAT.md 2.3, to the model the library's own: `TokenMajorLayer` for `kv`,
`WindowLayer` for `window`, `IndexedLayer` for `indexed`, `EmptyLayer` for `none`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcdn.errors import MismatchError, UsageError
from kvcdn.layout import LayerSpec
from kvcdn.model.memory import empty_tensors

GROWTH_TOKENS = 256
"""Room added whenever a layer is full: a copy of the cache every 256 decoded tokens instead of every one."""

_DECODING = 2
"""Tokens one at a time after which a layer takes it that more will come. A document's last block may have one token as well."""

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

LibraryDummyLayer: Any = getattr(cache_utils, "DummyLayer", object)
LibraryIndexedLayer: Any = getattr(cache_utils, "DynamicIndexedLayer", object)
"""The library's layers for what keeps nothing, and for indexed attention; older versions have none, and no models of it."""


def require_dtype(held: Sequence[torch.Tensor], computed: Sequence[torch.Tensor]) -> None:
    """Raises MismatchError where states are of another dtype than the cache they go to, and would be rounded unseen."""
    for tensor, states in zip(held, computed, strict=False):
        if tensor.dtype != states.dtype:
            raise MismatchError(
                f"the model computes {states.dtype}, its cache holds {tensor.dtype}: it was changed after loading"
            )


def require_one_row(states: torch.Tensor) -> None:
    """Raises UsageError for states of several rows, for a cache of one: only the first would be kept."""
    if states.shape[0] != 1:
        raise UsageError(
            f"the model was given {states.shape[0]} rows beside a cache of one",
            hint=f"cache.batch_repeat_interleave({states.shape[0]}) makes it a cache of as many",
        )


class TokenMajorLayer(DynamicLayer):  # type: ignore[misc] # transformers is untyped here
    """One layer's tensors, K and V, [capacity, heads, dim] each, of which tokens up to `length` are, or will be, valid.

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
        storage: list[torch.Tensor] | None = None,
        **library: Any,
    ) -> None:
        """`storage` is memory from elsewhere, [capacity - first, heads, dim] for each tensor; without, it is allocated here."""
        super().__init__(**library)
        self.device = device
        self.first = first
        self.storage = storage or empty_tensors(
            [(tensor.shape(capacity - first), TORCH_DTYPES[tensor.dtype]) for tensor in spec.tensors], device
        )
        self.is_initialized = True
        self._borrowed = False
        self._shared = storage is not None
        self._singles = 0
        self._wait = wait
        self._show(length)

    def rows(self, start: int, end: int) -> list[torch.Tensor]:
        """The places of tokens `start` to `end` of each tensor, [n, heads, dim], none of them before `first`."""
        if start < self.first:
            raise RuntimeError(f"tokens from {start} are asked of a cache layer that holds them from {self.first} on")
        return [tensor[start - self.first : end - self.first] for tensor in self.storage]

    def _views(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in self.rows(start, end)[:2])
        return key, value

    def reach(self, length: int) -> list[torch.Tensor]:
        """What the token behind the first `length` reads of each tensor, [n, heads, dim]; `settle` first."""
        return self.rows(self._first_needed(length), length)

    def _show(self, length: int) -> None:
        self._shown = self._views(0, length)
        self.keys, self.values = self._shown

    def declare(self, length: int) -> None:
        """Says that the first `length` tokens of the storage are valid: whoever filled them has finished."""
        self._wait = None
        self._singles = 0
        self._show(length)

    def await_with(self, wait: Callable[[], None]) -> None:
        """Calls `wait` when the model first uses the tensors from now on."""
        self._wait = wait

    def alias(self) -> Self:
        """A layer over the same memory that counts its tokens by itself; none at first."""
        twin = copy.copy(self)
        twin.declare(0)
        return twin

    def fork(self, length: int) -> Self:
        """A layer that shows the first `length` tokens of this one's memory, and takes a copy of them before it writes."""
        self.settle()
        twin = copy.copy(self)
        twin._borrowed = True  # noqa: SLF001 - of this class
        twin.declare(length)
        return twin

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
        require_one_row(key_states)
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        self._singles = self._singles + 1 if end - length == 1 else 0
        if self._borrowed or end - self.first > self.storage[0].shape[0]:
            self._grow(length, end + GROWTH_TOKENS, self._first_kept(length))
        elif self._singles == _DECODING and self.device.type == "cpu" and self._is_token_major() and not self._shared:
            # As large as it was: then the memory of one layer serves the next.
            self._grow(length, self.first + self.storage[0].shape[0], self.first)
        require_dtype(self.storage, (key_states, value_states))
        for tensor, states in zip(self.rows(length, end)[:2], (key_states, value_states), strict=True):
            tensor.copy_(states[0].transpose(0, 1))
        self._show(end)
        return self._views(self._first_needed(length), end)

    def _first_needed(self, length: int) -> int:  # noqa: ARG002 - of use in layers with a window
        """The first token that one behind `length` tokens reads."""
        return 0

    def _owns_views(self) -> bool:
        """False once the library has replaced the tensors (beams, batches): from then on this is a layer of the library's."""
        return self.keys is self._shown[0] and self.values is self._shown[1]

    def _grow(self, length: int, capacity: int, first: int) -> None:
        """Makes room for tokens up to `capacity`, and lets go of those before `first`; while decoding, head by head."""
        by_head = self.device.type == "cpu" and (self._singles >= _DECODING or not self._is_token_major())
        shapes = [(capacity - first, *tensor.shape[1:]) for tensor in self.storage]
        if by_head:
            shapes = [(heads, tokens, dim) for tokens, heads, dim in shapes]
        grown = empty_tensors([(shape, tensor.dtype) for shape, tensor in zip(shapes, self.storage, strict=True)], self.device)
        if by_head:
            grown = [tensor.transpose(0, 1) for tensor in grown]
        for old, new in zip(self.rows(first, length), grown, strict=True):
            new[: length - first].copy_(old)
        self.storage, self.first, self._borrowed, self._shared = grown, first, False, False

    def _is_token_major(self) -> bool:
        """Whether a head's tokens are apart in memory: as blocks have them, and as attention on a CPU reads them slowly."""
        return any(tensor.stride(0) > tensor.shape[2] for tensor in self.storage)

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

    def crop(self, tokens_to_remove: int) -> None:
        """As of other layers. Raises UsageError where what a token there reads was not loaded, or is gone."""
        length = max(self.cumulative_length + tokens_to_remove, 0)
        if self._owns_views() and tokens_to_remove < 0 and self._first_needed(length) < self.first:
            raise UsageError(
                f"a cache layer with a window holds tokens from {self.first} on, and cannot be cut back to {length}",
                hint="load or compute the shorter prefix",
            )
        super().crop(tokens_to_remove)

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


class IndexedLayer(TokenMajorLayer, LibraryIndexedLayer):  # type: ignore[misc] # transformers is untyped here
    """A layer whose attention reads the tokens that an indexer chooses, by keys of its own, [capacity, 1, dim]."""

    def _show_indexer(self, length: int) -> None:
        self.indexer_keys = self.rows(0, length)[2].transpose(0, 1)
        self.is_indexer_initialized = True

    def __init__(self, spec: LayerSpec, capacity: int, length: int, *args: Any, **options: Any) -> None:
        super().__init__(spec, capacity, length, *args, **options)
        self._show_indexer(length)

    def declare(self, length: int) -> None:
        """As of other layers, indexer keys included."""
        super().declare(length)
        self._show_indexer(length)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Appends [1, n, dim] keys, before or after `update`, and returns all of them, [1, length + n, dim]."""
        self.settle()
        if not self._owns_views():
            return super().update_indexer(indexer_key_states)  # type: ignore[no-any-return]
        require_one_row(indexer_key_states)
        length = self.indexer_keys.shape[1]
        end = length + indexer_key_states.shape[1]
        if self._borrowed or end > self.storage[0].shape[0]:
            self._grow(length, end + GROWTH_TOKENS, self.first)
            self._show(length)
        self.rows(length, end)[2].copy_(indexer_key_states.transpose(0, 1))
        self._show_indexer(end)
        return self.indexer_keys

    def crop(self, tokens_to_remove: int) -> None:
        """As of other layers, indexer keys included."""
        owned = self._owns_views()
        super().crop(tokens_to_remove)
        if owned and self._owns_views():
            self._show_indexer(self.get_seq_length())


class EmptyLayer(LibraryDummyLayer):  # type: ignore[misc] # transformers is untyped here
    """A layer that keeps nothing: it reads the KV of another, or has no attention."""

    first = 0

    def rows(self, start: int, end: int) -> list[torch.Tensor]:  # noqa: ARG002 - as other layers have it
        """No tensors."""
        return []

    def declare(self, length: int) -> None:
        """Nothing to declare."""

    def await_with(self, wait: Callable[[], None]) -> None:
        """Nothing to wait for: the model does not come by."""

    def alias(self) -> Self:
        """As of other layers."""
        return self

    def fork(self, length: int) -> Self:  # noqa: ARG002 - as other layers have it
        """There is nothing to share."""
        return self
