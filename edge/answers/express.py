"""Express: objects that lie here, from a request's bytes to the answer in one call.

A manifest takes some 15 microseconds of reading and sending, and six times that in a web framework's hands. So what nearly all
requests for objects look like is recognised as bytes: a GET or HEAD for an object, in its one text form, or for a part of it,
with header fields that change nothing. Whatever else it may be, `answer` says None, has done nothing, and `app` answers it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from email.utils import formatdate
from functools import partial
from typing import NamedTuple

from kvcdn.access.grant import Grant, Scope
from kvcdn.digest import ModelTag
from kvcdn.edge.answers.access import Answered, access_log, record
from kvcdn.edge.answers.coming import Asked, Coming
from kvcdn.edge.answers.front import Answer, Delivery, Pending
from kvcdn.edge.answers.objects import SMALL_BYTES
from kvcdn.edge.disk.storage import DiskCache, Entry, Harm
from kvcdn.edge.http.hops import from_edge
from kvcdn.edge.http.outcome import CacheOutcome, cache_status
from kvcdn.edge.http.ranges import ByteRange, RangeOutcome, select_range
from kvcdn.edge.http.respond import IMMUTABLE, SERVER, Note
from kvcdn.edge.http.sending import FileBody, FileSlice
from kvcdn.edge.http.target import ObjectName, short_of
from kvcdn.edge.http.wellformed import HOST
from kvcdn.edge.reads.fetch import Fetcher
from kvcdn.edge.telemetry.metrics import Metrics
from kvcdn.edge.telemetry.traffic import Traffic
from kvcdn.edge.tenants.admission import Admission
from kvcdn.edge.tenants.usage import EdgeUsage
from kvcdn.edge.upkeep.recall import Recall
from kvcdn.errors import UntrustedError
from kvcdn.trail import REQUEST_ID, Trail, following

HEAD_BYTES = 2048

LINE_BYTES = 512
FIELDS = 16
"""The least that settings can set as limits of a request's head: what is within is within any."""

SHORT = "it could not be read to its end"
"""What the log says of a file that was shorter than it should."""

FIELDS_REMEMBERED = 256
"""Sets of header fields, each byte for byte what a client always sends: some 0.5 MB."""

NOTES_REMEMBERED = 4096
"""Of as many objects: some 2 MB."""

_NOTHING = contextlib.nullcontext()

_ENDING = b" HTTP/1.1\r\n"

_FIELD = re.compile(
    rb"(host|user-agent|accept|accept-encoding|accept-language|connection|via|x-forwarded-[a-z]+|x-real-ip"
    rb"|authorization|x-request-id|traceparent|tracestate|range):"
    rb"[ \t]*([\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?[ \t]*",
    re.IGNORECASE,
)
"""Fields that say nothing to an edge, or what stands in `_Fields`; `connection` where it says keep-alive."""


class _Fields(NamedTuple):
    """What of a request's header fields says something."""

    authorization: str | None
    via: str | None
    request_id: str | None
    traceparent: str | None
    tracestate: str | None
    range: str | None


_NAMES = ("authorization", "via", "x-request-id", "traceparent", "tracestate", "range")
"""Of these fields, in the same order."""


class _Request(NamedTuple):
    """What is asked for, and permitted."""

    method: str
    key: str
    fields: _Fields
    span: ByteRange | None
    grant: Grant
    began: float


class Express:
    """For the event loop's thread."""

    def __init__(
        self,
        fetcher: Fetcher,
        cache: DiskCache,
        recall: Recall,
        admission: Admission,
        metrics: Metrics,
        traffic: Traffic,
        usage: EdgeUsage | None = None,
    ) -> None:
        self._cache, self._recall, self._admission = cache, recall, admission
        self._metrics, self._traffic, self._usage = metrics, traffic, usage
        self._coming = Coming(fetcher, cache, recall, admission, metrics, traffic)
        self._fields: dict[bytes, _Fields] = {}
        """Sets of fields that will do, byte for byte."""
        self._notes: dict[str, tuple[Entry, Note]] = {}
        """By key, of the file that is cached under it."""
        self._second, self._date = 0, ""

    def answer(self, data: bytes, *, files: bool) -> Answer | None:
        """The whole answer to the request that `data` is; None where it is for `app`, and then nothing was done."""
        began = time.perf_counter()
        end = data.find(_ENDING, 0, LINE_BYTES)
        method, _, path = data[: max(end, 0)].partition(b" /")
        if method not in (b"GET", b"HEAD") or len(data) > HEAD_BYTES:
            return None
        try:
            # What is in the index stands there in its one text form, so that no other finds anything.
            key = path.decode("ascii")
            fields = self._read_fields(data[end + len(_ENDING) :])
        except ValueError:
            return None
        size = self._cache.size_of(key)
        if size is None or self._recall.revoked.covers(key):
            return self._wait_for(key, fields, began) if size is None and files and method == b"GET" else None
        # A Range field means something for GET only (RFC 9110 section 14.2).
        part = select_range((fields.range,), size) if fields.range is not None and method == b"GET" else RangeOutcome.WHOLE
        span = part if isinstance(part, ByteRange) else None
        large = method == b"GET" and (size if span is None else span.length) > SMALL_BYTES
        if part is RangeOutcome.UNSATISFIABLE or (large and not files):
            return None
        if self._usage is not None and (span is not None or from_edge((fields.via or "",))):
            return None
        grant = self._admitted(key, fields)
        return None if grant is None else self._find(_Request(method.decode("ascii"), key, fields, span, grant, began))

    def _admitted(self, key: str, fields: _Fields) -> Grant | None:
        admission = self._admission
        try:
            grant = admission.guard.admit(fields.authorization)
        except UntrustedError:
            return None
        covered = Scope.READ in grant.scopes and admission.covers(grant, ModelTag(bytes.fromhex(key[3:35])))
        return grant if covered else None

    def _wait_for(self, key: str, fields: _Fields, began: float) -> Pending | None:
        """The answer to a GET for what is not here."""
        name = ObjectName.from_path(f"/{key}")
        # An edge that asks may have come by here before; a ledger asks for more than is at hand.
        if name is None or fields.via is not None or self._usage is not None:
            return None
        grant = self._admitted(key, fields)
        if grant is None or self._admission.wait(grant) is not None:
            return None
        trail = Trail.of(fields.request_id, fields.traceparent, fields.tracestate)
        asked = Asked(name, fields.range, grant, trail, began)
        return partial(self._coming.answer, asked)

    def _find(self, request: _Request) -> bytes | Delivery | None:
        try:
            opened = self._cache.open(request.key)
        except OSError:
            return None
        if opened is None:
            return None
        entry, file = opened.entry, opened.file
        start, length = (0, entry.size) if request.span is None else request.span
        small = length <= SMALL_BYTES or request.method == "HEAD"
        try:
            body = os.pread(file.fileno(), length, start) if small and request.method == "GET" else b""
        except OSError:
            body = b""
        # Not checked in this process yet, or damaged; or the tenant has to wait.
        broken = entry.etag is None or (small and request.method == "GET" and len(body) < length)
        if broken or self._admission.wait(request.grant) is not None:
            file.close()
            return None
        trail = Trail.of(request.fields.request_id, request.fields.traceparent, request.fields.tracestate)
        head = self._head(entry, request.span, trail.request_id)
        if request.method == "GET":
            self._admission.charge(request.grant, length)
        if small:
            file.close()
            self._record(request, entry, trail, len(body))
            return head + body
        sending = FileBody(FileSlice(file, start, length), lambda: self._cache.drop_key(request.key, Harm.DAMAGED, SHORT))
        name = ObjectName.from_path(f"/{request.key}")
        if name is not None:
            self._recall.attend(sending, name)
        return Delivery(head, sending, lambda: self._record(request, entry, trail, sending.sent))

    def _record(self, request: _Request, entry: Entry, trail: Trail, sent: int) -> None:
        status, seconds = 200 if request.span is None else 206, time.perf_counter() - request.began
        answer = Answered(self._note(request.key, entry), request.method, request.grant.tenant, status, sent, seconds)
        # The trail is for the log alone.
        with following(trail) if access_log.isEnabledFor(logging.INFO) else _NOTHING:
            record(self._metrics, self._traffic, answer)
        if self._usage is not None:
            # What ties a request to a prompt, to a peer or to a tier is not for us.
            self._usage.sent_whole(request.key, answer.note, answer.tenant, sent)

    def _note(self, key: str, entry: Entry) -> Note:
        """What is said of each answer with this object."""
        known = self._notes.get(key)
        if known is None or known[0] is not entry:
            if len(self._notes) >= NOTES_REMEMBERED:
                self._notes.clear()
            worth = entry.tokens / entry.size
            note = Note("object", short_of(key), CacheOutcome.HIT, key, worth, tokens=entry.tokens)
            known = self._notes[key] = entry, note
        return known[1]

    def _head(self, entry: Entry, span: ByteRange | None, request_id: str) -> bytes:
        now = time.time()
        if int(now) != self._second:
            self._second, self._date = int(now), formatdate(now, usegmt=True)
        status, length = "200 OK", entry.size
        if span is not None:
            status, length = f"206 Partial Content\r\nContent-Range: {span.content_range(entry.size)}", span.length
        return (
            f'HTTP/1.1 {status}\r\nServer: {SERVER}\r\nETag: "{entry.etag}"\r\nCache-Control: {IMMUTABLE}\r\n'
            f"Accept-Ranges: bytes\r\nAge: {max(0, int(now - entry.stored_at))}\r\nCache-Status: {_HIT}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {length}\r\nDate: {self._date}\r\n"
            f"{REQUEST_ID}: {request_id}\r\n\r\n"
        ).encode("ascii")

    def _read_fields(self, fields: bytes) -> _Fields:
        """What a request's header fields say. Raises ValueError where they are for `app` to read."""
        known = self._fields.get(fields)
        if known is not None:
            return known
        lines = fields.split(b"\r\n")
        if len(lines) - 2 > FIELDS or lines[-2:] != [b"", b""] or max(map(len, lines)) > LINE_BYTES:
            raise ValueError("no plain head")
        seen: dict[str, str] = {}
        for line in lines[:-2]:
            match = _FIELD.fullmatch(line)
            if match is None or (name := match[1].decode("ascii").lower()) in seen:
                raise ValueError("a field that may say something")
            seen[name] = (match[2] or b"").decode("ascii")
        if not HOST.fullmatch(seen.get("host", " ")) or seen.get("connection", "keep-alive").lower() != "keep-alive":
            raise ValueError("not the usual connection")
        found = _Fields(*map(seen.get, _NAMES))
        if not any(found[2:]):
            if len(self._fields) >= FIELDS_REMEMBERED:
                self._fields.clear()
            self._fields[fields] = found
        return found


_HIT = cache_status(CacheOutcome.HIT)
