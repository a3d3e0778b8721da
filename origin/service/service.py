"""The prefill service's HTTP interface: jobs in, their progress out. `kvcdn.origin.service.openapi` describes it.

All questions to the queue go through one thread. What is submitted while a transaction runs is accepted by the next one
together, so that many clients share the wait for the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn, TypeVar

from aiohttp import web

from kvcdn.access.grant import Grant, Scope
from kvcdn.access.guard import Guard
from kvcdn.access.tasks import beside
from kvcdn.digest import ModelTag, hash_bytes
from kvcdn.errors import KvcdnError, NotFoundError, UntrustedError, UsageError
from kvcdn.origin.jobs.jobs import Job, JobRequest, JobState, read_request
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.jobs.queue_errors import QueueFullError
from kvcdn.origin.publishing.sources import decode_document
from kvcdn.origin.service.openapi import describe
from kvcdn.origin.service.service_settings import ServiceSettings
from kvcdn.origin.watching.watch_settings import read_watch, require_served
from kvcdn.origin.watching.watched import WatchBook

T = TypeVar("T")

RETRY_SECONDS = 5
"""What whoever finds the queue full is told to wait."""

MAX_JOBS_AT_ONCE = 1000
"""Lines of one request."""

MAX_PAGE = 1000

WATCH_SECONDS = 0.5
"""Between two looks at a job whose events somebody reads."""

SILENCE_SECONDS = 15.0
"""After so long without news a comment is sent, so that nobody on the way takes the connection for dead."""

RECONNECT_SECONDS = 2
"""After so long whoever reads events and has lost the connection is to come again."""

FORGET_SECONDS = 3600.0
"""Between two looks for jobs that ended long ago."""

NO_TAG = ModelTag(bytes(ModelTag.SIZE))
"""A model that is known by its name only: its files may not have been read yet."""

_CODINGS = frozenset(("identity", "gzip", "deflate"))
"""Of bodies: what is read as the framework unpacked it. It leaves others as they came."""

GRANT = web.RequestKey("grant", Grant)

_STATUS = {2: 400, 3: 404, 4: 403, 5: 503}

log = logging.getLogger("kvcdn.origin.service.service")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """The jobs of one queue over HTTP. Belongs to an event loop; `close` when it has ended."""

    def __init__(self, settings: ServiceSettings, queue: JobQueue, guard: Guard, book: WatchBook) -> None:
        self._settings, self._queue, self._guard, self._book = settings, queue, guard, book
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvcdn-queue")
        self._orders: list[tuple[str, list[JobRequest], asyncio.Future[list[Job]]]] = []
        self._bytes_per_day: dict[str, int] = {}
        self._accepting: asyncio.Task[None] | None = None
        self.draining = False

    def application(self) -> web.Application:
        """What answers."""
        app = web.Application(middlewares=[self._answer_errors], client_max_size=self._settings.max_document)
        app.add_routes(
            [
                web.get("/healthz", self._healthy),
                web.get("/readyz", self._ready),
                web.get("/v1/openapi.json", self._describe),
                web.post("/v1/jobs", self._submit),
                web.get("/v1/jobs", self._list),
                web.get("/v1/jobs/{id}", self._show),
                web.get("/v1/jobs/{id}/events", self._events),
                web.delete("/v1/jobs/{id}", self._cancel),
                web.post("/v1/jobs/{id}/retry", self._retry),
                web.get("/v1/watches", self._watches),
                web.post("/v1/watches", self._add_watch),
                web.delete("/v1/watches/{name}", self._remove_watch),
            ]
        )
        return app

    def close(self) -> None:
        self._thread.shutdown()

    async def asked(self, question: Callable[..., T], *values: Any) -> T:
        """The answer of the queue, from the thread that asks it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, question, *values)

    # -- accepting ------------------------------------------------------------------------------------------------------------

    async def accept(self, tenant: str, requests: list[JobRequest], bytes_per_day: int | None = None) -> list[Job]:
        """Accepts jobs, all or none; they are on the disk on return. Raises QueueFullError, UsageError.

        `bytes_per_day` is what the tenant's token lets it submit.
        """
        if bytes_per_day is not None:
            self._bytes_per_day[tenant] = min(bytes_per_day, self._bytes_per_day.get(tenant, bytes_per_day))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Job]] = loop.create_future()
        self._orders.append((tenant, requests, answer))
        if self._accepting is None or self._accepting.done():
            self._accepting = loop.create_task(self._accept_all())
        return await answer

    async def _accept_all(self) -> None:
        while self._orders:
            orders, self._orders = self._orders, []
            quotas, self._bytes_per_day = self._bytes_per_day, {}
            wanted = [(who, what) for who, what, _ in orders]
            try:
                answers: list[Any] = list(await self.asked(self._queue.accept_together, wanted, None, quotas))
            except Exception as error:  # noqa: BLE001 - told to each who waits
                answers = [error] * len(orders)
            for (_, _, future), answer in zip(orders, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    async def _submit(self, request: web.Request) -> web.Response:
        grant = _granted(request, Scope.PUBLISH)
        jobs = await _requests(request)
        for job in jobs:
            self._check(job, grant)
        accepted = await self.accept(grant.tenant, jobs, grant.bytes_per_day)
        return _json({"jobs": [job.to_json() for job in accepted]}, 202)

    def _check(self, job: JobRequest, grant: Grant) -> None:
        """Raises UsageError for what is not served here, UntrustedError for what is not this tenant's."""
        model, namespace = job.model or self._settings.models[0], job.namespace
        if model not in self._settings.models:
            raise UsageError(
                f"the model {model[:80]!r} is not served here", hint="the operator lists the models in the settings"
            )
        if namespace is not None and namespace not in self._settings.namespaces:
            raise UsageError(f"the namespace {namespace!r} is not served here", hint="the operator lists the namespaces")
        if not grant.covers_model(NO_TAG, model) or not grant.covers_namespace(namespace or "public"):
            raise UntrustedError("the token is not for this model, or not for this namespace")

    # -- looking --------------------------------------------------------------------------------------------------------------

    async def _list(self, request: web.Request) -> web.Response:
        grant = _granted(request, Scope.PUBLISH, Scope.ADMIN)
        try:
            limit = min(max(int(request.query.get("limit", "100")), 1), MAX_PAGE)
            state = JobState(request.query["state"]) if "state" in request.query else None
        except ValueError:
            raise UsageError(f"limit is a number, state one of {', '.join(JobState)}") from None
        tenant = None if Scope.ADMIN in grant.scopes else grant.tenant
        after = request.query.get("after", "")
        jobs = await self.asked(lambda: self._queue.list(tenant=tenant, state=state, after=after, limit=limit))
        return _json({"jobs": [job.to_json() for job in jobs], "next": jobs[-1].id if len(jobs) == limit else None})

    async def _own(self, request: web.Request) -> Job:
        """The job that the path names, if the tenant may know of it. Raises NotFoundError."""
        grant = _granted(request, Scope.PUBLISH, Scope.ADMIN)
        name = request.match_info["id"]
        job = await self.asked(self._queue.get, name)
        if job.tenant != grant.tenant and Scope.ADMIN not in grant.scopes:
            raise NotFoundError(f"there is no job {name[:40]!r}")
        return job

    async def _show(self, request: web.Request) -> web.Response:
        return _json((await self._own(request)).to_json())

    async def _cancel(self, request: web.Request) -> web.Response:
        job = await self._own(request)
        return _json((await self.asked(self._queue.cancel, job.id)).to_json())

    async def _retry(self, request: web.Request) -> web.Response:
        job = await self._own(request)
        return _json((await self.asked(self._queue.retry, job.id)).to_json())

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the job at once, whenever it changes, and a last time when it has ended.

        An event's id tells what it showed: who comes again with it is told what is new since. Where nothing will be, 204: by
        that browsers know not to come again (WHATWG HTML, 9.2).
        """
        job = await self._own(request)
        shown = request.headers.get("Last-Event-ID", "")
        if job.ended and shown == _event(job)[0]:
            return web.Response(status=204)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        silent = 0.0
        with contextlib.suppress(ConnectionError, KvcdnError):  # gone, or not to be had: whoever follows asks again
            await response.write(b"retry: %d\n" % (1000 * RECONNECT_SECONDS))
            while True:
                name, event = _event(job)
                if name != shown:
                    shown, silent = name, 0.0
                    await response.write(event)
                elif silent >= SILENCE_SECONDS:
                    silent = 0.0
                    await response.write(b": waiting\n\n")
                if job.ended or self.draining:
                    break
                await asyncio.sleep(WATCH_SECONDS)
                silent += WATCH_SECONDS
                job = await self.asked(self._queue.get, job.id)
            await response.write_eof()
        return response

    async def _watches(self, request: web.Request) -> web.Response:
        _granted(request, Scope.ADMIN)
        return _json({"watches": await self.asked(self._book.status)})

    async def _add_watch(self, request: web.Request) -> web.Response:
        _granted(request, Scope.ADMIN)
        try:
            value = _parsed((await request.read()).decode("utf-8-sig"))
        except (ValueError, RecursionError):
            raise UsageError("the body is no JSON", hint="GET /v1/openapi.json describes a watch") from None
        watch = read_watch(value)
        require_served((*self._settings.watch, watch), self._settings.models, self._settings.namespaces)
        await self.asked(self._book.add, watch)
        return _json(watch.model_dump(mode="json"), 201)

    async def _remove_watch(self, request: web.Request) -> web.Response:
        _granted(request, Scope.ADMIN)
        name = request.match_info["name"]
        await self.asked(self._book.remove, name)
        return _json({"removed": name})

    # -- the service ----------------------------------------------------------------------------------------------------------

    async def _healthy(self, _request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _ready(self, _request: web.Request) -> web.Response:
        return _json({"status": "draining" if self.draining else "ready"}, 503 if self.draining else 200)

    async def _describe(self, _request: web.Request) -> web.Response:
        return _json(describe())

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who is asking is found out first; what goes wrong is one JSON object."""
        try:
            if request.path not in ("/healthz", "/readyz", "/v1/openapi.json"):
                try:
                    request[GRANT] = self._guard.admit(request.headers.get("Authorization"))
                except UntrustedError as error:
                    return _error(error, 401, {"WWW-Authenticate": "Bearer"})
            return await handler(request)
        except QueueFullError as error:
            return _error(error, 429, {"Retry-After": str(math.ceil(error.retry_seconds or RETRY_SECONDS))})
        except KvcdnError as error:
            return _error(error, _STATUS.get(error.exit_code, 500))
        except web.RequestPayloadError:
            return _error(UsageError("the body is not what its headers say"), 400)
        except web.HTTPException as error:
            return _error(KvcdnError(error.reason), error.status, {k: v for k, v in error.headers.items() if k == "Allow"})


async def _requests(request: web.Request) -> list[JobRequest]:
    """The jobs that a request's body holds: one in JSON, one a line, or a text as it is with the rest in the query."""
    kind, body = request.content_type, await request.read()
    charset = request.charset or "utf-8"
    if charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        raise UsageError(f"a body in {charset[:80]!r} is not read", hint="send UTF-8")
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in _CODINGS:
        raise UsageError(f"a body packed as {coding[:80]!r} is not read", hint="send it as it is, or packed with gzip")
    try:
        if kind == "text/plain":
            return [read_request({**_from_query(request.query), "text": decode_document("the body", body).text})]
        text = body.decode("utf-8-sig")
        if kind == "application/json":
            return [read_request(_parsed(text))]
        if kind in ("application/jsonl", "application/x-ndjson"):
            # Not splitlines, which also parts at characters that a JSON string may have as they are (U+2028).
            lines = [line for line in text.split("\n") if line.strip()]
            if not 0 < len(lines) <= MAX_JOBS_AT_ONCE:
                raise UsageError(f"a request holds 1 to {MAX_JOBS_AT_ONCE} jobs, not {len(lines)}")
            return [read_request(_parsed(line)) for line in lines]
    except (ValueError, RecursionError):
        raise UsageError("the body is not UTF-8, or not JSON, or the query has a number that is none") from None
    raise UsageError(f"a body of type {kind} is not read", hint="send application/json, application/jsonl or text/plain")


def _parsed(text: str) -> Any:
    """JSON as RFC 8259 has it. Raises ValueError, RecursionError."""
    return json.loads(text, parse_constant=_no_number)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _from_query(query: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: value for name, value in query.items() if name in ("model", "namespace", "label", "name", "window", "precision")
    } | {name: int(query[name]) for name in ("priority", "ttl") if name in query}


def _granted(request: web.Request, *scopes: Scope) -> Grant:
    """The request's grant, which has one of `scopes`. Raises UntrustedError."""
    grant = request[GRANT]
    if not grant.scopes & set(scopes):
        raise UntrustedError(f"the token has not the scope {scopes[0]}")
    return grant


def _event(job: Job) -> tuple[str, bytes]:
    """What is told of a job as it is now: the id by which that is known again, and the event."""
    text = json.dumps(job.to_json())
    name = str(hash_bytes(text.encode()))[:32]
    return name, f"event: {job.state}\nid: {name}\ndata: {text}\n\n".encode()


def _json(value: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.json_response(value, status=status, headers={"Cache-Control": "no-store"})


def _error(error: KvcdnError, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    value = {"error": str(error), "hint": error.hint}
    return web.json_response(value, status=status, headers={"Cache-Control": "no-store", **(headers or {})})


def forgetting(
    service: Service, queue: JobQueue, keep_seconds: float, clock: Callable[[], float]
) -> AbstractAsyncContextManager[None]:
    """Forgets jobs that ended long ago while it lasts."""

    async def forget() -> None:
        while True:
            try:
                await service.asked(queue.forget, clock() - keep_seconds)
            except KvcdnError as error:
                log.warning("jobs are not forgotten, which is tried again: %s", error)
            await asyncio.sleep(FORGET_SECONDS)

    return beside(forget(), "forgetting")
