"""Traffic: what was answered, to whom and of which model, since the start and step by step. What the status page shows.

All of it is bounded, whatever names requests bring: tenants, models and their pairs up to a limit each, further ones together;
models count only where an object of theirs was found. What is counted is lost at the end of the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvcdn.edge.http.outcome import CacheOutcome
from kvcdn.edge.http.respond import Note
from kvcdn.edge.telemetry.history import History
from kvcdn.edge.telemetry.hot import Hot

MAX_TENANTS = 200
MAX_MODELS = 100
MAX_PAIRS = 1000
"""Tenants, models, and pairs of them that are counted by name: each is several time series."""

MAX_KNOWN = 4096
"""Combinations for which the sums are remembered."""

OTHER = "other"
"""The name of what exceeds a limit."""

_HITS = frozenset((CacheOutcome.HIT, CacheOutcome.COLLAPSED))
_SENT = frozenset((200, 206))
_ANSWERED = frozenset((200, 206, 304))
_LIMITED = 429

K = TypeVar("K")


@dataclass(slots=True)
class Sums:
    """Answers with an object, whole, in part, or unchanged; and what they were worth to readers."""

    requests: int = 0
    hits: int = 0
    """Of these, without a fetch of their own: from the cache, or from a fill that another request had begun."""
    collapsed: int = 0
    """Of these hits, the latter."""
    bytes: int = 0
    hit_bytes: int = 0
    """Body bytes, and those of hits."""
    tokens: float = 0.0
    """Prefill saved: the tokens of blocks, by the share of their bytes that was sent."""
    seconds: float = 0.0
    """The same in time, as far as it is known how fast readers prefill."""
    limited: int = 0
    """Requests refused because a limit of the tenant's was reached; not among `requests`."""

    def add(self, note: Note, size: int, tokens: float, seconds: float) -> None:
        self.requests += 1
        self.bytes += size
        self.tokens += tokens
        self.seconds += seconds
        if note.cache in _HITS:
            self.hits += 1
            self.hit_bytes += size
        if note.cache is CacheOutcome.COLLAPSED:
            self.collapsed += 1


TIMELINE = ("requests", "hits", "bytes", "hit_bytes", "origin_bytes", "tokens")
"""What the history is of."""


class Traffic:
    """Counts answers. For the event loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.began = clock()
        self.all = Sums()
        self.by_tenant: dict[str, Sums] = {}
        self.by_model: dict[str, Sums] = {}
        """By tag."""
        self.by_pair: dict[tuple[str, str], Sums] = {}
        """By tenant and tag."""
        self.by_outcome: dict[CacheOutcome, Sums] = {}
        self.objects, self.prefixes = Hot(self.began), Hot(self.began)
        self.history = History(self.began, TIMELINE)
        self._speeds: Mapping[str, float] = {}
        self._known: dict[tuple[str, str, CacheOutcome], tuple[Sums, ...]] = {}
        """Sums by what an answer has, as looked up before: on the way of a small hit it is felt."""

    @property
    def knows_speeds(self) -> bool:
        """Whether it is known of any model how fast readers prefill."""
        return bool(self._speeds)

    def apply(self, speeds: Mapping[str, float]) -> None:
        """How fast readers prefill, in tokens a second by model tag: from now on."""
        self._speeds = speeds

    def count(self, note: Note, status: int, size: int, tenant: str) -> None:
        """One answer with `size` body bytes."""
        if status == _LIMITED:
            _named(self.by_tenant, tenant, MAX_TENANTS, OTHER).limited += 1
        if not note.key or status not in _ANSWERED:
            return
        if note.route != "object":
            self.prefixes.add(note.key, blocks=note.blocks)
            return
        sent = size if status in _SENT else 0
        tokens = sent * note.tokens_per_byte
        tag = note.key[3:35]
        speed = self._speeds.get(tag)
        seconds = tokens / speed if speed else 0.0
        for sums in self._concerned(tenant, tag, note.cache):
            sums.add(note, sent, tokens, seconds)
        self.objects.add(note.key, sent)

    def _concerned(self, tenant: str, tag: str, cache: CacheOutcome) -> tuple[Sums, ...]:
        """All sums that an answer belongs to."""
        found = self._known.get((tenant, tag, cache))
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            found = self._known[tenant, tag, cache] = (
                self.all,
                _named(self.by_tenant, tenant, MAX_TENANTS, OTHER),
                _named(self.by_model, tag, MAX_MODELS, OTHER),
                _named(self.by_pair, (tenant, tag), MAX_PAIRS, (OTHER, OTHER)),
                _named(self.by_outcome, cache, len(CacheOutcome), cache),
            )
        return found

    def record(self, origin_bytes: float) -> None:
        """Takes the sums of now down in the history, beside the bytes that origins have sent so far."""
        now = self._clock()
        for hot in (self.objects, self.prefixes):
            hot.fade(now)
        sums = {name: getattr(self.all, name) for name in TIMELINE if name != "origin_bytes"}
        self.history.record(now, {**sums, "origin_bytes": origin_bytes})

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self.began


def _named(sums: dict[K, Sums], name: K, limit: int, other: K) -> Sums:
    """The sums under `name`, or `other` where there are `limit` names already."""
    found = sums.get(name)
    if found is None:
        if len(sums) >= limit:
            name = other
        found = sums.setdefault(name, Sums())
    return found
