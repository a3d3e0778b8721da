"""Removing: taking documents back, one by one or all of a model.

Manifests go first and their blocks after, from the last to the first, so that whatever dies when, no manifest names a block
that is gone. Blocks that other documents begin with stay, and so do those that a running publisher relies on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcdn.digest import Digest, ModelTag
from kvcdn.journal import Retired
from kvcdn.keys import block_key
from kvcdn.manifest import Manifest
from kvcdn.origin.upkeep.catalog import Progress, address_of, block_infos, manifest_infos, read_manifest, silent
from kvcdn.origin.upkeep.journal import Journal
from kvcdn.origin.upkeep.references import References
from kvcdn.origin.upkeep.sweep import Condemned, Sweeper, delete_manifests
from kvcdn.store import BlobInfo, BlobStore


@dataclass(frozen=True)
class Removal:
    """What was removed, and what of it stayed and why.

    `blocks_shared` other documents begin with; `blocks_held` a running publisher relies on: if it ends without naming
    them, `gc` removes them. `unreadable` documents were removed without their blocks, which `gc` finds.
    """

    model_tag: str
    documents: int
    blocks: int
    bytes: int
    blocks_shared: int
    blocks_held: int
    unreadable: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def remove_documents(
    store: BlobStore, infos: Sequence[BlobInfo], progress: Progress = silent, journal: Journal | None = None
) -> list[Removal]:
    """Removes the documents of these manifests with all blocks that only they name; a result for each model.

    Reads every other manifest of these models before it removes anything, and says so in the `journal` first. Raises
    CorruptError where one cannot be read.
    """
    by_model: dict[str, list[BlobInfo]] = {}
    for info in infos:
        by_model.setdefault(info.key.split("/")[1], []).append(info)
    return [_remove(store, ModelTag(bytes.fromhex(tag)), group, progress, journal) for tag, group in by_model.items()]


def _remove(store: BlobStore, tag: ModelTag, infos: list[BlobInfo], progress: Progress, journal: Journal | None) -> Removal:
    listed = [found for info in infos if (found := read_manifest(store, info))]
    manifests = [found.manifest for found in listed if found.manifest]
    references = References(store, tag, progress)
    if manifests:  # what cannot be read names no blocks that we could remove, and needs no look at the others
        references.read(without=[address for found in listed if (address := address_of(found.info.key))])
    if journal:
        journal.remove(tag, [address for found in listed if (address := address_of(found.info.key))])
    for found in listed:
        store.delete(found.info.key)
    blocks = _blocks_from_the_last(manifests)
    own = [address for address in blocks if address not in references]
    sweeper = Sweeper(store, tag, references, progress)
    sweeper.sweep(_existing(store, tag, own), at_once=1)
    swept = sweeper.swept
    return Removal(
        model_tag=str(tag),
        documents=len(listed),
        blocks=swept.blocks,
        bytes=swept.bytes,
        blocks_shared=len(blocks) - len(own) + swept.named,
        blocks_held=swept.held,
        unreadable=len(listed) - len(manifests),
    )


def _blocks_from_the_last(manifests: list[Manifest]) -> list[Digest]:
    """Each address once, those at the end of their chains first."""
    places = {block.address: index for manifest in manifests for index, block in enumerate(manifest.blocks)}
    return sorted(places, key=lambda address: places[address], reverse=True)


def _existing(store: BlobStore, tag: ModelTag, addresses: Iterable[Digest]) -> Iterator[Condemned]:
    for address in addresses:
        info = store.stat(block_key(tag, address))
        if info is not None:
            yield Condemned(address, info.size, info.modified)


def retire_model(store: BlobStore, tag: ModelTag, progress: Progress = silent, journal: Journal | None = None) -> Removal:
    """Removes every document and every block of a model, but what is published meanwhile; the `journal` says so first."""
    if journal:
        journal.append(Retired(tag))
    documents = delete_manifests(store, (info.key for info in manifest_infos(store, tag)), progress)
    references = References(store, tag, progress)
    references.read()
    sweeper = Sweeper(store, tag, references, progress)
    named = 0

    def condemned() -> Iterator[Condemned]:
        nonlocal named
        for info in block_infos(store, tag):
            address = address_of(info.key)
            if address is not None and address not in references:
                yield Condemned(address, info.size, info.modified)
            else:
                named += 1

    sweeper.sweep_batches(condemned())
    swept = sweeper.swept
    return Removal(str(tag), documents, swept.blocks, swept.bytes, named + swept.named, swept.held)
