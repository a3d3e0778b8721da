"""The OpenAPI 3.1 description of the prefill service; what a job is comes from the code that reads jobs."""

from __future__ import annotations

from typing import Any

from kvcdn import __version__
from kvcdn.origin.jobs.jobs import JobRequest, JobState
from kvcdn.origin.watching.watch_settings import WatchSettings

_JOB = {"$ref": "#/components/schemas/Job"}
_JOBS = {
    "type": "object",
    "required": ["jobs"],
    "properties": {"jobs": {"type": "array", "items": _JOB}, "next": {"type": ["string", "null"]}},
}
_WATCH = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "next_look": {"type": "number"},
        "last_look": {"type": ["number", "null"]},
        "added": {"type": ["object", "null"], "description": "The WatchSettings of a watch that was added; null for others."},
        "reason": {"type": "string", "description": "Why the last look saw nothing, or not all; empty where it did."},
        "failures": {
            "type": "array",
            "description": "The first documents that could not be had, or are nothing to publish, published before or not.",
            "items": {"type": "object", "properties": {"document": {"type": "string"}, "reason": {"type": "string"}}},
        },
        **{name: {"type": "integer"} for name in ("named", "documents", "failing", "submitted", "current", "old")},
    },
}
_WATCHES = {
    "type": "object",
    "required": ["watches"],
    "properties": {"watches": {"type": "array", "items": _WATCH}},
}
_ERROR = {
    "type": "object",
    "required": ["error", "hint"],
    "properties": {"error": {"type": "string"}, "hint": {"type": "string"}},
}

_FAILURES = {
    "400": "The request cannot be served as it stands.",
    "401": "A bearer token is needed, or this one is not taken.",
    "403": "The token is not for this.",
    "404": "There is no such job.",
    "413": "The body is larger than max_document.",
    "429": "The queue, or the tenant's part of it, is full: Retry-After tells the seconds to wait.",
    "503": "The queue cannot be used now.",
}

_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


def describe() -> dict[str, Any]:
    """The document that the service answers at /v1/openapi.json."""
    request = JobRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    watch = WatchSettings.model_json_schema(ref_template="#/components/schemas/{model}")
    kinds = watch.pop("$defs", {})
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvcdn prefill service", "version": __version__},
        "paths": _paths(),
        "components": {
            "schemas": {"JobRequest": request, "Job": _job(), "WatchSettings": watch, "Error": _ERROR, **kinds},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}},
        },
        "security": [{"bearer": []}],
    }


def _paths() -> dict[str, Any]:
    body = {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/JobRequest"}},
            "application/jsonl": {"schema": {"type": "string", "description": "A JobRequest a line, accepted together."}},
            "application/x-ndjson": {"schema": {"type": "string", "description": "As application/jsonl."}},
            "text/plain": {"schema": {"type": "string", "description": "A document; the rest of the job is in the query."}},
        },
    }
    page = [
        {"name": "state", "in": "query", "schema": {"enum": list(JobState)}},
        {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "The `next` of the page before."},
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000}},
    ]
    watch = {"$ref": "#/components/schemas/WatchSettings"}
    watched = {"required": True, "content": {"application/json": {"schema": watch}}}
    status = {"type": "object", "properties": {"status": {"type": "string"}}}
    return {
        "/v1/jobs": {
            "post": _operation("Submit documents; they are on the disk when the answer comes.", _JOBS, "202", requestBody=body),
            "get": _operation("List the tenant's jobs, or, with the scope admin, all.", _JOBS, parameters=page),
        },
        "/v1/jobs/{id}": {
            "get": _operation("Show a job.", _JOB, parameters=[_ID]),
            "delete": _operation("Cancel a job; a running one ends at its next block.", _JOB, parameters=[_ID]),
        },
        "/v1/jobs/{id}/events": {
            "get": {
                "summary": "Follow a job: its state as server-sent events, until it has ended.",
                "parameters": [_ID],
                "responses": {
                    "200": {"description": "Events.", "content": {"text/event-stream": {}}},
                    "204": {"description": "The job has ended, as the event that Last-Event-ID names has told."},
                    **_failures(),
                },
            }
        },
        "/v1/jobs/{id}/retry": {"post": _operation("Try a dead job again.", _JOB, parameters=[_ID])},
        "/v1/watches": {
            "get": _operation("What the watches see: needs the scope admin.", _WATCHES),
            "post": _operation("Add a watch of URLs: needs the scope admin.", watch, "201", requestBody=watched),
        },
        "/v1/watches/{name}": {
            "delete": _operation(
                "Remove a watch that was added; what it published stays: needs the scope admin.",
                {"type": "object", "properties": {"removed": {"type": "string"}}},
                parameters=[{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
            )
        },
        "/v1/openapi.json": {"get": _operation("This document.", {"type": "object"}, security=[])},
        "/healthz": {"get": _operation("Whether the service runs.", status, security=[])},
        "/readyz": {"get": _operation("Whether it takes new work.", status, security=[])},
    }


def _operation(summary: str, answer: dict[str, Any], code: str = "200", **more: Any) -> dict[str, Any]:
    answers = {code: {"description": "Done.", "content": {"application/json": {"schema": answer}}}, **_failures()}
    return {"summary": summary, "responses": answers, **more}


def _failures() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {code: {"description": description, "content": content} for code, description in _FAILURES.items()}


def _job() -> dict[str, Any]:
    text, number, word = {"type": "string"}, {"type": "number"}, {"type": ["string", "null"]}
    fields: dict[str, Any] = {
        "id": text,
        "tenant": text,
        "state": {"enum": list(JobState)},
        "name": text,
        "model": word,
        "precision": text,
        "namespace": word,
        "labels": {"type": "object", "additionalProperties": text},
        "priority": {"type": "integer"},
        "window": word,
        "attempts": {"type": "integer"},
        "created": number,
        "updated": number,
        "not_before": number,
        "reason": text,
        "progress": {"type": "object"},
        "result": {"type": ["object", "null"], "description": "What `kvcdn publish --json` prints, once it is published."},
    }
    return {"type": "object", "required": list(fields), "properties": fields}
