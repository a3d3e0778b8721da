"""Hits: how much of what documents offered was reused, by whom or of what, and who lost the rest."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcdn.accounting.books import Books
from kvcdn.accounting.entry import Counts, Entry, Loss, Outcome, Part, total

NOT_KNOWN = "(unknown)"
"""Shown where a tenant, model or document is not known. No tenant is called so."""


class By(enum.StrEnum):
    """What counts are told by."""

    ALL = "all"
    TENANT = "tenant"
    MODEL = "model"
    DOCUMENT = "document"
    HOUR = "hour"

    def of(self, entry: Entry) -> str:
        """The row of `entry`."""
        if self is By.ALL:
            return "all"
        value = getattr(entry.key, self.value)
        return str(value) if value != "" else NOT_KNOWN


@dataclass
class Row:
    """What clients, edges and origins have counted of one tenant, model, document, or hour."""

    name: str
    client: Counts = field(default_factory=dict)
    edge: Counts = field(default_factory=dict)
    origin: Counts = field(default_factory=dict)
    lost: dict[Loss, int] = field(default_factory=dict)
    """Tokens by who lost the hit."""
    answers: dict[Outcome, int] = field(default_factory=dict)
    """Bytes that edges sent to readers, by where they came from."""

    @property
    def hit_ratio(self) -> float | None:
        """Of the tokens that prompts' documents offered, the part that was reused."""
        offered = self.client.get("tokens_offered", 0)
        return None if not offered else 1 - self.client.get("tokens_lost", 0) / offered

    @property
    def edge_hit_ratio(self) -> float | None:
        """Of the bytes that edges sent to readers, the part that they had."""
        sent = sum(self.answers.values())
        return self.answers.get(Outcome.HIT, 0) / sent if sent else None

    @property
    def bytes_to_readers(self) -> int:
        """What edges sent to others than edges."""
        return to_readers(self.edge)

    @property
    def saved_ms(self) -> int:
        """Milliseconds to first tokens saved, less those lost; may be below zero."""
        return self.client.get("saved_ms", 0) - self.client.get("lost_ms", 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "hit_ratio": _rounded(self.hit_ratio),
            "edge_hit_ratio": _rounded(self.edge_hit_ratio),
            "seconds_saved": self.saved_ms / 1000,
            "lost_tokens": {loss.value: tokens for loss, tokens in sorted(self.lost.items())},
            "edge_bytes": {outcome.value: count for outcome, count in sorted(self.answers.items())},
            "client": _sorted(self.client),
            "edge": _sorted(self.edge),
            "origin": _sorted(self.origin),
        }


def rows(books: Books, by: By) -> list[Row]:
    """What `books` say, most tokens asked first."""
    found: dict[str, Row] = {}
    word = edges_word(books)
    for entry in books:
        row = found.setdefault(by.of(entry), Row(by.of(entry)))
        match entry.key.part:
            case Part.CLIENT:
                row.client = total((row.client, entry.counts))
                if lost := entry.counts.get("tokens_lost", 0):
                    loss = blamed(entry, word)
                    row.lost[loss] = row.lost.get(loss, 0) + lost
            case Part.EDGE:
                row.edge = total((row.edge, entry.counts))
                if sent := to_readers(entry.counts):
                    row.answers[entry.key.outcome] = row.answers.get(entry.key.outcome, 0) + sent
            case Part.ORIGIN:
                row.origin = total((row.origin, entry.counts))
    return sorted(found.values(), key=_order)


def _order(row: Row) -> tuple[int, int, str]:
    return -row.client.get("tokens_asked", 0), -row.edge.get("bytes_sent", 0), row.name


def to_readers(counts: Mapping[str, int]) -> int:
    """Bytes that an edge sent to readers: without those that went to edges which fill from it."""
    return max(0, counts.get("bytes_sent", 0) - counts.get("bytes_tiers", 0))


def edges_word(books: Books) -> dict[str, Loss]:
    """What only edges know of prompts: that they once had what was missing, or could not ask the origin for it."""
    found: dict[str, Loss] = {}
    for entry in books:
        if entry.key.part is Part.EDGE and entry.key.prompt:
            if entry.counts.get("blocks_evicted"):
                found[entry.key.prompt] = Loss.EVICTED
            elif entry.counts.get("matches_cut"):
                found.setdefault(entry.key.prompt, Loss.UNAVAILABLE)
    return found


def blamed(entry: Entry, word: Mapping[str, Loss]) -> Loss:
    """Who lost a client's hit: its own word, unless that only says that nothing more was there, and an edge knows why."""
    passing = (Loss.NOT_PUBLISHED, Loss.DIVERGED, Loss.UNAVAILABLE, Loss.NONE)
    return word.get(entry.key.prompt, entry.key.loss) if entry.key.loss in passing else entry.key.loss


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
