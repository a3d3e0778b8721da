"""Publishing: the one path by which KV caches are written.

Prefill runs block by block; while the next block is computed, the one before is encoded, sealed and created at the
origin. Blocks come first, the manifest last, nothing is overwritten: what exists is complete, an interrupted run leaves
whole blocks that the next run picks up, and a second run finds the manifest and does nothing. Blocks that exist (a
shared prefix, an earlier run) are loaded instead of computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from kvcdn.block import BlockHeader, open_header, open_segment, seal_block
from kvcdn.digest import hash_bytes
from kvcdn.errors import CorruptError, NotFoundError, UsageError
from kvcdn.keys import BlockName, Namespace, PrefixNames, block_key, manifest_key
from kvcdn.manifest import MAX_BLOCKS, BlockEntry, Manifest, open_manifest
from kvcdn.model.load import LoadedModel
from kvcdn.model.prefill import PrefilledBlock, ScheduledPrefill, tensor_bytes
from kvcdn.model.speed import Pass, remember_passes
from kvcdn.origin.lease import Lease
from kvcdn.seal import ObjectKeys
from kvcdn.signing import SigningKey, TrustList
from kvcdn.store import BlobStore

_UPLOADS_IN_FLIGHT = 2
"""Blocks being encoded or uploaded while the next is computed; each holds its raw KV, some 16 MB, in memory."""


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Publisher:
    """Publishes prefixes of one model to one origin under one key. Not thread-safe: the model runs one prefix at a time."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: BlobStore,
        key: SigningKey,
        *,
        namespace: Namespace | None = None,
        trust: TrustList | None = None,
    ) -> None:
        self.loaded = loaded
        self._store = store
        self._key = key
        self._namespace = namespace or Namespace.public()
        # Blocks that others published under the same names are used only if they are trusted.
        self._trust = TrustList({**(trust.names if trust else {}), key.public: "myself"})

    def publish(
        self,
        token_ids: Sequence[int],
        *,
        label: str = "",
        expires: int | None = None,
        progress: Callable[[PublishProgress], None] = lambda _: None,
    ) -> PublishResult:
        """Publishes the prefix `token_ids`; `expires` is a Unix time. Raises UsageError before anything is written.

        The model's adapters must not change while this runs.
        """
        self.loaded = self.loaded.current()
        names = self._names(token_ids)
        run = _Run(self.loaded, self._store, self._key, self._trust, names, progress)
        existing = run.existing_manifest()
        if existing is not None and run.is_complete():
            return run.result("exists", self._namespace, existing)
        key = manifest_key(names.model.tag, names.manifest_address)
        with Lease(self._store, names.model.tag, [block.address for block in names.blocks]) as lease:
            entries = run.write_blocks(token_ids)
            if existing is not None:
                # Somebody removed blocks under it. The new ones have other salts, sizes and etags: the manifest is made anew.
                self._store.delete(key)
            manifest = Manifest(
                address=names.manifest_address,
                fingerprint=names.model.fingerprint,
                model_name=names.model.name,
                layout=names.model.layout,
                precision=names.model.precision,
                tokens=names.tokens,
                blocks=tuple(entries),
                created=int(time.time()),
                expires=expires,
                label=label,
                producer=self.loaded.producer,
            )
            lease.require()
            self._store.create(key, [manifest.seal(self._key)])
        return run.result("published" if existing is None else "repaired", self._namespace, manifest)

    def _names(self, token_ids: Sequence[int]) -> PrefixNames:
        check_length(self.loaded, len(token_ids))
        names = PrefixNames.of(self.loaded.identity, self._namespace, token_ids)
        if len(names.blocks) > MAX_BLOCKS:
            raise UsageError(f"the document has {len(names.blocks)} blocks; a manifest lists at most {MAX_BLOCKS}")
        return names


def check_length(loaded: LoadedModel, tokens: int) -> None:
    """Raises UsageError for a prefix that `loaded` cannot read."""
    limit = loaded.max_positions
    if limit is not None and tokens > limit:
        raise UsageError(
            f"the document has {tokens:,} tokens, {loaded.identity.name} reads at most {limit:,}",
            hint="split the document, or choose a model with a longer context",
        )


class _Run:
    """One publish in progress."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: BlobStore,
        key: SigningKey,
        trust: TrustList,
        names: PrefixNames,
        progress: Callable[[PublishProgress], None],
    ) -> None:
        self._loaded = loaded
        self._store = store
        self._key = key
        self._trust = trust
        self._names = names
        self._progress = progress
        self._started = time.perf_counter()
        self._prefill_seconds = 0.0
        self._passes: list[Pass] = []
        self._tokens_loaded = 0
        self._tokens_computed = 0
        self._uploaded: list[int] = []

    def existing_manifest(self) -> Manifest | None:
        """The manifest of this very prefix, if it is there, sound and trusted."""
        key = manifest_key(self._names.model.tag, self._names.manifest_address)
        try:
            data = self._store.read(key)
        except NotFoundError:
            return None
        what = f"manifest {self._names.manifest_address}"
        manifest = open_manifest(data, what)
        if manifest.address != self._names.manifest_address or manifest.publisher is None:
            raise CorruptError(f"{what}: another manifest lies under this name", hint=f"remove {key} from {self._store.url}")
        self._trust.require(manifest.publisher, what)
        return manifest

    def is_complete(self) -> bool:
        """Whether every block is there: blocks may have been removed under a manifest."""
        return all(self._exists(block) for block in self._names.blocks)

    def write_blocks(self, token_ids: Sequence[int]) -> list[BlockEntry]:
        """Brings every block to the origin and returns their entries in order."""
        prefill = ScheduledPrefill(self._loaded.model, self._names.model.layout, len(token_ids))
        entries = self._load_existing(prefill)
        with ThreadPoolExecutor(_UPLOADS_IN_FLIGHT, thread_name_prefix="kvcdn-upload") as pool:
            pending: list[Future[BlockEntry]] = []
            try:
                for block in prefill.run(token_ids, start=self._tokens_loaded):
                    self._prefill_seconds += block.seconds
                    self._passes.append(Pass(block.start, block.end, block.seconds))
                    self._tokens_computed += block.end - block.start
                    name = self._names.blocks[len(entries) + len(pending)]
                    pending.append(pool.submit(self._write_block, name, block))
                    if len(pending) >= _UPLOADS_IN_FLIGHT:
                        entries.append(pending.pop(0).result())
                    self._report()
                while pending:
                    entries.append(pending.pop(0).result())
                    self._report()
            finally:
                for future in pending:
                    future.cancel()
        remember_passes(self._loaded, self._passes)
        return entries

    def _load_existing(self, prefill: ScheduledPrefill) -> list[BlockEntry]:
        """Fills the model's cache from the blocks that lead the chain and exist, so that computing goes on behind them."""
        missing = next((block.index for block in self._names.blocks if not self._exists(block)), len(self._names.blocks))
        entries = []
        for name in self._names.blocks[:missing]:
            entries.append(self._load_block(name, prefill))
            self._tokens_loaded = name.end
            self._report()
        prefill.resume(self._tokens_loaded)
        return entries

    def _exists(self, name: BlockName) -> bool:
        return self._store.stat(block_key(self._names.model.tag, name.address)) is not None

    def _load_block(self, name: BlockName, prefill: ScheduledPrefill) -> BlockEntry:
        key = block_key(self._names.model.tag, name.address)
        data = self._store.read(key)
        try:
            header = self._checked_header(data, name)
            keys = ObjectKeys(name.content_key, header.salt)
            keys.check_commitment(header.commitment, f"block {name.address}")
            scratch = bytearray()
            for segment in header.segments:
                begin = header.envelope_bytes + segment.offset
                places = prefill.restore(segment.layer, name.start, name.end)
                cpu = [place if place.device.type == "cpu" else place.cpu() for place in places]
                stored = memoryview(data)[begin : begin + segment.length]
                open_segment(header, keys, segment.layer, stored, scratch, [tensor_bytes(tensor) for tensor in cpu])
                for place, tensor in zip(places, cpu, strict=True):
                    if place is not tensor:
                        place.copy_(tensor)
        except CorruptError as error:
            raise CorruptError(f"{error} ({key} at {self._store.url})", hint="remove the object and publish again") from None
        return BlockEntry(name.address, name.tokens, len(data), header.etag)

    def _checked_header(self, data: bytes, name: BlockName) -> BlockHeader:
        what = f"block {name.address}"
        header = open_header(data, what)
        self._trust.require(header.publisher, what)
        header.require(self._names.model, name, what)
        if header.size != len(data):
            raise CorruptError(f"{what}: the object has {len(data)} bytes, its header says {header.size}")
        return header

    def _write_block(self, name: BlockName, block: PrefilledBlock) -> BlockEntry:
        pieces = seal_block(self._names.model, name, self._loaded.producer, block.raw_layers(), self._key)
        size = sum(map(len, pieces))
        if self._store.create(block_key(self._names.model.tag, name.address), pieces):
            self._uploaded.append(size)
            return BlockEntry(name.address, name.tokens, size, hash_bytes(pieces[0]))
        # Another publisher was faster. Its block is as good as ours if we trust it.
        data = self._store.read(block_key(self._names.model.tag, name.address))
        return BlockEntry(name.address, name.tokens, len(data), self._checked_header(data, name).etag)

    def _report(self) -> None:
        done = self._tokens_loaded + self._tokens_computed
        elapsed = time.perf_counter() - self._started
        self._progress(PublishProgress(done, self._names.tokens, self._tokens_loaded, sum(self._uploaded), elapsed))

    def result(self, status: str, namespace: Namespace, manifest: Manifest) -> PublishResult:
        speed = self._tokens_computed / self._prefill_seconds if self._prefill_seconds else None
        return PublishResult(
            status=status,
            address=str(manifest.address),
            model=manifest.model_name,
            fingerprint=str(manifest.fingerprint),
            namespace=namespace.name,
            tokens=manifest.tokens,
            blocks=len(manifest.blocks),
            blocks_uploaded=len(self._uploaded),
            tokens_computed=self._tokens_computed,
            tokens_loaded=self._tokens_loaded,
            raw_bytes=manifest.raw_bytes,
            stored_bytes=manifest.stored_bytes,
            uploaded_bytes=sum(self._uploaded),
            ratio=round(manifest.stored_bytes / manifest.raw_bytes, 4),
            seconds=round(time.perf_counter() - self._started, 3),
            prefill_seconds=round(self._prefill_seconds, 3),
            tokens_per_second=round(speed, 1) if speed else None,
        )
