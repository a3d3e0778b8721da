"""Fetching: the blocks of a prefix into the layers of a cache, while the model may already be running on the first of them.

Worker threads each own some of the blocks. All take layer 0 of their blocks first, then layer 1, and so on, so that the
model, which reaches layer i after layer i - 1, waits as little as can be. Every piece is verified and decrypted before
it is decoded into its place in the layer's tensors (FORMAT.md section 6). A layer is ready when all blocks have
delivered it; a failure wakes every waiter with the error.

Of a layer with a window only the blocks that reach into the window at the end of the prefix are read: what lies before
is passed over, and a block of which nothing is read is not asked for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from kvcdn.block import BlockHeader, open_header, open_segment
from kvcdn.client.source import ObjectReader, Source
from kvcdn.envelope import BLOCK_MAGIC, PREAMBLE_BYTES, envelope_size
from kvcdn.errors import CorruptError, KvcdnError, QualityError, UnavailableError
from kvcdn.keys import BlockName, ModelIdentity, block_key
from kvcdn.model.cache import make_layer
from kvcdn.model.prefill import tensor_bytes
from kvcdn.seal import ObjectKeys
from kvcdn.signing import TrustList

STREAMED_BLOCKS = 16
"""Up to this many blocks each have a connection of their own; longer prefixes are read in ranges."""

MAX_THREADS = 8
"""Verifying, decrypting and decoding run at some 300 MB/s of KV a thread; eight saturate most links."""

SKIPPED_BYTES = 256 * 1024
"""Raw bytes that are worth passing over: asking for a range costs a round trip, in which some 100 KB arrive at 100 Mbit/s."""

SALVAGE_SILENCE_SECONDS = 2.0
"""After a failure, blocks that are still on their way are waited for as long as some of them deliver in such a time."""

_EVERYTHING = 1 << 40
"""Of a block of which no layer is passed over, all bytes will be asked for."""

_HEADER_BYTES_PER_LAYER = 640
"""What a header has for each layer, two parts and four hashes and numbers, rounded up."""

_LINK_BOUND_SHARE = 0.6
"""Threads that spend more of their time than this waiting for bytes leave the cores to the model."""


class PrefixFetch:
    """Fills `layers` with the KV of `blocks` in the background. Create, hand the layers to a model, `close` when done."""

    def __init__(  # noqa: PLR0913 - by name
        self,
        source: Source,
        model: ModelIdentity,
        blocks: Sequence[BlockName],
        *,
        length: int,
        capacity: int,
        device: torch.device,
        trust: TrustList,
        whole: bool = False,
        max_kl: float | None = None,
    ) -> None:
        """`length` tokens are shown to the model, at most as many as the blocks hold; `capacity` tokens are allocated.

        A block whose certificate is worse than `max_kl` ends the fetch with QualityError.

        `whole` reads every row of every layer, also those that no window reaches.
        """
        self._source = source.session()
        self._model = model
        self._blocks = blocks
        self._trust = trust
        self._max_kl = max_kl
        self._lock = threading.Lock()
        self._error: KvcdnError | None = None
        self._usable = len(blocks)
        specs = model.layout.layers
        self._first_needed = [0 if whole else spec.first_needed(length) for spec in specs]
        self._wanted = [self._layers_to_read(name) for name in blocks]
        self._pending = [sum(wanted[layer] for wanted in self._wanted) for layer in range(len(specs))]
        self._ready = [threading.Event() for _ in specs]
        for event, pending in zip(self._ready, self._pending, strict=True):
            if not pending:
                event.set()
        self._delivered = [0 if any(wanted) else len(specs) for wanted in self._wanted]
        self._started = time.perf_counter()
        self._blocked = 0.0
        self._readers: dict[int, ObjectReader] = {}
        self.headers: dict[int, BlockHeader] = {}
        self.envelopes: dict[int, bytes] = {}
        self.bytes_fetched = 0
        self.seconds = 0.0
        self.layers = [
            make_layer(
                spec,
                capacity,
                length,
                device,
                partial(self.wait_layer, index),
                first=min((name.start for name in blocks if self._wanted[name.index][index]), default=0),
            )
            for index, spec in enumerate(specs)
        ]
        read = [name for name in blocks if any(self._wanted[name.index])]
        # One more than cores, since some always wait for bytes.
        count = max(1, min(len(read), (os.cpu_count() or 1) + 1, MAX_THREADS))
        self._ranged = len(read) > STREAMED_BLOCKS
        self._threads = [
            threading.Thread(target=self._work, args=(read[start::count],), name=f"kvcdn-fetch-{start}", daemon=True)
            for start in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _layers_to_read(self, name: BlockName) -> list[bool]:
        wanted: list[bool] = []
        for spec, first in zip(self._model.layout.layers, self._first_needed, strict=True):
            # The few bytes of a layer that keeps nothing are read where the layer before it is, rather than passed over.
            wanted.append(name.end > first if spec.tensors else bool(wanted) and wanted[-1])
        return wanted

    def wait_layer(self, layer: int) -> None:
        """Returns when `layer` is complete. Raises the error that ended the fetch."""
        self._ready[layer].wait()
        if self._error is not None:
            raise self._error

    def wait_until_overlap_pays(self) -> None:
        """Returns when the model had better start: when all is here, or when the threads are mostly waiting for the link.

        While they are busy decoding, they and the model would only take the cores from each other: on two cores a model
        that starts at once has its first token 10 to 15 % later. Raises the error that ended the fetch.
        """
        for layer in range(len(self._ready)):
            self.wait_layer(layer)
            elapsed = time.perf_counter() - self._started
            if self._blocked > _LINK_BOUND_SHARE * elapsed * len(self._threads):
                return
        self._join()

    def wait(self) -> None:
        """Returns when every layer is complete. Raises the error that ended the fetch."""
        for layer in range(len(self._ready)):
            self.wait_layer(layer)
        self._join()

    def salvage(self) -> int:
        """After a failure: how many blocks from the front can be used nevertheless. Waits for those still on their way.

        A shorter prefix has its windows elsewhere; where they begin before what was read, none can be.
        """
        self._join_while_bytes_come()
        layers = len(self._ready)
        usable = next((index for index, done in enumerate(self._delivered) if done < layers), len(self._blocks))
        tokens = self._blocks[usable - 1].end if usable else 0
        specs = self._model.layout.layers
        reach = all(layer.first <= spec.first_needed(tokens) for layer, spec in zip(self.layers, specs, strict=True))
        return usable if reach else 0

    def close(self) -> None:
        """Stops what is still on its way. The layers must not be waited for afterwards."""
        with self._lock:
            self._usable = 0
        self._source.abort()
        self._join()

    def _join_while_bytes_come(self) -> None:
        while any(thread.is_alive() for thread in self._threads):
            before, ends = self.bytes_fetched, time.monotonic() + SALVAGE_SILENCE_SECONDS
            for thread in self._threads:
                thread.join(max(ends - time.monotonic(), 0.0))
            if self.bytes_fetched == before:
                self._source.abort()
                self._join()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self, mine: Sequence[BlockName]) -> None:
        scratch = bytearray()
        steps = [(name, self._steps(name, scratch)) for name in mine]
        # Request, header, one step a layer, and one to let go of the reader.
        for _ in range(len(self._ready) + 3):
            for name, step in steps:
                self._advance(name, step)
        self.seconds = max(self.seconds, time.perf_counter() - self._started)

    def _advance(self, name: BlockName, step: Iterator[None]) -> None:
        if name.index >= self._usable:
            step.close()  # type: ignore[attr-defined] # a generator
            return
        try:
            next(step, None)
        except KvcdnError as error:
            self._fail(name, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the model must not wait for this thread for ever
            self._fail(name, UnavailableError(f"block {name.address} could not be loaded: {error!r}"))

    def _fail(self, name: BlockName, error: KvcdnError) -> None:
        with self._lock:
            self._usable = min(self._usable, name.index)
            self._error = self._error or error
            in_vain = [reader for index, reader in self._readers.items() if index >= self._usable]
        for reader in in_vain:
            reader.abort()
        for event in self._ready:
            event.set()

    def _steps(self, name: BlockName, scratch: bytearray) -> Iterator[None]:
        """The life of one block, a step at a time, so that a thread can take turns between its blocks."""
        key, wanted = block_key(self._model.tag, name.address), self._wanted[name.index]
        passing = self._worth_passing_over(name, wanted)
        reader = self._source.open(key, ranged=self._ranged or passing)
        with self._lock:
            self._readers[name.index] = reader
        try:
            yield
            header = self._read_header(name, reader, _HEADER_BYTES_PER_LAYER * len(wanted) if passing else _EVERYTHING)
            keys = ObjectKeys(name.content_key, header.salt)
            keys.check_commitment(header.commitment, f"block {name.address}")
            yield
            for layer, segment in enumerate(header.segments):
                if wanted[layer]:
                    asked = time.perf_counter()
                    stored = reader.read_exact(segment.length, _run_bytes(header, wanted, layer) if passing else _EVERYTHING)
                    self._blocked += time.perf_counter() - asked
                    received = len(stored)
                else:
                    received = reader.skip(segment.length)
                if layer == len(wanted) - 1 and not reader.at_end():
                    raise CorruptError(f"block {name.address}: trailing bytes behind the last segment")
                if wanted[layer]:
                    self._decode(name, header, keys, layer, stored, scratch)
                self._deliver(name, layer, received)
                yield
        finally:
            reader.close()

    def _worth_passing_over(self, name: BlockName, wanted: Sequence[bool]) -> bool:
        """Whether what is not wanted of a block is so much at a stretch that ranges are better than one stream."""
        stretch = 0
        for spec, wants in zip(self._model.layout.layers, wanted, strict=True):
            stretch = 0 if wants else stretch + spec.bytes_per_token * name.tokens
            if stretch >= SKIPPED_BYTES:
                return True
        return False

    def _read_header(self, name: BlockName, reader: ObjectReader, ahead: int) -> BlockHeader:
        what = f"block {name.address}"
        preamble = bytes(reader.read_exact(PREAMBLE_BYTES, ahead))
        envelope = preamble + bytes(reader.read_exact(envelope_size(preamble, BLOCK_MAGIC, what) - PREAMBLE_BYTES))
        header = open_header(envelope, what)
        self._trust.require(header.publisher, what)
        header.require(self._model, name, what)
        if header.certificate is not None and not header.certificate.meets(self._max_kl):
            raise QualityError(f"{what}: {header.certificate}; you accept a mean KL of {self._max_kl:g} at most")
        with self._lock:
            self.bytes_fetched += header.envelope_bytes
            self.headers[name.index] = header
            self.envelopes[name.index] = envelope
        return header

    def _decode(
        self, name: BlockName, header: BlockHeader, keys: ObjectKeys, layer: int, stored: memoryview, scratch: bytearray
    ) -> None:
        places = self.layers[layer].rows(name.start, name.end)
        on_cpu = [place if place.device.type == "cpu" else torch.empty_like(place, device="cpu") for place in places]
        open_segment(header, keys, layer, stored, scratch, [tensor_bytes(tensor) for tensor in on_cpu])
        for place, tensor in zip(places, on_cpu, strict=True):
            if place is not tensor:
                place.copy_(tensor)

    def _deliver(self, name: BlockName, layer: int, count: int) -> None:
        with self._lock:
            self.bytes_fetched += count
            self._delivered[name.index] += 1
            if self._wanted[name.index][layer]:
                self._pending[layer] -= 1
            complete = self._pending[layer] == 0
        if complete:
            self._ready[layer].set()


def _run_bytes(header: BlockHeader, wanted: Sequence[bool], layer: int) -> int:
    """Bytes from `layer` on up to the next that is not wanted."""
    total = 0
    for segment in header.segments[layer:]:
        if not wanted[segment.layer]:
            break
        total += segment.length
    return total
