"""Checking a journal: its chain, its signers, its end, and whether it explains what is at the origin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from kvcdn.digest import Digest, ModelTag, hash_bytes
from kvcdn.errors import CorruptError, UntrustedError
from kvcdn.journal import START, Entry, Head, Published, Removed, Retired, chain_digest, open_entry
from kvcdn.origin.upkeep.catalog import Progress, list_published, silent
from kvcdn.origin.upkeep.journal import list_numbers, read_entries
from kvcdn.revocation import CLOCK_SECONDS
from kvcdn.signing import PublicKey, TrustList
from kvcdn.store import BlobStore

_SHORT_GAP = 1000
"""Anybody who can write may put an object under a number far away: what lies between is not asked for."""


class Fault(StrEnum):
    """What can be wrong with a journal."""

    MISSING = "missing"
    CORRUPT = "corrupt"
    """Something lies there that is no entry."""
    UNTRUSTED = "untrusted"
    """Well signed, by a key that is not on the trust list."""
    UNCHAINED = "unchained"
    """It does not follow the entry before it: that one was changed, or this one put in."""
    CLOCK = "clock"
    """It says that it is older than the entry before it, by more than clocks differ."""
    CUT = "cut"
    """An entry that was seen here is not there any more, nor is any behind it."""
    REWRITTEN = "rewritten"
    """Another entry lies under the number of one that was seen here."""


@dataclass(frozen=True)
class Finding:
    """An entry, and what is wrong with it."""

    number: int
    fault: Fault
    reason: str


@dataclass
class JournalChecked:
    """What a check of a journal saw. `head` is the last entry, to be kept where nothing is wrong."""

    entries: int = 0
    head: Head = START
    signers: dict[PublicKey, int] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)
    first_time: int | None = None
    last_time: int | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """4 where something is wrong."""
        return CorruptError.exit_code if self.findings else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "entries": self.entries,
            "last": self.head.number,
            "digest": str(self.head.digest),
            "signers": {key.text: count for key, count in sorted(self.signers.items())},
            "actions": dict(sorted(self.actions.items())),
            "first_time": self.first_time,
            "last_time": self.last_time,
            "findings": [asdict(finding) for finding in self.findings],
        }


def check_journal(
    store: BlobStore,
    trust: TrustList,
    *,
    seen: Head | None = None,
    follow: Callable[[Entry], None] = lambda _: None,
    progress: Progress = silent,
) -> JournalChecked:
    """Reads the whole journal at `store`; `seen` is the last entry that was seen there before.

    `follow` is given every entry that is well signed by somebody on `trust`, in order. Holds a few of them at a time.
    """
    checked = JournalChecked()
    listed = list_numbers(store)
    expected: Digest | None = START.digest
    before = time = 0
    for number, data in read_entries(store, _with_gaps(listed)):
        progress("entries read", number)
        if number > before + 1:
            reason = f"entries {before + 1} to {number - 1} are not there"
            checked.findings.append(Finding(before + 1, Fault.MISSING, reason))
            expected = None
        before = number
        if data is None:
            checked.findings.append(Finding(number, Fault.MISSING, "it is not there"))
            expected = None
            continue
        if seen is not None and number == seen.number and chain_digest(data) != seen.digest:
            checked.findings.append(Finding(number, Fault.REWRITTEN, "it is not the entry that was here"))
        entry = _checked_entry(checked, number, data, expected, trust)
        if entry is not None:
            if entry.time + CLOCK_SECONDS < time:
                reason = f"its time is {time - entry.time:,} seconds before the one before it"
                checked.findings.append(Finding(number, Fault.CLOCK, reason))
            time = entry.time
            checked.first_time = time if checked.first_time is None else checked.first_time
            checked.last_time = time
            follow(entry)
        checked.head = Head(number, chain_digest(data))
        expected = checked.head.digest
    if seen is not None and seen.number > before:
        reason = f"it was seen here, and the journal ends with entry {before}"
        checked.findings.append(Finding(seen.number, Fault.CUT, reason))
    return checked


def _with_gaps(listed: Iterable[int]) -> Iterator[int]:
    """The numbers, and those of short gaps: an entry may have come while the ones behind it were listed."""
    before = 0
    for number in listed:
        if number - before <= _SHORT_GAP:
            yield from range(before + 1, number)
        yield number
        before = number


def _checked_entry(
    checked: JournalChecked, number: int, data: bytes, expected: Digest | None, trust: TrustList
) -> Entry | None:
    """The entry, counted; None where it is none, or nobody's who is trusted."""
    what = f"entry {number}"
    try:
        entry = open_entry(data, number, what)
    except CorruptError as error:
        checked.findings.append(Finding(number, Fault.CORRUPT, str(error)))
        return None
    checked.entries += 1
    if expected is not None and entry.previous != expected:
        checked.findings.append(Finding(number, Fault.UNCHAINED, "it does not follow the entry before it"))
    if entry.signer is None:
        return None
    checked.signers[entry.signer] = checked.signers.get(entry.signer, 0) + 1
    checked.actions[entry.deed.action] = checked.actions.get(entry.deed.action, 0) + 1
    try:
        trust.require(entry.signer, what)
    except UntrustedError as error:
        checked.findings.append(Finding(number, Fault.UNTRUSTED, str(error)))
        return None
    return entry


@dataclass
class DocumentsCompared:
    """Documents at the origin that the journal does not explain, by their addresses.

    `unrecorded` ones no entry published: they are older than the journal, or were written by something that keeps none.
    `returned` ones were removed or retired and are there: that was interrupted, or they were put back. `gone` ones should be
    there: their publisher died before they were, or they were deleted by something that keeps no journal.
    """

    documents: int = 0
    unrecorded: list[str] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Shelf:
    """What should be at an origin, by its journal: given entry after entry, then compared with what is."""

    def __init__(self) -> None:
        self._etags: dict[bytes, set[bytes]] = {}
        """Of every document that was ever published, by address: which manifests those may be."""
        self._there: dict[bytes, tuple[ModelTag, int | None]] = {}
        """Those that were not removed since."""

    def follow(self, entry: Entry) -> None:
        """Takes the next entry."""
        match entry.deed:
            case Published() as deed:
                self._etags.setdefault(deed.address, set()).add(deed.etag)
                self._there[deed.address] = deed.model, deed.expires
            case Removed() as deed:
                for address in deed.addresses:
                    self._there.pop(address, None)
            case Retired() as deed:
                self._there = {name: what for name, what in self._there.items() if what[0] != deed.model}
            case _:
                pass

    def compare(self, store: BlobStore, now: float, progress: Progress = silent) -> DocumentsCompared:
        """Reads every manifest at `store`. Documents that expired by `now` may be there or not."""
        found = DocumentsCompared()
        missing: dict[bytes, tuple[ModelTag, int | None]] = dict(self._there)
        for listed in list_published(store, progress=progress):
            if listed.manifest is None:
                continue
            found.documents += 1
            address: bytes = listed.manifest.address
            missing.pop(address, None)
            if hash_bytes(listed.data) not in self._etags.get(address, ()):
                found.unrecorded.append(address.hex())
            elif address not in self._there:
                found.returned.append(address.hex())
        found.gone = [str(Digest(address)) for address, (_, expires) in missing.items() if expires is None or expires > now]
        return found
