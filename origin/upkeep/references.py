"""References: which blocks of one model the manifests at an origin name, kept up to date while others publish."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import CorruptError
from kvcdn.manifest import Manifest
from kvcdn.origin.upkeep.addresses import AddressSet
from kvcdn.origin.upkeep.catalog import Progress, address_of, manifest_infos, read_manifests, silent
from kvcdn.store import BlobStore


class References:
    """What manifests name. Each is read once: `read` takes those that are there, `refresh` those that came since."""

    def __init__(self, store: BlobStore, tag: ModelTag, progress: Progress = silent) -> None:
        """Nothing is read yet."""
        self._store = store
        self._tag = tag
        self._progress = progress
        self._seen: set[bytes] = set()
        self._named = AddressSet()

    def __contains__(self, address: bytes) -> bool:
        return address in self._named

    @property
    def manifests(self) -> int:
        """How many have been read and count."""
        return len(self._seen)

    def read(self, *, without: Iterable[Digest] = (), leave: Callable[[Manifest], bool] = lambda _: False) -> None:
        """Reads all manifests but those `without`, and those that `leave` accepts: they are about to be removed.

        Raises CorruptError for one that cannot be read: what it names cannot be told, so nothing may be deleted.
        """
        for manifest in self._new(set(without)):
            if not leave(manifest):
                self._count(manifest)
                self._progress("manifests read", len(self._seen))

    def refresh(self) -> set[bytes]:
        """Reads the manifests that do not count yet; the addresses that these name. Raises as `read` does."""
        fresh: set[bytes] = set()
        for manifest in self._new(set()):
            fresh.update(self._count(manifest))
        return fresh

    def _new(self, without: set[Digest]) -> Iterator[Manifest]:
        infos = manifest_infos(self._store, self._tag)
        new = (info for info in infos if (address := address_of(info.key)) not in self._seen and address not in without)
        for listed in read_manifests(self._store, new):
            if listed.manifest is None:
                raise CorruptError(
                    f"{listed.problem}: which blocks it names cannot be told, so none is removed",
                    hint="kvcdn fsck shows what is wrong, kvcdn fsck --repair removes it",
                )
            yield listed.manifest

    def _count(self, manifest: Manifest) -> list[Digest]:
        addresses = [block.address for block in manifest.blocks]
        self._named.add(addresses)
        self._seen.add(manifest.address)
        return addresses
