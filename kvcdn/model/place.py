"""Where a model computes, which must be one device: accelerate may keep weights elsewhere, and bring them for every pass."""

from __future__ import annotations

from typing import Any

import torch

from kvcdn.errors import UnsupportedModelError


def device_of(model: Any) -> torch.device:
    """Where `model` computes: where accelerate brings its weights for every pass, or where they lie."""
    hook = getattr(model, "_hf_hook", None)
    for one in (hook, *getattr(hook, "hooks", ())):
        place = getattr(one, "execution_device", None)
        if place is not None:
            return torch.device(place)
    device: torch.device = model.device
    return device


def require_one_device(model: Any) -> None:
    """Raises UnsupportedModelError for a model that accelerate spread over several devices that compute."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    # What lies on the CPU or on disk beside an accelerator is brought to it for every pass.
    computing = sorted(places - {"cpu", "disk"})
    if len(computing) > 1:
        raise UnsupportedModelError(
            f"{model.config.model_type} is spread over the devices {', '.join(computing)}; its cache must lie on one",
            hint="load it on one device, with what does not fit offloaded to the CPU",
        )
