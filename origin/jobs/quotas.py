"""Quotas: how many jobs may wait, of all and of each tenant, and how many bytes each may submit, and have stored, a day of UTC.

What is submitted is known, and refused, before it is accepted. What is stored is known when a job ends: who has used a day's up
may submit no more until midnight, and jobs that were accepted before still end.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcdn.access.allowance import DAY_SECONDS, Shortage
from kvcdn.origin.jobs.jobs import JobState
from kvcdn.origin.jobs.queue_errors import QueueFullError

OPEN = f"('{JobState.QUEUED}', '{JobState.RUNNING}')"
"""The states of jobs that have not ended, in SQL."""

KEPT_DAYS = 3
"""Days that are remembered; only today's counts."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS quota_days (
    day INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    submitted INTEGER NOT NULL DEFAULT 0,
    stored INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (day, tenant)
) STRICT, WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Quotas:
    """The bytes of a day; None is without limit. `by_tenant` are those that tokens limit further, of what is submitted."""

    submitted: int | None = None
    stored: int | None = None
    by_tenant: Mapping[str, int] = field(default_factory=dict)


class Room:
    """How many more jobs may wait or run, within one transaction that accepts jobs."""

    def __init__(self, base: sqlite3.Connection, most: int, most_of_tenant: int) -> None:
        self._base, self._most, self._most_of_tenant = base, most, most_of_tenant
        (self._open,) = base.execute(f"SELECT count(*) FROM jobs WHERE state IN {OPEN}").fetchone()  # noqa: S608 - constants
        self._open_of: dict[str, int] = {}

    def take(self, tenant: str) -> None:
        """Counts one more job of a tenant. Raises QueueFullError, and counts nothing."""
        if tenant not in self._open_of:
            asked = f"SELECT count(*) FROM jobs WHERE tenant = ? AND state IN {OPEN}"  # noqa: S608 - constants
            (self._open_of[tenant],) = self._base.execute(asked, (tenant,)).fetchone()
        if self._open >= self._most or self._open_of[tenant] >= self._most_of_tenant:
            most = self._most if self._open >= self._most else self._most_of_tenant
            raise QueueFullError(f"the queue holds {most:,} jobs, and no more", hint="try again later")
        self._open += 1
        self._open_of[tenant] += 1

    def give_back(self, tenant: str, jobs: int) -> None:
        """Takes back what was counted for jobs that are not accepted after all."""
        if jobs:
            self._open -= jobs
            self._open_of[tenant] -= jobs


def submit(base: sqlite3.Connection, quotas: Quotas, tenant: str, now: float, size: int) -> None:
    """Counts a document of `size` bytes that a tenant submits. Raises QueueFullError where its day is used up."""
    submitted, stored = base.execute(
        "SELECT submitted, stored FROM quota_days WHERE day = ? AND tenant = ?", (_day(now), tenant)
    ).fetchone() or (0, 0)
    limits = (quotas.submitted, quotas.by_tenant.get(tenant))
    most = min((limit for limit in limits if limit is not None), default=None)
    if most is not None and submitted + size > most:
        raise _refusal(f"{tenant} may submit {most:,} bytes of documents a day, and {submitted:,} are used", now)
    if quotas.stored is not None and stored >= quotas.stored:
        raise _refusal(f"{tenant} may have {quotas.stored:,} bytes stored a day, and {stored:,} are used", now)
    charge(base, tenant, now, submitted=size)


def _refusal(message: str, now: float) -> QueueFullError:
    seconds = (_day(now) + 1) * DAY_SECONDS - now
    return QueueFullError(f"{Shortage.DAY}: {message}", hint="again after midnight UTC", retry_seconds=seconds)


def charge(base: sqlite3.Connection, tenant: str, now: float, *, submitted: int = 0, stored: int = 0) -> None:
    """Adds to what a tenant has used today."""
    base.execute(
        "INSERT INTO quota_days (day, tenant, submitted, stored) VALUES (?, ?, ?, ?) ON CONFLICT (day, tenant) "
        "DO UPDATE SET submitted = submitted + excluded.submitted, stored = stored + excluded.stored",
        (_day(now), tenant, submitted, stored),
    )


def forget(base: sqlite3.Connection, now: float) -> None:
    """Forgets days that are over."""
    base.execute("DELETE FROM quota_days WHERE day < ?", (_day(now) - KEPT_DAYS,))


def _day(now: float) -> int:
    return int(now // DAY_SECONDS)
