"""The queue: jobs in SQLite, accepted durably, claimed by lease, ended once.

A transaction that accepts jobs is on the disk (WAL, synchronous FULL) before anybody is told. A worker claims a job for some
seconds and renews the claim while it works; whoever dies lets it run out, and another begins again, where publishing finds the
blocks that are there. Each claim has a random word, without which nobody ends a job: a worker that was thought dead and comes
back changes nothing. So a job may be worked on twice, ends once, and publishes one document, whose name is its content.
"""

from __future__ import annotations

import json
import random
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcdn.errors import KvcdnError, NotFoundError, UnavailableError, UsageError
from kvcdn.origin.jobs import quotas as quotas_
from kvcdn.origin.jobs.database import connected, transaction
from kvcdn.origin.jobs.jobs import ENDS, Job, JobRequest, JobState, Window, first_start
from kvcdn.origin.jobs.queue_errors import ClaimLostError, translated
from kvcdn.origin.jobs.quotas import OPEN, Quotas, Room

LEASE_SECONDS = 30.0
"""How long a claim lasts without a sign of life: as long a job of a dead worker lies."""

MAX_FAILURES = 10
"""Of one job, for reasons that may be gone the next time: with the pauses, a quarter of an hour without origin kills none."""

MAX_DEATHS = 20
"""Of workers at one job. More than failures: who kills a service, or its machine, says nothing about the job in hand."""

BACKOFF_SECONDS = 2.0
"""Before the second attempt; twice that before the third, and so on, and up to as much again by chance."""

MAX_BACKOFF_SECONDS = 600.0

MAX_REASON = 1000

VERSION = 1
"""Of the tables below, told in the file."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    idempotency_key TEXT,
    state TEXT NOT NULL,
    priority INTEGER NOT NULL,
    not_before REAL NOT NULL,
    request TEXT NOT NULL,
    document TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    deaths INTEGER NOT NULL DEFAULT 0,
    claim TEXT NOT NULL DEFAULT '',
    claimed_until REAL NOT NULL DEFAULT 0,
    cancelling INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    updated REAL NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    progress TEXT NOT NULL DEFAULT '{}',
    result TEXT
) STRICT;
CREATE UNIQUE INDEX IF NOT EXISTS jobs_keys ON jobs (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
DROP INDEX IF EXISTS jobs_next;
CREATE INDEX IF NOT EXISTS jobs_due ON jobs (state, priority DESC, number, not_before);
CREATE INDEX IF NOT EXISTS jobs_tenants ON jobs (tenant, state);
"""

_COLUMNS = "id, tenant, state, request, attempts, created, updated, not_before, reason, progress, result, claim, failures"

_DOCUMENT = frozenset(("text", "messages", "tools"))
"""Fields of a request that are read with a claim only: a page of jobs may have gigabytes of them."""


class JobQueue:
    """The jobs of one service, in the file at `path`. Thread-safe, and shared by the processes of a machine."""

    def __init__(
        self,
        path: Path,
        *,
        most: int = 100_000,
        most_of_tenant: int = 10_000,
        lease_seconds: float = LEASE_SECONDS,
        quotas: Quotas | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """At most `most` jobs are waiting or running. Raises UnavailableError, CorruptError, UsageError."""
        self._most, self._most_of_tenant, self._lease, self._clock = most, most_of_tenant, lease_seconds, clock
        self._path, self._quotas = path, quotas or Quotas()
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Documents lie in it: nobody else's business.
            path.touch(mode=0o600)
            self._base = connected(path, _SCHEMA + quotas_.SCHEMA)
            (version,) = self._base.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise UsageError(f"the queue {path} is of another version of kvcdn", hint="let that version empty it first")
            self._base.execute(f"PRAGMA user_version = {VERSION}")
        except OSError as error:
            raise UnavailableError(f"cannot open the queue {path}: {error.strerror}") from None
        except sqlite3.Error as error:
            raise translated(error, path) from None

    def close(self) -> None:
        with self._lock:
            self._base.close()

    def _transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        return transaction(self._base, self._lock, self._path)

    # -- tenants --------------------------------------------------------------------------------------------------------------

    def accept(
        self,
        orders: Sequence[tuple[str, JobRequest]],
        also: Callable[[sqlite3.Connection, Job], None] | None = None,
        bytes_per_day: Mapping[str, int] | None = None,
    ) -> list[Job | KvcdnError]:
        """As `accept_together`, each job by itself."""
        batches = [(tenant, [request]) for tenant, request in orders]
        answers = self.accept_together(batches, also, bytes_per_day)
        return [answer if isinstance(answer, KvcdnError) else answer[0] for answer in answers]

    def accept_together(
        self,
        batches: Sequence[tuple[str, Sequence[JobRequest]]],
        also: Callable[[sqlite3.Connection, Job], None] | None = None,
        bytes_per_day: Mapping[str, int] | None = None,
    ) -> list[list[Job] | KvcdnError]:
        """Accepts batches of jobs, each of a tenant, in one transaction: they are on the disk on return.

        What `also` writes for each new job is in the same transaction. A batch is accepted whole or not at all: the error where
        there is no room for all of it, or it is beyond its tenant's quotas (also those of its token, `bytes_per_day`).
        A key that its tenant has used means that job; for another job it is an error.
        """
        now, quotas = self._clock(), replace(self._quotas, by_tenant=bytes_per_day or {})
        with self._transaction() as base:
            room = Room(base, self._most, self._most_of_tenant)
            answers: list[list[Job] | KvcdnError] = []
            for tenant, requests in batches:
                base.execute("SAVEPOINT batch")
                taken = 0
                jobs: list[Job] = []
                try:
                    for request in requests:
                        job = self._keyed(tenant, request)
                        if job is None:
                            room.take(tenant)
                            taken += 1
                            quotas_.submit(base, quotas, tenant, now, request.size)
                            job = self._insert(tenant, request, now)
                            if also:
                                also(base, job)
                        jobs.append(job)
                    answers.append(jobs)
                except KvcdnError as error:
                    base.execute("ROLLBACK TO batch")
                    room.give_back(tenant, taken)
                    answers.append(error)
                base.execute("RELEASE batch")
        return answers

    def _keyed(self, tenant: str, request: JobRequest) -> Job | None:
        """The job for which the tenant has used the request's key. Raises UsageError where that was another."""
        if request.idempotency_key is None:
            return None
        key = (tenant, request.idempotency_key)
        found = self._base.execute(
            "SELECT request, document FROM jobs WHERE tenant = ? AND idempotency_key = ?", key
        ).fetchone()
        if found is None:
            return None
        if found != _texts(request):
            raise UsageError("this idempotency key was used for another job", hint="each job has a key of its own")
        return self._one("tenant = ? AND idempotency_key = ?", key)

    def _insert(self, tenant: str, request: JobRequest, now: float) -> Job:
        name, start = secrets.token_hex(16), first_start(request, now)
        self._base.execute(
            "INSERT INTO jobs (id, tenant, idempotency_key, state, priority, not_before, request, document, created, updated) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (name, tenant, request.idempotency_key, JobState.QUEUED, request.priority, start, *_texts(request), now, now),
        )
        return Job(name, tenant, JobState.QUEUED, request, 0, now, now, start, "", {}, None)

    def get(self, name: str) -> Job:
        """The job `name`, without its document. Raises NotFoundError."""
        with self._lock:
            found = self._one("id = ?", (name,))
        if found is None:
            raise NotFoundError(f"there is no job {name[:40]!r}")
        return found

    def list(self, *, tenant: str | None = None, state: JobState | None = None, after: str = "", limit: int = 100) -> list[Job]:
        """Jobs from the oldest on, those behind the job `after`, without their documents. Raises NotFoundError."""
        with self._lock:
            (behind,) = self._base.execute("SELECT max(number) FROM jobs WHERE id = ?", (after,)).fetchone() if after else (0,)
            if behind is None:
                raise NotFoundError(f"there is no job {after[:40]!r} to go on behind", hint="begin the list anew")
            rows = self._base.execute(
                f"SELECT {_COLUMNS} FROM jobs WHERE (?1 IS NULL OR tenant = ?1) AND (?2 IS NULL OR state = ?2) "  # noqa: S608 - constants
                "AND number > ?3 ORDER BY number LIMIT ?4",
                (tenant, state, behind, limit),
            ).fetchall()
        return [_job(row) for row in rows]

    def counts(self) -> dict[str, int]:
        """How many jobs there are of each state."""
        with self._lock:
            return dict(self._base.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())

    def cancel(self, name: str) -> Job:
        """Ends a waiting job, and has a running one end at its next block. No matter to one that has ended."""
        with self._transaction() as base:
            ended = base.execute(
                "UPDATE jobs SET state = ?, updated = ?, reason = 'cancelled' WHERE id = ? AND state = ?",
                (JobState.CANCELLED, self._clock(), name, JobState.QUEUED),
            )
            if not ended.rowcount:
                base.execute("UPDATE jobs SET cancelling = 1 WHERE id = ? AND state = ?", (name, JobState.RUNNING))
        return self.get(name)

    def retry(self, name: str) -> Job:
        """Puts a dead job back into the queue. Raises UsageError for another."""
        with self._transaction() as base:
            changed = base.execute(
                "UPDATE jobs SET state = ?, attempts = 0, failures = 0, deaths = 0, not_before = ?, updated = ?, "
                "cancelling = 0 WHERE id = ? AND state = ?",
                (JobState.QUEUED, self._clock(), self._clock(), name, JobState.DEAD),
            )
        if not changed.rowcount:
            raise UsageError(f"job {self.get(name).id} is not dead", hint="only what failed for good is tried again by hand")
        return self.get(name)

    def forget(self, before: float) -> int:
        """Removes jobs that ended before this time, documents and all; how many."""
        with self._transaction() as base:
            quotas_.forget(base, self._clock())
            gone = base.execute(f"DELETE FROM jobs WHERE state NOT IN {OPEN} AND updated < ?", (before,))  # noqa: S608 - constants
        return gone.rowcount

    # -- workers --------------------------------------------------------------------------------------------------------------

    def claim(self) -> Job | None:
        """The next job, from now on this worker's until its lease ends; None where nothing may begin."""
        now = self._clock()
        with self._transaction() as base:
            self._reclaim(now)
            while True:
                found = self._one(
                    f"state = '{JobState.QUEUED}' AND not_before <= ? ORDER BY priority DESC, number LIMIT 1", (now,)
                )
                if found is None:
                    return None
                opens = Window.parse(found.request.window).opens(now) if found.request.window else now
                if opens <= now:
                    break
                # All that wait for this window at once: one by one, a night's rest would keep everybody from the queue.
                base.execute(
                    "UPDATE jobs SET not_before = ? WHERE state = ? AND not_before <= ? "
                    "AND json_extract(request, '$.window') = ?",
                    (opens, JobState.QUEUED, now, found.request.window),
                )
            word = secrets.token_hex(8)
            base.execute(
                "UPDATE jobs SET state = ?, claim = ?, claimed_until = ?, attempts = attempts + 1, updated = ? WHERE id = ?",
                (JobState.RUNNING, word, now + self._lease, now, found.id),
            )
            (document,) = base.execute("SELECT document FROM jobs WHERE id = ?", (found.id,)).fetchone()
            claimed = self._one("id = ?", (found.id,))
            return claimed and replace(claimed, request=claimed.request.model_copy(update=json.loads(document)))

    def _reclaim(self, now: float) -> None:
        """Takes back what dead workers hold: to be tried again, or not, where it has killed too many."""
        stale = "state = ?1 AND claimed_until < ?2"
        values = (JobState.RUNNING, now)
        self._base.execute(
            f"UPDATE jobs SET state = '{JobState.CANCELLED}', reason = 'cancelled', updated = ?2 WHERE {stale} AND cancelling",  # noqa: S608 - constants
            values,
        )
        self._base.execute(
            f"UPDATE jobs SET state = '{JobState.DEAD}', reason = 'its worker died, every time', updated = ?2 "  # noqa: S608 - constants
            f"WHERE {stale} AND deaths >= {MAX_DEATHS - 1}",
            values,
        )
        self._base.execute(
            f"UPDATE jobs SET state = '{JobState.QUEUED}', claim = '', deaths = deaths + 1, "  # noqa: S608 - constants
            f"reason = 'its worker died', updated = ?2 WHERE {stale}",
            values,
        )

    def renew(self, job: Job, progress: Mapping[str, Any] | None = None) -> None:
        """A sign of life of whoever works on `job`. Raises ClaimLostError where it is to stop."""
        now = self._clock()
        with self._transaction() as base:
            renewed = base.execute(
                "UPDATE jobs SET claimed_until = ?, progress = coalesce(?, progress), updated = ? "
                "WHERE id = ? AND claim = ? AND state = ? AND NOT cancelling",
                (now + self._lease, None if progress is None else json.dumps(progress), now, *_held(job)),
            )
        if not renewed.rowcount:
            raise ClaimLostError(f"job {job.id} was cancelled, or is somebody else's by now")

    def finish(self, job: Job, result: Mapping[str, Any]) -> bool:
        """Ends a job that is published. False where it was not this worker's any more; nothing is changed then."""
        counted = {"stored": int(result.get("uploaded_bytes") or 0), "submitted": int(result.get("fetched_bytes") or 0)}
        return self._end(job, JobState.PUBLISHED, "", json.dumps(result), counted)

    def abandon(self, job: Job) -> bool:
        """Ends a job that was cancelled while it ran."""
        return self._end(job, JobState.CANCELLED, "cancelled", None)

    def fail(self, job: Job, reason: str, *, for_good: bool) -> bool:
        """Has a job tried again some time later, or ends it `for_good` or after too many attempts, with the reason.

        One that was cancelled meanwhile ends as cancelled.
        """
        failures = job.failures + 1
        if for_good or failures >= MAX_FAILURES:
            return self._end(job, JobState.DEAD, reason[:MAX_REASON], None)
        pause = min(BACKOFF_SECONDS * 2**job.failures, MAX_BACKOFF_SECONDS) * (1 + random.random())  # noqa: S311 - no secret
        return self._return(job, self._clock() + pause, reason[:MAX_REASON], attempts=job.attempts, failures=failures)

    def release(self, job: Job) -> bool:
        """Gives a job back that was begun and not ended, as the worker has to stop. That was no attempt."""
        return self._return(job, self._clock(), "", attempts=job.attempts - 1, failures=job.failures)

    def _return(self, job: Job, start: float, reason: str, *, attempts: int, failures: int) -> bool:
        with self._transaction() as base:
            changed = base.execute(
                f"UPDATE jobs SET state = iif(cancelling, '{JobState.CANCELLED}', ?), not_before = ?, "  # noqa: S608 - constants
                "reason = iif(cancelling, 'cancelled', ?), attempts = ?, failures = ?, claim = '', updated = ? "
                "WHERE id = ? AND claim = ? AND state = ?",
                (JobState.QUEUED, start, reason, attempts, failures, self._clock(), *_held(job)),
            )
        return changed.rowcount == 1

    def _end(
        self, job: Job, state: JobState, reason: str, result: str | None, counted: Mapping[str, int] | None = None
    ) -> bool:
        if state not in ENDS:
            raise ValueError(f"{state} is no end")
        with self._transaction() as base:
            if state is JobState.DEAD:  # who did not want it any more is not to find it among the dead
                asked = base.execute("SELECT cancelling FROM jobs WHERE id = ? AND claim = ?", (job.id, job.claim)).fetchone()
                state, reason = (JobState.CANCELLED, "cancelled") if asked == (1,) else (state, reason)
            changed = base.execute(
                "UPDATE jobs SET state = ?, reason = ?, result = ?, claim = '', updated = ? "
                "WHERE id = ? AND claim = ? AND state = ?",
                (state, reason, result, self._clock(), *_held(job)),
            )
            if changed.rowcount == 1 and counted:
                quotas_.charge(base, job.tenant, self._clock(), **counted)
        return changed.rowcount == 1

    def _one(self, condition: str, values: tuple[Any, ...]) -> Job | None:
        row = self._base.execute(f"SELECT {_COLUMNS} FROM jobs WHERE {condition}", values).fetchone()  # noqa: S608 - constants
        return None if row is None else _job(row)


def _texts(request: JobRequest) -> tuple[str, str]:
    """What the table keeps of a request: its wishes, and its document."""
    return request.model_dump_json(exclude=set(_DOCUMENT)), request.model_dump_json(include=set(_DOCUMENT))


def _held(job: Job) -> tuple[str, str, str]:
    return job.id, job.claim, JobState.RUNNING


def _job(row: Sequence[Any]) -> Job:
    name, tenant, state, request, attempts, created, updated, not_before, reason, progress, result, claim, failures = row
    return Job(
        name,
        tenant,
        JobState(state),
        JobRequest.model_construct(**json.loads(request)),
        attempts,
        created,
        updated,
        not_before,
        reason,
        json.loads(progress),
        None if result is None else json.loads(result),
        claim,
        failures,
    )
