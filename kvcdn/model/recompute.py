"""Recomputing: some tokens of a prefix run through the model again, given the KV that is at hand for those before them.

What comes out is compared with what was loaded. Two right results differ by rounding, as any two kernels do, and by how much
hangs on the model and its dtype; so, where they differ at all, the rounding is measured here and now: the same tokens once
more, with each input embedding off by half a unit in its last place. A model answers that with its own rounding noise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvcdn.errors import MismatchError
from kvcdn.keys import PRECISION_NATIVE
from kvcdn.layout import KINDS
from kvcdn.model.cache import beside, build_cache
from kvcdn.model.layers import (
    IndexedLayer,
    LibraryIndexedLayer,
    TokenMajorLayer,
    WindowLayer,
    require_dtype,
)
from kvcdn.model.load import LoadedModel
from kvcdn.model.place import device_of
from kvcdn.model.states import WithStates

_MOST = 0.75
"""The quantile of a layer's tokens that speaks for it: a mixture of experts may send a few tokens elsewhere for a rounding."""

_MOST_TIMES = 2.5
_EACH_TIMES = 4.0
"""How many times the measured noise is still rounding: for most tokens, and for the worst of them.

Two right kernels (eager and sdpa attention, bf16 and float32) were apart by at most 1.04 times the measured noise for most
tokens, over 14 architectures, and by 2.3 times for one, which a mixture of experts had sent elsewhere. In bf16 on
SmolLM2-135M that noise is 0.5 to 1.2 % for K and 1.4 to 3.5 % for V; all weights of one layer off by 5 % make 3 % and 9 %.
"""

_LEAST_LIMIT = 1e-3
"""Relative; below it nothing is wrong in any dtype. TF32 multiplies float32 with ten bits, whatever the dtype says."""

_CODED = {"int8": 0.05, "int4": 0.3, "tc-high": 1.1, "tc-medium": 1.1, "tc-low": 1.1, "tc-least": 1.1}
"""How far most tokens of a lossy precision may be off for its coding, relative, and each twice as far; of others not at all.
Measured with tiny models 0.6 % for int8 and 9 % for int4; what is wrong by another text or layout is off by 100 % and more.
The transform codec leaves out what is hardly read: of the worst tensor 36 %, 85 %, 92 % and 96 % with SmolLM2-135M, 108 % with
random weights. Two unrelated rows are 141 % apart."""

_LEAST_NORM = 0.1
"""Of a layer's mean norm: tokens with smaller values (attention sinks' V) are measured against this instead."""


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `end` of a prefix."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"tokens {self.start} to {self.end}"


@dataclass(frozen=True)
class Comparison:
    """Loaded rows against recomputed ones. `worst` is the largest relative difference of most of a tensor's tokens.

    `excess` is empty where all differences are rounding, else it names the first tensor that is not, and by how much.
    """

    identical: bool
    worst: float
    excess: str


def earliest_start(layers: Sequence[Any], start: int, specs: Sequence[Any]) -> int | None:
    """The first token from `start` on that can be recomputed from what `layers` hold; None where none can.

    What a window reaches before the first row that was read is not there, and of states only the last are: such layers are
    recomputed from the beginning of the text, and what they keep is seen in the rows of others.
    """
    if not any(isinstance(layer, TokenMajorLayer) for layer in layers):
        return None
    for layer, spec in zip(layers, specs, strict=True):
        if isinstance(layer, TokenMajorLayer) and layer.first > spec.first_needed(start):
            if spec.window is None:
                return None
            start = layer.first + spec.window - 1
    return None if start and any(isinstance(layer, WithStates) for layer in layers) else start


def compare_span(
    loaded: LoadedModel, layers: Sequence[Any], token_ids: Sequence[int], span: Span, precision: str = PRECISION_NATIVE
) -> Comparison:
    """Recomputes `span` of the prefix `token_ids` from what `layers` hold before it, and compares it with their rows.

    All rows up to `span.end` are there; `earliest_start` says where a span may begin. `precision` is what they were sent in.
    """
    try:
        ours = _recompute(loaded, layers, token_ids, span)
    except MismatchError as error:
        return Comparison(identical=False, worst=1.0, excess=str(error))
    pairs = list(_pairs(loaded, layers, ours, span))
    if all(torch.equal(_bits(computed), _bits(held)) for _, computed, held in pairs):
        return Comparison(identical=True, worst=0.0, excess="")
    differences = [_relative(computed, held) for _, computed, held in pairs]
    worst = max((float(torch.quantile(difference, _MOST)) for difference in differences), default=0.0)
    least = max(_LEAST_LIMIT, torch.finfo(pairs[0][1].dtype).eps / 2, _CODED.get(precision, 0.0))
    if all(bool((difference <= least).all()) for difference in differences):
        return Comparison(identical=False, worst=worst, excess="")
    with _last_places_off(loaded):
        jittered = _recompute(loaded, layers, token_ids, span)
    for (name, computed, _), (_, other, _), difference in zip(
        pairs, _pairs(loaded, layers, jittered, span), differences, strict=True
    ):
        noise = _relative(computed, other)
        for words, is_, should in (
            ("most tokens", torch.quantile(difference, _MOST), _MOST_TIMES * torch.quantile(noise, _MOST)),
            ("one token", difference.max(), max(_EACH_TIMES * float(noise.max()), 2 * _CODED.get(precision, 0.0))),
        ):
            limit = max(float(should), least)
            if not float(is_) <= limit:  # also where it is not a number
                return Comparison(
                    identical=False, worst=worst, excess=f"{name}: {words} off by {is_:.2%}, rounding is {limit:.2%}"
                )
    return Comparison(identical=False, worst=worst, excess="")


def _pairs(
    loaded: LoadedModel, layers: Sequence[Any], ours: Sequence[Any], span: Span
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, recomputed and held rows [n, heads, dim] of each tensor, as far as rows are held."""
    for index, (layer, computed) in enumerate(zip(layers, ours, strict=True)):
        if not isinstance(layer, TokenMajorLayer):
            continue
        start = max(span.start, layer.first)
        names = KINDS[loaded.identity.layout.layers[index].kind]
        for name, rows, held in zip(names, _computed_rows(computed), layer.rows(start, span.end), strict=True):
            yield f"layer {index}, {name}", rows[start - span.start :], held


def _computed_rows(layer: Any) -> list[torch.Tensor]:
    if isinstance(layer, _Probe):
        return layer.rows()
    return [states[0].transpose(0, 1) for states in (layer.keys, layer.values)]


def _recompute(loaded: LoadedModel, layers: Sequence[Any], token_ids: Sequence[int], span: Span) -> list[Any]:
    """Layers that have seen one pass over `span`, and have kept what it computed."""
    model = loaded.model
    fresh = DynamicCache(config=model.config).layers
    probes = [_probe(layer, span.start, new) for layer, new in zip(layers, fresh, strict=True)]
    cache: Cache = build_cache(model, probes)
    body = getattr(model, model.base_model_prefix, model)
    ids = torch.tensor([list(token_ids[span.start : span.end])], dtype=torch.long, device=device_of(model))
    with torch.inference_mode():
        body(input_ids=ids, use_cache=True, **beside(body.forward, cache, ids))
    for index, probe in enumerate(probes):
        if isinstance(probe, _Probe) and not probe.rows():
            raise MismatchError(f"the model computes nothing for layer {index}")
    return probes


def _probe(layer: Any, start: int, fresh: Any) -> Any:
    """A layer for one pass behind the first `start` tokens of `layer`; `fresh` is the library's own for what holds no rows."""
    if isinstance(layer, WithStates):
        return fresh
    if isinstance(layer, WindowLayer):
        return _WindowProbe(layer, start)
    if isinstance(layer, IndexedLayer):
        return _IndexedProbe(layer, start)
    return _Probe(layer, start) if isinstance(layer, TokenMajorLayer) else fresh


class _Probe(DynamicLayer):  # type: ignore[misc] # transformers is untyped here
    """Shows the first `start` tokens of another layer and keeps only what is computed behind them."""

    def __init__(self, base: TokenMajorLayer, start: int, **library: Any) -> None:
        super().__init__(**library)
        base.settle()
        self._before = [rows.transpose(0, 1).unsqueeze(0) for rows in base.reach(start)]
        self._start = start
        self._states: tuple[torch.Tensor, ...] = ()

    def rows(self) -> list[torch.Tensor]:
        """What the pass computed of each tensor, [n, heads, dim]."""
        return [states[0].transpose(0, 1) for states in self._states]

    def get_seq_length(self) -> int:
        return self._start

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        require_dtype(self._before, (key_states, value_states))
        self._states = (key_states, value_states)
        key, value = (torch.cat(pair, dim=-2) for pair in zip(self._before[:2], self._states, strict=True))
        return key, value


class _WindowProbe(_Probe, DynamicSlidingWindowLayer):  # type: ignore[misc] # transformers is untyped here
    """The same of a layer with a window."""

    def __init__(self, base: WindowLayer, start: int) -> None:
        super().__init__(base, start, sliding_window=base.sliding_window)
        self.cumulative_length = start


class _IndexedProbe(_Probe, LibraryIndexedLayer):  # type: ignore[misc] # transformers is untyped here
    """The same of a layer with an indexer."""

    _indexer: torch.Tensor

    def rows(self) -> list[torch.Tensor]:
        """As of other layers, indexer keys included."""
        rows = super().rows()
        return [*rows, self._indexer[0].unsqueeze(1)] if rows else []

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        require_dtype(self._before[2:], (indexer_key_states,))
        self._indexer = indexer_key_states
        return torch.cat([self._before[2][0], indexer_key_states], dim=1)


@contextmanager
def _last_places_off(loaded: LoadedModel) -> Iterator[None]:
    """In this thread, every value of an input embedding is off by half a unit in its last place, up or down."""
    thread = threading.get_ident()

    def jitter(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() != thread:
            return output
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, output.shape, generator=generator).mul_(2).sub_(1).to(output.device)
        return (output.double() * (1 + signs * torch.finfo(output.dtype).eps / 2)).to(output.dtype)

    handle = loaded.model.get_input_embeddings().register_forward_hook(jitter)
    try:
        yield
    finally:
        handle.remove()


def _relative(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """For each token the norm of the difference by that of the reference, [n] float32 on the CPU."""
    ours, theirs = (rows.to(torch.float32).flatten(1) for rows in (reference, other.to(reference.device)))
    norms = ours.norm(dim=1)
    relative: torch.Tensor = (ours - theirs).norm(dim=1) / norms.clamp_min(max(_LEAST_NORM * float(norms.mean()), 1e-30))
    return relative.cpu()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().cpu().view(torch.uint8)
