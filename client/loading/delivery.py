"""A delivery: one block on its way from a source into its rows of the layers, verified piece by piece (FORMAT.md section 6)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from kvcdn.block import BlockHeader
from kvcdn.client.loading.coarse import CoarseRows
from kvcdn.client.loading.reading import Reading, Terms
from kvcdn.digest import Digest
from kvcdn.errors import CorruptError
from kvcdn.keys import COARSE_OF, BlockName
from kvcdn.layout import Layout
from kvcdn.model.cache import CacheLayer, device_in
from kvcdn.model.layers import TORCH_DTYPES, TokenMajorLayer
from kvcdn.model.prefill import tensor_bytes
from kvcdn.model.staging import Staging, Uploads
from kvcdn.model.states import WithStates

SKIPPED_BYTES = 256 * 1024
"""Raw bytes that are worth passing over: asking for a range costs a round trip, in which some 100 KB arrive at 100 Mbit/s."""


def layers_to_read(layout: Layout, name: BlockName, first_needed: Sequence[int], *, states: bool) -> list[bool]:
    """Of which layers the block `name` is wanted by a reader who needs rows from `first_needed` on, and its `states` or not."""
    wanted: list[bool] = []
    for spec, first in zip(layout.layers, first_needed, strict=True):
        # The few bytes of a layer that keeps nothing are read where the layer before it is, rather than passed over.
        rows = name.end > first if spec.tensors else bool(wanted) and wanted[-1]
        wanted.append(states if spec.states and not spec.tensors else rows)
    return wanted


@dataclass(frozen=True)
class LayerMemory:
    """The memory of a layer's `tensors`, which begin at token `first`: each as bytes, with the bytes of a row."""

    tensors: list[torch.Tensor]
    first: int
    places: list[tuple[memoryview, int]]

    @classmethod
    def of(cls, layer: TokenMajorLayer) -> LayerMemory:
        """Of a layer on the CPU."""
        places = [(tensor_bytes(tensor), tensor.nbytes // tensor.shape[0]) for tensor in layer.storage]
        return cls(layer.storage, layer.first, places)


@dataclass(frozen=True)
class Order(Terms):
    """What all blocks of a fetch have in common: where they come from, and what is taken.

    `last` is the index of the last block, whose states go into the layers; `whole` keeps those of the others, too. Of a
    refinement, `coarse` are rows that need not be fetched.
    """

    last: int = -1
    whole: bool = False
    coarse: CoarseRows | None = None
    uploads: Uploads = field(default_factory=lambda: Uploads(()))
    """To layers on accelerators."""
    memory: dict[int, LayerMemory] = field(default_factory=dict)
    """Of layers on the CPU: looked at once, not once a block. To be cleared when all is there."""

    @property
    def of_coarse(self) -> Terms:
        """The terms for blocks that are refined: of these nobody sees but the exact numbers."""
        model = replace(self.model, precision=COARSE_OF[self.model.precision])
        return Terms(self.source, model, self.trust, self.bases)


class Delivery:
    """One block. `step` is called by one thread at a time until `complete`; everything else may be called at any time.

    While somebody computes the same block, what arrives is put aside, so that neither overwrites the other.
    """

    def __init__(self, order: Order, name: BlockName, wanted: Sequence[bool], layers: Sequence[CacheLayer]) -> None:
        self.name = name
        self.wanted = wanted
        self.header: BlockHeader | None = None
        self.envelope = b""
        self.received = 0
        self.steps = 0
        self.waited = 0.0
        self.decoding = 0.0
        self.computed = False
        self.held = False
        self.lost = False
        self._order = order
        self._layers = layers
        self._lock = threading.Lock()
        self._next_layer = 0 if any(wanted) else len(wanted)
        self._stopped = self.arrived
        self._reading: Reading | None = None
        self._coarse: Reading | None = None
        self._rows_taken = False
        self._aside: list[list[torch.Tensor]] | None = None
        self._earlier: dict[int, list[torch.Tensor]] = {}
        self._checkpoint = order.model.layout.is_checkpoint(name.index, name.tokens)
        self._passing = self._worth_passing_over()

    def take(self, header: BlockHeader, envelope: bytes, rows: Sequence[Sequence[torch.Tensor]]) -> None:
        """Fills the block from `rows`, layer by layer, that were kept on this host and checked: nothing is asked for."""
        for layer, tensors in enumerate(rows):
            for place, tensor in zip(self.places(layer), tensors, strict=True):
                place.copy_(tensor)
        self.header, self.envelope = header, envelope
        self._next_layer, self._stopped, self.held = len(self.wanted), True, True

    # -- what is there -----------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes of the objects that it consists of, as far as their headers have come."""
        return sum(one.header.size for one in self._readings if one.header is not None)

    @property
    def arrived(self) -> bool:
        """Whether all that is wanted was received, be it aside."""
        return self._next_layer == len(self.wanted)

    @property
    def nearly_there(self) -> bool:
        """Whether an eighth of its layers or less are still to come."""
        return 8 * (len(self.wanted) - self.segments_read) <= len(self.wanted)

    @property
    def segments_read(self) -> int:
        """How many layers have been read, or passed over."""
        return self._next_layer if self.header is not None else 0

    @property
    def complete(self) -> bool:
        """Whether all that is wanted is in its rows."""
        return self.computed or (self.arrived and not self._rows_taken)

    def holds(self, layer: int) -> bool:
        """Whether the rows of `layer` hold what is wanted of them."""
        return self.computed or not self.wanted[layer] or (self._next_layer > layer and not self._rows_taken)

    def bytes_left(self, ratio: float) -> float:
        """Object bytes still to come; before the header is there, raw bytes times `ratio`."""
        if self.computed or self.arrived:
            return 0.0
        if self._reading is not None and self.header is not None:
            return float(sum(one.bytes_from(self._next_layer) for one in self._readings))
        return ratio * raw_bytes(self._order.model.layout, self.name, self.wanted)

    # -- the way -----------------------------------------------------------------------------------------------------------

    def step(self, staging: Staging, *, ranged: bool, turn_s: float = 0.0) -> None:
        """Asks for the block, reads its header, or one layer; raises a KvcdnError. Does nothing once stopped.

        With `turn_s` as many of these as begin within so many seconds.
        """
        ends = time.perf_counter() + turn_s
        self._step(staging, ranged=ranged)
        while turn_s and not self._stopped and not self.arrived and time.perf_counter() < ends:
            self._step(staging, ranged=ranged)

    def _step(self, staging: Staging, *, ranged: bool) -> None:
        if self._stopped:
            return
        self.steps += 1
        if self._reading is None:
            self._ask(ranged=ranged)
        elif self.header is None:
            self._read_header(self._reading)
        else:
            self._read_layer(self._reading, staging)
        if self._stopped or self.arrived:
            self._let_go()

    @property
    def _readings(self) -> list[Reading]:
        return [one for one in (self._reading, self._coarse) if one is not None]

    def _ask(self, *, ranged: bool) -> None:
        name, order = self.name, self._order
        if name.coarse is not None and self._held_etag(name.coarse) is None:
            self._coarse = Reading(order.of_coarse, name.coarse, self.wanted, ranged=ranged, passing=self._passing)
        self._reading = Reading(order, name, self.wanted, ranged=ranged, passing=self._passing)

    def _read_header(self, reading: Reading) -> None:
        header, name = reading.read_header(), self.name
        if name.coarse is not None:
            etag = self._coarse.read_header().etag if self._coarse else self._held_etag(name.coarse)
            if header.coarse != etag:
                raise CorruptError(
                    f"block {name.address} refines block {header.coarse}, and in its place is {etag}",
                    hint="its publisher has to publish the document again",
                )
        self.received += sum(len(one.envelope) for one in self._readings)
        self.envelope, self.header = reading.envelope, header

    def _held_etag(self, name: BlockName) -> Digest | None:
        return None if self._order.coarse is None else self._order.coarse.etags.get(name.address)

    def _read_layer(self, reading: Reading, staging: Staging) -> None:
        layer = self._next_layer
        coarse, more = self._coarse.read_layer(layer) if self._coarse else (memoryview(b""), 0)
        stored, received = reading.read_layer(layer)
        self.waited = sum(one.waited for one in self._readings)
        with self._lock:
            if self._stopped:
                return
            if self.wanted[layer]:
                self._decode(reading, layer, stored, coarse, staging)
            self.received += received + more
            self._next_layer += 1

    def _decode(self, reading: Reading, layer: int, stored: memoryview, coarse: memoryview, staging: Staging) -> None:
        started = time.perf_counter()
        if self._rows_taken and self._aside is None:
            self._aside = self._room_aside()
        outs = self._bytes_in_place(layer) if self._aside is None else None
        if outs is None:
            places = self.places(layer) if self._aside is None else self._aside[layer]
            if any(place.device.type != "cpu" for place in places):
                self._decode_beyond(reading, layer, stored, coarse, staging, places)
            else:
                outs = [tensor_bytes(place) for place in places]
        if outs is not None:
            self._decode_here(reading, layer, stored, coarse, staging.scratch, outs)
        self.decoding += time.perf_counter() - started

    def _decode_here(
        self, reading: Reading, layer: int, stored: memoryview, coarse: memoryview, scratch: bytearray, outs: list[memoryview]
    ) -> None:
        if self.name.coarse is None:
            reading.decode(layer, stored, scratch, outs)
            return
        # The coarse numbers lie where the exact ones are to go, and nobody sees them there.
        if self._coarse is not None:
            self._coarse.decode(layer, coarse, scratch, outs)
        elif self._order.coarse is not None:
            self._order.coarse.fill(self.name, layer, outs)
        reading.decode(layer, stored, scratch, outs, coarse=outs)

    def _decode_beyond(
        self,
        reading: Reading,
        layer: int,
        stored: memoryview,
        coarse: memoryview,
        staging: Staging,
        places: list[torch.Tensor],
    ) -> None:
        """To `places` on an accelerator: what is refined by way of the host, where it is compared with its digest."""
        uploads, device = self._order.uploads, self._device(layer)
        staging.begin()
        try:
            if self.name.coarse is None:
                reading.decode_to(layer, stored, staging, places, uploads)
                return
            rooms = [staging.room(place) for place in places]
            self._decode_here(reading, layer, stored, coarse, staging.scratch, [tensor_bytes(room) for room in rooms])
            with uploads.lane(device):
                for place, room in zip(places, rooms, strict=True):
                    place.copy_(room, non_blocking=True)
        finally:
            staging.end(uploads.mark(layer, device))

    def _device(self, layer: int) -> torch.device:
        return device_in(self._layers[layer])

    def _bytes_in_place(self, layer: int) -> list[memoryview] | None:
        """The memory of what `places` names, where that is rows on the CPU and nothing else."""
        held, known = self._layers[layer], self._order.memory.get(layer)
        if known is None or known.tensors is not getattr(held, "storage", None):
            if not isinstance(held, TokenMajorLayer) or held.device.type != "cpu":
                return None
            known = self._order.memory[layer] = LayerMemory.of(held)
        start, end = self.name.start - known.first, self.name.end - known.first
        if start < 0 or (self._checkpoint and isinstance(held, WithStates)):
            return None
        return [memory[start * row : end * row] for memory, row in known.places]

    def places(self, layer: int) -> list[torch.Tensor]:
        """Where the tensors of a layer go, or, once it is complete, are: rows, and states where the block carries them."""
        if not self.wanted[layer]:
            return []
        held = self._layers[layer]
        rows = held.rows(self.name.start, self.name.end)
        if not self._checkpoint or not isinstance(held, WithStates):
            return rows
        if self.name.index == self._order.last:
            return rows + held.state_places()
        return rows + self._earlier_states(layer)

    def _earlier_states(self, layer: int) -> list[torch.Tensor]:
        """Room for states that no later token reads."""
        specs = self._order.model.layout.layers[layer].states
        room = self._earlier.get(layer) or [torch.empty(spec.dims, dtype=TORCH_DTYPES[spec.dtype]) for spec in specs]
        if self._order.whole:
            self._earlier[layer] = room
        return room

    # -- beside a computation ----------------------------------------------------------------------------------------------

    def put_aside(self) -> None:
        """From now on what arrives, and what has, is kept beside its rows, which somebody else is going to write."""
        with self._lock:
            if self._rows_taken or not any(self.wanted) or self.computed:
                return
            self._rows_taken = True
            if self._next_layer:
                self._aside = self._room_aside()

    def _room_aside(self) -> list[list[torch.Tensor]]:
        """Room for every layer, with what has arrived."""
        room = []
        for layer in range(len(self.wanted)):
            with self._order.uploads.lane(self._device(layer)):
                arrived = layer < self._next_layer
                room.append([place.clone() if arrived else torch.empty_like(place) for place in self.places(layer)])
        return room

    def bring_back(self) -> None:
        """Puts what is aside into its rows, which nobody else writes any more."""
        with self._lock:
            uploads = self._order.uploads
            for layer, tensors in enumerate(self._aside or ()):
                if layer < self._next_layer:
                    with uploads.lane(self._device(layer)):
                        for place, tensor in zip(self.places(layer), tensors, strict=True):
                            place.copy_(tensor)
                    uploads.mark(layer, self._device(layer))
            self._rows_taken, self._aside = False, None

    def outrun(self) -> None:
        """The block was computed: what was on its way is not wanted any more."""
        with self._lock:
            self.computed, self._stopped, self._rows_taken, self._aside = True, True, False, None
        self._wake()

    def stop(self) -> None:
        """Nothing is written any more, from the return of this call on; `lost` unless all is there."""
        with self._lock:
            self._stopped = True
            self.lost = self.lost or not (self.computed or self.arrived)
        self._wake()

    def _wake(self) -> None:
        """Ends the wait of a thread that reads what is not wanted any more."""
        if not self.arrived:
            for one in self._readings:
                one.abort()

    @property
    def stopped(self) -> bool:
        return self._stopped

    def _let_go(self) -> None:
        for one in self._readings:
            one.close()

    def close(self) -> None:
        """Lets go of the reader, which no thread is using."""
        self.stop()
        self._let_go()

    # -- what is passed over -----------------------------------------------------------------------------------------------

    def _worth_passing_over(self) -> bool:
        """Whether what is not wanted of the block is so much at a stretch that ranges are better than one stream."""
        stretch = 0
        for spec, wants in zip(self._order.model.layout.layers, self.wanted, strict=True):
            states = spec.state_bytes if self._checkpoint else 0
            stretch = 0 if wants else stretch + spec.bytes_per_token * self.name.tokens + states
            if stretch >= SKIPPED_BYTES:
                return True
        return False


class Held(Protocol):
    """What this host has of a prefix already."""

    def fill(self, delivery: Delivery) -> None:
        """Fills the block of `delivery`, if what is wanted of it is here."""


def raw_bytes(layout: Layout, name: BlockName, wanted: Sequence[bool]) -> int:
    """Raw bytes of the block `name` in the layers that are `wanted`."""
    specs = [spec for spec, wants in zip(layout.layers, wanted, strict=True) if wants]
    states = sum(spec.state_bytes for spec in specs) if layout.is_checkpoint(name.index, name.tokens) else 0
    return sum(spec.bytes_per_token for spec in specs) * name.tokens + states
