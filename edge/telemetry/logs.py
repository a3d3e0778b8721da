"""Logs: JSON lines to standard error, written by a thread, so that a slow terminal or pipe never holds up a request."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
from collections.abc import Iterator
from logging.handlers import QueueHandler, QueueListener

from aiohttp.http_exceptions import HttpProcessingError

from kvcdn.trail import current

QUEUED_LINES = 10_000
"""Lines that wait for standard error; what exceeds them is dropped and counted."""

ROOT = "kvcdn"

_TRACER = "opentelemetry"
"""What it has to say is that spans are lost."""


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time, level, logger, event, the request it was for, and the fields given with it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            line["request_id"] = request_id
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"), default=str)


class _BoundedHandler(QueueHandler):
    """Never waits, never complains."""

    def __init__(self, lines: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(lines)
        self.dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        # The listener's thread runs for nobody.
        trail = current()
        record.request_id = None if trail is None else trail.request_id
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class _NoBadRequests(logging.Filter):
    """Drops aiohttp's stack trace for every request that is not HTTP: the access log has its line."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


@contextlib.contextmanager
def logging_to_stderr(level: str) -> Iterator[None]:
    """While it lasts, what kvcdn's loggers say at `level` or above goes to standard error; so do the tracer's warnings."""
    lines: queue.Queue[logging.LogRecord] = queue.Queue(QUEUED_LINES)
    handler = _BoundedHandler(lines)
    handler.addFilter(_NoBadRequests())
    writer = logging.StreamHandler(sys.stderr)
    writer.setFormatter(JsonFormatter())
    listener = QueueListener(lines, writer)
    heard = {logging.getLogger(ROOT): level.upper(), logging.getLogger(_TRACER): "WARNING"}
    before = {logger: (logger.level, logger.propagate) for logger in heard}
    for logger, least in heard.items():
        logger.setLevel(least)
        logger.propagate = False
        logger.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        for logger, (least_before, propagate) in before.items():
            logger.removeHandler(handler)
            logger.level, logger.propagate = least_before, propagate
        listener.stop()
        if handler.dropped:
            sys.stderr.write(f'{{"event":"log lines dropped","count":{handler.dropped}}}\n')
