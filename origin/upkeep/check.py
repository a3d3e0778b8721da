"""Checking an origin: every document complete, every hash right, everything under its own name; and mending what is not."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from kvcdn.digest import Digest, ModelTag, hash_bytes
from kvcdn.errors import CorruptError, NotFoundError
from kvcdn.keys import block_key
from kvcdn.manifest import Manifest
from kvcdn.origin.upkeep.addresses import AddressSet
from kvcdn.origin.upkeep.catalog import (
    Listed,
    Progress,
    address_of,
    block_infos,
    manifest_infos,
    model_tags,
    read_manifest,
    read_manifests,
    silent,
)
from kvcdn.origin.upkeep.journal import Journal
from kvcdn.origin.upkeep.references import References
from kvcdn.origin.upkeep.sweep import Condemned, Sweeper, delete_manifests
from kvcdn.origin.upkeep.whole import BlockState, verify_block
from kvcdn.store import BlobInfo, BlobStore

_READERS = 4
"""Blocks read at once: enough to fill a link with objects of some 10 MB."""


class Kind(StrEnum):
    """What can be wrong with an object."""

    MANIFEST_CORRUPT = "manifest-corrupt"
    BLOCK_CORRUPT = "block-corrupt"
    BLOCK_MISMATCH = "block-mismatch"
    """Sound in itself, but not the object that a manifest names: of another size or etag."""
    BLOCK_MISSING = "block-missing"


@dataclass
class Problem:
    """One object, what is wrong with it, and how many documents suffer."""

    kind: Kind
    object: str
    reason: str
    documents: int = 0


@dataclass
class Checked:
    """What a check saw. `documents_damaged` are the addresses of those that cannot be used in full."""

    read_blocks: bool
    models: int = 0
    documents: int = 0
    blocks: int = 0
    bytes: int = 0
    orphan_blocks: int = 0
    orphan_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    documents_damaged: list[str] = field(default_factory=list)
    repaired: bool = False
    manifests_removed: int = 0
    blocks_removed: int = 0
    blocks_held: int = 0

    @property
    def exit_code(self) -> int:
        """4 where something is corrupt, 3 where only blocks are missing, 0 where all is well."""
        kinds = {problem.kind for problem in self.problems}
        if kinds - {Kind.BLOCK_MISSING}:
            return CorruptError.exit_code
        return NotFoundError.exit_code if kinds else 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_origin(
    store: BlobStore,
    *,
    tag: ModelTag | None = None,
    read_blocks: bool = True,
    repair: bool = False,
    progress: Progress = silent,
    journal: Callable[[], Journal] | None = None,
) -> Checked:
    """Checks every document and block at `store`, or those of one model.

    Without `read_blocks` blocks are only looked for, and their sizes compared. With `repair` damaged manifests are removed,
    then damaged blocks: what is left is whole, and publishing a removed document again makes it anew. Documents that come
    or go meanwhile are no problem. A `journal` is opened where documents are removed, and says so first. Holds some 200 bytes
    of memory per block of a model.
    """
    checked = Checked(read_blocks)
    for each in [tag] if tag else model_tags(store):
        checked.models += 1
        check = _Check(store, each, checked, progress)
        check.look_at_blocks()
        check.look_at_manifests()
        if repair:
            check.repair(journal)
    checked.repaired = repair
    return checked


class _Check:
    """The check of one model."""

    def __init__(self, store: BlobStore, tag: ModelTag, checked: Checked, progress: Progress) -> None:
        self._store = store
        self._tag = tag
        self._checked = checked
        self._progress = progress
        self._sound: dict[bytes, bytes] = {}
        """Address to what `_packed` gives, in order of address; corrupt blocks are not in it."""
        self._problems: dict[str, Problem] = {}
        self._damaged: list[str] = []

    def look_at_blocks(self) -> None:
        """Verifies each block by itself."""
        for count, (info, found) in enumerate(self._blocks(), 1):
            self._progress("blocks checked", count)
            address = address_of(info.key)
            if isinstance(found, CorruptError):
                self._report(Kind.BLOCK_CORRUPT, info.key, found)
            elif address is not None and found is not None:
                self._sound[address] = _packed(info.size, found)
            if found is not None:
                self._checked.blocks += 1
                self._checked.bytes += info.size

    def look_at_manifests(self) -> None:
        """Checks each manifest, and that its blocks are those that it names."""
        named = AddressSet()
        infos = manifest_infos(self._store, self._tag)
        for count, listed in enumerate(read_manifests(self._store, infos), 1):
            self._progress("documents checked", count)
            self._checked.documents += 1
            if listed.manifest is None:
                self._report(Kind.MANIFEST_CORRUPT, listed.info.key, listed.problem).documents += 1
                self._damaged.append(listed.info.key)
            else:
                named.add(block.address for block in listed.manifest.blocks)
                self._look_at_entries(listed, listed.manifest)
        for address, packed in self._sound.items():
            if address not in named:
                self._checked.orphan_blocks += 1
                self._checked.orphan_bytes += _size(packed)
        self._checked.problems += self._problems.values()
        self._checked.documents_damaged += [key.rpartition("/")[2] for key in self._damaged]

    def repair(self, journal: Callable[[], Journal] | None) -> None:
        """Removes what is damaged: manifests first, so that none names a block that is gone."""
        if journal and self._damaged:
            journal().remove(self._tag, [address for key in self._damaged if (address := address_of(key))], "repair")
        self._checked.manifests_removed += delete_manifests(self._store, self._damaged, self._progress)
        corrupt = [key for key, problem in self._problems.items() if problem.kind is Kind.BLOCK_CORRUPT]
        if not corrupt:
            return
        references = References(self._store, self._tag, self._progress)
        references.read()
        sweeper = Sweeper(self._store, self._tag, references, self._progress)
        addresses = [address for key in corrupt if (address := address_of(key)) and address not in references]
        sweeper.sweep(Condemned(address, 0, 0.0) for address in addresses)
        self._checked.blocks_removed += sweeper.swept.blocks
        self._checked.blocks_held += sweeper.swept.held

    def _blocks(self) -> Iterator[tuple[BlobInfo, BlockState | CorruptError | None]]:
        """Every block with what it says of itself; None where it is gone."""
        with ThreadPoolExecutor(_READERS, thread_name_prefix="kvcdn-check") as pool:
            waiting: deque[tuple[BlobInfo, Future[BlockState | CorruptError | None]]] = deque()
            try:
                for info in block_infos(self._store, self._tag):
                    waiting.append((info, pool.submit(self._state, info)))
                    if len(waiting) > 2 * _READERS:
                        done, future = waiting.popleft()
                        yield done, future.result()
                for done, future in waiting:
                    yield done, future.result()
            finally:
                for _, future in waiting:
                    future.cancel()

    def _state(self, info: BlobInfo) -> BlockState | CorruptError | None:
        try:
            if not self._checked.read_blocks:
                return _unread(info.size)
            return BlockState.of(verify_block(self._store, info.key))
        except CorruptError as error:
            return error
        except NotFoundError:
            return None

    def _look_at_entries(self, listed: Listed, manifest: Manifest) -> None:
        bad = []
        for index, block in enumerate(manifest.blocks):
            expected = BlockState.expected(manifest, index)
            if not self._checked.read_blocks:
                expected = _unread(expected.size)
            if self._sound.get(block.address) != _packed(expected.size, expected):
                bad.append((index, expected))
        if not bad:
            return
        problems = [found for index, expected in bad if (found := self._problem(manifest, index, expected))]
        again = read_manifest(self._store, listed.info) if problems else None
        if again is None or again.manifest != manifest:  # removed or replaced while we looked: its blocks went after it
            return
        self._damaged.append(listed.info.key)
        for kind, key, reason in problems:
            self._report(kind, key, reason).documents += 1

    def _problem(self, manifest: Manifest, index: int, expected: BlockState) -> tuple[Kind, str, str] | None:
        """What is wrong with an entry, looked at again: None where the block came after we listed blocks."""
        key = block_key(self._tag, manifest.blocks[index].address)
        if key in self._problems and self._problems[key].kind is Kind.BLOCK_CORRUPT:
            return Kind.BLOCK_CORRUPT, key, self._problems[key].reason
        info = self._store.stat(key)
        if info is None:
            return Kind.BLOCK_MISSING, key, "there is no such block"
        found = self._state(info)
        if found is None:
            return Kind.BLOCK_MISSING, key, "there is no such block"
        if isinstance(found, CorruptError):
            return Kind.BLOCK_CORRUPT, key, str(found)
        if found == expected:
            return None
        return Kind.BLOCK_MISMATCH, key, _difference(found, expected)

    def _report(self, kind: Kind, key: str, reason: object) -> Problem:
        return self._problems.setdefault(key, Problem(kind, key, str(reason)))


def _unread(size: int) -> BlockState:
    """What is known of a block that is only listed."""
    nothing = Digest(bytes(Digest.SIZE))
    return BlockState(size, nothing, nothing, "", 0, 0)


def _packed(size: int, state: BlockState) -> bytes:
    """A block's size and a digest of all that a manifest says of it, in 24 bytes."""
    words = f"{state.size} {state.etag} {state.layout} {state.precision} {state.start} {state.tokens}"
    return struct.pack("<Q", size) + hash_bytes(words.encode("ascii"))[:16]


def _size(packed: bytes) -> int:
    return int.from_bytes(packed[:8], "little")


def _difference(found: BlockState, expected: BlockState) -> str:
    for name, value in asdict(expected).items():
        if getattr(found, name) != value:
            return f"its {name} is {getattr(found, name)}, the manifest says {value}"
    return "it changed while it was looked at"
