"""A fill as the event loop sees it: one object on its way, those who wait for it, and what they may read already.

The bytes are not here but in the fill's spool, a file that grows while readers read it: however many there are, and however
slow, none holds up another or the fill, and none takes memory. They are told of the frontier and never read beyond it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from kvcdn.edge.disk.staging import Spool
from kvcdn.edge.fills.fill_lock import FillLock, FillState
from kvcdn.edge.fills.origins import Giver
from kvcdn.edge.http.outcome import PASSING_TROUBLES, BrokenFillError, Reason, Refusal
from kvcdn.edge.http.target import ObjectName
from kvcdn.signing import PublicKey

WHOLE_BYTES = 64 * 1024
"""Objects up to this are answered when they are whole: a refusal then needs no broken connection to be told."""


class Fill:
    """For the event loop's thread."""

    def __init__(self, name: ObjectName, seconds: float) -> None:
        """`seconds` is what may pass until the object's envelope is here."""
        self.name = name
        self.task: asyncio.Task[None] | None = None
        self.spool: Spool | None = None
        self.size = 0
        self.etag = ""
        self.stored = False
        """Whether the object is meant for the cache."""
        self.wanted = True
        """Whether the cache is to keep it still, now that it comes."""
        self.direct = False
        """Whether no peers are asked, because a peer asks."""
        self.guest = False
        """Whether a peer keeps the object, and not this edge."""
        self.tokens = 0
        """Of a block, once its envelope is here."""
        self.evicted = False
        """Whether the object had been here before, and had to leave."""
        self.resumes = 0
        self.giver = Giver.ORIGIN
        """Who gives its beginning, as far as is known."""
        self.given: Mapping[Giver, int] = {}
        """Proven bytes by who gave them, once it has ended."""
        self.publisher: PublicKey | None = None
        """Who signed the object, once its envelope is here."""
        self.refusal: Refusal | None = None
        self._lock = FillLock(time.monotonic(), time.monotonic() + seconds)
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def admits(self) -> bool:
        """Whether who comes now joins it."""
        return self._lock.admits(time.monotonic())

    @property
    def verified(self) -> int:
        """Leading bytes that have come and are proven."""
        return self._lock.verified

    def open(self, spool: Spool, size: int, etag: str, deadline: float, *, stored: bool) -> None:
        """The envelope is good and there is a place for the bytes."""
        self.spool, self.size, self.etag, self.stored = spool, size, etag, stored
        self._lock.open(size, time.monotonic(), deadline)
        self._wake()

    def advance(self, verified: int) -> None:
        """So many leading bytes are in the spool and proven."""
        if self._lock.state is not FillState.WRITING:
            return  # a thread that hung goes on after all, when the fill was given up
        self._lock.advance(verified, time.monotonic())
        self._wake()

    def finish(self) -> None:
        self._lock.finish()
        self._wake()

    def fail(self, refusal: Refusal) -> None:
        self.refusal = refusal
        self._lock.fail(transient=refusal.reason in PASSING_TROUBLES)
        self._wake()

    def cut(self, refusal: Refusal) -> None:
        """The object must not be served any more, nor kept."""
        self.wanted = False
        if self._lock.state.running:
            self.fail(refusal)

    def require_uncut(self) -> None:
        """Raises BrokenFillError after `cut`."""
        if self.refusal is not None:
            raise BrokenFillError(self.refusal)

    def abandon(self) -> None:
        """The writer is gone; does nothing after a verdict."""
        self._lock.abandon()
        self._wake()

    async def opened(self) -> FillState:
        """Waits until readers may begin: WRITING or DONE; any other state says why they cannot."""
        since = time.monotonic()
        while (state := self._lock.seen(time.monotonic(), since)).running and not self._readable():
            await self._moved(since)
        return state

    async def reach(self, position: int) -> int:
        """Waits until bytes behind `position` may be passed on; up to where. Raises BrokenFillError."""
        since = time.monotonic()
        while self._lock.verified <= position:
            state = self._lock.seen(time.monotonic(), since)
            if not state.running:
                raise BrokenFillError(self.refusal_for(state))
            await self._moved(since)
        return self._lock.verified

    async def ended(self) -> Refusal | None:
        """Waits until the object is here, and stored where it is meant to be; else why it is not."""
        since = time.monotonic()
        while (state := self._lock.seen(time.monotonic(), since)).running:
            await self._moved(since)
        return None if state is FillState.DONE else self.refusal_for(state)

    def refusal_for(self, state: FillState) -> Refusal:
        """What to tell a reader who saw `state`, which is an end without the object."""
        if self.refusal is not None:
            return self.refusal
        if state is FillState.WRITER_GONE:
            return Refusal(Reason.INTERNAL, f"{self.name}: the fill ended without a result")
        return Refusal(Reason.BUSY, f"{self.name} is on its way and does not come forward")

    def _readable(self) -> bool:
        lock = self._lock
        # Of a large object the envelope says all that the head of an answer says; its bytes may be a moment away.
        return lock.verified == lock.size > 0 or lock.size > WHOLE_BYTES

    async def _moved(self, since: float) -> None:
        """Waits for any change, or until time alone may have brought one."""
        loop = asyncio.get_running_loop()
        change: asyncio.Future[None] = loop.create_future()
        self._waiting.add(change)
        timer = loop.call_later(self._lock.patience(time.monotonic(), since) + 0.01, _set, change)
        try:
            await change
        finally:
            timer.cancel()
            self._waiting.discard(change)

    def _wake(self) -> None:
        for change in self._waiting:
            _set(change)
        self._waiting = set()


def _set(change: asyncio.Future[None]) -> None:
    if not change.done():
        change.set_result(None)
