"""What is kept in memory: the KV of the document computed last, for the next one that begins like it.

A system prompt before every document of a folder, or of a queue, is then neither computed nor loaded again. What is the same is
told by the names of blocks, which stand for model, namespace and every token up to the block's end; and by their etags, so that
what is written behind a block of the origin was computed behind those very bytes. The memory is one document's, used again by
each. States, which cannot be cut back to a beginning, are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcdn.digest import Digest
from kvcdn.keys import PrefixNames
from kvcdn.layout import Layout
from kvcdn.manifest import BlockEntry
from kvcdn.model.cache import CacheLayer, make_layers
from kvcdn.model.load import LoadedModel
from kvcdn.model.place import Devices, layer_devices, on_cpu
from kvcdn.model.prefill import ScheduledPrefill
from kvcdn.signing import PublicKey

_ROOM = 2
"""Documents of twice the length find room: memory that nobody has touched is none on a CPU."""


@dataclass(frozen=True)
class KeptBlock:
    """A block in memory; `entry` is of its object at the origin, None where it was computed and not written."""

    address: Digest
    entry: BlockEntry | None
    publisher: PublicKey


class Kept:
    """The memory of one publisher. A document in work overwrites all behind its shared beginning."""

    def __init__(self) -> None:
        self._layers: list[CacheLayer] = []
        self._capacity = 0
        self._fits: tuple[Layout, Devices] | None = None
        self._blocks: tuple[KeptBlock, ...] = ()

    def drop(self) -> None:
        """Lets the memory go."""
        self._layers, self._capacity, self._fits, self._blocks = [], 0, None, ()

    def prefill(self, loaded: LoadedModel, names: PrefixNames) -> tuple[ScheduledPrefill, Sequence[KeptBlock]]:
        """A prefill of the prefix, and those of its leading blocks that it holds already."""
        layout, tokens = names.model.layout, names.tokens
        if layout.state_bytes:
            self.drop()
            return ScheduledPrefill(loaded.model, layout, tokens), ()
        fits = (layout, layer_devices(loaded.model, layout))
        if self._fits != fits or tokens > self._capacity:
            self.drop()  # first: two documents would be more memory than is promised
            self._capacity = _room(loaded, tokens)
            self._layers = make_layers(layout, self._capacity, fits[1])
            self._fits = fits
        shared = 0
        for ours, theirs in zip(self._blocks, names.blocks, strict=False):
            if ours.address != theirs.address:
                break
            shared += 1
        self._blocks = self._blocks[:shared]
        return ScheduledPrefill(loaded.model, layout, tokens, layers=self._layers), self._blocks

    def hold(self, blocks: Sequence[KeptBlock]) -> None:
        """These blocks lead the prefix that `prefill` was last asked for, and are in memory now."""
        if self._layers:
            self._blocks = tuple(blocks)


def _room(loaded: LoadedModel, tokens: int) -> int:
    if not on_cpu(layer_devices(loaded.model, loaded.identity.layout)):
        return tokens
    return max(tokens, min(_ROOM * tokens, loaded.max_positions or _ROOM * tokens))
