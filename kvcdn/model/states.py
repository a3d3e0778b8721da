"""Layers that keep a state, alone or beside K and V: what linear attention and convolutions hold (FORMAT.md 2.3).

A state is a tensor of fixed shape that every pass overwrites. So these layers cannot be cut back, they know the states of
one token only, and a block takes a copy of them where it ends at a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from transformers import cache_utils

from kvcdn.errors import UnsupportedModelError
from kvcdn.layout import LayerSpec
from kvcdn.model.layers import TORCH_DTYPES, TokenMajorLayer, WindowLayer

LibraryStateLayer: Any = getattr(cache_utils, "LinearAttentionLayer", object)
LibraryHybridLayer: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", object)
LibraryHybridWindowLayer: Any = getattr(cache_utils, "LinearAttentionAndSlidingWindowAttentionLayer", object)
"""The library's layers with states; older versions have none."""


class _States(LibraryStateLayer):  # type: ignore[misc] # transformers is untyped here
    """The states of a layer, which may still be on their way when a model asks for them."""

    spec: LayerSpec
    home: torch.device
    """Where the model wants them."""

    _wait: Callable[[], None] | None = None

    @property
    def conv_states(self) -> dict[int, Any]:
        self.settle()
        return self._conv_states

    @conv_states.setter
    def conv_states(self, states: dict[int, Any]) -> None:
        self._conv_states = states

    @property
    def recurrent_states(self) -> dict[int, Any]:
        self.settle()
        return self._recurrent_states

    @recurrent_states.setter
    def recurrent_states(self, states: dict[int, Any]) -> None:
        self._recurrent_states = states

    def settle(self) -> None:
        """Waits until the tensors hold their bytes. Raises what the filler raised."""
        if self._wait is not None:
            self._wait()
            self._wait = None

    def state_places(self) -> list[torch.Tensor]:
        """The states, in the order of the layout, to be filled; made where there are none yet."""
        places = []
        for state in self.spec.states:
            held, index = self._held(state.name)
            if held[index] is None:
                held[index] = torch.empty((1, *state.dims), dtype=TORCH_DTYPES[state.dtype], device=self.home)
                declare_state(self, state.name, held[index])
            places.append(held[index].squeeze(0))
        return places

    def state_copies(self) -> list[torch.Tensor]:
        """Copies of the states on the CPU, in the order of the layout. Raises UnsupportedModelError where one is missing."""
        copies = []
        for state in self.spec.states:
            held, index = self._held(state.name)
            if held[index] is None or tuple(held[index].shape) != (1, *state.dims):
                raise UnsupportedModelError(f"after a pass a cache layer does not hold the state {state.name} of its layout")
            copies.append(held[index].squeeze(0).to("cpu", copy=True, memory_format=torch.contiguous_format))
        return copies

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As of other layers of the library, which has no such method for states."""
        self._for_each(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """As of other layers of the library, which has no such method for states."""
        self._for_each(lambda tensor: tensor[indices, ...])

    def _for_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for held in (self.conv_states, self.recurrent_states):
            for index, tensor in held.items():
                held[index] = None if tensor is None else change(tensor)

    def alias(self) -> Self:
        """Not to be had: whoever computes from a token on needs the states there, and these are the last."""
        raise RuntimeError("a layer with states has no alias")

    def fork(self, length: int) -> Self:
        """Not to be had, as an alias."""
        raise RuntimeError(f"a layer with states cannot show its first {length} tokens")

    def _held(self, name: str) -> tuple[dict[int, Any], int]:
        return (self._conv_states if name[0] == "c" else self._recurrent_states), int(name[1:])


def declare_state(layer: Any, name: str, tensor: torch.Tensor) -> None:
    """Says to the library's code in `layer` what it says to itself after a pass that left the state `name`, [rows, ...]."""
    index = int(name[1:])
    if name[0] == "r":
        layer.is_recurrent_states_initialized[index] = True
        return
    layer.is_conv_states_initialized[index] = True
    layer.has_previous_state[index] = True
    layer.conv_kernel_size[index] = tensor.shape[-1]
    layer.dtype, layer.device = tensor.dtype, tensor.device


def join_states(target: Any, layers: Sequence[Any]) -> None:
    """Puts the states of `layers`, which have one row each, into a layer of the library's."""
    for state in layers[0].spec.states:
        held = "conv_states" if state.name[0] == "c" else "recurrent_states"
        index = int(state.name[1:])
        joined = torch.cat([getattr(layer, held)[index] for layer in layers])
        getattr(target, held)[index] = joined
        declare_state(target, state.name, joined)


def _state_count(spec: LayerSpec) -> int:
    return 1 + max(int(state.name[1:]) for state in spec.states)


class StateLayer(_States):
    """A layer that keeps nothing but its states."""

    first = 0

    def __init__(self, spec: LayerSpec, device: torch.device, wait: Callable[[], None] | None = None) -> None:
        super().__init__(number_of_states=_state_count(spec))
        self.spec, self.home = spec, device
        self._wait = wait

    def rows(self, start: int, end: int) -> list[torch.Tensor]:  # noqa: ARG002 - as other layers have it
        """No tensors by token."""
        return []

    def declare(self, length: int) -> None:  # noqa: ARG002 - as other layers have it
        """Says that the states are valid: whoever filled them has finished."""
        self._wait = None

    def await_with(self, wait: Callable[[], None]) -> None:
        """Calls `wait` when the model first uses the states from now on."""
        self._wait = wait


class HybridLayer(_States, TokenMajorLayer, LibraryHybridLayer):  # type: ignore[misc] # transformers is untyped here
    """A layer of full attention that keeps states besides."""

    is_compileable = False

    def __init__(self, spec: LayerSpec, capacity: int, length: int, device: torch.device, *args: Any, **options: Any) -> None:
        self.spec, self.home = spec, device
        TokenMajorLayer.__init__(self, spec, capacity, length, device, *args, number_of_states=_state_count(spec), **options)

    def lazy_initialization(self, *args: Any, **options: Any) -> None:
        LibraryHybridLayer.lazy_initialization(self, *args, **options)

    def crop(self, tokens_to_remove: int) -> None:
        """As the library's, which refuses unless it was told before."""
        LibraryHybridLayer.crop(self, tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        TokenMajorLayer.batch_repeat_interleave(self, repeats)
        _States.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        TokenMajorLayer.batch_select_indices(self, indices)
        _States.batch_select_indices(self, indices)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        TokenMajorLayer.settle(self)
        LibraryHybridLayer.reorder_cache(self, beam_idx)


class HybridWindowLayer(_States, WindowLayer, LibraryHybridWindowLayer):  # type: ignore[misc] # transformers is untyped here
    """A layer with a window that keeps states besides."""

    is_compileable = False

    def __init__(self, spec: LayerSpec, capacity: int, length: int, device: torch.device, *args: Any, **options: Any) -> None:
        self.spec, self.home = spec, device
        WindowLayer.__init__(self, spec, capacity, length, device, *args, number_of_states=_state_count(spec), **options)

    def lazy_initialization(self, *args: Any, **options: Any) -> None:
        LibraryHybridWindowLayer.lazy_initialization(self, *args, **options)

    def crop(self, tokens_to_remove: int) -> None:
        """As the library's, which refuses unless it was told before."""
        LibraryHybridWindowLayer.crop(self, tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        WindowLayer.batch_repeat_interleave(self, repeats)
        _States.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        WindowLayer.batch_select_indices(self, indices)
        _States.batch_select_indices(self, indices)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        WindowLayer.settle(self)
        LibraryHybridWindowLayer.reorder_cache(self, beam_idx)


WithStates = StateLayer | HybridLayer | HybridWindowLayer
