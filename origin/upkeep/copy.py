"""Copying documents from one origin to another: blocks first, manifests last, everything verified on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from kvcdn.digest import Buffer, ModelTag, hash_bytes
from kvcdn.envelope import BLOCK_MAGIC, MANIFEST_MAGIC, open_envelope, reseal_envelope
from kvcdn.errors import CorruptError, NotFoundError, UntrustedError
from kvcdn.journal import Published
from kvcdn.keys import block_key
from kvcdn.manifest import BlockEntry, Manifest
from kvcdn.origin.upkeep.catalog import Progress, manifest_infos, model_tags, read_manifest, read_manifests, silent
from kvcdn.origin.upkeep.journal import Journal
from kvcdn.origin.upkeep.lease import Lease
from kvcdn.origin.upkeep.whole import BlockState, read_block, read_envelope, read_header
from kvcdn.signing import SigningKey, TrustList
from kvcdn.store import BlobInfo, BlobStore

_AT_ONCE = 4
"""Blocks on the way at once, each in memory: some 16 MB."""


@dataclass
class Copied:
    """What a copy did. Documents that `existed` were there whole.

    `conflicts` are documents that could not be copied because the target holds another object under the name of one of
    their blocks (somebody published there too); `damaged` are those of which the source lacks a block or has a corrupt one;
    `untrusted` ones are not signed anew, as somebody who is not on the trust list has signed a part of them.
    """

    documents: int = 0
    existed: int = 0
    blocks: int = 0
    blocks_existed: int = 0
    bytes: int = 0
    conflicts: list[dict[str, str]] = field(default_factory=list)
    damaged: list[dict[str, str]] = field(default_factory=list)
    untrusted: list[dict[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Resigner:
    """Signs copies anew, with `key`, in place of publishers on the trust list: whoever signs answers for what they said."""

    key: SigningKey
    trust: TrustList

    def reseal(self, data: bytes, magic: bytes, what: str) -> bytes:
        """The envelope at the start of `data`, signed anew. Raises UntrustedError, CorruptError."""
        self.trust.require(open_envelope(data, magic, what).publisher, what)
        return reseal_envelope(data, magic, self.key, what)


class _Conflict(Exception):  # noqa: N818 - not an error of the tree: it ends one document, not the copy
    """The target has another block under this name."""


def copy_documents(
    source: BlobStore,
    target: BlobStore,
    *,
    tag: ModelTag | None = None,
    progress: Progress = silent,
    journal: Callable[[], Journal] | None = None,
    resigner: Resigner | None = None,
) -> Copied:
    """Copies every document of `source`, or those of one model, that `target` lacks.

    What exists at the target is not overwritten, so a copy that was interrupted goes on where it ended; only of a document that
    was made to last longer is the manifest brought over again. A document that cannot be copied does not stop the others. The
    target's `journal` is opened for the first document, and told of each before its manifest is there. With a `resigner` the
    copies are its key's. Raises what the stores raise; UsageError where the source cannot be listed.
    """
    copied, opened = Copied(), cache(journal) if journal else None

    def record(deed: Published) -> None:
        if opened:
            opened().append(deed)

    tags: Iterable[ModelTag] = [tag] if tag else model_tags(source)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kvcdn-copy") as pool:
        for each in tags:
            for listed in read_manifests(source, manifest_infos(source, each)):
                key = listed.info.key
                try:
                    if listed.manifest is None:
                        raise listed.problem or CorruptError(f"{key}: cannot be read")
                    _Copy(source, target, pool, copied, record, resigner).copy(listed.info, listed.manifest, listed.data)
                except _Conflict as conflict:
                    copied.conflicts.append({"object": key, "reason": str(conflict)})
                except UntrustedError as error:
                    copied.untrusted.append({"object": key, "reason": str(error)})
                except (CorruptError, NotFoundError) as error:
                    if source.stat(key) is not None:  # else it was removed while we copied it
                        copied.damaged.append({"object": key, "reason": str(error)})
                done = copied.documents + copied.existed + len(copied.conflicts) + len(copied.damaged) + len(copied.untrusted)
                progress("documents copied or there", done)
    return copied


class _Copy:
    """Copies one document after another."""

    def __init__(
        self,
        source: BlobStore,
        target: BlobStore,
        pool: ThreadPoolExecutor,
        copied: Copied,
        record: Callable[[Published], None],
        resigner: Resigner | None,
    ) -> None:
        self._source = source
        self._target = target
        self._pool = pool
        self._copied = copied
        self._record = record
        self._resigner = resigner

    def copy(self, info: BlobInfo, manifest: Manifest, data: bytes) -> None:
        """Copies the document of `manifest` unless the target has it: a manifest that exists is complete."""
        key = info.key
        there = self._target.stat(key)
        if there is not None and not self._was_renewed(info, manifest, there):
            self._copied.existed += 1
            return
        if self._resigner:
            self._resigner.reseal(data, MANIFEST_MAGIC, key)  # before anything is fetched
        blocks: list[BlockEntry] = []
        with Lease(self._target, manifest.tag, [block.address for block in manifest.blocks]) as lease:
            for start in range(0, len(manifest.blocks), _AT_ONCE):
                group = range(start, min(start + _AT_ONCE, len(manifest.blocks)))
                for size, block in self._pool.map(lambda index: self._block(manifest, index), group):
                    blocks.append(block)
                    self._copied.blocks += size > 0
                    self._copied.blocks_existed += size == 0
                    self._copied.bytes += size
            if self._resigner:
                data = replace(manifest, blocks=tuple(blocks)).seal(self._resigner.key)
            self._record(Published(manifest.tag, manifest.address, hash_bytes(data), manifest.expires, "copy"))
            lease.require()
            if there is not None:
                self._target.delete(key)
            self._target.create(key, [data])
        self._copied.documents += 1

    def _was_renewed(self, info: BlobInfo, manifest: Manifest, there: BlobInfo) -> bool:
        """Whether the source's manifest was made since the target's, and lasts longer."""
        if info.modified <= there.modified:
            return False
        listed = read_manifest(self._target, there)
        theirs = listed.manifest if listed else None
        return theirs is not None and not theirs.lasts(manifest.expires, time.time())

    def _block(self, manifest: Manifest, index: int) -> tuple[int, BlockEntry]:
        """Brings one block to the target: its size, or 0 where it was there, and as the target's manifest is to name it."""
        entry = manifest.blocks[index]
        key = block_key(manifest.tag, entry.address)
        if self._target.stat(key) is None:
            data = read_block(self._source, key, manifest, index)
            pieces, entry = self._signed(data, key, entry)
            if self._target.create(key, pieces):
                return len(data), entry
        elif self._resigner:
            _, entry = self._signed(read_envelope(self._source, key), key, entry)
        expected = replace(BlockState.expected(manifest, index), etag=entry.etag)
        if BlockState.of(read_header(self._target, key)) != expected:
            raise _Conflict(f"{self._target.url} holds another object as {key}")
        return 0, entry

    def _signed(self, data: bytes, key: str, entry: BlockEntry) -> tuple[list[Buffer], BlockEntry]:
        """The block, or its envelope, as the target is to have it."""
        if not self._resigner:
            return [data], entry
        envelope = self._resigner.reseal(data, BLOCK_MAGIC, key)
        return [envelope, data[len(envelope) :]], replace(entry, etag=hash_bytes(envelope))
