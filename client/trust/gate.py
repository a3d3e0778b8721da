"""The gate: what a loaded cache passes before its first use, the canary and, by chance, an audit."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvcdn.client.loading.report import Audited, Report
from kvcdn.client.trust.audit import audit_block, auditable, choose_blocks, find_culprit, poison, reason_of
from kvcdn.client.trust.canary import Canary, Headers, makers
from kvcdn.client.trust.revoked import Revoked
from kvcdn.errors import MismatchError
from kvcdn.keyring import load_distrust
from kvcdn.model.load import LoadedModel
from kvcdn.signing import PublicKey, TrustList


class Gate:
    """Of one model in memory. `trust` is whom to accept blocks from, less those who failed here or in another process."""

    def __init__(self, loaded: LoadedModel, trust: TrustList, audit: float, revoked: Revoked) -> None:
        """`audit` is the probability, 0 to 1, with which one block of a prompt is recomputed."""
        self.revoked = revoked
        self._loaded = loaded
        self._canary = Canary(loaded)
        self._audit = audit
        self._trust = trust.without(load_distrust())
        self._lock = threading.Lock()

    @property
    def trust(self) -> TrustList:
        """Whom to accept blocks from now."""
        failures, revoked = self._canary.failures(), self.revoked.known.publishers
        trust = self._trust.without(failures) if failures else self._trust
        return trust.revoking(revoked) if revoked else trust

    def draw(self) -> bool:
        """Whether the next prompt is to be audited."""
        return self._audit > 0 and random.SystemRandom().random() < self._audit

    def open_for(self, headers: Headers) -> bool:
        """Whether the caches of which these are blocks need no canary any more."""
        return not self._canary.due(makers(headers))

    def admit(
        self,
        layers: Sequence[Any],
        headers: Headers,
        token_ids: Sequence[int],
        length: int,
        report: Report,
        *,
        audit: bool,
    ) -> None:
        """Checks a complete cache of the first `length` tokens. Raises MismatchError; then nothing of it may be used."""
        started = time.perf_counter()
        if not self.open_for(headers):
            self._canary.check(layers, headers, token_ids, length)
            report.seconds["canary"] = time.perf_counter() - started
        if audit:
            started = time.perf_counter()
            used = {index: header for index, header in headers.items() if header.start < length}
            for header in choose_blocks(auditable(self._loaded, layers, used), 1):
                report.audit = audit_block(self._loaded, layers, header, token_ids)
            report.seconds["audit"] = time.perf_counter() - started
            if report.audit is not None and not report.audit.passed:
                raise self._blamed(report.audit, find_culprit(self._loaded, layers, used, token_ids, report.audit))

    def _blamed(self, failed: Audited, culprit: Audited | None) -> MismatchError:
        """The error to raise, after whoever is to blame for it was refused."""
        if culprit is None:
            return MismatchError(f"{reason_of(failed)}; which of several publishers is to blame cannot be told")
        publisher = PublicKey.from_text(culprit.publisher)
        reason = poison(publisher, reason_of(culprit))
        with self._lock:
            self._trust = self._trust.without({publisher: reason})
        return MismatchError(
            f"{reason}; its publisher {publisher.text} is no longer trusted",
            hint=f"if that was a mistake: kvcdn trust forgive {publisher.text}",
        )
