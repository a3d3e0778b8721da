"""Admission: from a request's header or link to what it may do, and how much of it its tenant has left."""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress

from aiohttp import web

from kvcdn.access.allowance import Allowances, Limits, Wait
from kvcdn.access.grant import Grant
from kvcdn.digest import ModelTag
from kvcdn.edge.settings import EdgeSettings
from kvcdn.edge.tenants.guard import PEER, Guard

TENANT = web.RequestKey("tenant", str)
"""On whose account a request is, once that is known."""

_MAX_ACCOUNT_BYTES = 4 << 20
"""Ten thousand tenants of 64 characters, and their bytes."""

log = logging.getLogger("kvcdn.edge.tenants.admission")


class Admission:
    """Who may do what, as the settings say; they may change while the edge runs. Belongs to the event loop's thread."""

    def __init__(self, settings: EdgeSettings) -> None:
        """Raises UsageError where the settings would leave the edge open to the network."""
        self._account_path = settings.cache_dir.expanduser() / "accounts.json"
        self._allowances = Allowances(Limits())
        self._allowances.restore(self._read_accounts(), time.time())
        self.apply(settings)

    def apply(self, settings: EdgeSettings) -> None:
        """Goes by `settings` from now on. Raises UsageError, and then changes nothing."""
        guard = Guard.of(settings)
        counted = self._allowances.to_json(time.time())
        self.guard = guard
        self._allowances = Allowances(
            settings.tenant_limits.limits(), {tenant: limits.limits() for tenant, limits in settings.tenants.items()}
        )
        self._allowances.restore(counted, time.time())
        self._names: dict[str, list[str]] = {}
        for name, tag in settings.model_names.items():
            self._names.setdefault(tag, []).append(name)

    def covers(self, grant: Grant, tag: ModelTag) -> bool:
        """Whether `grant` is for the model `tag`."""
        return grant.covers_model(tag, *self._names.get(str(tag), ()))

    def name_of(self, tag: str) -> str:
        """What the settings call the model `tag`; the tag itself where they do not."""
        return next(iter(self._names.get(tag, ())), tag)

    def wait(self, grant: Grant) -> Wait | None:
        """Counts a request of `grant`'s tenant, or says why it has to wait."""
        if grant is PEER:
            return None
        return self._allowances.admit(grant, time.time())

    def charge(self, grant: Grant, size: int) -> None:
        """Counts `size` body bytes that are about to be sent."""
        if grant is PEER:
            return
        self._allowances.charge(grant.tenant, size, time.time())

    def remember(self) -> None:
        """Writes down what tenants were sent today, for after a restart. Blocks; a disk that refuses is no reason to stop."""
        if self.guard.is_open:
            return
        draft = self._account_path.with_suffix(".draft")
        try:
            draft.write_text(json.dumps(self._allowances.to_json(time.time())), encoding="utf-8")
            draft.rename(self._account_path)
        except OSError as error:
            log.warning(
                "accounts are not written", extra={"fields": {"path": str(self._account_path), "error": error.strerror}}
            )

    def _read_accounts(self) -> object:
        with suppress(OSError, ValueError), self._account_path.open("rb") as file:
            return json.loads(file.read(_MAX_ACCOUNT_BYTES))
        return None
