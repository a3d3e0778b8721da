"""Coming: objects that have yet to come, from a plain request to the head of the answer without the web framework.

What `express` recognises, and the cache does not hold, waits here for its fill. A third of what the loop did until the first
byte of a miss was the framework's: to read the request once more, and to wrap it, its answer and its task.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

from kvcdn.access.grant import Grant
from kvcdn.edge.answers.access import Answered, record
from kvcdn.edge.answers.front import Delivery
from kvcdn.edge.answers.objects import SMALL_BYTES, cannot_open, damaged, fields_of, note_of, refuse, unsatisfiable
from kvcdn.edge.disk.storage import DiskCache, Harm
from kvcdn.edge.http.outcome import BrokenFillError, CacheOutcome
from kvcdn.edge.http.ranges import ByteRange, RangeOutcome, select_range
from kvcdn.edge.http.respond import SERVER, Note, PlainResponse
from kvcdn.edge.http.sending import FileBody, FileSlice
from kvcdn.edge.http.target import ObjectName
from kvcdn.edge.reads.fetch import Fetcher, Found, Refused
from kvcdn.edge.telemetry.metrics import Metrics
from kvcdn.edge.telemetry.traffic import Traffic
from kvcdn.edge.tenants.admission import Admission
from kvcdn.edge.upkeep.recall import Recall
from kvcdn.trail import REQUEST_ID, Trail, follow


class Asked(NamedTuple):
    """A plain GET, permitted and counted."""

    name: ObjectName
    range: str | None
    grant: Grant
    trail: Trail
    began: float


class Coming:
    """For the event loop's thread."""

    def __init__(
        self, fetcher: Fetcher, cache: DiskCache, recall: Recall, admission: Admission, metrics: Metrics, traffic: Traffic
    ) -> None:
        self._fetcher, self._cache, self._recall, self._admission = fetcher, cache, recall, admission
        self._metrics, self._traffic = metrics, traffic

    async def answer(self, asked: Asked) -> bytes | Delivery:
        """The whole answer, or its head and a body that comes. The task that awaits it runs for the request from now on."""
        follow(asked.trail)
        try:
            result = await self._fetcher.get(asked.name)
        except OSError as error:
            return self._plain(asked, cannot_open(asked.name, error))
        if isinstance(result, Refused):
            return self._plain(asked, refuse(self._cache, asked.name, result))
        return await self._serve(asked, result)

    async def _serve(self, asked: Asked, found: Found) -> bytes | Delivery:
        note = note_of(asked.name, found)
        part = RangeOutcome.WHOLE if asked.range is None else select_range((asked.range,), found.size)
        if part is RangeOutcome.UNSATISFIABLE:
            return self._plain(asked, unsatisfiable(note, found))
        status, start, length, fields = 200, 0, found.size, fields_of(found)
        if isinstance(part, ByteRange):
            status, (start, length) = 206, part
            fields["Content-Range"] = part.content_range(found.size)
        self._admission.charge(asked.grant, length)
        fields |= {"Content-Type": "application/octet-stream", "Content-Length": str(length)}
        head = _head(status, fields, asked.trail)
        source = FileSlice(found.file, start, length, found.fill)
        if length > SMALL_BYTES:
            body = FileBody(source, lambda: self._drop(asked.name))
            self._recall.attend(body, asked.name)
            return Delivery(head, body, lambda: self._record(asked, note, status, body.sent))
        try:
            data = await source.read()
        except BrokenFillError as error:
            refused = Refused(error.refusal, CacheOutcome.REFUSED)
            return self._plain(asked, refuse(self._cache, asked.name, refused))
        if len(data) < length:
            self._drop(asked.name)
            return self._plain(asked, damaged(note))
        self._record(asked, note, status, length)
        return head + data

    def _plain(self, asked: Asked, response: PlainResponse) -> bytes:
        self._record(asked, response.note, response.status, response.sent)
        fields = {**response.headers, "Content-Length": str(response.sent)}
        body = response.body
        return _head(response.status, fields, asked.trail) + (body if isinstance(body, bytes) else b"")

    def _record(self, asked: Asked, note: Note, status: int, sent: int) -> None:
        seconds = time.perf_counter() - asked.began
        record(self._metrics, self._traffic, Answered(note, "GET", asked.grant.tenant, status, sent, seconds))

    def _drop(self, name: ObjectName) -> None:
        self._cache.drop_key(name.key, Harm.DAMAGED, "it could not be read to its end")


def _head(status: int, fields: Mapping[str, str], trail: Trail) -> bytes:
    told = {"Server": SERVER, **fields, "Date": formatdate(usegmt=True), REQUEST_ID: trail.request_id}
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}\r\n".encode("latin-1", "replace")
