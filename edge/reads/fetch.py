"""The read path: an object from the cache, or from the origins by one fill, however many ask.

A fill is a task of its own: it goes on when those who asked have left. Its blocking halves (`arrival`, `staging`) run in
threads; index and accounting are touched by the loop's thread only. Who asks while an object is on its way joins the fill and
reads what is proven so far, from the fill's file, so that eviction cannot come between. What a fill ends with goes to all.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from threading import Event

from kvcdn.edge.disk.staging import DISK_FULL, Staging
from kvcdn.edge.disk.storage import DiskCache, Harm, OpenEntry
from kvcdn.edge.fills.arrival import FILL_SECONDS, Arrival
from kvcdn.edge.fills.fill import Fill
from kvcdn.edge.fills.fill_lock import FillState
from kvcdn.edge.fills.guests import CAPACITY_SHARE, Guests
from kvcdn.edge.fills.inspection import inspect_file
from kvcdn.edge.fills.lodging import Lodging, Lodgings
from kvcdn.edge.fills.origins import Origin, Origins
from kvcdn.edge.fills.peers import Peers
from kvcdn.edge.fills.revocations import Revoked
from kvcdn.edge.http.outcome import REMEMBERED_SECONDS, BrokenFillError, CacheOutcome, Reason, Refusal
from kvcdn.edge.http.target import ObjectName
from kvcdn.edge.memory import FadingMemory
from kvcdn.edge.telemetry.metrics import Metrics
from kvcdn.edge.telemetry.tracing import SpanKind, Tracing, begin
from kvcdn.edge.tenants.usage import EdgeUsage
from kvcdn.edge.threads import begin_in_thread, in_thread
from kvcdn.errors import IntegrityError, KvcdnError, UnavailableError

RUNNING_FILLS = 8
"""Fills that run at once. Each holds two or three pieces of a megabyte; eight fill any link from one origin."""

WAITING_FILLS = 1024
"""Fills that may wait for a place; whoever asks for more objects at once is told to come back."""

WAIT_SECONDS = 30.0
"""How long a fill waits for a place."""

STOP_SECONDS = 10.0
"""How long the end of the process waits for fills that a slow disk makes durable; what they leave the next start removes."""

REFUSALS_REMEMBERED = 16384
"""Bounds the memory of what the origin lacks: some 10 MB."""

HANG_SECONDS = 120.0
"""A fill that outlives its deadline by this hangs in a system call: its place is given to others."""

HEAD_TURNS = 5
"""Turns of the loop that it takes from an envelope to the head of the answer to whoever asked first."""

JOINS = 3
"""Fills that one request joins or begins before it gives up: one that its writer left, or that hangs, has a successor."""

log = logging.getLogger("kvcdn.edge.reads.fetch")


@dataclass(frozen=True)
class Found:
    """An object to serve. Whoever gets it closes `file`."""

    file: FileIO
    size: int
    etag: str
    age: int
    """Whole seconds since the edge stored it."""
    outcome: CacheOutcome
    tokens: int = 0
    """Tokens whose KV it holds."""
    evicted: bool = False
    """Whether it is filled again, after it had to leave."""
    fill: Fill | None = None
    """The fill that writes `file` while it is read: nothing behind what it has reached is the object's."""


@dataclass(frozen=True)
class Refused:
    """No object: why, and whether the origin was asked for it just now."""

    refusal: Refusal
    outcome: CacheOutcome


class Fetcher:
    """Finds objects. For the event loop's thread."""

    def __init__(
        self,
        origins: Origins,
        cache: DiskCache,
        revoked: Revoked,
        metrics: Metrics,
        peers: Peers | None = None,
    ) -> None:
        self.origins = origins
        self._cache, self._revoked, self._metrics, self._peers = cache, revoked, metrics, peers
        self.usage: EdgeUsage | None = None
        """What counts fills, where a ledger is kept."""
        self._guests = Guests(int(cache.capacity * CAPACITY_SHARE) if peers else 0)
        self._fills: dict[str, Fill] = {}
        self._alive: weakref.WeakSet[Fill] = weakref.WeakSet()
        """Those that somebody holds, also after others took their places."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusals: FadingMemory[Refusal] = FadingMemory(REFUSALS_REMEMBERED)
        self._places = asyncio.Semaphore(RUNNING_FILLS)
        self._lodgings = Lodgings(cache, self._guests)
        self._stopping = Event()
        self.tracing: Tracing | None = None

    async def get(self, name: ObjectName, *, direct: bool = False) -> Found | Refused:
        """The object, or why there is none; `direct` for a peer, so that no peers are asked.

        Raises OSError where the process has no file descriptors left.
        """
        refusal = self._revoked.refusal(name)
        result = Refused(refusal, CacheOutcome.REFUSED) if refusal else await self._find(name, direct=direct)
        # What was revoked in the meantime.
        refusal = self._revoked.refusal(name)
        if refusal is None or isinstance(result, Refused):
            return result
        result.file.close()
        return Refused(refusal, CacheOutcome.REFUSED)

    def refuses(self, name: ObjectName) -> bool:
        """Whether `name` is revoked, so that it need not be asked for."""
        return self._revoked.refusal(name) is not None

    def recall(self) -> None:
        """Ends fills of what is revoked by now."""
        for fill in list(self._alive):
            refusal = self._revoked.refusal(fill.name, fill.publisher)
            if refusal is not None:
                self._leave(fill)
                fill.cut(refusal)
        self._guests.drop(lambda fill: self._revoked.refusal(fill.name, fill.publisher) is not None)

    def disown(self, chosen: Callable[[str], bool]) -> None:
        """Has what is on its way under `chosen` keys passed on to those who wait for it, and not kept."""
        for fill in list(self._alive):
            if chosen(fill.name.key):
                self._leave(fill)
                fill.wanted = False
        self._guests.drop(lambda fill: chosen(fill.name.key))

    async def confirm(self, key: str) -> None:
        """Drops a cached object whose envelope does not hold, by the trust list of now."""
        name = ObjectName.from_path(f"/{key}")
        opened = self._cache.peek(key)
        if name is not None and opened is not None:
            if opened.entry.etag is None:
                await self._confirm(name, opened)
            opened.file.close()

    async def _find(self, name: ObjectName, *, direct: bool) -> Found | Refused:
        opened = self._cache.open(name.key)
        if opened is not None and (etag := opened.entry.etag or await self._confirm(name, opened)) is not None:
            age = max(0, int(time.time() - opened.entry.stored_at))
            return Found(opened.file, opened.entry.size, etag, age, CacheOutcome.HIT, opened.entry.tokens)
        guest = None if self._cache.is_pinned(name.key) else self._guests.get(name.key)
        if guest is not None:
            fill, spool, age = guest
            return Found(spool.open(), fill.size, fill.etag, age, CacheOutcome.COLLAPSED, fill.tokens, fill=fill)
        refusal = self._refusals.get(name.key)
        if refusal is not None:
            return Refused(refusal, CacheOutcome.REMEMBERED)
        return await self._fill_or_follow(name, direct=direct)

    async def stop(self) -> None:
        """Ends fills under way at their next piece, leaving nothing behind; waits a moment for those that hang."""
        self._stopping.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_SECONDS)

    async def _confirm(self, name: ObjectName, opened: OpenEntry) -> str | None:
        """The tag of a file that an earlier process stored, from its envelope; None, and it is dropped, if that is bad."""
        try:
            while True:
                trust = self._revoked.trust
                head = await in_thread(inspect_file, name, opened.file, opened.entry.size, trust)
                if trust is self._revoked.trust:
                    break
        except (IntegrityError, OSError) as error:
            opened.file.close()
            harm = Harm.of(error)
            self._cache.drop(name.key, opened.entry, harm, str(error))
            return None
        opened.entry.etag, opened.entry.tokens = head.etag, head.tokens
        return head.etag

    async def _fill_or_follow(self, name: ObjectName, *, direct: bool) -> Found | Refused:
        refusal = Refusal(Reason.BUSY, f"{name}: {JOINS} fills came to nothing")
        for _ in range(JOINS):
            fill = self._fills.get(name.key)
            leading = fill is None or not fill.admits
            if fill is None or not fill.admits:
                if len(self._tasks) >= WAITING_FILLS:
                    busy = Refusal(Reason.BUSY, f"{WAITING_FILLS} objects are on their way already; try again")
                    return Refused(busy, CacheOutcome.REFUSED)
                fill = self._begin(name, direct=direct)
            state = await fill.opened()
            if state in (FillState.WRITING, FillState.DONE) and fill.spool is not None:
                outcome = CacheOutcome.COLLAPSED if not leading else CacheOutcome.MISS if fill.stored else CacheOutcome.PASSED
                return Found(fill.spool.open(), fill.size, fill.etag, 0, outcome, fill.tokens, fill.evicted, fill)
            refusal = fill.refusal_for(state)
            if state not in (FillState.WRITER_GONE, FillState.TOO_OLD):
                break
        return Refused(refusal, CacheOutcome.REFUSED)

    def _begin(self, name: ObjectName, *, direct: bool) -> Fill:
        fill = self._fills[name.key] = Fill(name, WAIT_SECONDS + FILL_SECONDS)
        fill.direct = direct
        fill.evicted = self._cache.has_evicted(name.key)
        fill.giver = self.origins.each[0].giver
        self._alive.add(fill)
        # The fill outlives the request that began it.
        task = asyncio.create_task(self._run(fill), name=f"fill {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return fill

    async def _run(self, fill: Fill) -> None:
        self._metrics.fills_running.inc()
        # In the trace, and under the id, of the request that began it.
        span = begin(self.tracing, "fill", SpanKind.INTERNAL, object=fill.name.short)
        span.follow()
        refusal: Refusal | None = Refusal(Reason.INTERNAL, "")
        try:
            refusal = await self._attempt(fill)
            if refusal is not None:
                self._refuse(fill, refusal)
            if self.usage is not None:
                self.usage.filled(fill, refusal)
        finally:
            span.set(size=fill.size, outcome=_KEPT[fill.stored] if refusal is None else refusal.reason)
            span.end(error="" if refusal is None or refusal.reason is Reason.NOT_FOUND else refusal.reason)
            fill.abandon()
            self._metrics.fills_running.dec()
            self._leave(fill)

    def _leave(self, fill: Fill) -> None:
        """Who comes from now on does not join `fill`."""
        if self._fills.get(fill.name.key) is fill:
            del self._fills[fill.name.key]

    def _refuse(self, fill: Fill, refusal: Refusal) -> None:
        self._metrics.fills.labels(refusal.reason).inc()
        if seconds := REMEMBERED_SECONDS.get(refusal.reason):
            self._refusals.put(fill.name.key, refusal, seconds)
        if refusal.reason is not Reason.NOT_FOUND:
            log.warning("no %s: %s: %s", fill.name, refusal.reason, refusal.message)
        if fill.refusal is None:
            fill.fail(refusal)

    async def _attempt(self, fill: Fill) -> Refusal | None:
        """None once the object is complete."""
        name = fill.name
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._places.acquire()
        except TimeoutError:
            return Refusal(Reason.BUSY, f"{name} waited {WAIT_SECONDS:.0f} s for a place to be filled")
        try:
            if self._stopping.is_set():
                raise UnavailableError(f"{name}: the edge is stopping")
            async with asyncio.timeout(FILL_SECONDS + HANG_SECONDS) as limit:
                await self._receive(fill, limit)
        except (KvcdnError, BrokenFillError) as error:
            return Refusal.of(error) if isinstance(error, KvcdnError) else error.refusal
        except TimeoutError:
            return Refusal(Reason.ORIGIN_UNAVAILABLE, f"{name}: the origin or the disk hangs")
        except OSError as error:
            reason = Reason.DISK_FULL if error.errno in DISK_FULL else Reason.DISK_ERROR
            return Refusal(reason, f"{name}: the edge's disk {_DISK_WORDS[reason]} ({error.strerror})")
        except Exception:
            log.exception("filling %s failed", name)
            return Refusal(Reason.INTERNAL, f"{name}: the edge failed, its log says how")
        finally:
            self._places.release()
        return None

    async def _receive(self, fill: Fill, limit: asyncio.Timeout) -> None:
        begin = partial(Arrival.begin, self._sources(fill), fill.name, self._revoked.trust, self._count)
        arrival, early = await self._lodgings.receive(fill.name, begin)
        fill.publisher, fill.tokens = arrival.head.publisher, arrival.head.tokens
        fill.giver = arrival.origin.giver
        limit.reschedule(asyncio.get_running_loop().time() + arrival.deadline - time.monotonic() + HANG_SECONDS)
        try:
            # Whoever had to ask the origin keeps what it got, as no peer gave it.
            fill.guest = not arrival.origin.authority and not self._keeps(fill.name.key)
            lodging = await self._lodgings.find(fill.name, arrival.head.size, guest=fill.guest, early=early)
        except BaseException:
            arrival.abandon()
            raise
        try:
            refusal = fill.refusal or self._revoked.refusal(fill.name, fill.publisher)
            if refusal is not None:
                raise BrokenFillError(refusal)
            fill.open(lodging.staging.spool, arrival.head.size, arrival.head.etag, arrival.deadline, stored=lodging.stored)
            # The thread would take turns with the loop from now on: who waits for the head of the answer has it first.
            for _ in range(HEAD_TURNS):
                await asyncio.sleep(0)
            if lodging.stored:
                self._lodgings.clear()
        except BaseException:
            arrival.abandon()
            self._lodgings.leave(lodging)
            raise
        landing = begin_in_thread(_land, arrival, lodging.staging, self._stopping, fill, _told(fill))
        landing.add_done_callback(lambda done: self._landed(fill, arrival, lodging, done))
        try:
            # A thread that hangs keeps its room until it ends: what it may still write is counted.
            kept = await asyncio.shield(landing)
        finally:
            fill.resumes, fill.given = arrival.resumes, arrival.given()
            self._metrics.resumes.inc(arrival.resumes)
        (self._metrics.origin_bytes if arrival.origin.authority else self._metrics.peer_bytes).inc(fill.size)
        self._metrics.fills.labels("stored" if kept and lodging.stored else "passed").inc()
        fill.require_uncut()
        fill.finish()

    def _landed(self, fill: Fill, arrival: Arrival, lodging: Lodging, landing: asyncio.Future[bool]) -> None:
        """The thread that filled has ended, or there was none to be had."""
        kept = not landing.cancelled() and landing.exception() is None and landing.result()
        if not kept:
            arrival.abandon()
        self._lodgings.settle(lodging, fill, kept=kept)
        if kept and (not fill.wanted or self._revoked.refusal(fill.name, fill.publisher) is not None):
            self._guests.drop(lambda guest: guest is fill)
            if lodging.stored:
                self._cache.remove([fill.name.key])
                self._cache.delete_removed()

    def _sources(self, fill: Fill) -> tuple[Origin, ...]:
        """Where the object may come from, in order: peers that are to keep it, then the origins."""
        if self._peers is None or fill.direct:
            return self.origins.each
        return (*self._peers.before(fill.name.key), *self.origins.each)

    def _keeps(self, key: str) -> bool:
        return self._peers is None or self._peers.keeps(key) or self._cache.is_pinned(key)

    def _count(self, origin: Origin) -> None:
        """`origin` is asked for an object."""
        (self._metrics.origin_requests.labels("get") if origin.authority else self._metrics.peer_requests).inc()


_KEPT = {True: "stored", False: "passed"}

_DISK_WORDS = {Reason.DISK_FULL: "is full", Reason.DISK_ERROR: "failed"}


def _land(arrival: Arrival, staging: Staging, stopping: Event, fill: Fill, tell: Callable[[int], None]) -> bool:
    """Receives an object and makes it durable; False where the disk does not: then it has passed through, and that is all.

    Raises as `Arrival.land`, BrokenFillError where `fill` is cut, and leaves nothing behind.
    """
    try:
        arrival.land(staging, stopping, tell)
    except BaseException:
        staging.discard()
        raise
    if not fill.wanted:
        staging.discard()
        return False
    try:
        staging.commit()
    except OSError as error:
        log.warning("cannot keep an object: %s", error.strerror)
        staging.discard()
        return False
    return True


def _told(fill: Fill) -> Callable[[int], None]:
    """What the thread that fills calls, for `fill.advance` in the loop."""
    loop = asyncio.get_running_loop()

    def tell(verified: int) -> None:
        fill.require_uncut()
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            loop.call_soon_threadsafe(fill.advance, verified)

    return tell
