"""Snapshots: what a ledger held at one moment, as a value and as lines of canonical JSON (FORMAT.md section 14)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvcdn import canonical
from kvcdn.accounting.entry import LAST_HOUR, Entry, Part
from kvcdn.canonical import MAX_INTEGER
from kvcdn.digest import FixedBytes
from kvcdn.errors import CorruptError
from kvcdn.fields import Fields

MAX_RUNS = 10_000
"""Runs that did not end in order of which a ledger keeps note one by one."""

MAX_LINES = 2_000_000
"""Of a snapshot: more than a ledger holds. What is read is held in memory."""

MAX_LINE_BYTES = 4096
"""An entry with every count there is has some 1,500."""

VERSION = 1


class LedgerId(FixedBytes):
    """16 random bytes that name a ledger, whatever file it lies in."""

    SIZE = 16


class RunId(FixedBytes):
    """8 random bytes that name one process's time with a ledger."""

    SIZE = 8


@dataclass(frozen=True)
class Run:
    """A process that has counted and has not said that it ended: it is still there, or was killed. Unix seconds."""

    id: RunId
    part: Part
    started: int
    seen: int
    """When it last wrote: what it counted after that is not here."""

    def to_json(self) -> dict[str, Any]:
        return {"id": str(self.id), "part": str(self.part), "seen": self.seen, "started": self.started}

    @classmethod
    def read(cls, value: Any) -> Self:
        fields = Fields(value, "usage run")
        run = cls(
            fields.fixed("id", RunId),
            Part(fields.choice("part", list(Part))),
            fields.integer("started", 0, 1 << 40),
            fields.integer("seen", 0, 1 << 40),
        )
        fields.done()
        return run


@dataclass(frozen=True)
class Head:
    """What a ledger says of itself. Of two copies of one ledger, that with the larger `version` knows all the other does."""

    ledger: LedgerId
    version: int
    """Changes so far: grows with each."""
    entries: int
    """Lines that follow."""
    folded_to: int
    """Up to this hour, entries may have been added up without their prompts; -1 where none were."""
    dropped: int
    """Entries that were never written, because there was no room for them, in memory or on the disk."""
    forgotten: int
    """Sums that were deleted, because the ledger has a limit."""
    runs: tuple[Run, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "dropped": self.dropped,
            "entries": self.entries,
            "folded_to": self.folded_to,
            "forgotten": self.forgotten,
            "ledger": str(self.ledger),
            "runs": [run.to_json() for run in self.runs],
            "type": "usage",
            "v": VERSION,
            "version": self.version,
        }

    @classmethod
    def read(cls, value: Any) -> Self:
        """Reads hostile JSON. Raises CorruptError."""
        fields = Fields(value, "usage ledger")
        fields.choice("type", ["usage"])
        fields.integer("v", VERSION, VERSION)
        head = cls(
            ledger=fields.fixed("ledger", LedgerId),
            version=fields.integer("version", 0, MAX_INTEGER),
            entries=fields.integer("entries", 0, MAX_LINES),
            folded_to=fields.integer("folded_to", -1, LAST_HOUR),
            dropped=fields.integer("dropped", 0, MAX_INTEGER),
            forgotten=fields.integer("forgotten", 0, MAX_INTEGER),
            runs=tuple(Run.read(run) for run in fields.array("runs", 0, MAX_RUNS)),
        )
        fields.done()
        return head


@dataclass(frozen=True)
class Snapshot:
    """One ledger, as of one moment."""

    head: Head
    entries: tuple[Entry, ...]

    def lines(self) -> Iterator[bytes]:
        """The text form, line by line, each with its end."""
        return encode_lines(self.head, self.entries)

    @classmethod
    def decode(cls, lines: Iterable[bytes], what: str) -> Self:
        """Reads the lines of a snapshot, hostile as they may be. Raises CorruptError, also for one that was cut off."""
        head: Head | None = None
        entries: list[Entry] = []
        for line in lines:
            if len(line) > MAX_LINE_BYTES and head is not None:
                raise CorruptError(f"{what}: a line of more than {MAX_LINE_BYTES} bytes")
            if not line.endswith(b"\n"):
                raise CorruptError(f"{what}: the last line is cut off")
            if head is None:
                head = Head.read(canonical.decode(line[:-1], what))
            elif len(entries) == head.entries:
                raise CorruptError(f"{what}: more lines than its first one says")
            else:
                entries.append(Entry.decode(line[:-1]))
        if head is None or len(entries) < head.entries:
            raise CorruptError(f"{what}: it is cut off")
        return cls(head, tuple(entries))


def encode_lines(head: Head, entries: Iterable[Entry]) -> Iterator[bytes]:
    """The text form of a ledger whose entries come one by one."""
    yield canonical.encode(head.to_json()) + b"\n"
    for entry in entries:
        yield entry.encode() + b"\n"


def unended(runs: Sequence[Run], part: Part) -> bool:
    """Whether a run of `part` among `runs` may have been killed."""
    return any(run.part is part for run in runs)
