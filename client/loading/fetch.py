"""Fetching: the blocks of a prefix into the layers of a cache, while the model may already be running on the first of them.

Worker threads take turns at the blocks, a step at a time. Usually whole blocks come first, from the left, which are of use
even if the source dies; then layer 0 of the last quarter, layer 1, and so on, so that the model, which reaches layer i after
layer i - 1, waits as little as can be. Beside a computation that comes from the left (`client.planning.race`), whole
blocks come instead, from the right. A layer is ready when all blocks have delivered it; a failure wakes every waiter with the
error.

Of a layer with a window only the blocks that reach into the window at the end of the prefix are read: what lies before
is passed over, and a block of which nothing is read is not asked for.
"""

from __future__ import annotations

import heapq
import math
import os
import threading
import time
from collections.abc import Callable, Sequence

from kvcdn.block import BlockHeader
from kvcdn.client.loading.arrivals import Arrivals
from kvcdn.client.loading.coarse import CoarseRows
from kvcdn.client.loading.delivery import Delivery, Held, Order, layers_to_read
from kvcdn.client.loading.room import make_room
from kvcdn.client.sources.source import Source
from kvcdn.errors import KvcdnError, QualityError, UnavailableError, UntrustedError
from kvcdn.keys import BlockName, ModelIdentity
from kvcdn.model.bases import Bases
from kvcdn.model.cache import device_in
from kvcdn.model.place import Devices, on_cpu
from kvcdn.model.staging import Staging
from kvcdn.signing import TrustList

STREAMED_BLOCKS = 16
"""Up to this many blocks each have a connection of their own; longer prefixes are read in ranges."""

MAX_THREADS = 8
"""Verifying, decrypting and decoding run at some 300 MB/s of KV a thread; eight saturate most links."""

WIDTH_BESIDE_COMPUTING = 2
"""Blocks under way at once where the model computes on the same cores: one is decoded while bytes of the other arrive."""

SLOW_BLOCK_SECONDS = 0.2
"""But each alone where it takes longer: what has come of two when a pass reaches them came in vain of both."""

LAYERED_SHARE = 0.25
LEAST_LAYERED = 2
"""Of the blocks, that come layer by layer at the end: so many, and this share. A question's pass takes less than that."""

TICK_SECONDS = 0.02
"""How often a waiter looks whether waiting is still the best it can do."""

SALVAGE_SILENCE_SECONDS = 2.0
"""After a failure, blocks that are still on their way are waited for as long as some of them deliver in such a time."""

FAILING_SECONDS = 0.05
"""Requests that have failed for so long, without a byte since, mean a source that is down, not one connection that broke."""

_OF_ALL = (UnavailableError, UntrustedError, QualityError)
"""Errors that the other blocks of the prefix would end in, too."""

TURN_SECONDS = 0.005
"""A thread stays with a whole block for so long: taking turns after each layer costs as much as a tenth of decoding it."""

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
        devices: Devices,
        trust: TrustList,
        held: Held | None = None,
        whole: bool = False,
        max_kl: float | None = None,
        beside: bool = False,
        alone: bool = False,
        mendable: bool = False,
        watch: Callable[[], None] | None = None,
        coarse: CoarseRows | None = None,
    ) -> None:
        """`length` tokens are shown to the model, at most as many as the blocks hold; `capacity` are allocated, on `devices`.

        Blocks that are `held` on this host are not asked for. A block whose certificate is worse than `max_kl` fails with
        QualityError. `whole` reads every row of every layer, also those that no window reaches. `beside` is for a computation
        at the same time: whole blocks from the right, perhaps each `alone`, and room for every row. `mendable` blocks can be
        computed where they fail, so that others go on. Who waits calls `watch` at each tick; it may raise. `coarse` is refined.
        """
        self._source = source.session()
        self._watch = watch
        self._mendable = mendable
        self.beside = beside
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._layer_there, self._awaited = threading.Condition(self._lock), -1  # who waits for a layer is woken by no less
        self._settled = threading.Event()
        self._error: KvcdnError | None = None
        self._closed = False
        self._specs = specs = model.layout.layers
        needed = [0 if whole else spec.first_needed(length) for spec in specs]
        wanted = [layers_to_read(model.layout, name, needed, states=whole or name is blocks[-1]) for name in blocks]
        self._read_from = starts = [
            min((n.start for n in blocks if wanted[n.index][index]), default=0) for index in range(len(specs))
        ]
        first = [0] * len(specs) if beside else starts
        self.layers, self.uploads = make_room(specs, devices, first, self.wait_layer, length=length, capacity=capacity)
        last, bases = blocks[-1].index if blocks else -1, Bases(self._source.read, model)
        self._order = order = Order(self._source, model, trust, bases, max_kl, last, whole, coarse, self.uploads)
        self.deliveries = [Delivery(order, name, wanted[name.index], self.layers) for name in blocks]
        if held is not None:
            for one in self.deliveries:
                held.fill(one)
        self.started, self.seconds = time.perf_counter(), 0.0
        read = [one for one in self.deliveries if not one.complete]
        count = max(1, min(len(read), (os.cpu_count() or 1) + 1, MAX_THREADS))  # one more: some always wait for bytes
        self._ranged = len(read) > STREAMED_BLOCKS
        self._widths = (min(count, WIDTH_BESIDE_COMPUTING), 1) if on_cpu(devices) else (count, count)
        self.width = self._widths[1] if alone else count
        self._arrivals = Arrivals()
        self._busy: set[int] = set()
        self._idle: list[tuple[tuple[int, int], Delivery]] = []
        for one in read:
            self._queue(one)
        self._threads = [
            threading.Thread(target=self._work, name=f"kvcdn-fetch-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    # -- what is there -----------------------------------------------------------------------------------------------------

    @property
    def error(self) -> KvcdnError | None:
        """What went wrong first, if anything did."""
        return self._error

    @property
    def headers(self) -> dict[int, BlockHeader]:
        """Of the blocks of which bytes came, or are to come, into the layers, by index."""
        return {one.name.index: one.header for one in self.deliveries if one.header is not None and not one.computed}

    @property
    def bytes_fetched(self) -> int:
        return sum(one.received for one in self.deliveries)

    @property
    def complete(self) -> bool:
        return all(one.complete for one in self.deliveries)

    @property
    def settled(self) -> bool:
        """Whether waiting alone will not bring more: all is there, or a block is lost and nobody has computed it."""
        return self.complete or (self._error is not None and any(one.lost and not one.complete for one in self.deliveries))

    @property
    def decoding_seconds(self) -> float:
        """Seconds that the threads have verified, decrypted and decoded, added up."""
        return sum(one.decoding for one in self.deliveries)

    @property
    def threads(self) -> int:
        return len(self._threads)

    def rate(self, now: float, grace_s: float) -> float | None:
        """Bytes per second of late; a silence of more than `grace_s` lowers it as it lasts, and 0 where requests fail.

        None while too little has come.
        """
        if self._source.failing_s() > FAILING_SECONDS:
            return 0.0
        with self._changed:
            # While nothing is asked for, silence says nothing.
            return self._arrivals.rate(now if self._busy else -math.inf, grace_s)

    def usable(self) -> int:
        """How many blocks from the front can be gone on from, by the model or by computing the next.

        A shorter prefix has its windows elsewhere; where they begin before what was read, it is none. States are those of the
        last block.
        """
        count = next((one.name.index for one in self.deliveries if not one.complete), len(self.deliveries))
        if count < len(self.deliveries) and any(spec.states for spec in self._specs):
            return 0
        while count and not self._reaches(count):
            count -= 1
        return count

    def _reaches(self, count: int) -> bool:
        """Whether all rows that the windows behind the first `count` blocks reach are there."""
        leading, tokens = self.deliveries[:count], self.deliveries[count - 1].name.end
        for layer, (spec, read_from) in enumerate(zip(self._specs, self._read_from, strict=True)):
            needed = spec.first_needed(tokens)
            if needed < read_from and not all(one.computed or one.wanted[layer] for one in leading if one.name.end > needed):
                return False
        return True

    # -- waiting -----------------------------------------------------------------------------------------------------------

    def wait_layer(self, layer: int) -> None:
        """Returns when `layer` is complete. Raises the error that ended the fetch, or what `watch` raises."""
        while self._error is None and not self._holds(layer):
            with self._lock:
                self._awaited = layer
                if not self._closed and self._error is None and not self._holds(layer):
                    self._layer_there.wait(TICK_SECONDS)
            if self._watch is not None and self._error is None and not self._holds(layer):
                self._watch()
        if self._error is not None:
            raise self._error
        self.uploads.join_layer(layer, device_in(self.layers[layer]))

    def _holds(self, layer: int) -> bool:
        return all(one.holds(layer) for one in self.deliveries)

    def _tell(self) -> None:
        """Wakes whom it concerns that something has changed; the lock is held."""
        self._changed.notify_all()
        if self._closed or self._error is not None or (self._awaited >= 0 and self._holds(self._awaited)):
            self._layer_there.notify_all()

    def wait_until_settled(self, seconds: float) -> None:
        """Returns when it is, or after so long: nothing in between wakes the caller."""
        self._settled.wait(seconds)

    def overlap_pays(self) -> bool:
        """Whether the model had better start: the threads are mostly waiting for the link.

        While they are busy decoding, they and the model would only take the cores from each other: on two cores a model
        that starts at once has its first token 10 to 15 % later.
        """
        elapsed = time.perf_counter() - self.started
        begun, waited = all(one.holds(0) for one in self.deliveries), sum(one.waited for one in self.deliveries)
        return begun and waited > _LINK_BOUND_SHARE * elapsed * len(self._threads)

    def wait(self) -> None:
        """Returns when every layer is complete. Raises the error that ended the fetch."""
        for layer in range(len(self.layers)):
            self.wait_layer(layer)
        self._join()

    def salvage(self) -> int:
        """After a failure: how many blocks from the front can be used nevertheless. Waits for those still on their way.

        Not for ever: where nothing comes for SALVAGE_SILENCE_SECONDS, what is there is all there will be.
        """
        while any(thread.is_alive() for thread in self._threads):
            before, ends = self.bytes_fetched, time.monotonic() + SALVAGE_SILENCE_SECONDS
            for thread in self._threads:
                thread.join(max(ends - time.monotonic(), 0.0))
            if self.bytes_fetched == before:
                self._source.abort()
                self._join()
        return self.usable()

    def close(self) -> None:
        """Stops what is still on its way. The layers must not be waited for afterwards."""
        with self._lock:
            self._closed = True
            self._tell()
        for one in self.deliveries:
            one.stop()
        self._source.abort()
        self._join()
        self._watch = None  # who watches holds this fetch: in a circle, memory would wait for the garbage collector
        self._order.memory.clear()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        self.uploads.join()

    # -- beside a computation ----------------------------------------------------------------------------------------------

    def turn_right(self, *, alone: bool = False) -> None:
        """From now on whole blocks come from the right, few at a time or one `alone`: somebody computes from the left."""
        with self._changed:
            self.width = self._widths[alone]
            if not self.beside:
                self.beside = True
                waiting, self._idle = [one for _, one in self._idle], []
                for one in waiting:
                    self._queue(one)
            self._changed.notify_all()

    def widen(self) -> None:
        """From now on nobody computes: all threads may work."""
        with self._changed:
            self.width = len(self._threads)
            self._changed.notify_all()

    def computing(self, first: int, count: int) -> None:
        """`count` blocks from `first` on are being computed: what arrives of them does so aside."""
        for one in self.deliveries[first : first + count]:
            one.put_aside()
        self.uploads.join()

    def not_computed(self, first: int, count: int) -> None:
        """They are not: what has arrived of them takes its place."""
        self.uploads.follow()
        for one in self.deliveries[first : first + count]:
            one.bring_back()

    def is_enough(self, first: int, count: int) -> bool:
        """Whether `count` blocks from `first` on have arrived, be it aside, so that nobody need compute them."""
        ours = self.deliveries[first : first + count]
        if not all(one.arrived for one in ours):
            return False
        return self._reaches(first + count) or all(one.complete for one in self.deliveries if one not in ours)

    def outrun(self, first: int, count: int) -> None:
        """They were computed meanwhile; what is behind a block that was lost is worth waiting for again."""
        for one in self.deliveries[first : first + count]:
            one.outrun()
        with self._changed:
            if not self.settled:
                self._settled.clear()

    # -- threads -----------------------------------------------------------------------------------------------------------

    def _queue(self, one: Delivery) -> None:
        index = one.name.index
        whole = (-index if self.beside else index - len(self.deliveries), 0)
        heapq.heappush(self._idle, ((one.steps, index) if self._in_layers(one) else whole, one))

    def _in_layers(self, one: Delivery) -> bool:
        """Whether a block comes layer by layer: those at the end, unless somebody computes beside."""
        layered = max(LEAST_LAYERED, math.ceil(LAYERED_SHARE * len(self.deliveries)))
        return not self.beside and one.name.index >= len(self.deliveries) - layered

    def _take(self) -> Delivery | None:
        """The next block to take a step with; None when nothing is left."""
        with self._changed:
            while not self._closed:
                while self._idle and self._idle[0][1].stopped:
                    heapq.heappop(self._idle)[1].close()
                # Behind one that is alone and nearly there the next is asked for: the link is not to be idle.
                more = self.width == 1 and all(self.deliveries[index].nearly_there for index in self._busy)
                if self._idle and len(self._busy) < self.width + more:
                    one = heapq.heappop(self._idle)[1]
                    self._busy.add(one.name.index)
                    return one
                if not self._idle and not self._busy:
                    return None
                self._changed.wait()
            return None

    def _work(self) -> None:
        staging = Staging()
        while (one := self._take()) is not None:
            try:
                one.step(staging, ranged=self._ranged, turn_s=0.0 if self._in_layers(one) else TURN_SECONDS)
            except KvcdnError as error:
                self._fail(one, error)
            except Exception as error:  # noqa: BLE001 - whatever it is, the model must not wait for this thread for ever
                self._fail(one, UnavailableError(f"block {one.name.address} could not be loaded: {error!r}"))
            with self._changed:
                self._busy.discard(one.name.index)
                # Connections, requests and headers say little of how fast bytes come.
                self._arrivals.note(self.bytes_fetched if one.segments_read else 0)
                if one.arrived:
                    self.seconds = time.perf_counter() - self.started
                    if self.complete:
                        self._order.memory.clear()
                        self._settled.set()
                elif not one.stopped:
                    self._queue(one)
                self._tell()
            if one.stopped:
                one.close()
        if self._closed:
            for _, one in self._idle:
                one.close()

    def _fail(self, failed: Delivery, error: KvcdnError) -> None:
        if failed.stopped:
            return
        if not self._mendable:
            ended = self.deliveries[failed.name.index :]  # nobody has a use for what is behind a gap
        else:
            ended = self.deliveries if isinstance(error, _OF_ALL) else [failed]
        for one in ended:
            one.stop()
        with self._changed:
            self._error = self._error or error
            self._settled.set()
            self._tell()
