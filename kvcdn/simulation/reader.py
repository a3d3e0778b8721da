"""A reader: one prompt from its arrival to its first token, as the client goes about it.

What the devices' memory holds is free. Of what follows, the published part is fetched, computed, or both: computed from the
left while it arrives from the right, until they meet (`client/planning/race.py`). A fetch that takes longer than it should is
planned anew. The rest of the prompt is one pass. A device is taken when there is something to compute, and kept until the
first token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from kvcdn.simulation.link import Transfer
from kvcdn.simulation.node import Node, Supply
from kvcdn.simulation.site import Offer, Site
from kvcdn.simulation.workload import Request

FETCH, COMPUTE, BOTH, NONE = "fetch", "compute", "both", "none"

LATE = 1.02
"""A fetch is late, and planned anew, when it has taken so many times what was expected."""

LEAST_WAIT = 0.05
"""Between two plans of one fetch at least this part of the prefill, so that there are few."""


class Reader:
    """One prompt. `begin` is called at its arrival."""

    def __init__(self, site: Site, request: Request) -> None:
        self._site, self._request = site, request
        self._memory = self._first(site.memory.missing(request.chain))
        self._lead = self._memory if site.node is None else site.catalogue.lead(request.chain, self._memory)
        """Blocks from `_memory` to here can be fetched."""
        self._computing = self._memory
        """Blocks before this are in memory or computed."""
        self._fetched_from = self._lead
        """Blocks from here to `_lead` are fetched, or on their way."""
        self._mode = NONE
        self._supply: Supply | None = None
        self._transfer: Transfer | None = None
        self._fetch_left = 0
        self._fetching_since = 0.0
        self._match_s = 0.0
        self._expected_s = 0.0
        """What the device was taken for."""
        self._turn = 0
        """Events of an earlier turn are void."""
        self._over = False
        self._asked_device = self._has_device = False

    def begin(self) -> None:
        """The question is asked."""
        site = self._site
        node = site.node
        if node is not None:
            site.catalogue.computed(self._request, self._lead)
        if node is None or self._lead == self._memory:
            self._compute_all()
            return
        blocks = self._request.chain[self._memory : self._lead]
        missing = node.look(blocks)
        self._match_s = node.match_s(blocks)
        planned = site.planner(self._offer(node, blocks, missing), site.readers.mode)
        self._mode = planned.mode
        if planned.mode == COMPUTE:
            self._compute_all()
            return
        self._fetched_from = self._memory + (planned.computed if planned.mode == BOTH else 0)
        if self._fetched_from == self._lead:
            self._mode = COMPUTE
            self._compute_all()
            return
        lacking = set(missing)
        asked = blocks[self._fetched_from - self._memory :]
        self._fetch(node, asked, [block for block in asked if block in lacking])
        if planned.mode == BOTH:
            self._take(sum(self._block_s(place) for place in range(self._memory, self._fetched_from)), self._compute_blocks)
        elif site.readers.mode == "auto" and math.isfinite(planned.seconds):
            site.loop.after(planned.seconds * LATE, self._look_again)

    # -- planning -----------------------------------------------------------------------------------------------------------

    def _offer(self, node: Node, blocks: Sequence[int], missing: Sequence[int]) -> Offer:
        site = self._site
        size = math.fsum(map(self._size, blocks))
        lacking = math.fsum(map(self._size, missing))
        out_s = size / node.out.expected_rate if node.out.expected_rate else math.inf
        fill_s = node.expected_fill_s(lacking)
        expected_s = max(out_s, fill_s, self._turns_s(self._memory))
        wait = site.pool.expected_wait_s
        block_s = [self._block_s(place) for place in range(self._memory, self._lead)]
        block_s[0] += wait
        return Offer(
            block_s=block_s,
            prompt_s=wait + site.scale.pass_s(self._start(self._memory), self._end(self._lead)),
            sizes=[self._size(block) for block in blocks],
            link=size / expected_s if expected_s else math.inf,
            decode=self._opening,
            latency_s=self._latency_s,
        )

    def _look_again(self) -> None:
        """The fetch should be here by now."""
        if self._over or not self._fetch_left or self._asked_device:
            return
        site = self._site
        elapsed = site.loop.now - self._fetching_since
        left = sum(map(self._size, self._request.chain[self._fetched_from : self._lead])) - self._arrived
        rate = self._arrived / max(elapsed - self._latency_s, 1e-9)
        sizes = []
        for block in self._request.chain[self._fetched_from : self._lead]:
            sizes.append(min(self._size(block), max(left, 0.0)))
            left -= sizes[-1]
        block_s = [self._block_s(place) for place in range(self._fetched_from, self._lead)]
        block_s[0] += site.pool.expected_wait_s
        prompt_s = site.scale.pass_s(self._start(self._memory), self._end(self._lead))
        offer = Offer(block_s, site.pool.expected_wait_s + prompt_s, sizes, rate, self._opening, 0.0, elapsed)
        planned = site.planner(offer, "auto")
        if planned.mode == FETCH and math.isfinite(planned.seconds):
            site.loop.after(max(planned.seconds * LATE, LEAST_WAIT * prompt_s), self._look_again)
            return
        site.tally.turned += 1
        self._take(prompt_s, self._compute_blocks)

    # -- fetching -----------------------------------------------------------------------------------------------------------

    @property
    def _latency_s(self) -> float:
        return self._site.readers.round_trips * self._site.edge.rtt_ms / 1000 + self._match_s

    @property
    def _opening(self) -> float:
        """Stored bytes a second that the reader opens."""
        return self._site.readers.open_mb_per_s * 1e6 * self._site.scale.ratio

    @property
    def _arrived(self) -> float:
        """Bytes that are here and open."""
        if self._supply is None or self._transfer is None or self._site.node is None:
            return 0.0
        opened = (self._site.loop.now - self._fetching_since - self._latency_s) * self._opening
        return min(self._supply.arrived, self._site.node.out.arrived(self._transfer), opened)

    def _turns_s(self, first: int) -> float:
        """What a connection waits for its requests, one after the other, to fetch from block `first` on."""
        edge = self._site.edge
        tokens = self._end(self._lead) - self._start(first)
        return self._site.scale.turns(tokens) * (edge.rtt_ms + edge.request_ms) / 1000

    def _fetch(self, node: Node, blocks: Sequence[int], missing: Sequence[int]) -> None:
        site = self._site
        self._fetching_since = site.loop.now
        size = math.fsum(map(self._size, blocks))
        self._fetch_left = 3
        self._supply = node.supply(blocks, missing, self._size, self._part_fetched, delay_s=self._latency_s)

        def begin() -> None:
            if self._over or not self._fetch_left:
                return
            self._transfer = node.out.start(size, self._part_fetched)

        site.loop.after(self._latency_s, begin)
        # A reader opens no faster, however fast the bytes come, and asks no faster.
        site.loop.after(self._latency_s + max(size / self._opening, self._turns_s(self._fetched_from)), self._part_fetched)

    def _part_fetched(self) -> None:
        """One of three: the edge has all, the link has brought all, and all is opened."""
        if self._over or not self._fetch_left:
            return
        self._fetch_left -= 1
        if self._fetch_left:
            return
        if not self._asked_device:
            self._take(0.0, self._rest)
        elif self._has_device and self._computing >= self._fetched_from:
            self._met(self._computing)

    def _stop_fetch(self) -> None:
        self._fetch_left = 0
        if self._transfer is not None and self._site.node is not None:
            self._site.node.out.stop(self._transfer)

    # -- computing ----------------------------------------------------------------------------------------------------------

    def _take(self, seconds: float, then: Callable[[], None]) -> None:
        """A device, for so long and for the rest of the prompt."""
        self._asked_device = True
        self._expected_s = max(seconds, 0.0) + self._rest_s(self._lead)

        def begin() -> None:
            self._has_device = True
            then()

        self._site.pool.take(self._expected_s, begin)

    def _compute_all(self) -> None:
        """One pass over all that is not in memory."""
        self._lead = self._fetched_from = self._computing = self._memory
        self._take(0.0, self._rest)

    def _compute_blocks(self) -> None:
        """Block by block, until what is computed meets what has arrived."""
        if self._computing == self._lead or (self._computing >= self._fetched_from and self._enough()):
            self._met(self._computing)
            return
        self._turn += 1
        self._site.loop.after(self._block_s(self._computing), partial(self._block_computed, self._turn))

    def _block_computed(self, turn: int) -> None:
        if turn != self._turn or self._over:
            return
        self._computing += 1
        self._compute_blocks()

    def _enough(self) -> bool:
        """Whether all blocks from the one to be computed next on have arrived, the last ones first."""
        needed = math.fsum(map(self._size, self._request.chain[self._computing : self._lead]))
        return not self._fetch_left or self._arrived >= needed

    def _met(self, place: int) -> None:
        self._turn += 1
        self._stop_fetch()
        self._fetched_from = place
        self._rest()

    def _rest(self) -> None:
        """The pass over what was not published, and the question."""
        seconds = self._rest_s(self._lead)
        self._site.loop.after(seconds, self._first_token)

    def _rest_s(self, lead: int) -> float:
        return self._site.scale.pass_s(self._last_start(lead), self._request.tokens)

    def _last_start(self, lead: int) -> int:
        """Where the last pass begins: at least one token is left to the model."""
        return min(self._end(lead), self._request.tokens - 1)

    def _first_token(self) -> None:
        site, request, tally = self._site, self._request, self._site.tally
        self._over = True
        site.pool.give(self._expected_s)
        site.memory.use(request.chain)
        memory = self._end(self._memory)
        fetched = self._end(self._lead) - self._end(self._fetched_from)
        tally.first_token_s.append(site.loop.now - request.time)
        tally.tokens += request.tokens
        tally.tokens_memory += memory
        tally.tokens_fetched += fetched
        tally.tokens_computed += request.tokens - memory - fetched
        tally.modes[self._mode] = tally.modes.get(self._mode, 0) + 1
        site.finished()

    # -- places -------------------------------------------------------------------------------------------------------------

    def _first(self, missing: Sequence[int]) -> int:
        """How many blocks of the chain are in memory, none left out."""
        if not missing:
            return len(self._request.chain)
        return self._request.chain.index(missing[0])

    def _start(self, place: int) -> int:
        return min(place * self._site.scale.block_tokens, self._request.covered)

    _end = _start

    def _block_s(self, place: int) -> float:
        return self._site.scale.pass_s(self._start(place), self._start(place + 1))

    def _size(self, block: int) -> float:
        """Stored bytes of a block of this chain: the last may be short."""
        if block != self._request.chain[-1]:
            return self._site.scale.block_bytes
        place = len(self._request.chain) - 1
        return (self._request.covered - place * self._site.scale.block_tokens) * self._site.scale.token_bytes
