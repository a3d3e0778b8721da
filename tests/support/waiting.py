"""Waiting for what others are still at: another thread, another process, a disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

WAIT_SECONDS = 120.0
"""Far more than anything here takes where nothing is wrong, on a machine that is ten times slower than it was yesterday."""

PROCESS_SECONDS = 600.0
"""As that, of a process of its own that may load torch and a model: who hangs is ended, and nobody else."""

POLL_SECONDS = 0.01

T = TypeVar("T")


def until(look: Callable[[], T], seen: Callable[[], object] | None = None, seconds: float = WAIT_SECONDS) -> T:
    """Looks again and again until what `look` gives is true, and gives that; fails with what is `seen`, or was given last."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, found if seen is None else seen()
        time.sleep(POLL_SECONDS)
    return found
