"""Hot: which keys are asked for most just now, of any number, in bounded memory.

Counts fade by half every HALF_SECONDS, so that what was asked for yesterday makes place. Where more keys come than are counted,
those counted least are forgotten, many at once: what is among the first few is right, what is far behind may be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COUNTED = 4096
"""Keys counted at most, some 1 MB."""

KEPT = 1024
"""Keys that are kept when there are too many."""

HALF_SECONDS = 1800.0
"""By then a count is half of what it was."""

FORGOTTEN = 0.01
"""A faded count below this is none."""


@dataclass(slots=True)
class Heat:
    """What one key was asked for, faded."""

    asked: float = 0.0
    bytes: float = 0.0
    blocks: int = 0
    """Of a prefix, when it was last looked up."""


class Hot:
    """Faded counts by key. Used by one thread; seconds are the caller's clock, which never goes back."""

    def __init__(self, now: float) -> None:
        self._heats: dict[str, Heat] = {}
        self._faded = now

    def add(self, key: str, size: int = 0, blocks: int = 0) -> None:
        """`key` was asked for once, and `size` bytes were sent."""
        heat = self._heats.get(key)
        if heat is None:
            if len(self._heats) >= COUNTED:
                self._heats = dict(self.first(KEPT))
            heat = self._heats[key] = Heat()
        heat.asked += 1.0
        heat.bytes += size
        heat.blocks = blocks

    def fade(self, now: float) -> None:
        """Lets the counts fade to what they are at `now`."""
        factor = 0.5 ** ((now - self._faded) / HALF_SECONDS)
        self._faded = now
        for heat in self._heats.values():
            heat.asked *= factor
            heat.bytes *= factor
        self._heats = {key: heat for key, heat in self._heats.items() if heat.asked >= FORGOTTEN}

    def first(self, count: int) -> Sequence[tuple[str, Heat]]:
        """The `count` keys that are asked for most, hottest first."""
        return sorted(self._heats.items(), key=lambda item: item[1].asked, reverse=True)[:count]

    def __len__(self) -> int:
        return len(self._heats)
