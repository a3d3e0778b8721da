"""Reports: what a prompt's cache came from, what it cost, and, where the model had to prefill, why."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from kvcdn.client.network.wire import OriginDownError
from kvcdn.errors import (
    CorruptError,
    KvcdnError,
    MismatchError,
    NotFoundError,
    QualityError,
    RevokedError,
    UnavailableError,
    UnsupportedModelError,
    UntrustedError,
)
from kvcdn.keys import PRECISION_NATIVE


class MissReason(enum.StrEnum):
    """Why tokens were prefilled here instead of loaded. The same words in reports, logs and metrics."""

    NOT_PUBLISHED = "not-published"
    UNAVAILABLE = "unavailable"
    ORIGIN_UNAVAILABLE = "origin-unavailable"
    CORRUPT = "corrupt"
    UNTRUSTED = "untrusted"
    REVOKED = "revoked"
    MISMATCH = "mismatch"
    UNSUPPORTED_MODEL = "unsupported-model"
    QUALITY = "quality"
    REFUSED = "refused"
    PLANNED = "planned"

    @classmethod
    def of(cls, error: KvcdnError) -> Self:
        """The reason that `error` amounts to."""
        for kind, reason in (
            (OriginDownError, cls.ORIGIN_UNAVAILABLE),
            (NotFoundError, cls.NOT_PUBLISHED),
            (RevokedError, cls.REVOKED),
            (UntrustedError, cls.UNTRUSTED),
            (MismatchError, cls.MISMATCH),
            (QualityError, cls.QUALITY),
            (CorruptError, cls.CORRUPT),
            (UnavailableError, cls.UNAVAILABLE),
            (UnsupportedModelError, cls.UNSUPPORTED_MODEL),
        ):
            if isinstance(error, kind):
                return reason
        return cls.REFUSED


class Refining(enum.StrEnum):
    """What becomes of coarse KV that a prompt began with."""

    PENDING = "pending"
    KEPT = "kept"
    FAILED = "failed"


@dataclass(frozen=True)
class Audited:
    """A block that was recomputed: the same to the bit, or the same but for rounding (`passed`), or not (`detail`).

    `worst` is the largest relative difference of most tokens of a layer.
    """

    block: str
    start: int
    tokens: int
    publisher: str
    identical: bool
    passed: bool
    worst: float
    detail: str


@dataclass
class Report:
    """One prompt. Tokens and bytes are counts; `seconds` by stage are wall time and may overlap.

    `tokens_reused` were loaded, `tokens_computed` computed beside them, and the rest of `tokens_total` was prefilled by the
    model itself. `reason` and `detail` are set where less was reused than the prompt offered. `plan` says which way was chosen
    and why (`client.planning.history.History`). `seconds_saved` is what the model needs here for the
    whole prompt beyond what it needs behind those tokens, as last measured, less the time spent on
    having them; None where that speed is not known yet.
    `audit` says which block was recomputed, and what came of it, where one was. `tokens_local` of the reused were mapped from
    this host's local store; `local_refused` says why that could not be looked at. `tokens_kept` of them were in memory already,
    in a `Prefix` or from earlier turns of a `Conversation`. `tokens_coarse` of the reused were lossy, or computed behind such,
    when the first token came, in `precision`; `refinement` says whether the exact KV is on its way to this host's store, or
    there, for later prompts, or why not (`refinement_detail`); it changes after the answer. `request_id` is what edges log of
    everything they were asked for it; `prompt_id` is what ledgers call it, where usage is counted.
    """

    source: str
    tokens_total: int = 0
    tokens_reused: int = 0
    tokens_computed: int = 0
    blocks_reused: int = 0
    bytes_fetched: int = 0
    bytes_raw: int = 0
    precision: str = PRECISION_NATIVE
    reason: MissReason | None = None
    detail: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    seconds_saved: float | None = None
    tokens_kept: int = 0
    audit: Audited | None = None
    tokens_local: int = 0
    local_refused: str = ""
    prompt_id: str = ""
    tokens_coarse: int = 0
    refinement: Refining | None = None
    refinement_detail: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    request_id: str = ""

    def miss(self, error: KvcdnError) -> None:
        """Records why reuse ended where it did."""
        self.reason, self.detail = MissReason.of(error), str(error)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`; field names are stable."""
        rounded = {stage: round(seconds, 4) for stage, seconds in self.seconds.items()}
        saved = None if self.seconds_saved is None else round(self.seconds_saved, 3)
        return {**asdict(self), "seconds": rounded, "seconds_saved": saved}

    def __str__(self) -> str:
        line = f"{self.tokens_reused:,} of {self.tokens_total:,} tokens reused, {self.bytes_fetched / 1e6:.1f} MB fetched"
        if self.tokens_local:
            line += f", {self.tokens_local:,} tokens from this host's store"
        if self.precision != PRECISION_NATIVE:
            line += f" in {self.precision}"
        if self.refinement is not None:
            detail = f": {self.refinement_detail}" if self.refinement_detail else ""
            line += f", exact KV {self.refinement}{detail}"
        if self.tokens_computed:
            line += f", {self.tokens_computed:,} computed meanwhile"
        if "first_token" in self.seconds:
            line += f", first token after {self.seconds['first_token']:.2f} s"
        if self.seconds_saved is not None:
            verb = "saved" if self.seconds_saved >= 0 else "lost"
            line += f", {abs(self.seconds_saved):.1f} s {verb}"
        return f"{line} ({self.reason}: {self.detail})" if self.reason else line
