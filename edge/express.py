"""Express: small objects that lie here, from a request's bytes to the answer's in one call.

A manifest takes some 15 microseconds of reading and sending, and ten times that in a web framework's hands. So what nearly all
requests for small objects look like is recognised as bytes: a GET or HEAD for an object, in its one text form, with header
fields that change nothing. Whatever else it may be, `answer` says None, has done nothing, and `app` answers it.
"""

from __future__ import annotations

import os
import re
import time
from email.utils import formatdate
from typing import NamedTuple

from kvcdn.access.grant import Scope
from kvcdn.digest import ModelTag
from kvcdn.edge.access import Answered, record
from kvcdn.edge.admission import Admission
from kvcdn.edge.metrics import Metrics
from kvcdn.edge.outcome import CacheOutcome, cache_status
from kvcdn.edge.respond import IMMUTABLE, SERVER, Note
from kvcdn.edge.revocations import Revoked
from kvcdn.edge.storage import DiskCache, Entry
from kvcdn.edge.target import short_of
from kvcdn.edge.traffic import Traffic
from kvcdn.edge.usage import EdgeUsage
from kvcdn.errors import UntrustedError
from kvcdn.trail import REQUEST_ID, Trail, following

SMALL_BYTES = 64 * 1024
"""Objects up to this are read and sent with their headers in one go: cheaper than a sendfile of their own."""

HEAD_BYTES = 2048

LINE_BYTES = 512
FIELDS = 16
"""The least that settings can set as limits of a request's head: what is within is within any."""

FIELDS_REMEMBERED = 256
"""Sets of header fields, each byte for byte what a client always sends: some 0.5 MB."""

_ENDING = b" HTTP/1.1\r\n"

_FIELD = re.compile(
    rb"(host|user-agent|accept|accept-encoding|accept-language|connection|via|x-forwarded-[a-z]+|x-real-ip"
    rb"|authorization|x-request-id|traceparent|tracestate):"
    rb"[ \t]*([\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?[ \t]*",
    re.IGNORECASE,
)
"""Fields that say nothing to an edge, or what stands in `_Fields`; `connection` where it says keep-alive."""


class _Fields(NamedTuple):
    """What of a request's header fields says something."""

    authorization: str | None
    request_id: str | None
    traceparent: str | None
    tracestate: str | None


_NAMES = ("authorization", "x-request-id", "traceparent", "tracestate")
"""Of these fields, in the same order."""


class Express:
    """For the event loop's thread."""

    def __init__(
        self,
        cache: DiskCache,
        revoked: Revoked,
        admission: Admission,
        metrics: Metrics,
        traffic: Traffic,
        usage: EdgeUsage | None = None,
    ) -> None:
        self._cache, self._revoked, self._admission = cache, revoked, admission
        self._metrics, self._traffic, self._usage = metrics, traffic, usage
        self._fields: dict[bytes, _Fields] = {}
        """Sets of fields that will do, byte for byte."""
        self._second, self._date = 0, ""

    def answer(self, data: bytes) -> bytes | None:
        """The whole answer to the request that `data` is; None where it is for `app`, and then nothing was done."""
        began = time.perf_counter()
        end = data.find(_ENDING, 0, LINE_BYTES)
        if end < 0 or len(data) > HEAD_BYTES:
            return None
        method, _, path = data[:end].partition(b" /")
        if method not in (b"GET", b"HEAD"):
            return None
        try:
            # What is in the index stands there in its one text form, so that no other finds anything.
            key = path.decode("ascii")
            fields = self._read_fields(data[end + len(_ENDING) :])
        except ValueError:
            return None
        size = self._cache.size_of(key)
        if size is None or size > SMALL_BYTES or self._revoked.covers(key):
            return None
        return self._send(method.decode("ascii"), key, fields, began)

    def _send(self, method: str, key: str, fields: _Fields, began: float) -> bytes | None:
        admission = self._admission
        try:
            grant = admission.guard.admit(fields.authorization)
        except UntrustedError:
            return None
        tag = ModelTag(bytes.fromhex(key[3:35]))
        if Scope.READ not in grant.scopes or not admission.covers(grant, tag):
            return None
        try:
            opened = self._cache.open(key)
        except OSError:
            return None
        if opened is None:
            return None
        with opened.file:
            etag, size = opened.entry.etag, opened.entry.size
            body = os.pread(opened.file.fileno(), size, 0) if etag is not None else b""
        # Not checked in this process yet, or damaged; or the tenant has to wait.
        if etag is None or len(body) < size or admission.wait(grant) is not None:
            return None
        sent = size if method == "GET" else 0
        if sent:
            admission.charge(grant, size)
        trail = Trail.of(fields.request_id, fields.traceparent, fields.tracestate)
        head = self._head(opened.entry, etag, trail.request_id)
        note = Note("object", short_of(key), CacheOutcome.HIT, key, opened.entry.tokens / size)
        answer = Answered(note, method, grant.tenant, 200, sent, time.perf_counter() - began)
        with following(trail):
            record(self._metrics, self._traffic, answer)
        if self._usage is not None:
            # What ties a request to a prompt, or to a peer, is a field that is not for us.
            self._usage.sent_whole(key, note, grant.tenant, sent)
        return head + body if sent else head

    def _head(self, entry: Entry, etag: str, request_id: str) -> bytes:
        now = time.time()
        if int(now) != self._second:
            self._second, self._date = int(now), formatdate(now, usegmt=True)
        return (
            f'HTTP/1.1 200 OK\r\nServer: {SERVER}\r\nETag: "{etag}"\r\nCache-Control: {IMMUTABLE}\r\nAccept-Ranges: bytes\r\n'
            f"Age: {max(0, int(now - entry.stored_at))}\r\nCache-Status: {_HIT}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {entry.size}\r\nDate: {self._date}\r\n"
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
        if "host" not in seen or seen.get("connection", "keep-alive").lower() != "keep-alive":
            raise ValueError("not the usual connection")
        found = _Fields(*map(seen.get, _NAMES))
        if found[1:] == (None, None, None):
            if len(self._fields) >= FIELDS_REMEMBERED:
                self._fields.clear()
            self._fields[fields] = found
        return found


_HIT = cache_status(CacheOutcome.HIT)
