"""What can be wrong with a queue: no room, a claim that is lost, a file that cannot be used."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from kvcdn.errors import CorruptError, KvcdnError, UnavailableError


class QueueFullError(UnavailableError):
    """There is no room for more jobs, of anybody or of this tenant, or the tenant has used up its bytes of today."""

    def __init__(self, message: str, *, hint: str = "", retry_seconds: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_seconds = retry_seconds
        """When asking again may help; None where nobody knows."""


class ClaimLostError(KvcdnError):
    """The job is not, or no longer, this worker's: it was cancelled, or its claim ran out."""


def translated(error: sqlite3.Error, path: Path) -> KvcdnError:
    """The error that says what is wrong with the file at `path`."""
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return CorruptError(f"the queue {path} is damaged: {error}", hint="move it away and submit again what it held")
    return UnavailableError(f"the queue {path} cannot be used: {error}")
