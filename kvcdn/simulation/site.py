"""A site: an edge, the devices of the readers behind it, and the KV that those keep by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvcdn.simulation.catalogue import Catalogue
from kvcdn.simulation.loop import Loop
from kvcdn.simulation.node import Cache, Node
from kvcdn.simulation.pool import Pool
from kvcdn.simulation.scale import Scale
from kvcdn.simulation.topology import Edge, Readers


@dataclass(frozen=True)
class Planned:
    """A way to have a prefix: `computed` blocks from its beginning on, the others fetched. `seconds` is what it should take."""

    mode: str
    computed: int
    seconds: float


@dataclass(frozen=True)
class Offer:
    """What is known when a way is chosen: the blocks that could be fetched, in order.

    `block_s` are the seconds of each block's own pass, `prompt_s` those of one pass over all; `sizes` their stored bytes still
    to come, `link` and `decode` bytes a second. `fetching_s` is set where a fetch has been running for so long.
    """

    block_s: Sequence[float]
    prompt_s: float
    sizes: Sequence[float]
    link: float
    decode: float
    latency_s: float
    fetching_s: float | None = None


class Planner(Protocol):
    """The client's plan."""

    def __call__(self, offer: Offer, mode: str) -> Planned:
        """The way to take; `mode` other than auto settles it."""


@dataclass
class Tally:
    """What became of the prompts so far. Tokens, bytes, seconds."""

    first_token_s: list[float] = field(default_factory=list)
    tokens: int = 0
    tokens_memory: int = 0
    """In the memory of the readers' devices already."""
    tokens_fetched: int = 0
    tokens_computed: int = 0
    modes: dict[str, int] = field(default_factory=dict)
    """Prompts by the way that was chosen; `none` where nothing was published."""
    turned: int = 0
    """Fetches that were slower than expected, so that computing began beside them."""


@dataclass
class Site:
    """One edge's place. Without kvcdn `node` is None, and devices and their memory are all there is."""

    loop: Loop
    scale: Scale
    edge: Edge
    readers: Readers
    pool: Pool
    memory: Cache
    node: Node | None
    catalogue: Catalogue
    planner: Planner
    tally: Tally
    finished: Callable[[], None]
