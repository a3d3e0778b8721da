"""Ledgers: what is counted, in a SQLite file that processes of one machine share, and that any of them may die on.

Entries are appended. When there are more than DETAILED_ENTRIES, the oldest are added up without their prompts, so that nobody
is billed wrongly for the sake of a limit: sums stay exact, only the ties between a client's and an edge's entries are lost.
When there are more than SUMMED_ENTRIES of these, the oldest lose their documents, then all do, and at last the oldest hours
are deleted, which is counted. All of that happens in the transaction that writes, so that a kill leaves one state or the
other; what a power failure takes is the last transactions, not the file.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from kvcdn.accounting.entry import HOUR_SECONDS, LAST_HOUR, Entry, Key, Part, added
from kvcdn.accounting.snapshot import MAX_RUNS, Head, RunId, Snapshot, encode_lines
from kvcdn.errors import CorruptError, NotFoundError, UnavailableError, UsageError

DETAILED_ENTRIES = 200_000
"""Entries with their prompts, some 60 MB: of an edge that serves ten prompts a second the last hours."""

SUMMED_ENTRIES = 200_000
"""Sums by hour: of 20 documents that 10 tenants read at any hour more than a month; documents left out, years."""

FOLD_SHARE = 100
"""When there are too many, one in so many is folded at once: 2,000 take a writer some 0.1 s."""

BUSY_SECONDS = 10.0
"""How long a transaction waits for another process's."""

APPLICATION_ID = 0x4B565500 + ord("u")
"""Told in the file, so that no other database is taken for a ledger."""

VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY AUTOINCREMENT, hour INTEGER NOT NULL, entry TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS sums (key TEXT PRIMARY KEY, hour INTEGER NOT NULL, counts TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sums_hours ON sums (hour);
CREATE TABLE IF NOT EXISTS runs (
    id TEXT PRIMARY KEY, part TEXT NOT NULL, started INTEGER NOT NULL, seen INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
"""


class Ledger:
    """The ledger at `path`. Thread-safe, and shared by the processes of a machine."""

    def __init__(
        self,
        path: Path,
        *,
        create: bool = True,
        detailed: int = DETAILED_ENTRIES,
        summed: int = SUMMED_ENTRIES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens it; makes it if there is none and `create`.

        Raises NotFoundError, UsageError where a folder or something else lies there, UnavailableError, CorruptError.
        """
        self.path = path = path.expanduser().absolute()
        self._detailed, self._summed, self._clock = detailed, summed, clock
        self._lock = threading.Lock()
        self._base: sqlite3.Connection | None = None
        if path.is_dir():
            raise UsageError(f"{path} is a folder; a ledger is a file", hint=f"name a file, such as {path / 'usage.sqlite'}")
        if not create and not path.exists():
            raise NotFoundError(f"there is no ledger {path}")
        try:
            if create:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                path.touch(mode=0o600)
            self._base = self._open(path, create=create)
        except OSError as error:
            raise UnavailableError(f"cannot use the ledger {path}: {error.strerror}") from None
        except sqlite3.DatabaseError as error:
            raise self._error(error) from None

    def _open(self, path: Path, *, create: bool = False) -> sqlite3.Connection:
        base = sqlite3.connect(
            f"file:{quote(str(path))}?mode=rw", uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            base.execute("PRAGMA trusted_schema = OFF")
            # Several processes may make it at once: who looks sees it before or after, and not in between.
            base.execute("BEGIN IMMEDIATE" if create else "BEGIN")
            try:
                self._check(base, path, create=create)
            finally:
                base.execute("COMMIT")
            if base.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                with suppress(sqlite3.OperationalError):  # another process is doing so
                    base.execute("PRAGMA journal_mode = WAL")
            base.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            base.close()
            raise
        return base

    @staticmethod
    def _check(base: sqlite3.Connection, path: Path, *, create: bool) -> None:
        """Makes the tables if there are none, and it may. Raises UsageError for another database."""
        (kind,) = base.execute("PRAGMA application_id").fetchone()
        (tables,) = base.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        (version,) = base.execute("PRAGMA user_version").fetchone()
        if kind != APPLICATION_ID and (tables or not create):
            raise UsageError(f"{path} is a database, and no ledger")
        if version not in (0, VERSION):
            raise UsageError(f"the ledger {path} is of another version of kvcdn")
        if create and not tables:
            base.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            for statement in _SCHEMA.split(";"):
                base.execute(statement)
            base.execute(f"PRAGMA user_version = {VERSION}")
            base.execute("INSERT OR IGNORE INTO state VALUES ('ledger', lower(hex(randomblob(16))))")

    def close(self) -> None:
        with self._lock:
            base, self._base = self._base, None
            if base is not None:
                with suppress(sqlite3.Error):
                    base.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing ------------------------------------------------------------------------------------------------------------

    def begin_run(self, run: RunId, part: Part) -> None:
        """Notes that a process counts from now on. Raises UnavailableError or CorruptError, as all that follows."""
        now = int(self._clock())
        with self._transaction() as base:
            base.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?)", (str(run), str(part), now, now))
            base.execute(
                "DELETE FROM runs WHERE id NOT IN (SELECT id FROM runs ORDER BY started DESC, id LIMIT ?)", (MAX_RUNS,)
            )

    def write(self, run: RunId, entries: Iterable[Entry], dropped: int = 0, folded_to: int = -1) -> None:
        """Appends `entries`, and notes how many more were `dropped`; all of it or nothing.

        Up to the hour `folded_to` some may have been added up without their prompts.
        """
        rows = [(entry.key.hour, entry.encode().decode("ascii")) for entry in entries]
        with self._transaction() as base:
            base.executemany("INSERT INTO entries (hour, entry) VALUES (?, ?)", rows)
            base.execute("UPDATE runs SET seen = ? WHERE id = ?", (int(self._clock()), str(run)))
            if dropped:
                self._raise_by(base, "dropped", dropped)
            self._note_folded(base, folded_to)
            self._fold(base)

    def end_run(self, run: RunId) -> None:
        """Everything that the process has counted is here."""
        with self._transaction() as base:
            base.execute("DELETE FROM runs WHERE id = ?", (str(run),))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            base = self._connected()
            try:
                base.execute("BEGIN IMMEDIATE")
                try:
                    yield base
                    self._raise_by(base, "version", 1)
                    base.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):
                        base.execute("ROLLBACK")
                    raise
            except sqlite3.DatabaseError as error:
                raise self._error(error) from None

    def _connected(self) -> sqlite3.Connection:
        if self._base is None:
            raise UnavailableError(f"the ledger {self.path} was closed")
        return self._base

    def _error(self, error: sqlite3.Error) -> UnavailableError | CorruptError:
        if isinstance(error, sqlite3.OperationalError) or getattr(error, "sqlite_errorname", "").startswith("SQLITE_FULL"):
            return UnavailableError(f"the ledger {self.path}: {error}")
        return CorruptError(
            f"the ledger {self.path} is damaged, or is none: {error}",
            hint="sqlite3 FILE .recover may save what is left; move the file away, and a new one is begun",
        )

    # -- keeping to the limit -----------------------------------------------------------------------------------------------

    def _fold(self, base: sqlite3.Connection) -> None:
        first, last = base.execute("SELECT MIN(number), MAX(number) FROM entries").fetchone()
        if first is None or last - first < self._detailed:
            return
        stop = last - self._detailed + max(self._detailed // FOLD_SHARE, 1)
        rows = base.execute("SELECT entry FROM entries WHERE number <= ? ORDER BY number", (stop,)).fetchall()
        entries = [Entry.decode(text.encode("ascii")) for (text,) in rows]
        self._add_up(base, ((entry.key._replace(prompt=""), entry.counts) for entry in entries))
        base.execute("DELETE FROM entries WHERE number <= ?", (stop,))
        # An hour to come is a clock's that was wrong. It must not make all hours until then look as if they were folded.
        now = int(self._clock()) // HOUR_SECONDS
        self._note_folded(base, max((entry.key.hour for entry in entries if entry.key.hour <= now), default=-1))
        if self._sums(base) > self._summed:
            (middle,) = base.execute("SELECT hour FROM sums ORDER BY hour LIMIT 1 OFFSET ?", (self._summed // 2,)).fetchone()
            self._leave_documents_out(base, middle)
        if self._sums(base) > self._summed:
            self._leave_documents_out(base, LAST_HOUR)
        if self._sums(base) > self._summed:
            self._forget(base)

    def _note_folded(self, base: sqlite3.Connection, hour: int) -> None:
        if hour > int(self._state(base, "folded_to", -1)):
            base.execute("INSERT OR REPLACE INTO state VALUES ('folded_to', ?)", (hour,))

    @staticmethod
    def _sums(base: sqlite3.Connection) -> int:
        (count,) = base.execute("SELECT COUNT(*) FROM sums").fetchone()
        return int(count)

    def _leave_documents_out(self, base: sqlite3.Connection, last: int) -> None:
        """Of the sums up to the hour `last`."""
        rows = base.execute("SELECT key, counts FROM sums WHERE hour <= ?", (last,)).fetchall()
        base.execute("DELETE FROM sums WHERE hour <= ?", (last,))
        self._add_up(base, ((read_key(key)._replace(document=""), json.loads(counts)) for key, counts in rows))

    def _forget(self, base: sqlite3.Connection) -> None:
        extra = self._sums(base) - self._summed + max(self._summed // FOLD_SHARE, 1)
        base.execute("DELETE FROM sums WHERE key IN (SELECT key FROM sums ORDER BY hour, key LIMIT ?)", (extra,))
        self._raise_by(base, "forgotten", extra)

    @staticmethod
    def _add_up(base: sqlite3.Connection, found: Iterable[tuple[Key, Mapping[str, int]]]) -> None:
        sums: dict[Key, Mapping[str, int]] = {}
        for key, counts in found:
            sums[key] = added(sums.get(key, {}), counts)
        for key, counts in sums.items():
            text = write_key(key)
            row = base.execute("SELECT counts FROM sums WHERE key = ?", (text,)).fetchone()
            total = counts if row is None else added(json.loads(row[0]), counts)
            base.execute("INSERT OR REPLACE INTO sums VALUES (?, ?, ?)", (text, key.hour, json.dumps(total)))

    @staticmethod
    def _state(base: sqlite3.Connection, name: str, default: int | str) -> int | str:
        row = base.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        return default if row is None else row[0]

    @staticmethod
    def _raise_by(base: sqlite3.Connection, name: str, count: int) -> None:
        base.execute(
            "INSERT INTO state VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value", (name, count)
        )

    # -- reading ------------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """All of it, as of now. Raises CorruptError for a file that somebody has written into."""
        with self._reading() as base:
            head = self._head(base)
            return Snapshot(head, tuple(self._entries(base)))

    def copy_lines(self, write: Callable[[bytes], Any]) -> None:
        """Hands over the text form of a snapshot, line by line: for a ledger that is larger than one wants in memory."""
        with self._reading() as base:
            for line in encode_lines(self._head(base), self._summed_entries(base)):
                write(line)
            # As they were written: whoever reads them checks them, and an edge has better things to do.
            for (entry,) in base.execute("SELECT entry FROM entries ORDER BY number"):
                write(entry.encode("utf-8") + b"\n")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own: whoever reads for long holds up nobody."""
        try:
            base = self._open(self.path)
        except sqlite3.DatabaseError as error:
            raise self._error(error) from None
        try:
            base.execute("BEGIN")
            yield base
        except sqlite3.DatabaseError as error:
            raise self._error(error) from None
        finally:
            base.close()

    def _head(self, base: sqlite3.Connection) -> Head:
        (detailed,) = base.execute("SELECT COUNT(*) FROM entries").fetchone()
        runs = base.execute("SELECT id, part, started, seen FROM runs ORDER BY started, id").fetchall()
        value = {
            "type": "usage",
            "v": 1,
            "ledger": self._state(base, "ledger", ""),
            "version": self._state(base, "version", 0),
            "entries": detailed + self._sums(base),
            "folded_to": self._state(base, "folded_to", -1),
            "dropped": self._state(base, "dropped", 0),
            "forgotten": self._state(base, "forgotten", 0),
            "runs": [{"id": run, "part": part, "started": started, "seen": seen} for run, part, started, seen in runs],
        }
        return Head.read(value)

    @staticmethod
    def _summed_entries(base: sqlite3.Connection) -> Iterator[Entry]:
        try:
            for key, counts in base.execute("SELECT key, counts FROM sums ORDER BY hour, key"):
                yield Entry.read({**read_key(key)._asdict(), "counts": json.loads(counts)})
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptError(f"a row of the ledger is none of ours ({error})") from None

    def _entries(self, base: sqlite3.Connection) -> Iterator[Entry]:
        yield from self._summed_entries(base)
        try:
            for (entry,) in base.execute("SELECT entry FROM entries ORDER BY number"):
                yield Entry.decode(entry.encode("ascii"))
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptError(f"a row of the ledger is none of ours ({error})") from None


def write_key(key: Key) -> str:
    """A key as one text, the same for the same key."""
    return json.dumps(list(key))


def read_key(text: str) -> Key:
    """The key of such a text. Raises ValueError or TypeError."""
    return Key(*json.loads(text))
