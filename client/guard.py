"""The guard of prepared caches: whoever runs the model beside one with other ids, masks or positions is told, not misled.

The library takes any cache with any prompt and computes something. A prepared cache remembers the tokens it has read, its
prompt's at first and then those of every pass, and is compared in two places: by a hook of torch's own on the model's body,
which sees every pass, and in the method with which generate() prepares each pass, which sees the whole sequence, of which the
library takes only the end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvcdn.errors import KvcdnError, UsageError
from kvcdn.model.states import StateLayer

_MARK = "_kvcdn_prompt"
_PREPARES = "prepare_inputs_for_generation"
_OF_TOKENS = frozenset({"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", "labels"})
"""Tensors that are looked at one by one, or say nothing of the prompt."""

_HINT = "pass prepared.inputs() to generate() as they are, once"


class Mark:
    """What a cache belongs to: the tokens that it has read or is to read next, and the model as it was."""

    def __init__(self, token_ids: tuple[int, ...], model: object) -> None:
        """`model` is equal to what the same model gives later, unless it was changed."""
        self.token_ids = torch.tensor(token_ids, dtype=torch.long)
        self.model = model
        self.prompt_tokens = len(token_ids)

    def require(self, start: int, end: int, ids: torch.Tensor) -> None:
        """Raises UsageError unless `ids`, [rows, n], begin with what is known of tokens `start` to `end`."""
        known = self.token_ids[start:end].to(ids.device)
        if ids.shape[0] and not torch.equal(ids[:, : known.shape[0]], known.expand(ids.shape[0], -1)[:, : ids.shape[1]]):
            raise UsageError("the model was given other tokens than those the cache was loaded for", hint=_HINT)

    def went_on(self, length: int, ids: torch.Tensor) -> None:
        """Remembers that `ids` are read behind `length` tokens; of several rows each goes its own way."""
        if ids.shape[0] == 1 and length + ids.shape[1] > self.prompt_tokens:
            self.token_ids = torch.cat([self.token_ids[:length], ids[0].to("cpu", torch.long)])


def mark(cache: Cache, token_ids: tuple[int, ...], model: object) -> None:
    """Says that `cache` belongs to the prompt `token_ids`; one of states alone cannot tell how much of it it has seen."""
    if not all(isinstance(layer, StateLayer) for layer in cache.layers):
        setattr(cache, _MARK, Mark(token_ids, model))


class Guard:
    """Compares every pass of a model beside a marked cache until it is removed; passes beside others cost nothing."""

    def __init__(self, model: PreTrainedModel, state: Callable[[], object], steady_tokens: int | None) -> None:
        """`state` says what `model` is like now; from `steady_tokens` on it reads with another rope (kvcdn/model/rope.py)."""
        self._model = model
        body: torch.nn.Module = getattr(model, model.base_model_prefix, model)
        _watched[body] = Watched(tuple(inspect.signature(body.forward).parameters), state, steady_tokens)
        self._hook = body.register_forward_pre_hook(_check_pass, with_kwargs=True)
        self._own = vars(model).get(_PREPARES)
        # A method bound to the model, so that a copy of the model has its own.
        vars(model)[_PREPARES] = MethodType(_preparing(model, self._own), model)

    def remove(self) -> None:
        """Nobody watches any more, and nothing is left behind."""
        self._hook.remove()
        del vars(self._model)[_PREPARES]
        if self._own is not None:
            vars(self._model)[_PREPARES] = self._own


@dataclass(frozen=True)
class Watched:
    """Of a body: the names of its arguments in order, what its model is like now, and up to where its rope is the same."""

    names: tuple[str, ...]
    state: Callable[[], object]
    steady_tokens: int | None


_watched: WeakKeyDictionary[torch.nn.Module, Watched] = WeakKeyDictionary()
"""By body, since a hook is copied with its module, and a client cannot be."""


def _check_pass(body: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    watched = _watched.get(body)
    given = named if watched is None else {**dict(zip(watched.names, positional, strict=False)), **named}
    cache, belongs = _marked(given)
    if cache is None or belongs is None:
        return
    _require_only_tokens(given)
    ids = given.get("input_ids")
    if ids is None:
        raise UsageError("a loaded cache belongs to tokens, and the model was given embeddings beside it", hint=_HINT)
    length, count = cache.get_seq_length(), ids.shape[1]
    if watched is not None and length < belongs.prompt_tokens:
        _require_same_model(watched, belongs)
    steady = None if watched is None else watched.steady_tokens
    if steady is not None and count > 1 and length <= steady < length + count:
        raise UsageError(
            f"the model reads more than {steady} tokens with another rope than the loaded cache",
            hint="prepare the longer prompt, which then has no cache",
        )
    belongs.require(length, length + count, ids)
    mask = given.get("attention_mask")
    if mask is not None and not _all_ones(mask, length + count):
        raise UsageError("the model was given a mask that is not of ones for every token of the loaded cache", hint=_HINT)
    positions = given.get("position_ids")
    if positions is not None and not bool((positions == torch.arange(length, length + count, device=positions.device)).all()):
        raise UsageError("the model was given other positions than those the cache was loaded for", hint=_HINT)
    belongs.went_on(length, ids)


def _require_only_tokens(given: Mapping[str, Any]) -> None:
    """Raises UsageError for images, sounds and whatever else a cache's name says nothing of; types of tokens may be 0."""
    for name, value in given.items():
        if name not in _OF_TOKENS and isinstance(value, torch.Tensor) and bool(value.any() if "type_ids" in name else True):
            raise UsageError(f"a loaded cache belongs to tokens, and the model was given {name} beside it", hint=_HINT)


def _require_same_model(watched: Watched, belongs: Mark) -> None:
    try:
        if watched.state() == belongs.model:
            return
        what = "its weights, adapters, hooks or settings are others"
    except KvcdnError as error:
        what = str(error)
    raise UsageError(
        f"the model was changed after the cache was prepared: {what}", hint="prepare again, with the model as it is now"
    )


def _preparing(model: PreTrainedModel, own: Callable[..., Any] | None) -> Callable[..., Any]:
    """The model's own preparation of a pass, once the whole sequence was compared with what its cache has read."""

    @wraps(getattr(type(model), _PREPARES))
    def prepare(self: PreTrainedModel, input_ids: torch.Tensor, *args: Any, **named: Any) -> Any:
        cache, belongs = _marked(named)
        taken = named.get("next_sequence_length")
        if cache is not None and belongs is not None and taken is not None:
            length = cache.get_seq_length()
            # Other ids are the end of a sequence alone, and seen by the hook.
            if length + taken == input_ids.shape[1]:
                belongs.require(0, length if input_ids.shape[0] == 1 else min(length, belongs.prompt_tokens), input_ids)
        if own is not None:
            return own(input_ids, *args, **named)
        return getattr(type(self), _PREPARES)(self, input_ids, *args, **named)

    return prepare


def _marked(given: dict[str, Any]) -> tuple[Any, Mark | None]:
    cache = given.get("cache") if given.get("cache") is not None else given.get("past_key_values")
    return cache, getattr(cache, _MARK, None)


def _all_ones(mask: Any, tokens: int) -> bool:
    """Whether this is a mask [rows, tokens] that hides nothing; anything else may hide something."""
    return isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] == tokens and bool((mask == 1).all())  # noqa: PLR2004 - rows and tokens
