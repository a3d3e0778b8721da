"""Room: the layers of a cache that is about to be filled, each where the model computes it, and the way to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvcdn.errors import UnavailableError
from kvcdn.layout import LayerSpec
from kvcdn.model.cache import CacheLayer, make_layer, tensors_in
from kvcdn.model.place import Devices, on_cpu
from kvcdn.model.staging import Uploads


def make_room(
    specs: Sequence[LayerSpec],
    devices: Devices,
    first: Sequence[int],
    wait: Callable[[int], None],
    *,
    length: int,
    capacity: int,
) -> tuple[list[CacheLayer], Uploads]:
    """Layers with room for tokens `first` to `capacity`, of which `length` are shown, and what writes to accelerators.

    A layer calls `wait` with its number when it is first used. Raises UnavailableError where a device has no memory for them.
    """
    each = enumerate(zip(specs, devices, first, strict=True))
    try:
        layers = [
            make_layer(spec, capacity, length, device, partial(wait, index), first=start)
            for index, (spec, device, start) in each
        ]
    except torch.OutOfMemoryError as error:
        raise UnavailableError(f"there is no room for a cache of {capacity:,} tokens: {error}") from None
    return layers, Uploads(() if on_cpu(devices) else (tensor for layer in layers for tensor in tensors_in(layer)))
