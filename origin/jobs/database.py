"""The SQLite file that the queue and the watches share: how it is opened, and its transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from kvcdn.origin.jobs.queue_errors import translated

BUSY_SECONDS = 30.0
"""How long a transaction waits for another process's."""


def connected(path: Path, schema: str) -> sqlite3.Connection:
    """A connection whose transactions are on the disk when they end (WAL, synchronous FULL). Raises sqlite3.Error."""
    base = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    base.execute("PRAGMA journal_mode = WAL")
    base.execute("PRAGMA synchronous = FULL")
    base.executescript(schema)
    return base


@contextmanager
def transaction(base: sqlite3.Connection, lock: AbstractContextManager[Any], path: Path) -> Iterator[sqlite3.Connection]:
    """`base` in a transaction that is there in whole or not at all. Raises what `translated` makes of SQLite's errors."""
    with lock:
        try:
            base.execute("BEGIN IMMEDIATE")
            yield base
            base.execute("COMMIT")
        except sqlite3.Error as error:
            raise translated(error, path) from None
        finally:
            # A full disk ends a transaction by itself, or fails its COMMIT and leaves it open.
            if base.in_transaction:
                base.execute("ROLLBACK")
