"""Pace: who dies early is replaced later and later, and who lived long is replaced at once."""

from __future__ import annotations

import pytest

from kvcdn.origin.service import pace
from kvcdn.origin.service.pace import MAX_RESTART_SECONDS, RESTART_SECONDS, STEADY_SECONDS, Restarts


def test_pauses_grow_and_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as long after each early death, up to a minute; as short as ever after one that lived."""
    now = 0.0
    monkeypatch.setattr(pace.time, "monotonic", lambda: now)
    restarts = Restarts()

    def pause_after(seconds: float) -> float:
        nonlocal now
        restarts.begin()
        now += seconds
        return restarts.pause()

    early = [pause_after(STEADY_SECONDS / 2) for _ in range(8)]
    assert [min(RESTART_SECONDS * 2**number, MAX_RESTART_SECONDS) for number in range(8)] == early
    assert [RESTART_SECONDS] * 2 == [pause_after(STEADY_SECONDS + 1), pause_after(STEADY_SECONDS / 2)]
