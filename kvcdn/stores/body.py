"""A body: the bytes of an object as a server sends them, counted, timed, and taken up again where the connection breaks."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from kvcdn.errors import UnavailableError
from kvcdn.store import FIRST_BYTES, STREAM_CHUNK_BYTES
from kvcdn.stores.span import Span

MAX_RESUMES = 4
"""How often one stream is taken up again: enough for a restarted proxy, and a link that breaks more often is a broken link."""

RESUME_PAUSE_SECONDS = 0.1
"""First pause before taking up again; it doubles each time."""

PATIENCE_SECONDS = 60.0
SLOWEST_BYTES_PER_SECOND = 16 * 1024
"""A body may take PATIENCE_SECONDS and this rate on top, waiting time only: a server that drips one byte at a time under the
stall limit would otherwise hold its reader for ever, and any model prefills faster than this."""

MAX_SKIP_BYTES = 64 << 20
"""Most that is read and thrown away at a server that ignores ranges: beyond the size of any block."""

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.IGNORECASE)
_CONTENT_LENGTH = re.compile(r"\d{1,18}")


class BrokenBodyError(Exception):
    """A connection that ended or failed in mid-body; taken up again by `resumed`, never seen outside."""


@dataclass(frozen=True)
class Body:
    """One response's bytes."""

    read: Callable[[int], bytes]
    """At most so many next bytes, empty at the end. Raises BrokenBodyError."""
    close: Callable[[], None]
    start: int
    """Where in the object the next byte lies, once `skip` bytes are thrown away."""
    size: int
    """Of the whole object."""
    etag: str
    skip: int = 0


def body_extent(status: int, headers: Mapping[str, str], span: Span, where: str) -> tuple[int, int]:
    """The size of the whole object, and how many bytes come before those asked for, from the headers of a 200 or 206.

    RFC 9110 section 14.4: what a 206 holds is said by Content-Range alone. Raises UnavailableError for an answer that does not
    say, or that holds something other than what was asked for.
    """
    if status != 206:  # noqa: PLR2004 - RFC 9110 section 15.3.7
        length = headers.get("Content-Length", "")
        if not _CONTENT_LENGTH.fullmatch(length):
            raise UnavailableError(f"{where}: the answer does not say how long the object is")
        if min(span.start, int(length)) > MAX_SKIP_BYTES:
            raise UnavailableError(f"{where}: the server ignores ranges, and {span.start:,} bytes are too many to read in vain")
        return int(length), min(span.start, int(length))
    found = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if found is None:
        raise UnavailableError(f"{where}: a partial answer without a usable Content-Range")
    first, last, size = (int(number) for number in found.groups())
    if not (first == span.start <= last < size):
        raise UnavailableError(f"{where}: asked for {span.header}, the answer holds {found.group()}")
    return size, 0


def resumed(body: Body, span: Span, reopen: Callable[[Span], Body], where: str) -> Generator[bytes, None, None]:
    """The bytes of `span`, first from `body`, then from what `reopen` returns for the rest; begins with a dummy, see `begun`.

    Raises UnavailableError when the connection breaks too often, is too slow, or leads to another object than before.
    """
    position, stop = span.clip(body.size)
    skip, waited, resumes, wanted = body.skip, 0.0, 0, stop - position
    try:
        yield b""
        while position < stop:
            began = time.monotonic()
            # The first piece may be no more than what came in one packet with the answer's head.
            most = FIRST_BYTES if position + wanted < stop + FIRST_BYTES else STREAM_CHUNK_BYTES
            try:
                piece = _some(body, min(skip + stop - position, most))
            except BrokenBodyError as error:
                body.close()
                resumes += 1
                if resumes > MAX_RESUMES:
                    raise UnavailableError(f"{where}: broke off at byte {position:,} of {stop:,} ({error})") from error
                pause(resumes)
                body = _same(reopen(Span(position, stop)), body, where)
                skip = body.skip
                continue
            waited += time.monotonic() - began
            if waited > PATIENCE_SECONDS + wanted / SLOWEST_BYTES_PER_SECOND:
                raise UnavailableError(f"{where}: too slow, byte {position:,} of {stop:,} after {waited:.0f} s")
            skip, piece = max(skip - len(piece), 0), piece[skip:]
            position += len(piece)
            if piece:
                yield piece
    finally:
        body.close()


def pause(attempt: int) -> None:
    """Waits before attempt 1, 2, ...: exponentially, with jitter, so that many readers do not come back at once."""
    time.sleep(RESUME_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))  # noqa: S311 - no secret


def _some(body: Body, wanted: int) -> bytes:
    piece = body.read(wanted)
    if not piece:
        raise BrokenBodyError("the connection was closed")
    return piece


def _same(new: Body, old: Body, where: str) -> Body:
    if new.size != old.size or (new.etag and old.etag and new.etag != old.etag):
        new.close()
        raise UnavailableError(f"{where}: the object changed while it was read")
    return new
