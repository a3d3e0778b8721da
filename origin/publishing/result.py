"""A publisher's result: what a run has done so far, and what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from kvcdn.keys import Namespace
from kvcdn.manifest import Manifest


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
    there, but not all of its blocks; `renewed` where all was there, and would have expired too soon.
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

    @classmethod
    def of(
        cls,
        status: str,
        manifest: Manifest,
        namespace: Namespace,
        *,
        uploaded: Sequence[int],
        tokens: tuple[int, int],
        seconds: tuple[float, float],
    ) -> Self:
        """What a run did that has written, or left, `manifest`.

        `uploaded` are the sizes of its own blocks, `tokens` those computed and those loaded, `seconds` all and the prefill's.
        """
        tokens_computed, tokens_loaded = tokens
        all_seconds, prefill_seconds = seconds
        return cls(
            status=status,
            address=str(manifest.address),
            model=manifest.model_name,
            fingerprint=str(manifest.fingerprint),
            namespace=namespace.name,
            precision=manifest.precision,
            certificate=manifest.certificate.to_json() if manifest.certificate else None,
            tokens=manifest.tokens,
            blocks=len(manifest.blocks),
            blocks_uploaded=len(uploaded),
            tokens_computed=tokens_computed,
            tokens_loaded=tokens_loaded,
            raw_bytes=manifest.raw_bytes,
            stored_bytes=manifest.stored_bytes,
            uploaded_bytes=sum(uploaded),
            ratio=round(manifest.stored_bytes / manifest.raw_bytes, 4),
            seconds=round(all_seconds, 3),
            prefill_seconds=round(prefill_seconds, 3),
            tokens_per_second=round(tokens_computed / prefill_seconds, 1) if tokens_computed and prefill_seconds else None,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
