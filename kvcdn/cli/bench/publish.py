"""Publishing beside the bare prefill loop: the same passes over the same tokens, with and without writing their blocks."""

from __future__ import annotations

import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcdn.cli.bench.machine import machine, spread
from kvcdn.cli.bench.ttft import status_bytes
from kvcdn.cli.rig import document_text
from kvcdn.codec import load_codecs
from kvcdn.codecs.compiled import wait_until_compiled
from kvcdn.errors import UsageError
from kvcdn.keys import NAMESPACE_SECRET_MIN_BYTES, Namespace
from kvcdn.model.load import LoadedModel, load_model
from kvcdn.model.prefill import ScheduledPrefill
from kvcdn.model.tokens import encode_text
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.signing import SigningKey
from kvcdn.stores.folder import FolderStore

Tell = Callable[[str], None]

PROMPT_TOKENS = 2048
"""Of the beginning that two documents share."""

SPARE_BYTES = 64 * 1000**2
KV_SHARE = 1.5
"""What publishing may take beside the model: so many bytes, and so much of the KV of one document."""


def measure_publish(model: str, document: Path | None, tokens: int, runs: int, device: str, tell: Tell) -> dict[str, Any]:
    """Tokens a second of both, medians of `runs` in which they take turns at being first, and their ratio.

    `memory_bytes` is by how much the resident memory rose above what it was with the model and the codecs loaded, in the
    first publishing run;
    `shared_ratio` what a document costs whose first 2,048 tokens are published, beside the passes over its rest; None where the
    text is too short. Raises UsageError for a document that is too short.
    """
    loaded = load_model(model, device)
    all_ids = encode_text(loaded.tokenizer, document_text(document)).token_ids
    token_ids = all_ids[:tokens]
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
        shared = _shared_ratio(loaded, publish, all_ids, tokens, runs, tell)
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
        "memory_budget_bytes": int(SPARE_BYTES + KV_SHARE * loaded.identity.layout.raw_bytes(tokens)),
        "shared_ratio": shared,
        "spread_tok_s": {name: spread(values) for name, values in speeds.items()},
        "machine": machine(loaded),
    }


def _shared_ratio(
    loaded: LoadedModel, publish: _Publishing, all_ids: tuple[int, ...], tokens: int, runs: int, tell: Tell
) -> float | None:
    room = (loaded.max_positions or len(all_ids)) - PROMPT_TOKENS
    prompt, own = all_ids[:PROMPT_TOKENS], min(tokens, room, len(all_ids) - PROMPT_TOKENS - runs)
    if own <= 0:
        return None
    publisher = publish.publisher()
    publisher.publish(prompt)
    bare = ScheduledPrefill(loaded.model, loaded.identity.layout, PROMPT_TOKENS + own)
    start = PROMPT_TOKENS // loaded.identity.layout.block_tokens * loaded.identity.layout.block_tokens
    for _ in bare.run(prompt[:start]):
        pass
    seconds: dict[str, list[float]] = {"own": [], "second": []}
    for number in range(runs):
        # Another rest each time: what is published is not published again.
        token_ids = prompt + all_ids[PROMPT_TOKENS + number : PROMPT_TOKENS + number + own]
        for name in ("own", "second") if number % 2 else ("second", "own"):
            bare.resume(start)
            began = time.perf_counter()
            if name == "second":
                publisher.publish(token_ids)
            else:
                for _ in bare.run(token_ids, start=start):
                    pass
            seconds[name].append(time.perf_counter() - began)
        tell(f"shared {number + 1}: {own:,} tokens of its own {seconds['own'][-1]:.2f} s, all {seconds['second'][-1]:.2f} s")
    return round(statistics.median(seconds["second"]) / statistics.median(seconds["own"]), 4)


def _prefill(loaded: LoadedModel, token_ids: tuple[int, ...]) -> None:
    for _ in ScheduledPrefill(loaded.model, loaded.identity.layout, len(token_ids)).run(token_ids):
        pass


class _Publishing:
    """Publishes the same tokens again and again, each time under names that are new."""

    def __init__(self, loaded: LoadedModel, store: FolderStore) -> None:
        self._loaded, self._store, self._key = loaded, store, SigningKey.generate()

    def publisher(self) -> Publisher:
        space = Namespace.private("bench", secrets.token_bytes(NAMESPACE_SECRET_MIN_BYTES))
        return Publisher(self._loaded, self._store, self._key, namespace=space)

    def run(self, token_ids: tuple[int, ...]) -> None:
        self.publisher().publish(token_ids)

    def memory(self, token_ids: tuple[int, ...]) -> int | None:
        """By how much a run raises the resident memory at most; None where the system does not tell."""
        load_codecs()
        wait_until_compiled()
        try:
            before = status_bytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5", "ascii")
        except OSError:
            return None
        self.run(token_ids)
        return status_bytes("VmHWM") - before
