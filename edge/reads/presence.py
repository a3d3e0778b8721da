"""Presence: which objects exist, here or at the origin, and how large they are; asked once and remembered a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from kvcdn.edge.disk.storage import DiskCache
from kvcdn.edge.fills.origins import Origin, Origins
from kvcdn.edge.fills.peers import Peers
from kvcdn.edge.memory import FadingMemory
from kvcdn.edge.telemetry.metrics import Metrics
from kvcdn.edge.threads import in_thread
from kvcdn.errors import KvcdnError, UnavailableError
from kvcdn.store import BlobInfo

RUNNING_STATS = 8
"""Questions to the origin at once: each holds a thread and a connection."""

PRESENT_REMEMBERED = 65536
"""Sizes remembered, some 20 MB at most: documents of 300 million tokens in all."""

PRESENT_SECONDS = 600.0
"""Objects are immutable, but an operator may delete them."""

ABSENT_REMEMBERED = 16384

ABSENT_SECONDS = 2.0
"""What is published now is found two seconds later."""


class Presence:
    """Sizes of objects by key. For the event loop's thread."""

    def __init__(self, origins: Origins, cache: DiskCache, metrics: Metrics, peers: Peers | None = None) -> None:
        self._origins, self._cache, self._metrics, self._peers = origins, cache, metrics, peers
        self._present: FadingMemory[int] = FadingMemory(PRESENT_REMEMBERED)
        self._absent: FadingMemory[bool] = FadingMemory(ABSENT_REMEMBERED)
        self._asking: dict[str, asyncio.Task[int | None]] = {}
        self._places = asyncio.Semaphore(RUNNING_STATS)

    def known_size(self, key: str) -> int | None:
        """The size of an object that is cached or was seen at the origin lately; None says nothing."""
        size = self._cache.size_of(key)
        return self._present.get(key) if size is None else size

    def forget(self, chosen: Callable[[str], bool]) -> None:
        """Forgets what was seen at the origin of the keys that are `chosen`."""
        self._present.forget(chosen)

    async def size(self, key: str) -> int | None:
        """The object's size, or None where it does not exist; asks the origin if need be. Raises UnavailableError."""
        size = self.known_size(key)
        if size is not None or self._absent.get(key):
            return size
        question = self._asking.get(key)
        if question is None:
            question = self._asking[key] = asyncio.create_task(self._ask(key), name=f"stat {key}")
            question.add_done_callback(lambda task: self._answered(key, task))
        return await asyncio.shield(question)

    async def _ask(self, key: str) -> int | None:
        async with self._places:
            self._metrics.origin_requests.labels("stat").inc()
            before = self._peers.before(key) if self._peers is not None else ()
            info = await in_thread(_stat, key, self._origins, before)
        if info is None:
            self._absent.put(key, value=True, seconds=ABSENT_SECONDS)
            return None
        self._present.put(key, info.size, PRESENT_SECONDS)
        return info.size

    def _answered(self, key: str, question: asyncio.Task[int | None]) -> None:
        del self._asking[key]
        if not question.cancelled():
            question.exception()  # marks it as seen: whoever asked was told, if still there


def _stat(key: str, origins: Origins, peers: Sequence[Origin]) -> BlobInfo | None:
    """What the origins say; while none of them can be asked, whether a peer has it all the same. Raises UnavailableError."""
    try:
        return origins.stat(key)
    except UnavailableError:
        for peer in peers:
            with contextlib.suppress(KvcdnError):
                info = peer.stat(key)
                if info is not None:
                    return info
        raise
