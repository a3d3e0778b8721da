"""Books: ledgers merged. A set of ledgers, each in the latest state that was seen of it.

Of two copies of one ledger, one knows all that the other does, and more: merging takes that one, and refuses two of which
neither does, as when a ledger went on from a restored copy. So it does not matter in which order copies come, how they are
grouped, or how often: each entry counts once. What is asked of the merged ledgers is told by sums of whole numbers, which do
not hang on any order either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

from kvcdn.accounting.entry import Counts, Entry, Key, Part
from kvcdn.accounting.snapshot import LedgerId, Run, Snapshot
from kvcdn.errors import CorruptError


@dataclass(frozen=True)
class Books:
    """Ledgers by their ids."""

    ledgers: dict[LedgerId, Snapshot] = field(default_factory=dict)

    @classmethod
    def of(cls, snapshots: Iterable[Snapshot]) -> Self:
        """These ledgers. Raises CorruptError for two ledgers of one name of which neither holds all of the other."""
        books = cls()
        for one in snapshots:
            books = books.merged(cls({one.head.ledger: one}))
        return books

    def merged(self, other: Self) -> Self:
        """Both, each ledger once: associative, commutative, idempotent. Raises CorruptError as `of`."""
        found = dict(self.ledgers)
        for name, snapshot in other.ledgers.items():
            found[name] = _later(found[name], snapshot) if name in found else snapshot
        return type(self)(found)

    def __iter__(self) -> Iterator[Entry]:
        """All entries."""
        for snapshot in self.ledgers.values():
            yield from snapshot.entries

    def sums(self, by: Callable[[Key], Key | None]) -> dict[Key, Counts]:
        """Counts added up by what `by` makes of keys; those of which it makes None are left out."""
        found: dict[Key, Counts] = {}
        for entry in self:
            key = by(entry.key)
            if key is None:
                continue
            counts = found.setdefault(key, {})
            for name, count in entry.counts.items():
                counts[name] = counts.get(name, 0) + count
        return found

    def tied(self) -> Self:
        """These, with the tenant that edges know in clients' entries, and the document that clients know in edges'.

        A prompt ties them. Nobody's word is changed, and where a prompt has two tenants neither is taken.
        """
        tenants: dict[str, set[str]] = {}
        documents: dict[str, set[str]] = {}
        for entry in self:
            key = entry.key
            if key.prompt:
                tenants.setdefault(key.prompt, set()).update({key.tenant} - {""})
                documents.setdefault(key.prompt, set()).update({key.document} - {""})

        def only(found: set[str] | None) -> str:
            return next(iter(found)) if found and len(found) == 1 else ""

        def completed(entry: Entry) -> Entry:
            key = entry.key
            if not key.prompt or (key.tenant and key.document):
                return entry
            tenant = key.tenant or only(tenants.get(key.prompt))
            document = key.document or only(documents.get(key.prompt))
            return Entry(key._replace(tenant=tenant, document=document), entry.counts)

        return type(self)(
            {
                name: Snapshot(snapshot.head, tuple(completed(entry) for entry in snapshot.entries))
                for name, snapshot in self.ledgers.items()
            }
        )

    @property
    def folded_to(self) -> int:
        """Up to this hour prompts may be told apart no more; -1 where all are."""
        return max((snapshot.head.folded_to for snapshot in self.ledgers.values()), default=-1)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Processes that have not said that they ended."""
        return tuple(run for snapshot in self.ledgers.values() for run in snapshot.head.runs)

    @property
    def dropped(self) -> int:
        """Entries that were never written."""
        return sum(snapshot.head.dropped for snapshot in self.ledgers.values())

    @property
    def forgotten(self) -> int:
        """Sums that were deleted."""
        return sum(snapshot.head.forgotten for snapshot in self.ledgers.values())

    @property
    def dropped_by(self) -> set[Part]:
        """Whose ledgers lack entries that were never written."""
        return {entry.key.part for one in self.ledgers.values() if one.head.dropped for entry in one.entries}

    def parts(self) -> set[Part]:
        """Who has counted something in them."""
        return {entry.key.part for entry in self}

    def between(self, first: int | None, last: int | None) -> Self:
        """Only the hours from `first` to before `last`."""

        def within(hour: int) -> bool:
            return (first is None or hour >= first) and (last is None or hour < last)

        return type(self)(
            {
                name: Snapshot(snapshot.head, tuple(entry for entry in snapshot.entries if within(entry.key.hour)))
                for name, snapshot in self.ledgers.items()
            }
        )


def _later(one: Snapshot, other: Snapshot) -> Snapshot:
    later, earlier = (one, other) if one.head.version >= other.head.version else (other, one)
    if later != earlier and (later.head.version == earlier.head.version or not _holds(later, earlier)):
        raise CorruptError(
            f"two ledgers say that they are {one.head.ledger}, and neither holds all of the other",
            hint="one of them was changed by hand, or went on from a restored copy: give only one",
        )
    return later


def _holds(later: Snapshot, earlier: Snapshot) -> bool:
    """Whether nothing of `earlier` is missing in `later`. Of what was deleted for want of room that is not to be seen."""
    if later.head.forgotten > earlier.head.forgotten:
        return True
    if not Counter(entry.encode() for entry in earlier.entries) - Counter(entry.encode() for entry in later.entries):
        return True
    if later.head.folded_to < 0:
        return False
    # What was added up has lost its prompts, and may have lost its documents; sums only grow.
    sums = Books({later.head.ledger: later}).sums(_without_names)
    needed = Books({earlier.head.ledger: earlier}).sums(_without_names)
    return all(sums.get(key, {}).get(name, 0) >= count for key, counts in needed.items() for name, count in counts.items())


def _without_names(key: Key) -> Key:
    return key._replace(prompt="", document="")
