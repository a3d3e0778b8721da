"""Sweeping: the one path by which blocks, and many manifests, are deleted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from kvcdn.digest import Digest, ModelTag
from kvcdn.keys import block_key
from kvcdn.origin.upkeep.catalog import Progress, silent
from kvcdn.origin.upkeep.lease import Sweep
from kvcdn.origin.upkeep.references import References
from kvcdn.store import BlobStore

AT_ONCE = 8
"""Deletions in flight at a distant store, each of which takes one round trip."""

BATCH_BLOCKS = 50_000
"""Blocks condemned together: some 10 MB of memory, and one look at the manifests."""


CHUNK_MANIFESTS = 1000
"""Manifests removed between two words of progress."""


@dataclass(frozen=True)
class Condemned:
    """A block to be deleted unless somebody turns out to need it."""

    address: Digest
    size: int
    modified: float


@dataclass
class Swept:
    """What became of the condemned."""

    blocks: int = 0
    bytes: int = 0
    held: int = 0
    """Spared: a running publisher relies on them."""
    named: int = 0
    """Spared: a manifest that came meanwhile names them."""


class Sweeper:
    """Deletes blocks of one model that neither a manifest nor a lease names, and counts."""

    def __init__(self, store: BlobStore, tag: ModelTag, references: References, progress: Progress = silent) -> None:
        self._store = store
        self._tag = tag
        self._references = references
        self._progress = progress
        self.swept = Swept()

    def sweep(self, condemned: Iterable[Condemned], *, at_once: int = AT_ONCE) -> None:
        """Deletes them in this order. Raises what the store raises, and CorruptError as References does."""
        rest = deque(condemned)
        named: set[bytes] = set()
        while rest:
            with Sweep(self._store, self._tag) as sweep, ThreadPoolExecutor(at_once) as pool:
                held = sweep.held()  # before the manifests: see kvcdn.origin.upkeep.lease
                named |= self._references.refresh()
                while rest and not sweep.over:
                    chunk = [rest.popleft() for _ in range(min(at_once, len(rest)))]
                    list(pool.map(self._delete, (block for block in chunk if self._is_free(block, held, named))))
                    self._progress("blocks removed", self.swept.blocks)

    def sweep_batches(self, condemned: Iterator[Condemned]) -> None:
        """As `sweep`, for any number of blocks; the newest of a batch first.

        Blocks of a chain were made in order, and where one exists those before it should (FORMAT.md section 7).
        """
        while batch := list(islice(condemned, BATCH_BLOCKS)):
            self.sweep(sorted(batch, key=lambda block: block.modified, reverse=True))

    def _is_free(self, block: Condemned, held: set[bytes], named: set[bytes]) -> bool:
        if block.address in held:
            self.swept.held += 1
        elif block.address in named:
            self.swept.named += 1
        else:
            self.swept.blocks += 1
            self.swept.bytes += block.size
            return True
        return False

    def _delete(self, block: Condemned) -> None:
        self._store.delete(block_key(self._tag, block.address))


def delete_manifests(store: BlobStore, keys: Iterable[str], progress: Progress = silent) -> int:
    """Deletes manifests, several at once; how many."""
    done, waiting = 0, iter(keys)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while chunk := list(islice(waiting, CHUNK_MANIFESTS)):
            list(pool.map(store.delete, chunk))
            done += len(chunk)
            progress("documents removed", done)
    return done
