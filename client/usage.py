"""Usage: what a client counts of its prompts, for a ledger (FORMAT.md section 14). Off unless somebody asks for it.

A prompt is noted when it begins, and its counts when its cache is there and, where the client generates, its first token. The
ledger learns where tokens came from and what that cost: no text, no token id, no answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvcdn.accounting.entry import Key, Loss, Outcome, Part, hour_of
from kvcdn.accounting.recorder import Recorder
from kvcdn.client.loading.report import MissReason, Report
from kvcdn.client.network.tally import Tally
from kvcdn.digest import ModelTag

if TYPE_CHECKING:
    from kvcdn.client.planning.attempt import Attempt

FLUSH_SECONDS = 0.2
"""How long counts wait in memory: what is lost of a client that is killed."""

USAGE_VARIABLE = "KVCDN_USAGE"

TENANT_VARIABLE = "KVCDN_USAGE_TENANT"

_LOSSES: Mapping[MissReason, Loss] = {
    MissReason.NOT_PUBLISHED: Loss.NOT_PUBLISHED,
    MissReason.UNAVAILABLE: Loss.UNAVAILABLE,
    MissReason.ORIGIN_UNAVAILABLE: Loss.UNAVAILABLE,
    MissReason.CORRUPT: Loss.REFUSED,
    MissReason.UNTRUSTED: Loss.REFUSED,
    MissReason.REVOKED: Loss.REFUSED,
    MissReason.MISMATCH: Loss.REFUSED,
    MissReason.QUALITY: Loss.REFUSED,
    MissReason.REFUSED: Loss.REFUSED,
    MissReason.PLANNED: Loss.SLOWER,
    MissReason.UNSUPPORTED_MODEL: Loss.UNSUPPORTED,
}


class Usage:
    """Counts prompts for the ledger at `path`, on account of `tenant`. Thread-safe; several clients may share one."""

    def __init__(self, path: str | Path, *, tenant: str = "") -> None:
        """Raises UsageError for a tenant that is no plain word, and what opening a ledger raises."""
        self._tenant = Key(Part.CLIENT, 0, tenant, "", "", "", Outcome.BEGUN).checked().tenant
        self._recorder = Recorder(Path(path), Part.CLIENT, flush_s=FLUSH_SECONDS)
        self._open: dict[str, Tally] = {}

    @classmethod
    def of(cls, usage: Usage | str | Path | None) -> Usage | None:
        """`usage` itself, or one for the ledger at a path, on account of KVCDN_USAGE_TENANT.

        For `configured` the path is that of KVCDN_USAGE, and without one there is none.
        """
        path = os.environ.get(USAGE_VARIABLE, "") if usage == "configured" else usage
        if not isinstance(path, str | Path):
            return path
        return cls(path, tenant=os.environ.get(TENANT_VARIABLE, "")) if path else None

    def flush(self) -> None:
        """Returns when everything counted so far is written down."""
        self._recorder.flush()

    def close(self) -> None:
        """Writes down what is left. May be called twice."""
        self._recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- prompts ------------------------------------------------------------------------------------------------------------

    def begin(self, report: Report) -> Tally:
        """A prompt is asked: its id is in the report from now on."""
        tally = Tally()
        report.prompt_id = str(tally.id)
        self._open[report.prompt_id] = tally
        self._recorder.add(self._key(tally, Outcome.BEGUN), {"begun": 1})
        return tally

    def end(self, report: Report, attempt: Attempt | None, model: ModelTag | None) -> None:
        """What became of the prompt of `report`; with an `attempt`, what was offered and what came."""
        tally = self._open.pop(report.prompt_id, None)
        if tally is None:
            return
        reused = report.tokens_reused
        offered = max(min(attempt.offered if attempt else reused, report.tokens_total - 1), reused, 0)
        lost = offered - reused
        loss = Loss.NONE
        if lost or (attempt is None and report.reason is not None):
            # Computed beside fetching by plan; a batch, too, may use less than what was there, for no reason of this kind.
            computed = Loss.SLOWER if report.tokens_computed else Loss.NONE
            loss = _LOSSES[report.reason] if report.reason else computed
            if loss is Loss.NOT_PUBLISHED and attempt is not None and attempt.published_tokens:
                loss = Loss.DIVERGED
        outcome = Outcome.MISSED if not reused else Outcome.PARTLY if lost else Outcome.REUSED
        saved = round(1000 * (report.seconds_saved or 0.0))
        counts = {
            "prompts": 1,
            "tokens_asked": report.tokens_total,
            "tokens_offered": offered,
            "tokens_lost": lost,
            "tokens_kept": report.tokens_kept,
            "tokens_local": report.tokens_local,
            "tokens_fetched": max(reused - report.tokens_kept - report.tokens_local, 0),
            "tokens_computed": report.tokens_computed,
            "tokens_prefilled": max(report.tokens_total - reused - report.tokens_computed, 0),
            "bytes_edge": tally.bytes_edge,
            "bytes_origin": tally.bytes_origin,
            "requests_edge": tally.requests_edge,
            "requests_origin": tally.requests_origin,
            "requests_cut": tally.requests_cut,
            "objects_read": tally.objects_read,
            "saved_ms": max(saved, 0),
            "lost_ms": max(-saved, 0),
            **(attempt.arrived() if attempt is not None else {}),
        }
        reason = str(report.reason or "") if lost or attempt is None else ""
        key = self._key(tally, outcome)._replace(model=str(model or ""), loss=loss, reason=reason)
        self._recorder.add(key, {name: count for name, count in counts.items() if count})

    def _key(self, tally: Tally, outcome: Outcome) -> Key:
        document = str(tally.document or "")
        return Key(Part.CLIENT, hour_of(), self._tenant, "", document, str(tally.id), outcome)
