"""Whether a model's library goes on behind a cache: some code begins anew, or counts positions otherwise, without a word.

A few tokens are read in one pass, as the library does by itself, and in two, as blocks are made. What that leaves in the cache
must be the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvcdn.errors import UnsupportedModelError
from kvcdn.layout import Layout
from kvcdn.model.cache import beside, output_cache
from kvcdn.model.configuration import configuration_key
from kvcdn.model.place import device_of
from kvcdn.model.remembered import Remembered

_TOKENS, _BEHIND = 12, 2
"""Tokens that are read, and how many of them in the second pass."""

_HUGE = 1e30

_SAME = 0.1
"""Relative difference of states, and of the first layer's rows, by rounding only: in bf16 some 0.01; else some 1."""

_SAME_DEEPER = 0.5
"""In the layers behind it, where rounding may choose another expert."""


def require_continuation(model: PreTrainedModel, layout: Layout) -> None:
    """Raises UnsupportedModelError unless a pass behind a cache continues it; without states tried once a configuration."""
    if device_of(model).type == "meta" and not layout.state_bytes:
        return  # there are no numbers to compare
    memory, key = Remembered("continuations"), configuration_key(model)
    if not layout.state_bytes and memory.get(key) is True:
        return
    kind = model.config.model_type
    ids = torch.arange(_TOKENS, device=device_of(model)) * 7 % model.config.get_text_config(decoder=True).vocab_size
    try:
        with torch.inference_mode():
            once, begun, spoilt = _read(model, ids.unsqueeze(0))
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if device_of(model).type == "meta":
            raise
        raise UnsupportedModelError(f"{kind} does not read several tokens behind a cache: {error}") from None
    if _same_first_state(begun, spoilt):
        raise UnsupportedModelError(f"{kind}: its linear attention begins anew when it reads several tokens behind a state")
    _require_same(kind, once, begun)
    if not layout.state_bytes:
        memory.put(key, True)


def _read(model: PreTrainedModel, ids: torch.Tensor) -> tuple[Any, Any, Any]:
    """Caches of `ids` after one pass, after two, and after two with the first state spoilt between them."""
    once = output_cache(model(input_ids=ids, use_cache=True))
    begun, spoilt = (_pass(model, DynamicCache(config=model.config), ids[:, :-_BEHIND]) for _ in range(2))
    _spoil_first_state(spoilt)
    for cache in (begun, spoilt):
        _pass(model, cache, ids[:, -_BEHIND:])
    return once, begun, spoilt


def _require_same(kind: str, once: Any, begun: Any) -> None:
    # A cache that is made from a configuration may have a layer for each of an encoder's, too, which nothing is written into.
    used = begun.layers[: len(once.layers)]
    if len(used) < len(once.layers):
        raise UnsupportedModelError(f"{kind} keeps {len(once.layers)} layers, and its configuration tells of {len(used)}")
    for index, (whole, parts) in enumerate(zip(once.layers, used, strict=True)):
        if not all(_same(*pair, _SAME) for pair in _states(whole, parts)):
            raise UnsupportedModelError(f"{kind}: layer {index} does not continue from a state when it reads several tokens")
        if not all(_same(*pair, _SAME_DEEPER if index else _SAME) for pair in _rows(whole, parts)):
            raise UnsupportedModelError(f"{kind}: layer {index} keeps other keys and values in two passes than in one")


def _pass(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> Any:
    return output_cache(model(input_ids=ids, use_cache=True, **beside(model.forward, cache, ids)))


def _states(whole: Any, parts: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for attribute in ("conv_states", "recurrent_states"):
        for number, state in getattr(whole, attribute, {}).items():
            if state is not None:
                yield state, getattr(parts, attribute)[number]


def _rows(whole: Any, parts: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for attribute in ("keys", "values", "indexer_keys"):
        tensor = getattr(whole, attribute, None)
        if tensor is not None:
            yield tensor, getattr(parts, attribute)


def _same(whole: torch.Tensor, parts: torch.Tensor, most: float) -> bool:
    """Whether they are apart by at most `most` of what they are; not where one has a NaN."""
    if whole.shape != parts.shape:
        return False
    return bool((whole.float() - parts.float()).norm() <= most * whole.float().norm() + 1e-6)


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
