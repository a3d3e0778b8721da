"""Prefill speed of a model on this machine, measured whenever it prefills and remembered: what a saved token is worth."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress

import torch

from kvcdn.model.load import LoadedModel
from kvcdn.paths import cache_dir

_LEAST_TOKENS = 128
"""Shorter passes measure overhead, not speed."""


def remember_prefill(loaded: LoadedModel, tokens: int, seconds: float) -> None:
    """Records that `loaded` prefilled `tokens` tokens in `seconds` here. Never fails: the record is a convenience."""
    if tokens < _LEAST_TOKENS or seconds <= 0:
        return
    speeds = _load()
    speeds[_key(loaded)] = round(tokens / seconds, 2)
    path = cache_dir() / "prefill-speed.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(speeds, file)
        os.replace(file.name, path)


def prefill_speed(loaded: LoadedModel) -> float | None:
    """Tokens per second last measured here for this model, or None."""
    return _load().get(_key(loaded))


def _key(loaded: LoadedModel) -> str:
    return f"{loaded.identity.tag} {loaded.model.device} threads={torch.get_num_threads()} {loaded.model.dtype}"


def _load() -> dict[str, float]:
    try:
        content = json.loads((cache_dir() / "prefill-speed.json").read_text("utf-8"))
        return {str(key): float(value) for key, value in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
