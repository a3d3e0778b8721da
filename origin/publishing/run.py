"""One run of a publisher: the blocks and the manifest of one prefix, brought to the origin.

While a block is computed, the one before is created; on a GPU it is encoded and sealed then as well, on a CPU in between.
Blocks come first, the manifest last, nothing is overwritten. Blocks that exist (a shared prefix, an earlier run) are loaded
instead of computed.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvcdn.basis import BasisName
from kvcdn.block import BlockHeader, open_header, open_segment, seal_block
from kvcdn.certificate import Certificate
from kvcdn.codec import Encoded
from kvcdn.digest import Buffer, Digest, hash_bytes
from kvcdn.errors import CorruptError, NotFoundError, UnavailableError
from kvcdn.journal import Published
from kvcdn.keys import BlockName, Namespace, PrefixNames, block_key, manifest_key
from kvcdn.manifest import BlockEntry, Manifest, open_manifest
from kvcdn.model.bases import Bases
from kvcdn.model.load import LoadedModel
from kvcdn.model.memory import empty_bytes
from kvcdn.model.place import layer_devices, on_cpu
from kvcdn.model.prefill import PrefilledBlock, ScheduledPrefill, tensor_bytes
from kvcdn.model.speed import Pass, remember_passes
from kvcdn.origin.publishing.draft import Draft
from kvcdn.origin.publishing.kept import Kept, KeptBlock
from kvcdn.origin.publishing.result import PublishProgress, PublishResult
from kvcdn.origin.upkeep.lease import Lease
from kvcdn.origin.upkeep.whole import read_envelope, read_header
from kvcdn.seal import ObjectKeys
from kvcdn.signing import PublicKey, SigningKey, TrustList
from kvcdn.store import BlobStore

_UPLOADS_IN_FLIGHT = 2
"""Blocks being encoded or uploaded while the next is computed; each holds its raw KV, some 16 MB, in memory."""

_MOST_SEALING = 16
"""Threads that seal a block, a layer at a time: it is over before more would have begun."""

_FEW_CORES = 2
"""So many seal no faster than one: the interpreter goes to and fro between short loops, 88 instead of 78 ms for four blocks."""

_LOADS_IN_FLIGHT = 2
"""Blocks that are read and decoded at once: while one waits for the origin, another has the processor."""


class Run:
    """One publish in progress."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: BlobStore,
        key: SigningKey,
        trust: TrustList,
        names: PrefixNames,
        progress: Callable[[PublishProgress], None],
        record: Callable[[Published], object] = lambda _: None,
    ) -> None:
        """`record` is told of the manifest before it is created: it keeps the origin's journal."""
        self.loaded = loaded
        self._store = store
        self._key = key
        self._trust = trust
        self.names = names
        self._progress = progress
        self._record = record
        self._started = time.perf_counter()
        self._prefill_seconds = 0.0
        self._passes: list[Pass] = []
        self.kept = Kept()
        self._signers: dict[Digest, PublicKey] = {}
        self._others: set[Digest] = set()
        self._tokens_loaded = 0
        self._tokens_computed = 0
        self._uploaded: list[int] = []
        self._bases = Bases(lambda key, limit: store.read(key, 0, limit), names.model)
        # As many tokens a pass as the layout says: also for a basis, whose layout is not the model's.
        self._producer = replace(loaded.producer, chunk_tokens=names.model.layout.block_tokens)
        self._draft: Draft | None = None
        self._outcome: tuple[str, Manifest] | None = None

    def publish(self, token_ids: Sequence[int], label: str, expires: int | None) -> None:
        """Brings the prefix to the origin as the model computes it."""
        existing = self.existing_manifest()
        if existing is not None and self.is_complete():
            self.keep(existing, label=label, expires=expires)
        else:
            self.write(lambda: self._compute_blocks(token_ids), existing, label=label, expires=expires)

    @property
    def manifest(self) -> Manifest:
        """What was written, or left."""
        if self._outcome is None:
            raise RuntimeError("this run has not ended")
        return self._outcome[1]

    def refining(self, name: BlockName, coarse: Digest) -> BlockEntry | None:
        """The entry of a block that refines the block `coarse`; None where it is not there. Raises CorruptError for another."""
        header = self.header(name)
        if header is None:
            return None
        if header.coarse != coarse:
            raise CorruptError(
                f"block {name.address} refines block {header.coarse}, which was replaced by {coarse}",
                hint=f"remove the {self.names.model.precision} document and publish again",
            )
        return BlockEntry(name.address, name.tokens, header.size, header.etag)

    def keep(self, existing: Manifest, *, label: str, expires: int | None) -> None:
        """All of it is there: nothing is done, but where it ends too soon its manifest is made anew."""
        self._outcome, now = ("exists", existing), time.time()
        if existing.lasts(expires, now):
            return
        try:
            self.write(self._entries, existing, existing.certificate, label=label or existing.label, expires=expires)
            self._outcome = "renewed", self.manifest
        except UnavailableError:
            # Who may not delete leaves it as it is, while it lasts.
            if (existing.expires or 0) <= now or self.existing_manifest() != existing:
                raise

    def _entries(self) -> list[BlockEntry]:
        """The entries of blocks that are all there. Raises UnavailableError where one is not, any more."""
        headers = [(name, self.header(name)) for name in self.names.blocks]
        if not all(header for _, header in headers):
            raise UnavailableError(f"{self._store.url}: blocks of the document were removed meanwhile", hint="publish again")
        return [BlockEntry(name.address, name.tokens, header.size, header.etag) for name, header in headers if header]

    def write(
        self,
        blocks: Callable[[], list[BlockEntry]],
        existing: Manifest | None,
        certificate: Certificate | None = None,
        *,
        label: str,
        expires: int | None,
    ) -> None:
        """Writes what `blocks` writes, and then the manifest, in place of `existing`."""
        names = self.names
        key = manifest_key(names.model.tag, names.manifest_address)
        self._draft = Draft(names, self._producer, self._key, self._record, certificate, label, expires)
        with Lease(self._store, names.model.tag, [block.address for block in names.blocks]) as lease:
            entries = blocks()
            if existing is not None:
                # New blocks have other salts, sizes and etags, and a date cannot be changed: the manifest is made anew.
                self._store.delete(key)
            manifest, data = self._draft.of(entries)
            lease.require()
            self._store.create(key, [data])
        self._outcome = "published" if existing is None else "repaired", manifest

    def existing_manifest(self) -> Manifest | None:
        """The manifest of this very prefix, if it is there, sound and trusted."""
        key = manifest_key(self.names.model.tag, self.names.manifest_address)
        try:
            data = self._store.read(key)
        except NotFoundError:
            return None
        what = f"manifest {self.names.manifest_address}"
        manifest = open_manifest(data, what)
        if manifest.address != self.names.manifest_address or manifest.publisher is None:
            raise CorruptError(f"{what}: another manifest lies under this name", hint=f"remove {key} from {self._store.url}")
        self._trust.require(manifest.publisher, what)
        return manifest

    def is_complete(self) -> bool:
        """Whether every block is there: blocks may have been removed under a manifest."""
        return all(self.exists(block) for block in self.names.blocks)

    def compute(self, token_ids: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        """The exact KV of the prefix, [tokens, heads, dim] a tensor of each layer: loaded where it is there, else computed."""
        prefill, held = self.kept.prefill(self.loaded, self.names)
        entries = self._begin(prefill, held, stored=False)
        for block in prefill.run(token_ids, start=self._tokens_loaded):
            self._count(block)
            self._report()
            entries.append(None)
        addresses = (name.address for name in self.names.blocks)
        self.kept.hold([self._kept_block(address, entry) for address, entry in zip(addresses, entries, strict=True)])
        return prefill.rows(len(token_ids))

    def after(self, other: Run) -> None:
        """Counts what `other` has loaded and computed, and its time, as of this run."""
        self._started, self._prefill_seconds = other._started, other._prefill_seconds
        self._tokens_loaded, self._tokens_computed = other._tokens_loaded, other._tokens_computed

    def _compute_blocks(self, token_ids: Sequence[int]) -> list[BlockEntry]:
        """Brings every block to the origin and returns their entries in order."""
        prefill, held = self.kept.prefill(self.loaded, self.names)
        entries = [entry for entry in self._begin(prefill, held, stored=True) if entry]
        shared = on_cpu(layer_devices(self.loaded.model, self.names.model.layout))
        count = os.cpu_count() or 1
        with (
            ThreadPoolExecutor(_UPLOADS_IN_FLIGHT, thread_name_prefix="kvcdn-upload") as pool,
            ThreadPoolExecutor(min(count, _MOST_SEALING), thread_name_prefix="kvcdn-seal") as cores,
        ):
            each = map if count <= _FEW_CORES else cores.map
            pending: list[Future[BlockEntry]] = []
            expected: list[BlockEntry] = []
            try:
                for block in prefill.run(token_ids, start=self._tokens_loaded):
                    self._count(block)
                    name = self.names.blocks[len(entries) + len(pending)]
                    if shared:
                        # Between two passes, whose threads wait for each other: a core taken from one of them is taken
                        # from all.
                        pieces = self._seal(name, block.raw_layers(), each=each)
                        expected.append(_entry_of(name, pieces))
                        pending.append(pool.submit(self._create, name, pieces))
                    else:
                        pending.append(pool.submit(self.write_block, name, block.raw_layers()))
                    if len(pending) >= _UPLOADS_IN_FLIGHT:
                        entries.append(pending.pop(0).result())
                    self._report()
                remember_passes(self.loaded, self._passes)
                if shared and self._draft:
                    self._draft.of(entries + expected[len(expected) - len(pending) :])
                while pending:
                    entries.append(pending.pop(0).result())
                    self._report()
            finally:
                for future in pending:
                    future.cancel()
        ours = itertools.takewhile(lambda entry: entry.address not in self._others, entries)
        self.kept.hold([self._kept_block(entry.address, entry) for entry in ours])
        return entries

    def _kept_block(self, address: Digest, entry: BlockEntry | None) -> KeptBlock:
        return KeptBlock(address, entry, self._signers.get(address, self._key.public))

    def _count(self, block: PrefilledBlock) -> None:
        self._prefill_seconds += block.seconds
        self._passes.append(Pass(block.start, block.end, block.seconds))
        self._tokens_computed += block.end - block.start

    def _begin(self, prefill: ScheduledPrefill, held: Sequence[KeptBlock], *, stored: bool) -> list[BlockEntry | None]:
        """Fills the model's cache with the blocks that lead the chain and need not be computed; computing goes on behind.

        Those that are `held` are there; others are loaded. `stored`: only blocks of the origin count, and each has an entry.
        """
        blocks = self.names.blocks
        for missing, name in enumerate(blocks):
            if not self.exists(name) and (stored or missing >= len(held)):
                missing = self.names.model.layout.usable_blocks(missing)  # noqa: PLW2901
                break
        else:
            missing = len(blocks)
        entries: list[BlockEntry | None] = []
        for name, kept in zip(blocks[:missing], held, strict=False):
            entry = self._entry(name, kept)
            if entry and entry != kept.entry:
                self.kept.hold(held[: len(entries)])  # what is behind is overwritten now
                break
            self._signers[name.address] = kept.publisher
            self._add(entries, entry, name)
        with ThreadPoolExecutor(self._loads_in_flight, thread_name_prefix="kvcdn-load") as pool:
            rest = blocks[len(entries) : missing]
            loaded = pool.map(partial(self.load_block, places_of=prefill.restore), rest)
            for name, entry in zip(rest, loaded, strict=True):
                self._add(entries, entry, name)
        prefill.resume(self._tokens_loaded)
        return entries

    def _add(self, entries: list[BlockEntry | None], entry: BlockEntry | None, name: BlockName) -> None:
        entries.append(entry)
        self._tokens_loaded = name.end
        self._report()

    @property
    def _loads_in_flight(self) -> int:
        """States of one block after another have the same place, and the last one's must stay."""
        return 1 if self.names.model.layout.state_bytes else _LOADS_IN_FLIGHT

    def _entry(self, name: BlockName, kept: KeptBlock) -> BlockEntry | None:
        """The entry of a block at the origin, of which only the header is read; None where it is not there."""
        key = block_key(self.names.model.tag, name.address)
        info = self._store.stat(key)
        if info is None:
            return None
        same = BlockEntry(name.address, name.tokens, info.size, hash_bytes(read_envelope(self._store, key)))
        if same == kept.entry:  # the very bytes that were checked before: parsing and checking them takes milliseconds
            self._trust.require(kept.publisher, f"block {name.address}")
            return same
        header = self._checked(read_header(self._store, key), name, info.size)
        return BlockEntry(name.address, name.tokens, header.size, header.etag)

    def header(self, name: BlockName) -> BlockHeader | None:
        """The header of a block at the origin; None where it is not there."""
        key = block_key(self.names.model.tag, name.address)
        info = self._store.stat(key)
        return None if info is None else self._checked(read_header(self._store, key), name, info.size)

    def exists(self, name: BlockName) -> bool:
        """Whether the block is there."""
        return self._store.stat(block_key(self.names.model.tag, name.address)) is not None

    def load_block(self, name: BlockName, places_of: Callable[[int, int, int], Sequence[torch.Tensor]]) -> BlockEntry:
        """Decodes a block that is there into `places_of(layer, start, end)`. Raises CorruptError, or UntrustedError."""
        key = block_key(self.names.model.tag, name.address)
        data = self._store.read(key)
        try:
            header = self._checked(open_header(data, f"block {name.address}"), name, len(data))
            keys = ObjectKeys(name.content_key, header.salt)
            keys.check_commitment(header.commitment, f"block {name.address}")
            scratch = bytearray()
            for segment in header.segments:
                begin = header.envelope_bytes + segment.offset
                places = places_of(segment.layer, name.start, name.end)
                cpu = [place if place.device.type == "cpu" else torch.empty_like(place, device="cpu") for place in places]
                stored = memoryview(data)[begin : begin + segment.length]
                basis = self._bases.get(header.basis, self._trust).tensors[segment.layer] if header.basis else ()
                open_segment(header, keys, segment.layer, stored, scratch, [tensor_bytes(tensor) for tensor in cpu], basis)
                for place, tensor in zip(places, cpu, strict=True):
                    if place is not tensor:
                        place.copy_(tensor)
        except CorruptError as error:
            raise CorruptError(f"{error} ({key} at {self._store.url})", hint="remove the object and publish again") from None
        self._signers[name.address] = header.publisher
        return BlockEntry(name.address, name.tokens, len(data), header.etag)

    def _checked(self, header: BlockHeader, name: BlockName, size: int) -> BlockHeader:
        """The header of an object of `size` bytes, which is to be this block of somebody trusted."""
        what = f"block {name.address}"
        self._trust.require(header.publisher, what)
        header.require(self.names.model, name, what)
        if header.size != size:
            raise CorruptError(f"{what}: the object has {size} bytes, its header says {header.size}")
        return header

    def write_block(
        self,
        name: BlockName,
        layers: Sequence[Sequence[Buffer | Encoded]],
        certificate: Certificate | None = None,
        basis: BasisName | None = None,
        coarse: Digest | None = None,
    ) -> BlockEntry:
        """Seals a block and creates it at the origin."""
        return self._create(name, self._seal(name, layers, certificate, basis, coarse))

    def _seal(
        self,
        name: BlockName,
        layers: Sequence[Sequence[Buffer | Encoded]],
        certificate: Certificate | None = None,
        basis: BasisName | None = None,
        coarse: Digest | None = None,
        each: Callable[..., Iterable[Any]] = map,
    ) -> list[Buffer]:
        names = self.names.model, name
        return seal_block(
            *names, self._producer, layers, self._key, certificate, basis, coarse=coarse, each=each, memory=empty_bytes
        )

    def _create(self, name: BlockName, pieces: list[Buffer]) -> BlockEntry:
        if self._store.create(block_key(self.names.model.tag, name.address), pieces):
            entry = _entry_of(name, pieces)
            self._uploaded.append(entry.size)
            self._report()
            return entry
        # Another publisher was faster. Its block is as good as ours if we trust it, and has other bytes.
        self._others.add(name.address)
        data = self._store.read(block_key(self.names.model.tag, name.address))
        header = self._checked(open_header(data, f"block {name.address}"), name, len(data))
        return BlockEntry(name.address, name.tokens, len(data), header.etag)

    def _report(self) -> None:
        done = self._tokens_loaded + self._tokens_computed
        elapsed = time.perf_counter() - self._started
        self._progress(PublishProgress(done, self.names.tokens, self._tokens_loaded, sum(self._uploaded), elapsed))

    def result(self, namespace: Namespace) -> PublishResult:
        """What this run did. It has written, or left, a manifest."""
        return PublishResult.of(
            self._outcome[0] if self._outcome else "",
            self.manifest,
            namespace,
            uploaded=self._uploaded,
            tokens=(self._tokens_computed, self._tokens_loaded),
            seconds=(time.perf_counter() - self._started, self._prefill_seconds),
        )


def _entry_of(name: BlockName, pieces: Sequence[Buffer]) -> BlockEntry:
    """What a manifest says of a block of these bytes."""
    return BlockEntry(name.address, name.tokens, sum(map(len, pieces)), hash_bytes(pieces[0]))
