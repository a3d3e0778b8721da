"""Reconciliation: whether client and edge have counted the same, prompt by prompt, and what the differences are.

What an edge has handed to the system as sent, and what a client has received, differ whenever something ends early; so do
ledgers of processes that were killed. Each difference has a name and a size here. What fits none of them is a fault: somebody
counts wrongly, a ledger is missing, or somebody changed one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcdn.accounting.books import Books
from kvcdn.accounting.entry import Counts, Outcome, Part, total
from kvcdn.accounting.hits import to_readers
from kvcdn.accounting.snapshot import Run, unended


class Verdict(enum.StrEnum):
    """What the two say of one prompt."""

    AGREED = "agreed"
    """Sent and received, to the byte."""
    IN_FLIGHT = "in-flight"
    """More was sent than received, by requests that were not read to their end: it was on its way, or in buffers."""
    NOT_ENDED = "not-ended"
    """The client began the prompt and never ended it: it is still at it, or was killed."""
    CLIENT_UNKNOWN = "client-unknown"
    """No client's ledger knows the prompt, and a client's process did not end in order: it was killed before it wrote."""
    EDGE_LOST = "edge-lost"
    """More was received than edges say they sent, and an edge's process did not end in order: it was killed before it wrote."""
    DROPPED = "dropped"
    """One does not know what the other does, and its ledger says that entries were never written, for want of room."""
    NO_CLIENT_LEDGER = "no-client-ledger"
    """No client's ledger was given."""
    NO_EDGE_LEDGER = "no-edge-ledger"
    """No edge's ledger was given, or the client's server keeps none."""
    FOLDED = "folded"
    """Its entries may have been added up already in one of the ledgers."""
    UNEXPLAINED = "unexplained"

    @property
    def is_fault(self) -> bool:
        return self is Verdict.UNEXPLAINED


@dataclass
class Tied:
    """What is known of one prompt."""

    prompt: str
    hour: int
    client: Counts = field(default_factory=dict)
    edge: Counts = field(default_factory=dict)
    begun: bool = False
    ended: bool = False
    document: str = ""

    @property
    def sent(self) -> int:
        return self.edge.get("bytes_sent", 0)

    @property
    def received(self) -> int:
        return self.client.get("bytes_edge", 0)

    @property
    def difference(self) -> int:
        """Bytes sent and not received; below zero where more was received than is known to be sent."""
        return self.sent - self.received


@dataclass(frozen=True)
class Tiers:
    """What edges sent to edges that fill from them, and what these received."""

    sent: int
    filled: int
    verdict: Verdict


@dataclass(frozen=True)
class Reconciliation:
    """All prompts, by what the ledgers say of them."""

    prompts: Mapping[Verdict, int]
    sent: int
    """Bytes that edges sent for prompts with an id."""
    received: int
    """Bytes that clients received from edges."""
    used: int
    """Bytes of blocks that were verified and used, from edges or the origin."""
    at_most: Mapping[Verdict, int]
    """Bytes by which the two differ, by verdict."""
    tokens_served: int
    tokens_begun: int
    untied: int
    """Bytes that edges sent to readers who gave no id."""
    documents: int
    """Documents that were read through edges, and whose publication is in an origin's ledger."""
    documents_unknown: int
    """Those that were published elsewhere, or before."""
    faults: tuple[Tied, ...]
    edges_unended: int
    clients_unended: int
    tiers: Tiers

    @property
    def holds(self) -> bool:
        """Whether every difference is explained."""
        return not self.faults and not self.tiers.verdict.is_fault

    @property
    def bound(self) -> int:
        """Bytes by which sent and received are known to differ at most."""
        return sum(self.at_most.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "prompts": {verdict.value: count for verdict, count in sorted(self.prompts.items())},
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "bytes_used": self.used,
            "differ_by_at_most": self.bound,
            "differences": {verdict.value: count for verdict, count in sorted(self.at_most.items())},
            "tokens_served": self.tokens_served,
            "tokens_begun": self.tokens_begun,
            "untied_bytes": self.untied,
            "documents": self.documents,
            "documents_unknown": self.documents_unknown,
            "edges_unended": self.edges_unended,
            "clients_unended": self.clients_unended,
            "tiers": {"bytes_sent": self.tiers.sent, "bytes_filled": self.tiers.filled, "verdict": self.tiers.verdict.value},
            "faults": [
                {"prompt": one.prompt, "hour": one.hour, "bytes_sent": one.sent, "bytes_received": one.received}
                for one in self.faults[:1000]
            ],
        }


def reconcile(books: Books, first: int | None = None, last: int | None = None) -> Reconciliation:
    """Compares what `books` say of each prompt that began from the hour `first` on and before `last`.

    Prompts are chosen, not entries: one that goes on over the hour has entries in both.
    """
    tied, known = _tied(books), _Known(books.parts(), books.runs, books.folded_to, _published(books), books.dropped_by)
    verdicts: dict[Verdict, int] = {}
    differences: dict[Verdict, int] = {}
    faults = []
    tied = {name: one for name, one in tied.items() if _in(one.hour, first, last)}
    for one in tied.values():
        verdict = _verdict(one, known)
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
        if one.difference and verdict is not Verdict.AGREED:
            differences[verdict] = differences.get(verdict, 0) + abs(one.difference)
        if verdict.is_fault:
            faults.append(one)
    untied = 0
    for entry in books.between(first, last):
        if not entry.key.prompt and entry.key.part is Part.EDGE:
            untied += to_readers(entry.counts)
    return Reconciliation(
        prompts=verdicts,
        sent=sum(one.sent for one in tied.values()),
        received=sum(one.received for one in tied.values()),
        used=sum(one.client.get("bytes_used", 0) for one in tied.values()),
        at_most=differences,
        tokens_served=sum(one.edge.get("tokens_served", 0) for one in tied.values()),
        tokens_begun=sum(one.client.get("tokens_begun", 0) for one in tied.values() if one.client.get("bytes_edge")),
        untied=untied,
        documents=len({one.document for one in tied.values() if one.received} & set(known.published)),
        documents_unknown=len({one.document for one in tied.values() if one.received} - set(known.published)),
        faults=tuple(sorted(faults, key=lambda one: (one.hour, one.prompt))),
        edges_unended=sum(run.part is Part.EDGE for run in books.runs),
        clients_unended=sum(run.part is Part.CLIENT for run in books.runs),
        tiers=_tiers(books),
    )


@dataclass(frozen=True)
class _Known:
    """What is known besides the prompts."""

    parts: set[Part]
    runs: Sequence[Run]
    folded_to: int
    published: Mapping[str, int]
    dropped: set[Part]


def _tied(books: Books) -> dict[str, Tied]:
    found: dict[str, Tied] = {}
    for entry in books:
        key = entry.key
        if not key.prompt:
            continue
        one = found.setdefault(key.prompt, Tied(key.prompt, key.hour))
        one.hour = min(one.hour, key.hour)
        if key.part is Part.EDGE:
            _add(one.edge, entry.counts)
        elif key.part is Part.CLIENT:
            one.begun = one.begun or key.outcome is Outcome.BEGUN
            one.ended = one.ended or key.outcome is not Outcome.BEGUN
            one.document = one.document or key.document
            _add(one.client, entry.counts)
    return found


def _tiers(books: Books) -> Tiers:
    """Of all hours: a fill is counted when it has ended, what was sent for it may be in the hour before."""
    counts = total(entry.counts for entry in books if entry.key.part is Part.EDGE)
    sent, filled = counts.get("bytes_tiers", 0), counts.get("tier_bytes", 0)
    if sent == filled:
        return Tiers(sent, filled, Verdict.AGREED)
    if not sent or not filled:
        return Tiers(sent, filled, Verdict.NO_EDGE_LEDGER)
    if unended(books.runs, Part.EDGE):
        return Tiers(sent, filled, Verdict.EDGE_LOST)
    if Part.EDGE in books.dropped_by or books.forgotten:
        return Tiers(sent, filled, Verdict.DROPPED)
    # What broke off was sent and is not among what was filled, or not all of it.
    return Tiers(sent, filled, Verdict.IN_FLIGHT if sent > filled else Verdict.UNEXPLAINED)


def _in(hour: int, first: int | None, last: int | None) -> bool:
    return (first is None or hour >= first) and (last is None or hour < last)


def _published(books: Books) -> dict[str, int]:
    """Tokens of documents, as their publishers counted them."""
    found: dict[str, Counts] = {}
    for entry in books:
        if entry.key.part is Part.ORIGIN and entry.key.document:
            _add(found.setdefault(entry.key.document, {}), entry.counts)
    return {document: counts.get("tokens_published", 0) // counts["documents"] for document, counts in found.items()}


def _add(counts: Counts, more: Mapping[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


def _verdict(one: Tied, known: _Known) -> Verdict:
    if one.ended and not one.difference and _tokens_agree(one, known.published):
        return Verdict.AGREED
    if one.hour <= known.folded_to:
        return Verdict.FOLDED
    if not one.begun and not one.ended:
        return _missing(Part.CLIENT, Verdict.NO_CLIENT_LEDGER, Verdict.CLIENT_UNKNOWN, known)
    if not one.ended:
        return Verdict.NOT_ENDED
    if one.difference < 0:
        return _missing(Part.EDGE, Verdict.NO_EDGE_LEDGER, Verdict.EDGE_LOST, known)
    return Verdict.IN_FLIGHT if one.client.get("requests_cut", 0) else Verdict.UNEXPLAINED


def _missing(part: Part, not_given: Verdict, killed: Verdict, known: _Known) -> Verdict:
    """Why a part does not know what the other does."""
    if part not in known.parts:
        return not_given
    if unended(known.runs, part):
        return killed
    return Verdict.DROPPED if part in known.dropped else Verdict.UNEXPLAINED


def _tokens_agree(one: Tied, published: Mapping[str, int]) -> bool:
    """Whether blocks' tokens are the same on both sides, and no more than their publisher says the document has."""
    begun = one.client.get("tokens_begun", 0)
    if begun > published.get(one.document, begun):
        return False
    # A request that is not read to its end may begin a block in vain; and what is read whole, as the bases of codecs are, is no
    # block of the prompt.
    if not one.received or one.client.get("requests_cut", 0) or one.client.get("objects_read", 0):
        return True
    return one.edge.get("tokens_served", 0) == begun
