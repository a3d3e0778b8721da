"""The application: routes, and what each request gets."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from aiohttp import web

from kvcdn.access.grant import Grant, Scope
from kvcdn.edge.answers.administration import SCOPES, SHOWN, Administration
from kvcdn.edge.answers.objects import SMALL_BYTES, cannot_open, damaged, fields_of, note_of, refuse, unsatisfiable
from kvcdn.edge.disk.storage import DiskCache, Harm
from kvcdn.edge.fills.peers import LOAD_HEADER, PEER_HEADER, Peers
from kvcdn.edge.http.body import read_body
from kvcdn.edge.http.conditions import Precondition, evaluate, range_applies
from kvcdn.edge.http.outcome import BrokenFillError, CacheOutcome, Reason, cache_status
from kvcdn.edge.http.ranges import ByteRange, RangeOutcome, select_range
from kvcdn.edge.http.respond import (
    IMMUTABLE,
    JSON_HEADERS,
    NO_STORE,
    RETRY_SECONDS,
    FileResponse,
    HeadResponse,
    Note,
    PlainResponse,
)
from kvcdn.edge.http.sending import FileBody, FileSlice
from kvcdn.edge.http.target import ObjectName
from kvcdn.edge.page import PAGE
from kvcdn.edge.reads.fetch import Fetcher, Found, Refused
from kvcdn.edge.reads.handing import Handing
from kvcdn.edge.reads.match import MatchRequest, MatchResult, match_chain
from kvcdn.edge.reads.presence import Presence
from kvcdn.edge.tenants.admission import TENANT, Admission
from kvcdn.edge.upkeep.recall import Recall
from kvcdn.errors import CorruptError, UnavailableError, UntrustedError

_HERE = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
"""What a Host field says that no other machine's name can."""


class Edge:
    """Answers requests. Everything it needs is given; it owns nothing that must be closed."""

    def __init__(
        self,
        fetcher: Fetcher,
        presence: Presence,
        cache: DiskCache,
        admission: Admission,
        recall: Recall,
        administration: Administration,
        *,
        admin: bool,
    ) -> None:
        """`admin`: whether objects and administration share one address."""
        self._fetcher, self._presence, self._cache = fetcher, presence, cache
        self._admission, self._recall, self._administration = admission, recall, administration
        self._admin, self._handing = admin, Handing(fetcher.origins, recall.revoked)
        self.peers: Peers | None = None
        """The other edges of the site, where there is one."""
        self.draining = False
        """Whether the edge is about to end: it is not ready for new work, and still does it."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any request at all, where objects are."""
        path = request.rel_url.raw_path
        # An object has no query, but for a link's.
        is_object = not request.rel_url.raw_query_string or self._admission.guard.takes_links
        name = ObjectName.from_path(path) if is_object else None
        is_list = name is None and Handing.names(path[1:])
        if name is None and path != "/v1/match" and not is_list:
            return await self.handle_admin(request) if self._admin else self._health(request) or _nothing()
        try:
            grant = self._grant(request, path if name is not None else None)
        except UntrustedError as error:
            return _unknown(error)
        request[TENANT] = grant.tenant
        if Scope.READ not in grant.scopes:
            return _forbidden(Scope.READ)
        wait = self._admission.wait(grant)
        if wait is not None:
            headers = {"Retry-After": str(math.ceil(wait.seconds))}
            return PlainResponse.line(Note("limited"), 429, f"{grant.tenant} has used up its {wait.shortage}", headers)
        if name is None:
            return await (self._hand_on(request, path[1:]) if is_list else self._match(request, grant))
        refusal = self._only(("GET", "HEAD"), request, Note("object", name.short))
        if refusal is None and not self._admission.covers(grant, name.tag):
            # Whether it exists is not for this tenant to know.
            refusal = PlainResponse.line(Note("object", name.short), 404, f"there is no {name}", {})
        asking = request.headers.get(PEER_HEADER)
        if refusal is None and asking is not None and self.peers is not None:
            passed_over = self.peers.refusal(asking, request.headers.get(LOAD_HEADER), name.key)
            if passed_over is not None:
                refusal = PlainResponse.refusal(Note("object", name.short, CacheOutcome.REFUSED), passed_over)
        return refusal or await self._object(request, name, grant, direct=asking is not None)

    async def handle_admin(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any request at all, where administration is."""
        open_to_all = self._health(request) or self._page(request)
        if open_to_all is not None:
            return open_to_all
        try:
            grant = self._grant(request, None)
        except UntrustedError as error:
            return _unknown(error)
        request[TENANT] = grant.tenant
        scope = SCOPES.get(request.rel_url.raw_path)
        if scope is None:
            return _nothing()
        path = request.rel_url.raw_path
        methods, note = ("GET", "HEAD") if path in SHOWN else ("POST",), Note(path.rpartition("/")[2])
        refusal = self._forbids(scope, grant) or self._hides(request, note) or self._only(methods, request, note)
        return refusal or await self._administration.answer(request, note, grant)

    def _forbids(self, scope: Scope, grant: Grant) -> PlainResponse | None:
        if scope not in grant.scopes:
            return _forbidden(scope)
        if scope is not Scope.STATS and self._admin and self._admission.guard.is_open:
            # Who can read could give orders: everybody, where a proxy stands before an edge on loopback.
            message = f"to {scope}, use a token or the address of administration: set token_file, issuers_file or admin_listen"
            return PlainResponse.line(Note("denied"), 403, message, {})
        return None

    def _hides(self, request: web.BaseRequest, note: Note) -> PlainResponse | None:
        """What tenants do is for this machine where nobody is asked who they are.

        A name that leads to loopback may be a hostile page's that a browser here has open, or a proxy's before it.
        """
        if note.route != "status" or not self._admission.guard.is_open or _HERE.fullmatch(request.headers.get("Host", "")):
            return None
        message = "without tokens the status is for this machine: ask for it as localhost or 127.0.0.1, or set issuers_file"
        return PlainResponse.line(Note("denied"), 403, message, {})

    def _page(self, request: web.BaseRequest) -> PlainResponse | None:
        """A file of the status page, which has no figures in it, so that anybody may see it; None for other requests."""
        file = PAGE.get(request.rel_url.raw_path)
        note = Note("page")
        return None if file is None else self._only(("GET", "HEAD"), request, note) or file.answer(request, note)

    def _grant(self, request: web.BaseRequest, object_path: str | None) -> Grant:
        """What `request` may do. Raises UntrustedError."""
        query = request.rel_url.raw_query_string
        if query and object_path is not None:
            return self._admission.guard.admit_link(object_path, query)
        return self._admission.guard.admit(request.headers.get("Authorization"))

    def _health(self, request: web.BaseRequest) -> PlainResponse | None:
        """The answer to who asks whether the edge lives or is ready, which anybody may; None for other requests."""
        match request.rel_url.raw_path:
            case "/healthz":
                return self._only(("GET", "HEAD"), request, Note("health")) or PlainResponse.line(Note("health"), 200, "ok", {})
            case "/readyz":
                status, word = (503, "draining") if self.draining else (200, "ready")
                note = Note("health")
                return self._only(("GET", "HEAD"), request, note) or PlainResponse.line(note, status, word, {})
        return None

    def _only(self, methods: tuple[str, ...], request: web.BaseRequest, note: Note) -> PlainResponse | None:
        if request.method in methods:
            return None
        return PlainResponse.line(note, 405, f"use {' or '.join(methods)}", {"Allow": ", ".join(methods)})

    async def _object(self, request: web.BaseRequest, name: ObjectName, grant: Grant, *, direct: bool) -> web.StreamResponse:
        try:
            result = await self._fetcher.get(name, direct=direct)
        except OSError as error:
            return cannot_open(name, error)
        if isinstance(result, Refused):
            return refuse(self._cache, name, result)
        return await self._serve(request, name, result, grant)

    async def _serve(self, request: web.BaseRequest, name: ObjectName, found: Found, grant: Grant) -> web.StreamResponse:
        # A peer's readers are counted where they ask.
        note = note_of(name, found, counted=PEER_HEADER not in request.headers)
        headers = fields_of(found)
        given = request.headers
        precondition = evaluate(given.getall("If-Match", ()), given.getall("If-None-Match", ()), found.etag)
        if precondition is not Precondition.PROCEED:
            found.file.close()
            return _without_body(note, precondition, headers)
        # A Range field means something for GET only (RFC 9110 section 14.2).
        ranges = given.getall("Range", ()) if request.method == "GET" else ()
        part = select_range(ranges if range_applies(given.getall("If-Range", ()), found.etag) else (), found.size)
        if part is RangeOutcome.UNSATISFIABLE:
            return unsatisfiable(note, found)
        chosen = part if isinstance(part, ByteRange) else None
        if request.method == "GET":
            self._admission.charge(grant, found.size if chosen is None else chosen.length)
        return await self._send(request, name, note, found, headers, chosen)

    async def _send(
        self,
        request: web.BaseRequest,
        name: ObjectName,
        note: Note,
        found: Found,
        headers: dict[str, str],
        part: ByteRange | None,
    ) -> web.StreamResponse:
        status, start, length = 200, 0, found.size
        if part is not None:
            status, (start, length) = 206, part
            headers["Content-Range"] = part.content_range(found.size)
        headers |= {"Content-Type": "application/octet-stream", "Content-Length": str(length)}
        if request.method == "HEAD":
            found.file.close()
            return HeadResponse(note, status, headers)
        part_of_file = FileSlice(found.file, start, length, found.fill)
        if length > SMALL_BYTES:
            file = FileBody(part_of_file, lambda: self._drop(name))
            self._recall.attend(file, name)
            return FileResponse(note, status, headers, file)
        try:
            body = await part_of_file.read()
        except BrokenFillError as error:
            return refuse(self._cache, name, Refused(error.refusal, CacheOutcome.REFUSED))
        if len(body) < length:
            self._drop(name)
            return damaged(note)
        return PlainResponse(note, status, headers, body)

    async def _hand_on(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        """A list of revocations."""
        note = Note("revocations")
        refusal = self._only(("GET", "HEAD"), request, note)
        if refusal is not None:
            return refusal
        try:
            data = await self._handing.get(key)
        except UnavailableError as error:
            return PlainResponse.line(note, 504, str(error), {"Retry-After": str(RETRY_SECONDS)})
        if data is None:
            return PlainResponse.line(note, 404, f"there is no {key}", {})
        return PlainResponse(note, 200, {"Content-Type": "application/octet-stream", "Cache-Control": IMMUTABLE}, data)

    def _drop(self, name: ObjectName) -> None:
        self._cache.drop_key(name.key, Harm.DAMAGED, "it could not be read to its end")

    async def _match(self, request: web.BaseRequest, grant: Grant) -> web.StreamResponse:
        note = Note("match")
        refusal = self._only(("POST",), request, note)
        if refusal is not None:
            return refusal
        body = await read_body(request, note)
        if isinstance(body, PlainResponse):
            return body
        try:
            asked = MatchRequest.parse(body)
        except CorruptError as error:
            return PlainResponse.line(note, 400, str(error), {})
        note = Note("match", f"{len(asked.keys)} blocks")
        if not self._admission.covers(grant, asked.tag):
            return PlainResponse(note, 200, JSON_HEADERS, MatchResult(()).encode())
        try:
            result = await match_chain(self._recall.revoked.lead(asked.keys), self._presence)
        except UnavailableError as error:
            note = replace(note, asked=len(asked.keys), evicted=self._cache.has_evicted(asked.keys[0]))
            note = replace(note, reason=Reason.ORIGIN_UNAVAILABLE)
            said = {"Cache-Status": cache_status(CacheOutcome.REFUSED, Reason.ORIGIN_UNAVAILABLE)}
            return PlainResponse.line(note, 504, str(error), {**said, "Retry-After": str(RETRY_SECONDS)})
        detail = {} if result.complete else {"Cache-Status": cache_status(CacheOutcome.HIT, Reason.ORIGIN_UNAVAILABLE)}
        matched = len(result.sizes)
        last = asked.keys[matched - 1] if matched else ""
        evicted = any(self._cache.has_evicted(key) for key in asked.keys[matched : matched + 1])
        note = Note("match", f"{matched} of {len(asked.keys)} blocks", key=last, blocks=matched)
        reason = "" if result.complete else Reason.ORIGIN_UNAVAILABLE
        note = replace(note, asked=len(asked.keys), evicted=evicted, reason=reason)
        self._cache.announce(asked.keys[:matched])
        return PlainResponse(note, 200, {**JSON_HEADERS, **detail}, result.encode())


def _nothing() -> PlainResponse:
    return PlainResponse.line(Note("other"), 404, "there is nothing under this path", {})


def _unknown(error: UntrustedError) -> PlainResponse:
    """RFC 6750 section 3."""
    return PlainResponse.line(Note("denied"), 401, str(error), {"WWW-Authenticate": 'Bearer realm="kvcdn"'})


def _forbidden(scope: Scope) -> PlainResponse:
    challenge = {"WWW-Authenticate": f'Bearer realm="kvcdn", error="insufficient_scope", scope="{scope}"'}
    return PlainResponse.line(Note("denied"), 403, f"the token does not have the scope {scope}", challenge)


def _without_body(note: Note, precondition: Precondition, headers: Mapping[str, str]) -> PlainResponse:
    if precondition is Precondition.NOT_MODIFIED:
        return PlainResponse(note, precondition.value, headers)
    message = "the object under this name has another entity tag"
    return PlainResponse.line(note, precondition.value, message, {**headers, "Cache-Control": NO_STORE})
