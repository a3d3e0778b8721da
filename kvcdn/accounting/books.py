"""Books: ledgers merged. A set of ledgers, each in the latest state that was seen of it.

Of two copies of one ledger, one knows all that the other does, and more: merging takes that one. So it does not matter in which
order copies come, how they are grouped, or how often: each entry counts once. What is asked of the merged ledgers is told by
sums of whole numbers, which do not hang on any order either.
"""

from __future__ import annotations

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
        """These ledgers. Raises CorruptError for two different ledgers of one name."""
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
    if one.head.version == other.head.version and one != other:
        raise CorruptError(
            f"two ledgers say that they are {one.head.ledger}, and differ",
            hint="one of them was changed by hand, or went on from a copy: give only one",
        )
    return one if one.head.version >= other.head.version else other
