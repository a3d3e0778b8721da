"""Prefill on the schedule: one forward pass per block, at absolute positions (ARCHITECTURE.md, decisions).

On one software stack the result is the same to the bit, whoever runs it, whatever follows the block, on any number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvcdn.errors import KvcdnError, UnsupportedModelError
from kvcdn.layout import Layout
from kvcdn.model.cache import CacheLayer, beside, build_cache, make_layers
from kvcdn.model.layers import TokenMajorLayer
from kvcdn.model.mask import mask_beside
from kvcdn.model.place import device_of, layer_devices, synchronize
from kvcdn.model.staging import to_host
from kvcdn.model.states import WithStates


@dataclass(frozen=True)
class PrefilledBlock:
    """The KV of one block, token-major on the CPU: `layers[i]` = (K [n, heads, dim], V [n, heads, dim]); n = end - start.

    Indexer keys, [n, 1, dim], come third where a layer has them, and states last where the block ends at a checkpoint. A layer
    that keeps nothing has no tensors.
    """

    start: int
    end: int
    layers: tuple[tuple[torch.Tensor, ...], ...]
    seconds: float

    def raw_layers(self) -> list[list[memoryview]]:
        """The raw bytes of every tensor, without a copy."""
        return [[tensor_bytes(tensor) for tensor in layer] for layer in self.layers]


class PrefillStoppedError(KvcdnError):
    """A pass was given up between two layers, because its result is not wanted any more."""


class ScheduledPrefill:
    """Runs `model` over a prefix block by block; `cache` may go on being used for decoding."""

    def __init__(
        self, model: PreTrainedModel, layout: Layout, capacity: int, *, layers: Sequence[CacheLayer] | None = None
    ) -> None:
        """Computes into new layers of `capacity` tokens, or into the rows of `layers`, which are left as they are otherwise."""
        self._model = model
        self._layout = layout
        self._layers = (
            make_layers(layout, capacity, layer_devices(model, layout))
            if layers is None
            else [layer.alias() for layer in layers]
        )
        self.cache: Cache = build_cache(model, self._layers)
        # The body without the head: no logits are wanted, and the KV is the same.
        self._body = getattr(model, model.base_model_prefix, model)

    def run(self, token_ids: Sequence[int], start: int = 0, pass_tokens: int | None = None) -> Iterator[PrefilledBlock]:
        """Prefills `token_ids[start:]`, from a block's start, and yields each block when it is done.

        With `pass_tokens` it runs on another schedule than the publisher's, and what it yields are no blocks.
        """
        length = pass_tokens or self._layout.block_tokens
        for begin in range(start, len(token_ids), length):
            yield self._run_block(token_ids[begin : begin + length], begin)

    def _run_block(self, token_ids: Sequence[int], start: int) -> PrefilledBlock:
        seconds = self._pass(token_ids, start)
        end = start + len(token_ids)
        checkpoint = self._is_checkpoint(start, end)
        held = [_block_tensors(layer, start, end, checkpoint=checkpoint) for layer in self._layers]
        hosted = iter(to_host([tensor for tensors in held for tensor in tensors]))
        layers = tuple(tuple(next(hosted) for _ in tensors) for tensors in held)
        return PrefilledBlock(start, end, layers, seconds)

    def _pass(self, token_ids: Sequence[int], start: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            tokens = torch.tensor([list(token_ids)], dtype=torch.long, device=device_of(self._model))
            mask = mask_beside(self._model, self._body, self._layout, start, start + len(token_ids))
            self._body(input_ids=tokens, use_cache=True, **beside(self._body.forward, self.cache, tokens), **mask)
        synchronize(layer_devices(self._model, self._layout))
        return time.perf_counter() - started

    def run_one(self, token_ids: Sequence[int], start: int, at_layer: Callable[[int], None]) -> float:
        """Prefills one block, `token_ids`, that begins at token `start`, behind rows that are valid; returns its seconds.

        `at_layer` is called with each layer's number when the pass reaches its cache; it may raise PrefillStoppedError, and
        the rows of this block then hold anything.
        """
        for number, layer in enumerate(self._layers):
            layer.declare(start)
            layer.await_with(partial(at_layer, number))
        try:
            return self._pass(token_ids, start)
        except BaseException:
            # Whoever is called at layers holds them, in a circle: their memory would wait for the garbage collector.
            for layer in self._layers:
                layer.declare(start)
            raise

    def _is_checkpoint(self, start: int, end: int) -> bool:
        return self._layout.is_checkpoint(start // self._layout.block_tokens, end - start)

    def restore(self, layer: int, start: int, end: int) -> list[torch.Tensor]:
        """The places of a block's tensors of a layer, to be filled before `resume`: [n, heads, dim] each, and the states."""
        held = self._layers[layer]
        if isinstance(held, WithStates) and self._is_checkpoint(start, end):
            return held.rows(start, end) + held.state_places()
        return held.rows(start, end)

    def rows(self, tokens: int) -> list[tuple[torch.Tensor, ...]]:
        """The first `tokens` tokens of every layer, [tokens, heads, dim] a tensor, on the CPU."""
        return [tuple(tensor.cpu() for tensor in layer.rows(0, tokens)) for layer in self._layers]

    def resume(self, tokens: int) -> None:
        """Declares the first `tokens` tokens valid, after `restore` filled them."""
        for layer in self._layers:
            layer.declare(tokens)


def _block_tensors(layer: CacheLayer, start: int, end: int, *, checkpoint: bool) -> tuple[torch.Tensor, ...]:
    if isinstance(layer, TokenMajorLayer) and layer.get_seq_length() != end:
        raise UnsupportedModelError(
            f"after {end} tokens a cache layer holds {layer.get_seq_length()}: this model does not keep one entry a token"
        )
    states = layer.state_copies() if checkpoint and isinstance(layer, WithStates) else []
    return (*layer.rows(start, end), *states)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes, without a copy."""
    view: Any = tensor.view(torch.uint8).numpy()
    return memoryview(view).cast("B")
