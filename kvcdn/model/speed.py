"""Prefill speed of a model on this machine, measured whenever it prefills and remembered: what a saved token is worth."""

from __future__ import annotations

import torch

from kvcdn.model.load import LoadedModel
from kvcdn.model.remembered import Remembered

_LEAST_TOKENS = 128
"""Shorter passes measure overhead, not speed."""


def remember_prefill(loaded: LoadedModel, tokens: int, seconds: float) -> None:
    """Records that `loaded` prefilled `tokens` tokens in `seconds` here. Never raises: the record is a convenience."""
    if tokens >= _LEAST_TOKENS and seconds > 0:
        Remembered("prefill-speed").put(_key(loaded), round(tokens / seconds, 2))


def prefill_speed(loaded: LoadedModel) -> float | None:
    """Tokens per second last measured here for this model, or None."""
    speed = Remembered("prefill-speed").get(_key(loaded))
    return float(speed) if isinstance(speed, int | float) and speed > 0 else None


def _key(loaded: LoadedModel) -> str:
    return f"{loaded.identity.tag} {loaded.model.device} threads={torch.get_num_threads()} {loaded.model.dtype}"
