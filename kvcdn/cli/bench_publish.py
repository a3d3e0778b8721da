"""Publishing beside the bare prefill loop: the same passes over the same tokens, with and without writing their blocks."""

from __future__ import annotations

import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcdn.cli.bench_ttft import status_bytes
from kvcdn.cli.rig import document_text
from kvcdn.errors import UsageError
from kvcdn.keys import NAMESPACE_SECRET_MIN_BYTES, Namespace
from kvcdn.model.load import LoadedModel, load_model
from kvcdn.model.prefill import ScheduledPrefill
from kvcdn.model.tokens import encode_text
from kvcdn.origin.publish import Publisher
from kvcdn.signing import SigningKey
from kvcdn.stores.folder import FolderStore

Tell = Callable[[str], None]


def measure_publish(model: str, document: Path | None, tokens: int, runs: int, device: str, tell: Tell) -> dict[str, Any]:
    """Tokens a second of both, medians of `runs` in which they take turns at being first, and their ratio.

    `memory_bytes` is by how much the resident memory rose above what it was with the model loaded, in the first publishing run.
    Raises UsageError for a document that is too short.
    """
    loaded = load_model(model, device)
    token_ids = encode_text(loaded.tokenizer, document_text(document)).token_ids[:tokens]
    if len(token_ids) < tokens:
        raise UsageError(f"the document has {len(token_ids):,} tokens, fewer than {tokens:,}", hint="name a longer --document")
    _prefill(loaded, token_ids[: min(tokens, 64)])
    speeds: dict[str, list[float]] = {"prefill": [], "publish": []}
    with tempfile.TemporaryDirectory(prefix="kvcdn-publish-") as folder:
        publish = _Publishing(loaded, FolderStore(folder))
        memory = publish.memory(token_ids)
        for number in range(runs):
            for name in ("prefill", "publish") if number % 2 else ("publish", "prefill"):
                began = time.perf_counter()
                if name == "prefill":
                    _prefill(loaded, token_ids)
                else:
                    publish.run(token_ids)
                speeds[name].append(tokens / (time.perf_counter() - began))
            tell(f"round {number + 1}: prefill {speeds['prefill'][-1]:.1f}, publish {speeds['publish'][-1]:.1f} tokens/s")
    prefill, published = (statistics.median(speeds[name]) for name in ("prefill", "publish"))
    return {
        "model": model,
        "tokens": tokens,
        "runs": runs,
        "prefill_tok_s": round(prefill, 2),
        "publish_tok_s": round(published, 2),
        "ratio": round(published / prefill, 4),
        "raw_bytes": loaded.identity.layout.raw_bytes(tokens),
        "memory_bytes": memory,
    }


def _prefill(loaded: LoadedModel, token_ids: tuple[int, ...]) -> None:
    for _ in ScheduledPrefill(loaded.model, loaded.identity.layout, len(token_ids)).run(token_ids):
        pass


class _Publishing:
    """Publishes the same tokens again and again, each time under names that are new."""

    def __init__(self, loaded: LoadedModel, store: FolderStore) -> None:
        self._loaded, self._store, self._key = loaded, store, SigningKey.generate()

    def run(self, token_ids: tuple[int, ...]) -> None:
        space = Namespace.private("bench", secrets.token_bytes(NAMESPACE_SECRET_MIN_BYTES))
        Publisher(self._loaded, self._store, self._key, namespace=space).publish(token_ids)

    def memory(self, token_ids: tuple[int, ...]) -> int | None:
        """By how much a run raises the resident memory at most; None where the system does not tell."""
        try:
            before = status_bytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5", "ascii")
        except OSError:
            return None
        self.run(token_ids)
        return status_bytes("VmHWM") - before
