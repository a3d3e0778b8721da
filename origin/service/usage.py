"""Usage: what a publisher counts of its publications, for a ledger (FORMAT.md section 14)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvcdn.accounting.entry import Key, Loss, Outcome, Part, hour_of
from kvcdn.accounting.recorder import Recorder
from kvcdn.digest import Digest
from kvcdn.keys import model_tag

if TYPE_CHECKING:
    from kvcdn.origin.service.attempt import Outcome as Attempted

_OUTCOMES = {
    "published": Outcome.PUBLISHED,
    "repaired": Outcome.REPAIRED,
    "exists": Outcome.EXISTED,
    "renewed": Outcome.EXISTED,
}


class OriginUsage:
    """Counts for the ledger at `path`. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises what opening a ledger raises."""
        self._recorder = Recorder(path, Part.ORIGIN)

    @classmethod
    def of(cls, path: Path | None) -> Self | None:
        """For the ledger at `path`; None without one."""
        return None if path is None else cls(path)

    def tried(self, outcome: Attempted, tenant: str) -> None:
        """An attempt at a job of `tenant` has ended; one that is made again counts when it has ended."""
        if outcome.ending == "published":
            self.published(outcome.result, tenant)
        elif outcome.for_good:
            self.failed(tenant)

    def published(self, result: Mapping[str, Any], tenant: str = "") -> None:
        """A publication, on account of `tenant`, has ended with this `PublishResult`, as JSON has it."""
        counts = {
            "documents": 1,
            "tokens_published": result["tokens"],
            "tokens_computed": result["tokens_computed"],
            "tokens_loaded": result["tokens_loaded"],
            "blocks_uploaded": result["blocks_uploaded"],
            "bytes_uploaded": result["uploaded_bytes"],
            "bytes_stored": result["stored_bytes"],
            "prefill_ms": round(1000 * result["prefill_seconds"]),
        }
        model = model_tag(Digest.parse(result["fingerprint"], "fingerprint"))
        outcome = _OUTCOMES[result["status"]]
        key = Key(Part.ORIGIN, hour_of(), tenant, str(model), result["address"], "", outcome).checked()
        self._recorder.add(key, {name: count for name, count in counts.items() if count})

    def failed(self, tenant: str = "", reason: str = "") -> None:
        """A publication has failed."""
        self._recorder.add(
            Key(Part.ORIGIN, hour_of(), tenant, "", "", "", Outcome.FAILED, Loss.NONE, reason).checked(), {"documents": 1}
        )

    def close(self) -> None:
        """Writes down what is left."""
        self._recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
