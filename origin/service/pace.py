"""Pace: how often whoever works looks for jobs and gives signs of life, and how soon the dead are replaced."""

from __future__ import annotations

import time

IDLE_SECONDS = 0.2
"""Between two looks at an empty queue: how much later a job may begin."""

SIGNS_PER_CLAIM = 6
"""Signs of life that a worker gives before it would count as dead, also while a model is loaded or a document fetched."""

RESTART_SECONDS = 1.0
"""Before another takes the place of a worker that died; twice that for each that died early before it, up to a minute."""

MAX_RESTART_SECONDS = 60.0

STEADY_SECONDS = 60.0
"""A worker that lived so long did not die of its start."""


class Restarts:
    """How long to wait before a worker that died is replaced."""

    def __init__(self) -> None:
        self._early = 0
        self._began = time.monotonic()

    def begin(self) -> None:
        """A worker is started now."""
        self._began = time.monotonic()

    def pause(self) -> float:
        """Seconds to wait, as it has died now."""
        self._early = 0 if time.monotonic() - self._began > STEADY_SECONDS else self._early + 1
        return float(min(RESTART_SECONDS * 2 ** max(self._early - 1, 0), MAX_RESTART_SECONDS))
