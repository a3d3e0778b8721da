"""Prefill speed of a model on this machine, measured whenever it prefills and remembered: what a saved token is worth."""

from __future__ import annotations

import torch

from kvcdn.digest import ModelTag
from kvcdn.model.load import LoadedModel
from kvcdn.model.remembered import Remembered

_LEAST_TOKENS = 128
"""Shorter passes measure overhead, not speed."""


def remember_prefill(loaded: LoadedModel, tokens: int, seconds: float) -> None:
    """Records that `loaded` prefilled `tokens` tokens in `seconds` here. Never raises: the record is a convenience."""
    if tokens >= _LEAST_TOKENS and seconds > 0:
        Remembered("prefill-speed").put(
            _key(loaded.identity.tag, loaded.model.device, loaded.model.dtype), round(tokens / seconds, 2)
        )


def prefill_speed(loaded: LoadedModel) -> float | None:
    """Tokens per second last measured here for this model, or None."""
    return _remembered(_key(loaded.identity.tag, loaded.model.device, loaded.model.dtype))


def prefill_speed_of(tag: ModelTag, dtype: torch.dtype, device: str = "cpu") -> float | None:
    """As `prefill_speed`, for a model that is not loaded."""
    return _remembered(_key(tag, torch.device(device), dtype))


def _remembered(key: str) -> float | None:
    speed = Remembered("prefill-speed").get(key)
    return float(speed) if isinstance(speed, int | float) and speed > 0 else None


def _key(tag: ModelTag, device: torch.device, dtype: torch.dtype) -> str:
    return f"{tag} {device} threads={torch.get_num_threads()} {dtype}"
