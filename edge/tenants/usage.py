"""Usage: what an edge counts of its answers and fills, for a ledger (FORMAT.md section 14)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Self

from aiohttp import web

from kvcdn.access.guard import LOCAL
from kvcdn.accounting.entry import HEADER, Key, Outcome, Part, hour_of, read_tie
from kvcdn.accounting.ledger import Ledger
from kvcdn.accounting.recorder import Recorder
from kvcdn.edge.fills.peers import PEER_HEADER
from kvcdn.edge.http.hops import from_edge
from kvcdn.edge.http.outcome import CacheOutcome, Refusal
from kvcdn.edge.http.target import Kind, ObjectName
from kvcdn.edge.tenants.admission import TENANT
from kvcdn.edge.tenants.guard import PEER

if TYPE_CHECKING:
    from kvcdn.edge.fills.fill import Fill
    from kvcdn.edge.http.respond import Note

FLUSH_SECONDS = 1.0
"""How long counts wait in memory: what is lost of an edge that is killed, beside the answers that it had not ended."""

_BODIES = (200, 206)

_FIRST = re.compile(r"bytes 0-")

_ROUTES = frozenset(("object", "match"))


class EdgeUsage:
    """Counts for the ledger at `path`. `answered` is for the event loop's thread, and takes some microseconds."""

    def __init__(self, path: Path) -> None:
        """Raises what opening a ledger raises."""
        self._recorder = Recorder(path, Part.EDGE, flush_s=FLUSH_SECONDS)

    @classmethod
    def of(cls, path: Path | None) -> Self | None:
        """For the ledger at `path`; None without one."""
        return None if path is None else cls(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answered(self, request: web.BaseRequest, response: web.StreamResponse, note: Note, sent: int) -> None:
        """An answer has ended, be it whole or cut off after `sent` bytes of its body."""
        if note.route not in _ROUTES:
            return
        prompt, document = read_tie(request.headers.get(HEADER))
        tenant = request.get(TENANT, "")
        key = Key(Part.EDGE, hour_of(), tenant, "", "", prompt, Outcome.MATCHED, reason=str(note.reason))
        if note.route == "match":
            counts = {
                "matches": 1,
                "blocks_asked": note.asked,
                "blocks_matched": note.blocks,
                "blocks_evicted": int(note.evicted),
                "matches_cut": int(bool(note.reason)),
            }
            self._add(key, counts)
            return
        name = ObjectName.from_path(request.rel_url.raw_path)
        good = response.status in _BODIES
        # Of what is not there the names are whoever's asks: they must not fill the ledger.
        model = str(name.tag) if good and name is not None else ""
        key = key._replace(model=model, document=document if good else "", outcome=_outcome(note))
        if _is_peer(request, tenant):
            # What it asks for is for readers of its own, who are counted there.
            self._recorder.add(key, {"requests_peers": 1, "bytes_peers": sent if good else 0})
            return
        # A block counts with the answer that sends its first byte: readers begin there, and take up elsewhere.
        whole = response.status == 200 or bool(_FIRST.match(response.headers.get("Content-Range", "")))  # noqa: PLR2004 - HTTP's
        begins = bool(good and sent and whole and name is not None and name.kind is Kind.BLOCK)
        counts = _of_object(note, sent if good else 0, begins=begins, gone=note.evicted and not good)
        if from_edge(request.headers.getall("Via", ())):
            # Whoever says so falsely is billed all the same: these are among what was sent.
            counts |= {"requests_tiers": 1, "bytes_tiers": counts["bytes_sent"]}
        self._add(key, counts)

    def sent_whole(self, key: str, note: Note, tenant: str, sent: int) -> None:
        """The object `key` was there and was sent, with `sent` bytes of it, to a reader who named no prompt."""
        name = ObjectName.from_path(f"/{key}")
        if name is None:
            return
        entry = Key(Part.EDGE, hour_of(), tenant, str(name.tag), "", "", _outcome(note), reason=str(note.reason))
        self._add(entry, _of_object(note, sent, begins=bool(sent) and name.kind is Kind.BLOCK, gone=False))

    def _add(self, key: Key, counts: dict[str, int]) -> None:
        self._recorder.add(key, {name: count for name, count in counts.items() if count})

    def filled(self, fill: Fill, refusal: Refusal | None) -> None:
        """A fill has ended, with the object or with `refusal`."""
        outcome, reason = (Outcome.FILLED, "") if refusal is None else (Outcome.FAILED, str(refusal.reason))
        model = str(fill.name.tag) if refusal is None else ""
        key = Key(Part.EDGE, hour_of(), "", model, "", "", outcome, reason=reason)
        came = {f"{giver.value}_bytes": size for giver, size in fill.given.items()}
        self._recorder.add(key, {f"{fill.giver.value}_requests": 1 + fill.resumes, **came})

    def ledger(self) -> Ledger:
        """The ledger, with everything in it that was counted so far. Blocks."""
        self._recorder.flush()
        return Ledger(self._recorder.path, create=False)

    def close(self) -> None:
        """Writes down what is left."""
        self._recorder.close()


def _is_peer(request: web.BaseRequest, tenant: str) -> bool:
    """Whether an edge of the same site asks; who is not known by the peers' token, or on loopback, cannot say so."""
    return tenant == PEER.tenant or (tenant == LOCAL.tenant and PEER_HEADER in request.headers)


def _outcome(note: Note) -> Outcome:
    if note.cache is CacheOutcome.MISS and note.evicted:
        return Outcome.EVICTED
    return Outcome.REFUSED if note.cache is CacheOutcome.NONE else Outcome(note.cache.value)


def _of_object(note: Note, sent: int, *, begins: bool, gone: bool) -> dict[str, int]:
    return {
        "requests": 1,
        "bytes_sent": sent,
        "blocks_served": int(begins),
        "tokens_served": note.tokens if begins else 0,
        "blocks_evicted": int(gone),
    }
