"""Books: ledgers merge in any order, grouped in any way, as often as one likes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.accounting.books import Books
from kvcdn.accounting.entry import Entry, Key, Outcome, Part, total
from kvcdn.accounting.ledger import Ledger
from kvcdn.accounting.snapshot import Head, LedgerId, RunId, Snapshot
from kvcdn.errors import CorruptError
from support.usage import ENTRIES


@st.composite
def histories(draw: st.DrawFn) -> list[list[Snapshot]]:
    """Some ledgers, each in the states that it went through."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        written: list[Entry] = draw(st.lists(ENTRIES, max_size=6))
        states = [
            Snapshot(Head(LedgerId(bytes([number]) * 16), version, version, -1, 0, 0), tuple(written[:version]))
            for version in range(len(written) + 1)
        ]
        found.append(states)
    return found


@settings(deadline=None)
@given(histories(), st.data())
def test_merging_is_associative_commutative_and_idempotent(found, data):
    """Copies of any age: what counts is the latest of each ledger, once."""
    copies = [data.draw(st.sampled_from(states)) for states in found for _ in range(3)]
    three = [Books.of(data.draw(st.lists(st.sampled_from(copies)))) for _ in range(3)]
    one, two, last = three
    assert one.merged(two).merged(last) == one.merged(two.merged(last))
    assert one.merged(two) == two.merged(one)
    assert one.merged(one) == one
    assert one.merged(two).merged(two) == one.merged(two)
    merged = Books.of(data.draw(st.permutations(copies)))
    assert merged == Books.of(copies) == Books.of([*copies, *copies])
    latest = {name: max(one.head.version for one in copies if one.head.ledger == name) for name in merged.ledgers}
    assert latest == {name: snapshot.head.version for name, snapshot in merged.ledgers.items()}
    assert total(entry.counts for entry in merged) == total(
        entry.counts for states in found for entry in states[latest[states[0].head.ledger]].entries
    )


@settings(deadline=None)
@given(st.lists(ENTRIES, min_size=1))
def test_sums_do_not_hang_on_the_order(written):
    """Nor on how entries are spread over ledgers."""

    def ledger(number, entries):
        return Snapshot(Head(LedgerId(bytes([number]) * 16), 1, len(entries), -1, 0, 0), tuple(entries))

    together = Books.of([ledger(1, written)])
    apart = Books.of([ledger(number, [one]) for number, one in enumerate(reversed(written))])
    assert together.sums(lambda key: key) == apart.sums(lambda key: key)
    assert together.sums(lambda key: key if key.tenant == "acme" else None) == apart.sums(
        lambda key: key if key.tenant == "acme" else None
    )


def test_two_ledgers_of_one_name_are_refused():
    """A ledger that went on from a copy, or was changed by hand, is not added up silently."""
    one = Snapshot(Head(LedgerId(bytes(16)), 3, 0, -1, 0, 0), ())
    with pytest.raises(CorruptError):
        Books.of([one, replace(one, head=replace(one.head, dropped=1))])


def restored(tmp_path, detailed):
    """A ledger, its backup, and what became of each: the ledger went on, and so did the backup on another disk."""
    run = RunId(bytes(8))
    with Ledger(tmp_path / "first.sqlite", detailed=detailed) as first:
        for number in range(30):
            first.write(run, [counted(number, 10)])
        earlier = first.snapshot()
        with closing(sqlite3.connect(tmp_path / "backup.sqlite")) as copy, closing(sqlite3.connect(first.path)) as base:
            base.backup(copy)
        for number in range(30, 40):
            first.write(run, [counted(number, 11)])
        gone = first.snapshot()
    with Ledger(tmp_path / "backup.sqlite", detailed=detailed) as second:
        for number in range(40, 70):
            second.write(run, [counted(number, 12)])
        return earlier, gone, second.snapshot()


def counted(number, hour):
    return Entry(Key(Part.EDGE, hour, "", "", "", f"{number:032x}", Outcome.HIT), {"requests": 1, "bytes_sent": number})


@pytest.mark.parametrize("detailed", [1000, 20])
def test_a_ledger_that_went_on_from_a_restored_copy_is_not_taken_for_the_same(detailed, tmp_path):
    """The longer would swallow what the other counted; each goes with the backup, whether entries were folded or not."""
    earlier, gone, other = restored(tmp_path, detailed)
    assert earlier.head.ledger == gone.head.ledger == other.head.ledger
    assert earlier.head.version < gone.head.version < other.head.version
    assert [gone] == list(Books.of([earlier, gone, earlier]).ledgers.values())
    assert [other] == list(Books.of([other, earlier]).ledgers.values())
    for both in ([gone, other], [other, gone], [earlier, gone, other]):
        with pytest.raises(CorruptError, match="neither holds all of the other"):
            Books.of(both)
