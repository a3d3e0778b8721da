"""Objects: what is said of one that was found, and why there is none, whichever way a request has come."""

from __future__ import annotations

from kvcdn.edge.disk.storage import DiskCache
from kvcdn.edge.http.outcome import CacheOutcome, Reason, cache_status
from kvcdn.edge.http.respond import IMMUTABLE, NO_STORE, RETRY_SECONDS, Note, PlainResponse
from kvcdn.edge.http.target import ObjectName
from kvcdn.edge.reads.fetch import Found, Refused

SMALL_BYTES = 64 * 1024
"""Objects up to this are read and sent with their headers in one go: cheaper than a sendfile of their own."""


def note_of(name: ObjectName, found: Found, *, counted: bool = True) -> Note:
    """For log and metrics; `counted`: whether its tokens are saved where this request came from."""
    worth = found.tokens / found.size if counted else 0.0
    return Note("object", name.short, found.outcome, name.key, worth, tokens=found.tokens, evicted=found.evicted)


def fields_of(found: Found) -> dict[str, str]:
    """The header fields of every answer with the object."""
    return {
        "ETag": f'"{found.etag}"',
        "Cache-Control": IMMUTABLE,
        "Accept-Ranges": "bytes",
        "Age": str(found.age),
        "Cache-Status": cache_status(found.outcome),
    }


def refuse(cache: DiskCache, name: ObjectName, refused: Refused) -> PlainResponse:
    """There is no object."""
    evicted, reason = cache.has_evicted(name.key), refused.refusal.reason
    note = Note("object", name.short, refused.outcome, evicted=evicted, reason=reason)
    return PlainResponse.refusal(note, refused.refusal)


def cannot_open(name: ObjectName, error: OSError) -> PlainResponse:
    """The process has no file descriptors left."""
    note = Note("object", name.short, CacheOutcome.REFUSED, reason=Reason.BUSY)
    message = f"the edge cannot open a file ({error.strerror})"
    return PlainResponse.line(note, 503, message, {"Retry-After": str(RETRY_SECONDS)})


def unsatisfiable(note: Note, found: Found) -> PlainResponse:
    """No byte of the object is within the range asked for; closes its file."""
    found.file.close()
    fields = fields_of(found) | {"Content-Range": f"bytes */{found.size}", "Cache-Control": NO_STORE}
    return PlainResponse.line(note, 416, f"the object has {found.size} bytes", fields)


def damaged(note: Note) -> PlainResponse:
    """The file was shorter than the object."""
    return PlainResponse.line(note, 503, "the cached file is damaged; try again", {"Retry-After": str(RETRY_SECONDS)})
