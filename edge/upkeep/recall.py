"""The recall: what becomes of objects that an edge holds, or is sending, when they are revoked.

Nothing revoked is served from the moment on at which its list is known (`revocations`). So the recall may take its time over a
large cache, and does not hold up the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncIterator, Iterable

from kvcdn.edge.disk.storage import DiskCache, Harm
from kvcdn.edge.fills.inspection import inspect_head
from kvcdn.edge.fills.revocations import Revoked
from kvcdn.edge.http.sending import FileBody
from kvcdn.edge.http.target import ObjectName
from kvcdn.edge.reads.fetch import Fetcher
from kvcdn.edge.threads import in_thread
from kvcdn.edge.upkeep.purge import delete_chosen
from kvcdn.envelope import MAX_ENVELOPE_BYTES
from kvcdn.errors import UntrustedError

log = logging.getLogger("kvcdn.edge.fills.revocations")


class Recall:
    """Ends responses and fills of what is revoked, and deletes it. For the event loop's thread."""

    def __init__(self, revoked: Revoked, cache: DiskCache, fetcher: Fetcher) -> None:
        self.revoked = revoked
        self._cache, self._fetcher = cache, fetcher
        self._sending: weakref.WeakKeyDictionary[FileBody, ObjectName] = weakref.WeakKeyDictionary()
        self._trust = revoked.trust
        self._sweep: asyncio.Task[None] | None = None

    def attend(self, body: FileBody, name: ObjectName) -> None:
        """`body` is of `name`, and sent for as long as somebody holds it."""
        self._sending[body] = name

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """What is looked for in the background is looked for while the context lasts."""
        try:
            yield
        finally:
            await self._stop()

    async def recall(self) -> None:
        """Goes by what is revoked now."""
        self._fetcher.recall()
        changed, self._trust = self.revoked.trust != self._trust, self.revoked.trust
        if changed:
            # First: what begins to be served from here on is looked at anew, what began before is in `_sending`.
            self._cache.doubt()
        for body, name in list(self._sending.items()):
            if self.revoked.covers(name.key) or (changed and await in_thread(self._is_revoked, name, body)):
                body.cut()
        revoked = await delete_chosen(self.revoked.covers, self._cache)
        self._cache.dropped[Harm.REVOKED] += len(revoked)
        if changed:
            await self._stop()
            self._sweep = asyncio.create_task(self._confirm(self._cache.snapshot()), name="recall")

    def _is_revoked(self, name: ObjectName, body: FileBody) -> bool:
        """Whether the publisher of what is being sent is trusted no more; its envelope tells who that is."""
        try:
            inspect_head(name, body.begins(MAX_ENVELOPE_BYTES), self.revoked.trust)
        except UntrustedError:
            return True
        except Exception as error:  # noqa: BLE001 - the file is closed by now, or its fill goes on and is looked at as such
            log.debug("cannot look at %s: %s", name, error)
        return False

    async def _confirm(self, keys: Iterable[str]) -> None:
        """Reads the envelopes of all that is cached; those of publishers who are trusted no more are dropped."""
        for key in keys:
            try:
                await self._fetcher.confirm(key)
            except OSError as error:
                log.warning("the recall cannot open a file, which is looked at when it is asked for: %s", error.strerror)

    async def _stop(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweep
            self._sweep = None
