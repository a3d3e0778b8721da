"""Collecting garbage: blocks that no document names, and documents that have expired."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import CorruptError
from kvcdn.keys import manifest_key
from kvcdn.manifest import Manifest
from kvcdn.origin.upkeep.addresses import AddressSet
from kvcdn.origin.upkeep.catalog import Progress, address_of, block_infos, model_tags, read_manifests, silent
from kvcdn.origin.upkeep.doctor import PROBE_PREFIX
from kvcdn.origin.upkeep.lease import LEASE_SECONDS, SWEEP_DEAD_SECONDS, Sweep, lease_prefix, sweep_prefix
from kvcdn.origin.upkeep.references import References
from kvcdn.origin.upkeep.sweep import Condemned, Sweeper, delete_manifests
from kvcdn.store import BlobInfo, BlobStore

GRACE_SECONDS = 24 * 3600.0
"""Age below which blocks without a document stay: whoever interrupted a run within a day can still take it up."""

MANIFESTS_AT_ONCE = 64
"""Expired ones that are read again and deleted between two looks at the clock."""


@dataclass
class Collected:
    """What was removed (or would be), and what stayed.

    `blocks_young` no document names, but they are younger than the grace period; `blocks_held` a running publisher relies on;
    `leftovers` are leases, sweeps and probes whose processes died; `skipped` says of which models nothing was removed, and why.
    """

    dry_run: bool
    models: int = 0
    documents: int = 0
    documents_expired: int = 0
    blocks_kept: int = 0
    blocks_removed: int = 0
    bytes_freed: int = 0
    blocks_young: int = 0
    bytes_young: int = 0
    blocks_held: int = 0
    leftovers: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def collect_garbage(
    store: BlobStore,
    *,
    grace_seconds: float = GRACE_SECONDS,
    dry_run: bool = False,
    now: float | None = None,
    progress: Progress = silent,
) -> Collected:
    """Removes expired documents with the blocks that only they name, and blocks without a document older than the grace period.

    Safe beside running publishers whatever the grace period is. Holds one model's addresses at a time, packed. A model of
    which a manifest or lease cannot be read is left alone.
    """
    collected = Collected(dry_run)
    now = time.time() if now is None else now
    for tag in model_tags(store):
        collected.models += 1
        run = _Run(store, tag, collected, now, progress)
        try:
            run.collect(grace_seconds)
        except CorruptError as error:
            collected.skipped.append({"model_tag": str(tag), "reason": str(error), "hint": error.hint})
        _remove_dead(store, tag, now, collected)
    _remove_old(store, PROBE_PREFIX, now - GRACE_SECONDS, collected)
    return collected


class _Run:
    """The garbage of one model."""

    def __init__(self, store: BlobStore, tag: ModelTag, collected: Collected, now: float, progress: Progress) -> None:
        self._store = store
        self._tag = tag
        self._collected = collected
        self._now = now
        self._progress = progress
        self._references = References(store, tag, progress)
        self._released = AddressSet()
        """What expired documents name: no grace is needed, as they were complete."""

    def collect(self, grace_seconds: float) -> None:
        expired: list[tuple[Digest, BlobInfo]] = []

        def leave(manifest: Manifest) -> bool:
            if not self._is_over(manifest):
                return False
            key = manifest_key(manifest.tag, manifest.address)
            expired.append((manifest.blocks[-1].address, BlobInfo(key, 0, 0)))
            self._released.add(block.address for block in manifest.blocks)
            return True

        self._references.read(leave=leave)
        self._collected.documents += self._references.manifests
        garbage = self._garbage(self._now - grace_seconds)
        if self._collected.dry_run:
            self._collected.documents_expired += len(expired)
            for block in garbage:
                self._collected.blocks_removed += 1
                self._collected.bytes_freed += block.size
            return
        self._remove(expired)
        sweeper = Sweeper(self._store, self._tag, self._references, self._progress)
        try:
            sweeper.sweep_batches(garbage)
        finally:
            swept = sweeper.swept
            self._collected.blocks_removed += swept.blocks
            self._collected.bytes_freed += swept.bytes
            self._collected.blocks_kept += swept.named
            self._collected.blocks_held += swept.held

    def _is_over(self, manifest: Manifest) -> bool:
        return manifest.expires is not None and manifest.expires <= self._now

    def _remove(self, expired: Iterable[tuple[Digest, BlobInfo]]) -> None:
        """Removes manifests whose time is over, each told with its last block.

        Not where a running publisher relies on that block: it may be about to make the manifest anew. One that is there and
        lasts longer was made anew since it was read.
        """
        rest = deque(expired)
        while rest:
            with Sweep(self._store, self._tag) as sweep:
                held = sweep.held()
                while rest and not sweep.over:
                    chunk = [rest.popleft() for _ in range(min(MANIFESTS_AT_ONCE, len(rest)))]
                    again = read_manifests(self._store, (info for last, info in chunk if last not in held))
                    over = [found.info.key for found in again if found.manifest and self._is_over(found.manifest)]
                    self._collected.documents_expired += delete_manifests(self._store, over)
                    self._progress("documents removed", self._collected.documents_expired)

    def _garbage(self, newest: float) -> Iterator[Condemned]:
        """Blocks that no manifest names and that were created up to `newest`; counts the others."""
        collected = self._collected
        for count, info in enumerate(block_infos(self._store, self._tag), 1):
            self._progress("blocks listed", count)
            address = address_of(info.key)
            if address is None or address in self._references:
                collected.blocks_kept += 1
            elif info.modified <= newest or address in self._released:
                yield Condemned(address, info.size, info.modified)
            else:
                collected.blocks_young += 1
                collected.bytes_young += info.size


def _remove_dead(store: BlobStore, tag: ModelTag, now: float, collected: Collected) -> None:
    """Removes leases and sweeps whose processes died: by the store's clock, as they count by it (FORMAT.md section 8)."""
    if not collected.dry_run:
        with Sweep(store, tag) as sweep:
            now = sweep.began
    _remove_old(store, lease_prefix(tag), now - 2 * LEASE_SECONDS, collected)
    _remove_old(store, sweep_prefix(tag), now - 2 * SWEEP_DEAD_SECONDS, collected)


def _remove_old(store: BlobStore, prefix: str, newest: float, collected: Collected) -> None:
    """Removes what died processes left under `prefix`."""
    for info in store.list(prefix):
        if info.modified <= newest:
            collected.leftovers += 1
            if not collected.dry_run:
                store.delete(info.key)
