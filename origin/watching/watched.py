"""The book of watched documents, in the queue's file: what each looked like last, and which versions of it were published.

A version is a job. It is written down in the transaction that accepts the job, so that a crash at any moment neither loses a
change nor publishes it twice; and only where the document still is as it was when somebody looked, so that two services that
share a queue do not both submit it. Versions are *submitted*, *current*, *old* and *removing*, and then forgotten. While one is
being removed nobody submits the same content: the job would find it published, and then lose it.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcdn.errors import KvcdnError, NotFoundError, UsageError
from kvcdn.origin.jobs.database import connected, transaction
from kvcdn.origin.jobs.fetching import Validators
from kvcdn.origin.jobs.jobs import Job, JobRequest
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.jobs.queue_errors import translated
from kvcdn.origin.watching.watch_settings import WatchSettings

TENANT = "watch"
"""Whose the jobs of all watches are."""

MAX_REASON = 300

SHOWN_FAILURES = 20
"""Of one watch, with their reasons; all are counted."""

MAX_ADDED = 100
"""Watches that are in no settings: each has a thread."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS watches (
    name TEXT PRIMARY KEY,
    next REAL NOT NULL,
    looked REAL,
    documents INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE TABLE IF NOT EXISTS watches_added (
    name TEXT PRIMARY KEY,
    settings TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS watched (
    watch TEXT NOT NULL,
    document TEXT NOT NULL,
    digest TEXT NOT NULL,
    terms TEXT NOT NULL,
    etag TEXT NOT NULL,
    modified TEXT NOT NULL,
    gone REAL,
    reason TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (watch, document)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS versions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    job TEXT NOT NULL UNIQUE,
    watch TEXT NOT NULL,
    document TEXT NOT NULL,
    digest TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'submitted',
    fingerprint TEXT NOT NULL DEFAULT '',
    address TEXT NOT NULL DEFAULT '',
    own INTEGER NOT NULL DEFAULT 0,
    since REAL NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS versions_documents ON versions (watch, document);
CREATE INDEX IF NOT EXISTS versions_digests ON versions (digest);
CREATE INDEX IF NOT EXISTS versions_states ON versions (state, since);
CREATE INDEX IF NOT EXISTS watched_digests ON watched (digest);
CREATE VIEW IF NOT EXISTS watched_failing (watch, document, reason) AS
    SELECT watch, document, reason FROM watched WHERE reason <> ''
    UNION ALL
    SELECT watch, versions.document, 'its job is dead: ' || jobs.reason FROM versions JOIN jobs ON jobs.id = versions.job
    WHERE versions.state = 'submitted' AND jobs.state = 'dead';
"""


class OvertakenError(KvcdnError):
    """Somebody else has seen the same change first."""


@dataclass(frozen=True)
class Known:
    """A document as it was when it was last looked at; `terms` are those under which it was published."""

    digest: str
    terms: str
    validators: Validators
    gone: float | None


@dataclass(frozen=True)
class Version:
    """A version of a document: its job, and, once it is published, where. `own`: the job has made the manifest."""

    job: str
    watch: str
    document: str
    fingerprint: str
    address: str
    own: bool


class WatchBook:
    """What the watches of a service know. Thread-safe, and shared by the processes of a machine."""

    def __init__(self, path: Path, queue: JobQueue, clock: Callable[[], float] = time.time) -> None:
        """`path` is the file of `queue`. Raises UnavailableError, CorruptError."""
        self._path, self._queue, self._clock = path, queue, clock
        self._lock = threading.Lock()
        try:
            self._base = connected(path, _SCHEMA)
        except sqlite3.Error as error:
            raise translated(error, path) from None

    def close(self) -> None:
        with self._lock:
            self._base.close()

    def _writing(self) -> AbstractContextManager[sqlite3.Connection]:
        return transaction(self._base, self._lock, self._path)

    def _asked(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._base.execute(question, values).fetchall()
            except sqlite3.Error as error:
                raise translated(error, self._path) from None

    # -- watches that are in no settings ---------------------------------------------------------------------------------------

    def add(self, watch: WatchSettings) -> None:
        """A watch for every service with this queue, from their next second on. Raises UsageError where the name is taken."""
        with self._writing() as base:
            (count,) = base.execute("SELECT count(*) FROM watches_added").fetchone()
            if count >= MAX_ADDED:
                raise UsageError(f"{count} watches were added, which is the most", hint="remove one, or use the settings")
            if base.execute("SELECT 1 FROM watches_added WHERE name = ?", (watch.name,)).fetchone():
                raise UsageError(f"there is a watch {watch.name} already", hint="remove it, or take another name")
            base.execute("INSERT INTO watches_added VALUES (?, ?)", (watch.name, watch.model_dump_json()))
            base.execute("INSERT OR IGNORE INTO watches (name, next) VALUES (?, ?)", (watch.name, self._clock()))

    def remove(self, name: str) -> None:
        """Ends a watch that was added, and forgets what it saw; what it published stays. Raises NotFoundError."""
        with self._writing() as base:
            if base.execute("DELETE FROM watches_added WHERE name = ?", (name,)).rowcount == 0:
                raise NotFoundError(f"no watch {name} was added", hint="a watch of the settings is taken out there")
            base.execute("DELETE FROM watches WHERE name = ?", (name,))
            base.execute("DELETE FROM watched WHERE watch = ?", (name,))
            base.execute("DELETE FROM versions WHERE watch = ?", (name,))

    def added(self) -> dict[str, WatchSettings]:
        """The watches that were added, by name."""
        rows = self._asked("SELECT name, settings FROM watches_added ORDER BY name")
        return {name: WatchSettings.model_validate_json(settings) for name, settings in rows}

    # -- looks ----------------------------------------------------------------------------------------------------------------

    def claim(self, watch: str, every: float, *, added: bool = False) -> bool:
        """Whether a look is due, and this process's from now on; the next one is in `every` seconds.

        Never for a watch that was `added`, and is removed by now.
        """
        now = self._clock()
        with self._writing() as base:
            if not added:
                base.execute("INSERT OR IGNORE INTO watches (name, next) VALUES (?, ?)", (watch, now))
            due = "next <= ?2 OR next > ?2 + ?3"  # a clock that was set back does not stop it
            found = base.execute(f"UPDATE watches SET next = ?2 + ?3 WHERE name = ?1 AND ({due})", (watch, now, every))  # noqa: S608 - constants
        return found.rowcount == 1

    def end_look(self, watch: str, documents: int | None, reason: str) -> None:
        """What came of a look: how many documents there are, or why that cannot be told."""
        with self._writing() as base:
            base.execute(
                "UPDATE watches SET looked = ?, documents = coalesce(?, documents), reason = ? WHERE name = ?",
                (self._clock(), documents, reason[:MAX_REASON], watch),
            )

    def documents(self, watch: str) -> dict[str, Known]:
        """Every document that the watch knows, by name."""
        rows = self._asked("SELECT document, digest, terms, etag, modified, gone FROM watched WHERE watch = ?", watch)
        return {row[0]: Known(row[1], row[2], Validators(row[3], row[4]), row[5]) for row in rows}

    def submit(
        self, watch: str, document: str, request: JobRequest, before: Known | None, digest: str, terms: str, seen: Validators
    ) -> Job | KvcdnError:
        """Accepts the job that publishes a new version, and writes both down. Raises OvertakenError where that has been done.

        The error where the queue is full: then nothing has changed.
        """

        def write(base: sqlite3.Connection, job: Job) -> None:
            row = base.execute("SELECT digest FROM watched WHERE watch = ? AND document = ?", (watch, document)).fetchone()
            if (None if row is None else row[0]) != (None if before is None else before.digest):
                raise OvertakenError(f"{document} has been submitted already")
            if base.execute("SELECT 1 FROM versions WHERE digest = ? AND state = 'removing'", (digest,)).fetchone():
                raise OvertakenError(f"{document} is what is just being removed")
            base.execute(
                "INSERT OR REPLACE INTO watched (watch, document, digest, terms, etag, modified) VALUES (?, ?, ?, ?, ?, ?)",
                (watch, document, digest, terms, seen.etag, seen.modified),
            )
            base.execute(
                "INSERT INTO versions (job, watch, document, digest, since) VALUES (?, ?, ?, ?, ?)",
                (job.id, watch, document, digest, self._clock()),
            )

        return self._queue.accept([(TENANT, request)], also=write)[0]

    def aging(self, watch: str, seconds: float) -> set[str]:
        """Documents whose last version is published, and was so many seconds ago or more."""
        rows = self._asked(
            "SELECT document FROM versions last WHERE watch = ?1 AND state = 'current' AND since <= ?2 AND number = "
            "(SELECT max(number) FROM versions WHERE watch = ?1 AND document = last.document)",
            watch,
            self._clock() - seconds,
        )
        return {row[0] for row in rows}

    def same(self, watch: str, document: str, terms: str, seen: Validators) -> None:
        """The document is what it was, and there (again): a version that was on its way out stays, unless it is too late."""
        with self._writing() as base:
            removing = "SELECT 1 FROM versions WHERE watch = ?1 AND document = ?2 AND state = 'removing'"
            if base.execute(removing, (watch, document)).fetchone():
                return  # forgotten together with it, the document will be a new one
            base.execute(
                "UPDATE watched SET terms = ?, etag = ?, modified = ?, gone = NULL, reason = '' "
                "WHERE watch = ? AND document = ?",
                (terms, seen.etag, seen.modified, watch, document),
            )
            base.execute(
                "UPDATE versions SET state = 'current' WHERE watch = ?1 AND document = ?2 AND state = 'old' AND digest = "
                "(SELECT digest FROM watched WHERE watch = ?1 AND document = ?2) AND number = "
                "(SELECT max(number) FROM versions WHERE watch = ?1 AND document = ?2)",
                (watch, document),
            )

    def failed(self, watch: str, document: str, reason: str) -> bool:
        """It cannot be had, or is nothing that can be published; what was published of it stays. Whether that is news.

        It may never have been published: then this is all that anybody learns of it.
        """
        with self._writing() as base:
            changed = base.execute(
                "INSERT INTO watched (watch, document, digest, terms, etag, modified, reason) VALUES (?, ?, '', '', '', '', ?) "
                "ON CONFLICT (watch, document) DO UPDATE SET reason = excluded.reason WHERE reason <> excluded.reason",
                (watch, document, reason[:MAX_REASON]),
            )
        return changed.rowcount == 1

    def gone(self, watch: str, document: str) -> None:
        """It is not there any more: its versions are on their way out from the first such look on."""
        now = self._clock()
        with self._writing() as base:
            base.execute(
                "UPDATE watched SET gone = coalesce(gone, ?), reason = 'gone' WHERE watch = ? AND document = ?",
                (now, watch, document),
            )
            base.execute(
                "UPDATE versions SET state = 'old', since = ? WHERE watch = ? AND document = ? AND state = 'current'",
                (now, watch, document),
            )
            base.execute(
                "DELETE FROM watched WHERE watch = ?1 AND document = ?2 AND digest = ''",  # it never was more than a failure
                (watch, document),
            )

    # -- versions -------------------------------------------------------------------------------------------------------------

    def submitted(self, watch: str) -> list[Version]:
        """Versions whose jobs had not ended when somebody last asked, the oldest first."""
        return self._versions("watch = ? AND state = 'submitted'", watch)

    def overtaken(self, watch: str, document: str) -> list[str]:
        """Jobs of older versions than the last, that had not ended."""
        rows = self._asked(
            "SELECT job FROM versions WHERE watch = ?1 AND document = ?2 AND state = 'submitted' AND number < "
            "(SELECT max(number) FROM versions WHERE watch = ?1 AND document = ?2)",
            watch,
            document,
        )
        return [row[0] for row in rows]

    def published(self, job: str, *, fingerprint: str, address: str, own: bool) -> None:
        """A version is there: it is the current one, and those before it are old; or old itself, where it came too late."""
        now = self._clock()
        with self._writing() as base:
            number, watch, document = base.execute(
                "SELECT number, watch, document FROM versions WHERE job = ?", (job,)
            ).fetchone()
            base.execute(
                "UPDATE versions SET fingerprint = ?, address = ?, own = ?, since = ?, state = CASE WHEN EXISTS "
                "(SELECT 1 FROM watched WHERE watch = ?5 AND document = ?6 AND gone IS NULL) AND NOT EXISTS "
                "(SELECT 1 FROM versions WHERE watch = ?5 AND document = ?6 AND state = 'current' AND number > ?7) "
                "THEN 'current' ELSE 'old' END WHERE number = ?7",
                (fingerprint, address, own, now, watch, document, number),
            )
            base.execute(
                "UPDATE versions SET state = 'old', since = ?1 WHERE watch = ?2 AND document = ?3 AND state = 'current' "
                "AND number < (SELECT max(number) FROM versions WHERE watch = ?2 AND document = ?3 AND state = 'current')",
                (now, watch, document),
            )
            # Earlier ones of the same content are this one: it was published again to last longer, or came back.
            same = "watch = ?1 AND document = ?2 AND digest = (SELECT digest FROM versions WHERE number = ?3) AND number < ?3"
            same += " AND state IN ('current', 'old')"
            base.execute(
                f"UPDATE versions SET own = 1 WHERE number = ?3 AND EXISTS (SELECT 1 FROM versions WHERE {same} AND own)",  # noqa: S608 - constants
                (watch, document, number),
            )
            base.execute(f"DELETE FROM versions WHERE {same}", (watch, document, number))  # noqa: S608 - constants

    def lost(self, version: Version) -> None:
        """Nobody knows any more what has become of a version's job: its document is looked at as if for the first time."""
        with self._writing() as base:
            base.execute(
                "UPDATE watched SET digest = '', terms = '', etag = '', modified = '' WHERE watch = ?1 AND document = ?2 "
                "AND ?3 = (SELECT job FROM versions WHERE watch = ?1 AND document = ?2 ORDER BY number DESC LIMIT 1)",
                (version.watch, version.document, version.job),
            )
        self.drop([version.job])

    def drop(self, jobs: Sequence[str]) -> None:
        """Forgets versions: they are removed, or never came to be. Documents that are gone, and have none left, with them."""
        with self._writing() as base:
            base.executemany("DELETE FROM versions WHERE job = ?", [(job,) for job in jobs])
            base.execute(
                "DELETE FROM watched WHERE gone IS NOT NULL AND NOT EXISTS "
                "(SELECT 1 FROM versions WHERE versions.watch = watched.watch AND versions.document = watched.document)"
            )

    def outlived(self, watch: str, grace: float) -> list[Version]:
        """Old versions to be removed now: their grace is over, their content nowhere watched nor about to be published."""
        with self._writing() as base:
            base.execute(
                "UPDATE versions SET state = 'removing' WHERE watch = ? AND state = 'old' AND since <= ? "
                "AND NOT EXISTS (SELECT 1 FROM watched WHERE watched.digest = versions.digest AND gone IS NULL) "
                "AND NOT EXISTS (SELECT 1 FROM versions other WHERE other.digest = versions.digest "
                "AND other.state IN ('submitted', 'current'))",
                (watch, self._clock() - grace),
            )
        return self._versions("watch = ? AND state = 'removing'", watch)

    def _versions(self, condition: str, *values: Any) -> list[Version]:
        rows = self._asked(
            f"SELECT job, watch, document, fingerprint, address, own FROM versions WHERE {condition} ORDER BY number",  # noqa: S608 - constants
            *values,
        )
        return [Version(job, where, name, model, address, bool(own)) for job, where, name, model, address, own in rows]

    def status(self) -> list[dict[str, Any]]:
        """What is shown of every watch."""
        rows = self._asked(
            "SELECT name, next, looked, documents, reason, (SELECT count(*) FROM watched WHERE watch = name AND gone IS NULL), "
            "(SELECT count(*) FROM watched_failing WHERE watch = name), "
            "(SELECT count(*) FROM versions WHERE watch = name AND state = 'submitted'), "
            "(SELECT count(*) FROM versions WHERE watch = name AND state = 'current'), "
            "(SELECT count(*) FROM versions WHERE watch = name AND state = 'old'), "
            "(SELECT settings FROM watches_added added WHERE added.name = watches.name) FROM watches ORDER BY name"
        )
        words = ("name", "next_look", "last_look", "named", "reason", "documents", "failing", "submitted", "current", "old")
        return [
            {
                **dict(zip(words, row[:-1], strict=True)),
                "failures": self._failures(row[0]) if row[6] else [],
                "added": json.loads(row[-1]) if row[-1] else None,
            }
            for row in rows
        ]

    def _failures(self, watch: str) -> list[dict[str, str]]:
        found = self._asked(
            "SELECT document, reason FROM watched_failing WHERE watch = ? ORDER BY document LIMIT ?",
            watch,
            SHOWN_FAILURES,
        )
        return [{"document": document, "reason": reason} for document, reason in found]
