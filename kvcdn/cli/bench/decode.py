"""The decode step, measured: what `kvcdn bench decode` reports, our layers against the library's own cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from kvcdn.cli.bench.machine import machine, spread
from kvcdn.cli.options import quiet_libraries
from kvcdn.model.cache import build_cache, cache_argument, make_layer
from kvcdn.model.layers import GROWTH_TOKENS, TokenMajorLayer
from kvcdn.model.load import LoadedModel, load_model

_WARM_UP_STEPS = 3

TOLD = 4
"""How often progress is told of each length."""


def measure_decode(model: str, tokens: Sequence[int], steps: int, device: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """`rows` has one for each length: milliseconds of one decoded token behind so many, medians of `steps` that alternate.

    Both caches hold the same random values, which cost what real ones cost.
    """
    quiet_libraries()
    loaded = load_model(model, device)
    rows = []
    for length in tokens:
        tell(f"{steps} steps of each behind {length:,} tokens, the caches are being made")
        caches = _caches(loaded, length, steps + _WARM_UP_STEPS)
        samples: dict[str, list[float]] = {name: [] for name in caches}
        for step in range(steps + _WARM_UP_STEPS):
            # Each is first in every other step: who comes second finds the weights in the processor's cache.
            for name in list(caches) if step % 2 else list(caches)[::-1]:
                seconds = _step(loaded, caches[name])
                if step >= _WARM_UP_STEPS:
                    samples[name].append(seconds)
            if (done := step + 1 - _WARM_UP_STEPS) > 0 and done % max(steps // TOLD, 1) == 0:
                tell(f"{length:,} tokens: {done} of {steps} steps")
        ours, dynamic = (statistics.median(samples[name]) * 1000 for name in ("ours", "dynamic"))
        rows.append(
            {
                "tokens": length,
                "ours_ms": round(ours, 3),
                "dynamic_ms": round(dynamic, 3),
                "ratio": round(ours / dynamic, 3),
                "spread_ms": {name: spread([1000 * one for one in values]) for name, values in samples.items()},
            }
        )
    return {"model": model, "steps": steps, "rows": rows, "machine": machine(loaded)}


def _caches(loaded: LoadedModel, length: int, room: int) -> dict[str, Cache]:
    model = loaded.model
    layers = [
        make_layer(spec, length + max(room, GROWTH_TOKENS), length, model.device) for spec in loaded.identity.layout.layers
    ]
    dynamic = DynamicCache(config=model.config)
    for layer, stock in zip(layers, dynamic.layers, strict=True):
        if not isinstance(layer, TokenMajorLayer):
            continue
        for rows in layer.rows(0, length):
            rows.normal_()
        keys, values = layer.keys.contiguous().clone(), layer.values.contiguous().clone()
        stock.lazy_initialization(keys, values)
        stock.keys, stock.values = keys, values
        if hasattr(stock, "cumulative_length"):
            stock.cumulative_length = length
    return {"ours": build_cache(model, layers), "dynamic": dynamic}


def _step(loaded: LoadedModel, cache: Cache) -> float:
    model = loaded.model
    token = torch.ones((1, 1), dtype=torch.long, device=model.device)
    started = time.perf_counter()
    with torch.inference_mode():
        output = model(input_ids=token, use_cache=True, **{cache_argument(model.forward): cache})
        output.logits.argmax().item()  # waits for a GPU
    return time.perf_counter() - started
