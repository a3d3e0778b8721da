"""Where a model computes: on one device, or, spread by accelerate, each layer on its own.

accelerate may keep weights elsewhere, and bring them for every pass: where they lie says little. Where a layer computes is
where the library's own cache has that layer's tensors after a pass. That is looked at once for each way in which a model is
spread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvcdn.layout import Layout
from kvcdn.model.cache import output_cache

Devices = tuple[torch.device, ...]
"""One for each layer."""

_found: WeakKeyDictionary[Any, tuple[object, tuple[torch.device | None, ...]]] = WeakKeyDictionary()
"""By model: how it was spread, and where its layers kept their tensors then; None for layers that keep nothing."""


def device_of(model: Any) -> torch.device:
    """Where `model` takes its tokens, and gives what it expects: where accelerate brings its weights, or where they lie."""
    hook = getattr(model, "_hf_hook", None)
    for one in (hook, *getattr(hook, "hooks", ())):
        place = getattr(one, "execution_device", None)
        if place is not None:
            found = torch.device(place)
            # As tensors have it, which always say which.
            return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found
    device: torch.device = model.device
    return device


def layer_devices(model: Any, layout: Layout) -> Devices:
    """Where each layer of `model` computes, and so where its part of a cache lies."""
    home = device_of(model)
    if not is_spread(model):
        return all_on(str(home), layout)
    known = _found.get(model)
    if known is None or known[0] != _map(model):
        with torch.inference_mode():
            token = torch.zeros((1, 1), dtype=torch.long, device=home)
            note_devices(model, output_cache(model(input_ids=token, use_cache=True)))
        known = _found[model]
    return tuple(place or home for place in known[1])


def all_on(device: str, layout: Layout) -> Devices:
    """One device for all layers."""
    return (torch.device(device),) * len(layout.layers)


def is_spread(model: Any) -> bool:
    """Whether accelerate spread `model` over several devices that compute."""
    # What lies on the CPU or on disk beside an accelerator is brought to it for every pass.
    return len({str(place) for _, place in _map(model)} - {"cpu", "disk"}) > 1


def note_devices(model: Any, cache: Any) -> None:
    """Remembers where `cache`, the library's own after a pass of `model`, has each layer's tensors."""
    _found[model] = (_map(model), tuple(_device_in(layer) for layer in cache.layers))


def on_cpu(devices: Iterable[torch.device]) -> bool:
    """Whether a model of these devices computes on the processor, beside all else that does."""
    return all(device.type == "cpu" for device in devices)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Returns when what was asked of these devices is done: a pass on cuda is only begun when the call returns."""
    for device in {one for one in devices if one.type == "cuda"}:
        torch.cuda.synchronize(device)


def _map(model: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((getattr(model, "hf_device_map", None) or {}).items())


def _device_in(layer: Any) -> torch.device | None:
    held = [getattr(layer, "keys", None)]
    for states in ("conv_states", "recurrent_states"):
        held += getattr(layer, states, {}).values()
    return next((tensor.device for tensor in held if isinstance(tensor, torch.Tensor)), None)
