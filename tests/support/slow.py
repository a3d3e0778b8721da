"""Models so slow that fetching always pays: for tests of what clients do by themselves that are not about who is faster."""

from __future__ import annotations

from typing import Any

import pytest

from kvcdn.model import speed
from kvcdn.model.remembered import Remembered

_DAYS = 1e7
"""Seconds that a thousand tokens take: a link that is silent for long, on a busy machine, is still waited for."""


class _Slow(Remembered):
    """Every model takes days, and what it takes here changes nothing."""

    def get(self, key: str) -> Any:
        return {sort: [[0, 1000, _DAYS]] for sort in ("blocks", "prompts")}

    def put(self, key: str, value: Any, *, every_s: float = 0.0) -> None:
        """Not remembered."""


def remember_slow_models(patch: pytest.MonkeyPatch) -> None:
    """From now on plans know of every model that it is slow: they fetch, unless a source fails."""
    patch.setattr(speed, "Remembered", _Slow)
