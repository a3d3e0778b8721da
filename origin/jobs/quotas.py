"""Quotas: how many bytes each tenant may submit, and have stored, in a day of UTC. Kept in the queue's file.

What is submitted is known, and refused, before it is accepted. What is stored is known when a job ends: who has used a day's up
may submit no more until midnight, and jobs that were accepted before still end.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcdn.access.allowance import DAY_SECONDS, Shortage
from kvcdn.origin.jobs.queue_errors import QueueFullError

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


@dataclass
class Used:
    """What a tenant has used today, and what is being added."""

    submitted: int
    stored: int
    added: int = 0


class Ledger:
    """The tenants' bytes within one transaction that accepts jobs."""

    def __init__(self, base: sqlite3.Connection, quotas: Quotas, now: float) -> None:
        self._base, self._quotas, self._now = base, quotas, now
        self._used: dict[str, Used] = {}

    def take(self, tenant: str, size: int) -> QueueFullError | None:
        """Counts a document of `size` bytes, or tells why it is refused, and then counts nothing."""
        used = self._of(tenant)
        limits = (self._quotas.submitted, self._quotas.by_tenant.get(tenant))
        most = min((limit for limit in limits if limit is not None), default=None)
        if most is not None and used.submitted + used.added + size > most:
            return self._refusal(
                f"{tenant} may submit {most:,} bytes of documents a day, and {used.submitted + used.added:,} are used"
            )
        if self._quotas.stored is not None and used.stored >= self._quotas.stored:
            return self._refusal(f"{tenant} may have {self._quotas.stored:,} bytes stored a day, and {used.stored:,} are used")
        used.added += size
        return None

    def close(self) -> None:
        """Writes down what was counted."""
        for tenant, used in self._used.items():
            if used.added:
                charge(self._base, tenant, self._now, submitted=used.added)

    def _of(self, tenant: str) -> Used:
        if tenant not in self._used:
            found = self._base.execute(
                "SELECT submitted, stored FROM quota_days WHERE day = ? AND tenant = ?", (_day(self._now), tenant)
            ).fetchone()
            self._used[tenant] = Used(*(found or (0, 0)))
        return self._used[tenant]

    def _refusal(self, message: str) -> QueueFullError:
        seconds = (_day(self._now) + 1) * DAY_SECONDS - self._now
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
