"""What `kvcdn simulate` does not model but uses as it is: the edge's eviction, other policies, and the client's plan."""

from __future__ import annotations

from collections.abc import Sequence

from kvcdn.cli.bench.eviction import make_policy
from kvcdn.cli.bench.eviction_policies import Policy
from kvcdn.client.planning.plan import Aim, Mode, Progress, Work, decide
from kvcdn.simulation.node import Cache
from kvcdn.simulation.site import Offer, Planned
from kvcdn.simulation.world import Parts


class PolicyCache:
    """A policy of `kvcdn bench eviction` as a node's cache."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def missing(self, chain: Sequence[int]) -> list[int]:
        holds = self._policy.holds
        return [block for block in chain if not holds(block)]

    def use(self, chain: Sequence[int]) -> None:
        self._policy.request(chain)


class NoCache:
    """Room for nothing."""

    def missing(self, chain: Sequence[int]) -> list[int]:
        return list(chain)

    def use(self, chain: Sequence[int]) -> None:
        """Nothing stays."""


def make_cache(policy: str, blocks: int, place: str) -> Cache:  # noqa: ARG001 - by the protocol
    """An empty cache of so many blocks."""
    return PolicyCache(make_policy(policy, blocks, ())) if blocks else NoCache()


def plan(offer: Offer, mode: str) -> Planned:
    """What `client.planning.plan` decides on these numbers."""
    work = Work(
        block_s=offer.block_s,
        prompt_s=offer.prompt_s,
        wire_bytes=offer.sizes,
        link=offer.link,
        decode=offer.decode,
        latency_s=offer.latency_s,
    )
    progress = Progress()
    if offer.fetching_s is not None:
        progress = Progress(elapsed_s=offer.fetching_s, running=Mode.FETCH, spent_s=offer.fetching_s)
    decision = decide(work, Aim.of(mode), progress)
    seconds = decision.expected.of(decision.mode)
    return Planned(decision.mode.value, decision.expected.computed_blocks, float("inf") if seconds is None else seconds)


REAL = Parts(make_cache, plan)
