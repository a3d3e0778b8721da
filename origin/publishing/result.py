"""A publisher's result: what a run has done so far, and what it did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PublishProgress:
    """What a run has done so far."""

    tokens_done: int
    tokens_total: int
    tokens_loaded: int
    bytes_stored: int
    seconds: float


@dataclass(frozen=True)
class PublishResult:
    """What a run did.

    `status` is `published`; `exists` where all of it was there and nothing was done; `repaired` where the manifest was
    there, but not all of its blocks.
    """

    status: str
    address: str
    model: str
    fingerprint: str
    namespace: str
    precision: str
    certificate: dict[str, int] | None
    tokens: int
    blocks: int
    blocks_uploaded: int
    tokens_computed: int
    tokens_loaded: int
    raw_bytes: int
    stored_bytes: int
    uploaded_bytes: int
    ratio: float
    seconds: float
    prefill_seconds: float
    tokens_per_second: float | None
    refinement: dict[str, Any] | None = None
    """Address and stored bytes of what makes a lossy document exact, where that was asked for."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
