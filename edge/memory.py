"""Memory that fades: a bounded map whose entries expire, the least recently written leaving first."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FadingMemory(Generic[T]):
    """At most `limit` entries, each with its own time to live in seconds."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._items: OrderedDict[str, tuple[float, T]] = OrderedDict()

    def put(self, key: str, value: T, seconds: float) -> None:
        self._items.pop(key, None)
        self._items[key] = (self._clock() + seconds, value)
        if len(self._items) > self._limit:
            self._items.popitem(last=False)

    def get(self, key: str) -> T | None:
        item = self._items.get(key)
        if item is None:
            return None
        if item[0] <= self._clock():
            del self._items[key]
            return None
        return item[1]

    def forget(self, chosen: Callable[[str], bool]) -> None:
        """Drops the entries whose keys are `chosen`."""
        for key in [key for key in self._items if chosen(key)]:
            del self._items[key]

    def __len__(self) -> int:
        return len(self._items)
