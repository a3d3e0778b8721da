"""Allowances: how fast and how much each tenant may ask. Pure accounting; the time is given."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from kvcdn.access.grant import Grant

DAY_SECONDS = 24 * 3600

MAX_TENANTS = 10_000
"""Tenants whose account is kept. Beyond, those that asked least recently are forgotten."""

BURST_SECONDS = 2.0
"""What a tenant did not use for so long it may use at once."""


class Shortage(enum.StrEnum):
    """Why a request has to wait. The words of metrics and logs."""

    REQUESTS = "requests-per-second"
    BYTES = "bytes-per-second"
    DAY = "bytes-per-day"


@dataclass(frozen=True)
class Limits:
    """What one tenant may use; None is without limit."""

    requests_per_second: float | None = None
    bytes_per_second: float | None = None
    bytes_per_day: int | None = None


@dataclass(frozen=True)
class Wait:
    """A refusal: what is short, and in how many seconds asking again may help."""

    shortage: Shortage
    seconds: float


class _Bucket:
    """Refills at a rate, up to what BURST_SECONDS bring. May be in debt: a whole object is charged when it is begun."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._level = rate * BURST_SECONDS
        self._at = now

    def shortfall(self, amount: float, now: float) -> float:
        """Seconds until `amount` is there; 0 where it is."""
        self._refill(now)
        return max(0.0, (amount - self._level) / self.rate)

    def take(self, amount: float, now: float) -> None:
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        self._level = min(self._level + self.rate * max(0.0, now - self._at), max(self.rate * BURST_SECONDS, 1.0))
        # Also when the clock was set back: a bucket that waits for the old time would refuse everybody until then.
        self._at = now


class _Account:
    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self.requests = _Bucket(limits.requests_per_second, now) if limits.requests_per_second else None
        self.bytes = _Bucket(limits.bytes_per_second, now) if limits.bytes_per_second else None
        self.day = int(now // DAY_SECONDS)
        self.today = 0

    def turn_day(self, now: float) -> None:
        day = int(now // DAY_SECONDS)
        if day > self.day:
            self.day, self.today = day, 0


class Allowances:
    """The accounts of all tenants, by Unix time; days are UTC's. Used by one thread."""

    def __init__(self, default: Limits, by_tenant: dict[str, Limits] | None = None) -> None:
        self._default = default
        self._by_tenant = by_tenant or {}
        self._accounts: dict[str, _Account] = {}

    def admit(self, grant: Grant, now: float) -> Wait | None:
        """Counts a request of `grant`'s tenant, or tells why it has to wait, and then counts nothing."""
        account = self._account(grant.tenant, now)
        account.turn_day(now)
        quota = _least(account.limits.bytes_per_day, grant.bytes_per_day)
        if quota is not None and account.today >= quota:
            return Wait(Shortage.DAY, (account.day + 1) * DAY_SECONDS - now)
        # Whoever is not in debt may begin: an object has no size before it is looked up.
        if account.bytes and (seconds := account.bytes.shortfall(0, now)):
            return Wait(Shortage.BYTES, seconds)
        if account.requests:
            if seconds := account.requests.shortfall(1, now):
                return Wait(Shortage.REQUESTS, seconds)
            account.requests.take(1, now)
        return None

    def charge(self, tenant: str, size: int, now: float) -> None:
        """Counts `size` bytes that are about to be sent to `tenant`."""
        account = self._account(tenant, now)
        account.turn_day(now)
        account.today += size
        if account.bytes:
            account.bytes.take(size, now)

    def today(self, tenant: str, now: float) -> int:
        """Bytes counted for `tenant` since midnight UTC."""
        account = self._accounts.get(tenant)
        if account is None:
            return 0
        account.turn_day(now)
        return account.today

    def to_json(self, now: float) -> dict[str, Any]:
        """What outlives the process: the day, and every tenant's bytes of it."""
        counted = {tenant: self.today(tenant, now) for tenant in list(self._accounts)}
        return {"bytes": {tenant: size for tenant, size in counted.items() if size}, "day": int(now // DAY_SECONDS)}

    def restore(self, value: Any, now: float) -> None:
        """Takes over what `to_json` gave, if it is of today; anything else is forgotten."""
        if not isinstance(value, dict) or value.get("day") != int(now // DAY_SECONDS):
            return
        counted = value.get("bytes")
        for tenant, size in (counted if isinstance(counted, dict) else {}).items():
            if isinstance(size, int) and not isinstance(size, bool) and size > 0:
                self._account(str(tenant), now).today = size

    def _account(self, tenant: str, now: float) -> _Account:
        account = self._accounts.pop(tenant, None)
        if account is None:
            account = _Account(self._by_tenant.get(tenant, self._default), now)
            if len(self._accounts) >= MAX_TENANTS:
                self._accounts.pop(next(iter(self._accounts)))
        self._accounts[tenant] = account
        return account


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
