"""A race: one prefix fetched, computed, or both at once until they meet, as `client.planning.plan` decides and decides again.

The thread that calls `run` is the model's: it computes blocks from the left, or waits. Threads of `client.loading.fetch` bring
blocks from the right. Both write into the same layers, but never the same rows at once: a block that is computed while it
is arriving arrives aside, and whoever is first has its rows. A pass of the model can be cut at every layer, so that what
was begun in vain costs a layer's time and not a block's.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from kvcdn.client.loading.delivery import Delivery
from kvcdn.client.loading.fetch import SLOW_BLOCK_SECONDS, TICK_SECONDS, PrefixFetch
from kvcdn.client.loading.local import LocalPrefix
from kvcdn.client.planning.history import History, Switch
from kvcdn.client.planning.pace import Pace
from kvcdn.client.planning.plan import PROBE_SHARE, Aim, Decision, Expected, Mode, Progress, Work, decide
from kvcdn.client.planning.supply import Supply
from kvcdn.client.planning.wire_costs import WireCosts
from kvcdn.errors import KvcdnError
from kvcdn.keys import BlockName, ModelIdentity
from kvcdn.model.cache import GROWTH_TOKENS, CacheLayer
from kvcdn.model.load import LoadedModel
from kvcdn.model.place import layer_devices
from kvcdn.model.prefill import PrefillStoppedError, ScheduledPrefill

_IN_FLIGHT = 2
"""Segments a thread may be waiting for when the link is judged by what has not come."""

_DEAD_LINK_TOKENS = 1024
"""About as many are computed in one pass behind a prefix while nothing comes, and no small rest is left. Of SmolLM2-135M's
3,774 tokens, those from 1,024 on take 8 % less time so than in blocks of 512, and 18 % less than in one pass, in which each
token is compared with all."""


class ReplannedError(KvcdnError):
    """The model waits for a layer that had better not be waited for."""


class StoppedError(Exception):
    """Nobody wants the answer any more. Not a KvcdnError: nothing went wrong, and nothing is to be tried instead."""


class Race:
    """Brings the first `length` tokens of a prompt into layers of a cache. `run`, then use what is there, then `close`.

    `identity` is the model's in the precision that was found. `asked` is when the question was asked, by time.perf_counter().
    Set `stopped` to what tells that nobody waits any more: `run`, and layers that are waited for, then raise StoppedError.
    """

    def __init__(  # noqa: PLR0913 - by name
        self,
        loaded: LoadedModel,
        identity: ModelIdentity,
        supply: Supply,
        token_ids: Sequence[int],
        blocks: Sequence[BlockName],
        *,
        length: int,
        aim: Aim,
        asked: float,
        held: LocalPrefix | None = None,
    ) -> None:
        """`held` is what this host has already of the prefix."""
        self.history = History()
        self.fetch: PrefixFetch | None = None
        self._loaded = loaded
        self._identity = identity
        self._supply = supply
        self._token_ids = token_ids
        self._blocks = blocks
        self._length = length
        # States are those of the last block: nothing can be computed beside a fetch of them, nor behind a part of it.
        self._either = identity.layout.state_bytes > 0
        self._aim = replace(aim, mode=Mode.FETCH) if self._either and aim.mode is Mode.BOTH else aim
        self._held = held
        self._asked = asked
        self._began = time.perf_counter()
        self._costs = WireCosts(identity)
        self._link = supply.source.link()
        self._pace = Pace(loaded, blocks)
        self._mode: Mode | None = None
        self._prefill: ScheduledPrefill | None = None
        self._decided = -math.inf
        self._ended: float | None = None
        self._dropped = False
        self._closed = False
        self.stopped: Callable[[], bool] = lambda: False
        self._start()

    # -- the plan ----------------------------------------------------------------------------------------------------------

    def _decide(self) -> Decision:
        """Decides anew from what is known by now, and notes it where it is something else than before."""
        now = time.perf_counter()
        progress = Progress(now - self._asked, self._mode, now - self._began, self._pace.at_stake(now))
        decision = decide(self._work(now), self._aim, progress)
        if self.history.decision is None:
            self.history.decision = decision
        elif decision.mode is not self._mode and not (self.fetch is not None and self.fetch.complete):
            self.history.switches.append(Switch(now - self._asked, decision.mode, decision.why))
        self._mode, self._decided = decision.mode, now
        return decision

    def _work(self, now: float) -> Work:
        fetch = self.fetch
        first = fetch.usable() if fetch is not None else 0 if self._held is None else len(self._held.blocks)
        names = self._blocks[first:]
        block_s = self._pace.block_seconds(now, names)
        speeds, tokens = self._pace.speeds(now), len(self._token_ids)
        prompt_s = speeds.remaining(names[0].start, self._length, tokens) if names else 0.0
        if fetch is None:
            wire: list[float] = self._costs.expected_bytes(self._blocks, self._length)[first:]
        else:
            ratio = self._costs.ratio
            wire = [math.inf if one.lost else one.bytes_left(ratio) for one in fetch.deliveries[first:]]
        # The threads of a pass wait for each other: a core that is taken from one of them is taken from all.
        shared = float(min(torch.get_num_threads(), os.cpu_count() or 1)) if self._pace.on_cpu else 0.0
        rate = self._rate(now, PROBE_SHARE * (prompt_s or 0.0))
        decode, latency = self._costs.decoding_rate(fetch), self._link.latency_s or 0.0
        question_s = speeds.rest(self._length, tokens) or 0.0
        return Work(block_s, prompt_s, wire, rate, decode, latency, shared, question_s, self._either)

    def _rate(self, now: float, grace_s: float) -> float | None:
        """Bytes per second of the link: of late, or as remembered as long as what has not come does not speak against it."""
        fetch = self.fetch
        measured = None if fetch is None else fetch.rate(now, grace_s)
        if measured is not None or fetch is None:
            return measured if measured is not None else self._link.bytes_per_s
        spent = now - fetch.started - (self._link.latency_s or 0.0)
        if self._link.bytes_per_s is None:
            return None
        due = fetch.bytes_fetched + _IN_FLIGHT * fetch.width * self._costs.segment_bytes
        return min(self._link.bytes_per_s, due / spent) if spent > 0 else self._link.bytes_per_s

    # -- the way -----------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        decision = self._decide()
        if decision.mode is not Mode.COMPUTE:
            # What may end up as both is fetched in the order and with the room of both.
            unknown = self._aim.mode is None and decision.expected.fetch is None and not self._either
            self._begin_fetch(beside=decision.mode is Mode.BOTH or unknown)

    def _begin_fetch(self, *, beside: bool) -> None:
        self.fetch = PrefixFetch(
            self._supply.source,
            self._identity,
            self._blocks,
            length=self._length,
            capacity=len(self._token_ids) + GROWTH_TOKENS,
            devices=layer_devices(self._loaded.model, self._identity.layout),
            trust=self._supply.gate.trust,
            max_kl=self._supply.max_kl,
            held=self._held,
            beside=beside,
            alone=self._mode is Mode.BOTH and self._alone(),
            mendable=self._aim.mode is not Mode.FETCH and not self._either,
            watch=self._watch,
        )

    def run(self, *, stream: bool) -> bool:
        """Returns when as much of the prefix is there as will be: True, or, with `stream`, when the model had better start."""
        decision = self._decide()
        while True:
            self._heed()
            settled = self._settled
            if settled or decision.mode is Mode.BOTH or self._is_due():
                decision = self._decide()
            fetch = self.fetch
            if fetch is None or decision.mode is Mode.COMPUTE or fetch.complete:
                break
            if decision.mode is Mode.BOTH:
                self._compute_next(self._fetch_beside(fetch), decision.expected)
                continue
            if settled:
                break
            fetch.widen()
            if stream and fetch.error is None and fetch.overlap_pays():
                return False
            fetch.wait_until_settled(TICK_SECONDS)
        self._finish()
        return True

    def _is_due(self) -> bool:
        """Whether it is time to decide anew; never where fetching was asked for."""
        return self._aim.mode is not Mode.FETCH and time.perf_counter() - self._decided >= TICK_SECONDS

    @property
    def _settled(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.fetch is None or self.fetch.settled

    def _heed(self) -> None:
        """Raises StoppedError once `stopped` says so."""
        if self.stopped():
            raise StoppedError("the answer is not wanted any more")

    def _watch(self) -> None:
        """Called while the model waits for a layer."""
        self._heed()
        if self._is_due() and self._decide().mode is not Mode.FETCH:
            raise ReplannedError("fetching alone is not the fastest way any more")

    def _fetch_beside(self, fetch: PrefixFetch) -> PrefixFetch:
        """The fetch, coming from the right with room for every row."""
        if any(layer.first for layer in fetch.layers):
            # Only what the windows at the end reach has room: what was received of it is small.
            fetch.close()
            self._begin_fetch(beside=True)
        fetch = self.fetch or fetch
        fetch.turn_right(alone=self._alone())
        return fetch

    def _alone(self) -> bool:
        """Whether blocks that come beside a computation had better come one by one."""
        rate = self._rate(time.perf_counter(), TICK_SECONDS)
        block_bytes = self._costs.segment_bytes * len(self._identity.layout.layers)
        return rate is not None and block_bytes > SLOW_BLOCK_SECONDS * rate

    def _compute_next(self, fetch: PrefixFetch, expected: Expected) -> None:
        """Computes the first blocks that are not there, unless they arrive meanwhile or something else gets better."""
        first = fetch.usable()
        if first == len(fetch.deliveries):  # the last of them has arrived since the decision
            return
        running = self._pace.begin(first, self._blocks_at_once(fetch, first, expected))
        decoded = fetch.decoding_seconds
        if self._prefill is None:
            layout = self._loaded.identity.layout
            self._prefill = ScheduledPrefill(self._loaded.model, layout, 0, layers=fetch.layers)
        start, end = running.start, running.end
        fetch.computing(first, running.count)
        try:
            taken = self._prefill.run_one(self._token_ids[start:end], start, partial(self._at_layer, fetch, decoded))
        except BaseException as error:
            fetch.not_computed(first, running.count)
            if not isinstance(error, PrefillStoppedError):
                raise
        else:
            fetch.outrun(first, running.count)
            self._pace.ran(taken)
            self.history.passes.append((start, end))
        finally:
            self._pace.running = None
            self.history.computed_s += time.perf_counter() - running.since

    def _blocks_at_once(self, fetch: PrefixFetch, first: int, expected: Expected) -> int:
        """One, but from the first token on all up to where fetching is expected to meet: libraries have a fast way for that.

        Behind a prefix, _DEAD_LINK_TOKENS or so where nothing will come that could be met. Not together with what will not come
        what may come meanwhile. While nothing is known of the link, all of them: what comes sooner ends it.
        """
        rest = fetch.deliveries[first:]
        if first and expected.fetch == math.inf:
            tokens = sum(one.name.tokens for one in rest)
            wanted = math.ceil(len(rest) / max(1, round(tokens / _DEAD_LINK_TOKENS)))
        elif first:
            wanted = 1
        elif expected.both is None:
            wanted = len(rest)
        else:
            wanted = expected.computed_blocks
        return max(1, min(wanted, _alike(rest)))

    def _at_layer(self, fetch: PrefixFetch, decoded: float, layer: int) -> None:
        """Between two layers of a pass, before which `fetch` had `decoded` so long: goes on, or raises PrefillStoppedError."""
        running = self._pace.running
        if running is None:
            return
        self._heed()
        running.layer, running.stolen_s = layer, fetch.decoding_seconds - decoded
        if fetch.is_enough(running.first, running.count):
            raise PrefillStoppedError("the blocks have arrived")
        now = time.perf_counter()
        if now - self._decided < TICK_SECONDS:
            return
        decision = self._decide()
        if decision.mode is not Mode.BOTH:
            raise PrefillStoppedError("the plan has changed")
        if decision.expected.fetch == math.inf and self._pace.sooner_at_once(now, _alike(fetch.deliveries)):
            raise PrefillStoppedError("nothing comes that could be met")
        ours = fetch.deliveries[running.first : running.first + running.count]
        missing = max((count for count, one in enumerate(ours, start=1) if not one.arrived), default=0)
        if 0 < missing < running.count and self._pace.sooner_over(now, missing):
            raise PrefillStoppedError("the last of the blocks have arrived")

    # -- the end -----------------------------------------------------------------------------------------------------------

    @property
    def blocks_usable(self) -> int:
        """How many blocks from the front are there, after `run`."""
        return 0 if self.fetch is None or self._dropped else self.fetch.usable()

    @property
    def computed(self) -> list[int]:
        """Which of the usable blocks were computed here."""
        if self.fetch is None:
            return []
        return [one.name.index for one in self.fetch.deliveries[: self.blocks_usable] if one.computed]

    @property
    def held(self) -> list[int]:
        """Which of the usable blocks were kept on this host."""
        if self.fetch is None:
            return []
        return [one.name.index for one in self.fetch.deliveries[: self.blocks_usable] if one.held]

    @property
    def planned(self) -> str:
        """Why the model was to compute what could have been fetched; empty where it was not."""
        first = self.history.decision
        whys = [first.why] if first is not None and first.mode is not Mode.FETCH else []
        whys += [switch.why for switch in self.history.switches if switch.mode is not Mode.FETCH]
        return whys[0] if whys and (self.fetch is None or self.computed or self.blocks_usable < len(self._blocks)) else ""

    @property
    def error(self) -> KvcdnError | None:
        """What went wrong with fetching, if anything did."""
        return None if self.fetch is None else self.fetch.error

    @property
    def bytes_fetched(self) -> int:
        return 0 if self.fetch is None else self.fetch.bytes_fetched

    @property
    def spent_s(self) -> float:
        """Seconds from the first decision until the prefix was there."""
        return self.history.fetching_s if self._ended is None else self._ended - self._began

    @property
    def layers(self) -> Sequence[CacheLayer]:
        return () if self.fetch is None else self.fetch.layers

    def _finish(self) -> None:
        fetch = self.fetch
        self._ended = time.perf_counter()
        self.history.ready_s = self._ended - self._asked
        if fetch is not None:
            if fetch.error is not None and self._aim.mode is Mode.FETCH:
                fetch.salvage()
            self.close()

    def drop(self) -> None:
        """What has come is not used, after `run`."""
        self._dropped = True
        self.history.computed_blocks = self.history.fetched_blocks = 0

    def close(self) -> None:
        """Stops what is on its way, and remembers what was measured. May be called twice."""
        fetch, history = self.fetch, self.history
        if fetch is None or self._closed:
            return
        self._closed = True
        fetch.close()
        history.computed_blocks = len(self.computed)
        history.fetched_blocks = self.blocks_usable - history.computed_blocks
        history.fetching_s = fetch.seconds
        self._costs.remember(fetch)
        self._pace.remember()


def _alike(blocks: Sequence[Delivery]) -> int:
    """How many of `blocks` from the first on are all lost or all not, up to one that is there."""
    return next((at for at, one in enumerate(blocks) if one.complete or one.lost != blocks[0].lost), len(blocks))
