"""Administration: metrics, the status, and the orders that change a cache, for those who are allowed to."""

from __future__ import annotations

import json
import os
import tempfile
from asyncio import Lock
from collections.abc import Callable
from io import BufferedWriter, FileIO

from aiohttp import web

from kvcdn.access.grant import Grant, Scope
from kvcdn.digest import ModelTag
from kvcdn.edge.disk.storage import DiskCache
from kvcdn.edge.http.body import read_body
from kvcdn.edge.http.respond import (
    JSON_HEADERS,
    NO_STORE,
    RETRY_SECONDS,
    FileResponse,
    HeadResponse,
    Note,
    PlainResponse,
)
from kvcdn.edge.http.sending import FileBody, FileSlice
from kvcdn.edge.reads.fetch import Fetcher, Refused
from kvcdn.edge.reads.presence import Presence
from kvcdn.edge.telemetry.metrics import CONTENT_TYPE, Metrics
from kvcdn.edge.tenants.admission import Admission
from kvcdn.edge.tenants.usage import EdgeUsage
from kvcdn.edge.threads import in_thread
from kvcdn.edge.upkeep.pins import Pin, UnpinRequest
from kvcdn.edge.upkeep.purge import PurgeRequest, purge
from kvcdn.edge.upkeep.status import Status
from kvcdn.edge.upkeep.warm import Warming, WarmRequest
from kvcdn.errors import CorruptError, KvcdnError

SCOPES = {
    "/metrics": Scope.STATS,
    "/v1/pins": Scope.WARM,
    "/v1/purge": Scope.PURGE,
    "/v1/status": Scope.STATS,
    "/v1/unpin": Scope.WARM,
    "/v1/usage": Scope.STATS,
    "/v1/warm": Scope.WARM,
}
"""What is answered here, by path, and what a token has to permit for it."""

SHOWN = ("/metrics", "/v1/pins", "/v1/status", "/v1/usage")
"""What is only looked at."""


class Administration:
    """Carries out what `app` has found to be permitted."""

    def __init__(
        self,
        fetcher: Fetcher,
        presence: Presence,
        cache: DiskCache,
        warming: Warming,
        admission: Admission,
        metrics: Metrics,
        status: Status,
    ) -> None:
        self._fetcher, self._presence, self._cache, self._warming = fetcher, presence, cache, warming
        self._admission, self._metrics, self._status, self._pins = admission, metrics, status, warming.pins
        self.usage: EdgeUsage | None = None
        """What keeps the ledger, where one is kept."""
        self._copying = Lock()

    async def answer(self, request: web.BaseRequest, note: Note, grant: Grant) -> web.StreamResponse:
        """Metrics, the status, the ledger, or what becomes of an order; `note` says which."""
        match note.route:
            case "metrics":
                return self._show_metrics()
            case "usage":
                return await self._show_usage(request, note)
            case "status":
                return PlainResponse(note, 200, JSON_HEADERS, await self._status.encode())
            case "pins":
                shown = self._pins.encode(lambda key: self._covers(grant, key))
                return PlainResponse(note, 200, JSON_HEADERS, shown)
            case _:
                return await self._order(request, note, grant)

    def _show_metrics(self) -> PlainResponse:
        headers = {"Content-Type": CONTENT_TYPE, "Cache-Control": NO_STORE}
        return PlainResponse(Note("metrics"), 200, headers, self._metrics.render())

    async def _show_usage(self, request: web.BaseRequest, note: Note) -> web.StreamResponse:
        """The ledger as FORMAT.md section 14 has it, from a nameless file: it may be larger than one wants in memory."""
        if self.usage is None:
            return PlainResponse.line(note, 404, "this edge keeps no ledger: set usage_file", {})
        try:
            async with self._copying:
                file = await in_thread(_copied, self.usage)
        except (KvcdnError, OSError) as error:
            message = f"the ledger cannot be read: {error}"
            return PlainResponse.line(note, 503, message, {"Retry-After": str(RETRY_SECONDS)})
        size = os.fstat(file.fileno()).st_size
        headers = {"Content-Type": "application/jsonl", "Cache-Control": NO_STORE, "Content-Length": str(size)}
        if request.method == "HEAD":
            file.close()
            return HeadResponse(note, 200, headers)
        return FileResponse(note, 200, headers, FileBody(FileSlice(file, 0, size), lambda: None))

    async def _order(self, request: web.BaseRequest, note: Note, grant: Grant) -> PlainResponse:
        """What changes the cache. A body's type is asked for that no page in a browser can send without asking us first."""
        if request.content_type != "application/json":
            return PlainResponse.line(note, 415, "send a body of type application/json", {})
        body = await read_body(request, note)
        if isinstance(body, PlainResponse):
            return body
        try:
            if note.route == "warm":
                return await self._warm(note, WarmRequest.parse(body), grant)
            if note.route == "unpin":
                return await self._unpin(note, UnpinRequest.parse(body), grant)
            return await self._purge(note, PurgeRequest.parse(body), grant)
        except CorruptError as error:
            return PlainResponse.line(note, 400, str(error), {})

    async def _purge(self, note: Note, asked: PurgeRequest, grant: Grant) -> PlainResponse:
        def chosen(key: str) -> bool:
            return asked.covers(key) and self._covers(grant, key)

        # First: what is pinned would be fetched again.
        refusal = await self._release(note, lambda pin: any(map(chosen, pin.sizes)))
        if isinstance(refusal, PlainResponse):
            return refusal
        purged = await purge(chosen, self._cache, self._fetcher, self._presence)
        self._metrics.purged.inc(purged.objects)
        return PlainResponse(Note(note.route, f"{purged.objects} objects"), 200, JSON_HEADERS, purged.encode())

    async def _unpin(self, note: Note, asked: UnpinRequest, grant: Grant) -> PlainResponse:
        released = await self._release(note, lambda pin: asked.covers(pin.manifest) and self._covers(grant, pin.manifest))
        if isinstance(released, PlainResponse):
            return released
        body = json.dumps({"documents": released}).encode("ascii")
        return PlainResponse(Note(note.route, f"{released} documents"), 200, JSON_HEADERS, body)

    async def _release(self, note: Note, chosen: Callable[[Pin], bool]) -> int | PlainResponse:
        """Unpins what is `chosen`: how many documents, or the answer where the disk does not take it."""
        try:
            return await self._pins.remove(chosen)
        except OSError as error:
            message = f"the pins cannot be written ({error.strerror})"
            return PlainResponse.line(note, 503, message, {"Retry-After": str(RETRY_SECONDS)})

    def _covers(self, grant: Grant, key: str) -> bool:
        return self._admission.covers(grant, ModelTag(bytes.fromhex(key[3:35])))

    async def _warm(self, note: Note, asked: WarmRequest, grant: Grant) -> PlainResponse:
        if not self._admission.covers(grant, asked.tag):
            return PlainResponse.line(note, 404, f"there is no model {asked.tag}", {})
        try:
            warmed = await self._warming.order(asked)
        except OSError as error:
            message = f"the edge cannot use a file ({error.strerror})"
            return PlainResponse.line(note, 503, message, {"Retry-After": str(RETRY_SECONDS)})
        if warmed is None:
            message = (
                f"pinned documents may take {self._pins.limit} bytes, {self._pins.used} are taken, and this one has no room"
            )
            return PlainResponse.line(note, 409, message, {})
        if isinstance(warmed, Refused):
            return PlainResponse.refusal(Note(note.route, "", warmed.outcome), warmed.refusal)
        note = Note(note.route, f"{warmed.here} of {warmed.objects} objects")
        return PlainResponse(note, 200 if warmed.here == warmed.objects else 202, JSON_HEADERS, warmed.encode())


def _copied(usage: EdgeUsage) -> FileIO:
    """The text of the ledger in a file of its own, which nobody else can open."""
    with usage.ledger() as ledger:
        file = tempfile.TemporaryFile(dir=ledger.path.parent, buffering=0)  # noqa: SIM115 - whoever gets it closes it
        try:
            out = BufferedWriter(file)
            ledger.copy_lines(out.write)
            out.flush()
            out.detach()
        except BaseException:
            file.close()
            raise
        return file
