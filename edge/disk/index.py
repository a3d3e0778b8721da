"""The index: the names of a cache's files in a database beside them, so that a start reads one file instead of a million names.

A file is entered before it has its final name and leaves after it is gone: whatever dies when, no file is there that the index
does not know. The other way round is harmless: a name without a file is dropped when somebody asks for it.

That holds as long as the operating system lives, for the database is not synced: a start relies on it only after a clean end,
or within the same boot, and else walks the folder (`load` gives None). So it does where the database is missing or damaged.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY, stored_at REAL NOT NULL) WITHOUT ROWID;
"""

WAL_PAGES = 250
"""Of 4 KiB, written ahead before they are put into place: bounds what the index takes besides itself."""

BUSY_SECONDS = 1.0
"""Nobody else has the database open: the folder is locked."""

_CLEAN = "clean"

log = logging.getLogger("kvcdn.edge.disk.index")


class StoredFile(NamedTuple):
    """One file of a complete object."""

    name: str
    stored_at: float
    """Unix time in seconds."""


class FileIndex:
    """The names of a cache's files. Thread-safe. A failure of the database costs the next start a walk, and nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._closed = False
        self._database: sqlite3.Connection | None = None

    def load(self) -> Iterator[StoredFile] | None:
        """The files there may be, oldest first; None where a walk has to tell, after which `rebuild` has to be called."""
        try:
            self._database = self._open()
            ended = self._database.execute("SELECT value FROM state WHERE name = 'ended'").fetchone()
            if ended is None or ended[0] not in (_CLEAN, _boot_id()):
                return None
            (broken,) = self._database.execute("PRAGMA quick_check(1)").fetchone()
            if broken != "ok":
                raise sqlite3.DatabaseError(str(broken))
            self._mark(_boot_id())
            rows = self._database.execute("SELECT name, stored_at FROM files ORDER BY stored_at")
        except sqlite3.Error as error:
            self._give_up(error)
            return None
        return map(StoredFile._make, rows)

    def rebuild(self, files: Iterable[StoredFile]) -> None:
        """Begins anew, with what a walk has found."""
        self._close()
        self._remove()
        try:
            self._database = self._open()
            with self._database:
                self._database.execute("BEGIN")
                # In the order of the names, in which they lie: a tenth of the time of any other.
                self._database.executemany("INSERT OR REPLACE INTO files VALUES (?, ?)", sorted(files))
            self._mark(_boot_id())
        except sqlite3.Error as error:
            self._give_up(error)

    def add(self, name: str) -> None:
        """A file will have this name. Raises OSError after the end, for then no file may come that the index lacks."""
        if self._closed:
            raise OSError(errno.ESHUTDOWN, "the cache is closed")
        self._run("INSERT OR REPLACE INTO files VALUES (?, ?)", [(name, time.time())])

    def remove(self, names: Sequence[str]) -> None:
        """These files are gone."""
        self._run("DELETE FROM files WHERE name = ?", [(name,) for name in names])

    def close(self) -> None:
        """A clean end: the next start may rely on what is here."""
        with self._lock:
            self._closed = True
            if self._database is None:
                return
            try:
                self._mark(_CLEAN)
                self._database.execute("PRAGMA synchronous = FULL")
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.Error as error:
                self._give_up(error)
            self._close()

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = OFF")
            database.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
            database.executescript(_SCHEMA)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _run(self, statement: str, rows: list[tuple[str] | tuple[str, float]]) -> None:
        with self._lock:
            if self._database is None or not rows:
                return
            try:
                with contextlib.nullcontext() if len(rows) == 1 else self._database:
                    self._database.executemany(statement, rows)
            except sqlite3.Error as error:
                self._give_up(error)

    def _mark(self, ended: str) -> None:
        """Notes, durably, that what is here is to be believed: in this boot, or after a clean end in any."""
        if self._database is not None:
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute("INSERT OR REPLACE INTO state VALUES ('ended', ?)", (ended,))
            self._database.execute("PRAGMA synchronous = OFF")

    def _give_up(self, error: sqlite3.Error) -> None:
        """What is written from now on is not in the index, so that it must not be believed."""
        log.warning("%s cannot be used, the next start walks the folder: %s", self._path, error)
        self._close()
        self._remove()

    def _close(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)


def _boot_id() -> str:
    """Of the running system; one that never matches where it does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return f"unknown {time.time_ns()}"
