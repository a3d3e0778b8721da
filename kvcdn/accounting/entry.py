"""Entries: what a part of kvcdn counts, typed (FORMAT.md section 14). No text, no token, no content: documents by address."""

from __future__ import annotations

import enum
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from kvcdn import canonical
from kvcdn.canonical import MAX_INTEGER
from kvcdn.digest import Digest, FixedBytes, ModelTag
from kvcdn.errors import CorruptError
from kvcdn.fields import Fields

HOUR_SECONDS = 3600

LAST_HOUR = 1 << 28
"""Hours since 1970: bounds what arithmetic on them meets. Some 30,000 years."""

HEADER = "KVCDN-Usage"
"""The field with which a client tells an edge for which prompt it asks."""

_TENANT = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._@-]{0,63})?")

_HEADER = re.compile(r"([0-9a-f]{32})(?:/([0-9a-f]{64}))?")

_WORD = re.compile(r"(?:[a-z][a-z-]{0,31})?")


class PromptId(FixedBytes):
    """16 random bytes that name one prompt, new for each: what ties a client's entries to an edge's."""

    SIZE = 16

    @classmethod
    def new(cls) -> Self:
        return cls(secrets.token_bytes(cls.SIZE))


class Part(enum.StrEnum):
    """Who has counted."""

    CLIENT = "client"
    EDGE = "edge"
    ORIGIN = "origin"


class Outcome(enum.StrEnum):
    """What became of what is counted. Clients: of a prompt. Edges: of a request, or of a fill. Origins: of a publication."""

    BEGUN = "begun"
    """A prompt was begun: noted at once, so that one whose process is killed is known."""
    REUSED = "reused"
    """All that its document offered was reused."""
    PARTLY = "partly"
    MISSED = "missed"
    """Nothing was reused."""

    HIT = "hit"
    MISS = "miss"
    EVICTED = "evicted"
    """A miss of an object that had been here, and had to leave."""
    COLLAPSED = "collapsed"
    PASSED = "passed"
    REMEMBERED = "remembered"
    REFUSED = "refused"
    MATCHED = "matched"
    """A prefix lookup was answered."""
    FILLED = "filled"
    """An object came from the origin whole."""
    FAILED = "failed"
    """It did not, or a publication failed."""

    PUBLISHED = "published"
    REPAIRED = "repaired"
    EXISTED = "existed"


class Loss(enum.StrEnum):
    """Who lost the hit: why tokens that a document offers were not reused."""

    NONE = ""
    NOT_PUBLISHED = "not-published"
    """Nothing of the prompt's beginning is published."""
    EVICTED = "evicted"
    """An edge had it, and had it no more when it was asked, nor could get it back."""
    DIVERGED = "diverged"
    """The prompt, or what is published, goes on otherwise than the other before the document's end."""
    REFUSED = "refused"
    """What is there must not be used: not trusted, revoked, damaged, another model's, of too low a quality."""
    SLOWER = "slower-than-prefill"
    """The plan: prefilling is sooner, or cheaper, on this link."""
    UNAVAILABLE = "unavailable"
    """A server, link or disk failed."""
    UNSUPPORTED = "unsupported-model"


COUNTS = frozenset(
    (
        # clients, per prompt
        "begun",
        "prompts",
        "tokens_asked",
        "tokens_offered",
        "tokens_kept",
        "tokens_local",
        "tokens_fetched",
        "tokens_computed",
        "tokens_prefilled",
        "tokens_lost",
        "tokens_begun",
        "blocks_begun",
        "bytes_edge",
        "bytes_origin",
        "bytes_used",
        "requests_edge",
        "requests_origin",
        "requests_cut",
        "objects_read",
        "saved_ms",
        "lost_ms",
        # edges, per answer and per fill
        "requests",
        "tokens_served",
        "blocks_served",
        "bytes_sent",
        "matches",
        "matches_cut",
        "blocks_asked",
        "blocks_matched",
        "blocks_evicted",
        "origin_requests",
        "origin_bytes",
        "peer_requests",
        "peer_bytes",
        "tier_requests",
        "tier_bytes",
        "requests_peers",
        "bytes_peers",
        "requests_tiers",
        "bytes_tiers",
        # origins, per publication
        "documents",
        "tokens_published",
        "tokens_loaded",
        "blocks_uploaded",
        "bytes_uploaded",
        "bytes_stored",
        "prefill_ms",
    )
)
"""Everything that is counted, in whole numbers from 0: sums are exact, in any order."""


class Key(NamedTuple):
    """What entries are added up by. Texts are empty where something is not known."""

    part: Part
    hour: int
    """Since 1970, of UTC."""
    tenant: str
    model: str
    """A model tag."""
    document: str
    """The address of a document's manifest."""
    prompt: str
    """A `PromptId`."""
    outcome: Outcome
    loss: Loss = Loss.NONE
    reason: str = ""
    """The word that the part itself has for it: a MissReason, an edge's Reason."""

    def checked(self) -> Self:
        """This key. Raises CorruptError unless each text is in its one form."""
        if not 0 <= self.hour <= LAST_HOUR:
            raise CorruptError(f"usage entry: {self.hour} is no hour")
        known = (
            ("tenant", _TENANT.fullmatch(self.tenant)),
            ("model", not self.model or ModelTag.read(self.model)),
            ("document", not self.document or Digest.read(self.document)),
            ("prompt", not self.prompt or PromptId.read(self.prompt)),
            ("reason", _WORD.fullmatch(self.reason)),
        )
        for name, right in known:
            if not right:
                raise CorruptError(f"usage entry: field {name!r} is not in its form")
        return self


Counts = dict[str, int]


def added(one: Mapping[str, int], other: Mapping[str, int]) -> Counts:
    """The sum, count by count."""
    total = dict(one)
    for name, count in other.items():
        total[name] = total.get(name, 0) + count
    return total


def total(counts: Iterable[Mapping[str, int]]) -> Counts:
    """The sum of all of them."""
    found: Counts = {}
    for one in counts:
        for name, count in one.items():
            found[name] = found.get(name, 0) + count
    return found


@dataclass(frozen=True)
class Entry:
    """So much of this."""

    key: Key
    counts: Mapping[str, int]

    def encode(self) -> bytes:
        """The canonical bytes, one line without its end."""
        return canonical.encode_checked({**self.key._asdict(), "counts": dict(self.counts)})

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """Reads `encode`'s form. Raises CorruptError for anything else."""
        return cls.read(canonical.decode(line, "usage entry"))

    @classmethod
    def read(cls, value: Any) -> Self:
        """Reads hostile JSON. Raises CorruptError."""
        what = "usage entry"
        fields = Fields(value, what)
        key = Key(
            part=Part(fields.choice("part", list(Part))),
            hour=fields.integer("hour", 0, LAST_HOUR),
            tenant=fields.string("tenant", 64),
            model=fields.string("model", 32),
            document=fields.string("document", 64),
            prompt=fields.string("prompt", 32),
            outcome=Outcome(fields.choice("outcome", list(Outcome))),
            loss=Loss(fields.choice("loss", list(Loss))),
            reason=fields.string("reason", 32),
        ).checked()
        counts = read_counts(fields.any("counts"))
        fields.done()
        return cls(key, counts)


def read_counts(value: Any) -> Counts:
    """Counts from hostile JSON. Raises CorruptError."""
    fields = Fields(value, "usage counts")
    unknown = set(fields.names) - COUNTS
    if unknown:
        raise CorruptError(f"usage counts: this version does not know {min(unknown)[:40]!r}")
    return {name: fields.integer(name, 0, MAX_INTEGER) for name in fields.names}


def hour_of(seconds: float | None = None) -> int:
    """The hour of a Unix time, by default of now."""
    return int((time.time() if seconds is None else seconds) // HOUR_SECONDS)


def tie(prompt: PromptId, document: Digest | None) -> str:
    """The value of HEADER."""
    return f"{prompt}/{document}" if document else str(prompt)


def read_tie(value: str | None) -> tuple[str, str]:
    """Prompt and document of a header's value; both empty where there is none, or one in another form."""
    match = _HEADER.fullmatch(value or "")
    return (match[1], match[2] or "") if match else ("", "")
