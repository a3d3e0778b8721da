"""Reconciliation: each difference has a name and a size, and what has none is a fault."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.accounting.books import Books
from kvcdn.accounting.entry import Entry, Key, Loss, Outcome, Part
from kvcdn.accounting.hits import By, rows
from kvcdn.accounting.reconcile import Verdict, reconcile
from kvcdn.accounting.snapshot import Head, LedgerId, Run, RunId, Snapshot

PROMPT = "ab" * 16


def ledger(number, entries, *, killed=None, folded_to=-1, dropped=0):
    runs = () if killed is None else (Run(RunId(bytes(8)), killed, 1, 2),)
    return Snapshot(Head(LedgerId(bytes([number]) * 16), 1, len(entries), folded_to, dropped, 0, runs), tuple(entries))


def client(outcome=Outcome.REUSED, *, prompt=PROMPT, loss=Loss.NONE, tenant="", **counts):
    return Entry(Key(Part.CLIENT, 10, tenant, "", "cd" * 32, prompt, outcome, loss), counts)


def edge(outcome=Outcome.HIT, *, prompt=PROMPT, tenant="acme", **counts):
    return Entry(Key(Part.EDGE, 10, tenant, "", "", prompt, outcome), counts)


BEGUN = client(Outcome.BEGUN, begun=1)


@pytest.mark.parametrize(
    ("theirs", "ours", "killed", "folded_to", "verdict", "apart"),
    [
        ([BEGUN, client(bytes_edge=9, tokens_begun=4)], [edge(bytes_sent=9, tokens_served=4)], None, -1, Verdict.AGREED, 0),
        (
            [BEGUN, client(bytes_edge=9, tokens_begun=4)],
            [edge(bytes_sent=9, tokens_served=5)],
            None,
            -1,
            Verdict.UNEXPLAINED,
            0,
        ),
        ([BEGUN, client(bytes_edge=5, requests_cut=1)], [edge(bytes_sent=9)], None, -1, Verdict.IN_FLIGHT, 4),
        ([BEGUN, client(bytes_edge=5)], [edge(bytes_sent=9)], None, -1, Verdict.UNEXPLAINED, 4),
        ([BEGUN], [edge(bytes_sent=9)], None, -1, Verdict.NOT_ENDED, 9),
        ([], [edge(bytes_sent=9)], Part.CLIENT, -1, Verdict.NO_CLIENT_LEDGER, 9),
        ([client(prompt="cd" * 16)], [edge(bytes_sent=9)], Part.CLIENT, -1, Verdict.CLIENT_UNKNOWN, 9),
        ([client(prompt="cd" * 16)], [edge(bytes_sent=9)], None, -1, Verdict.UNEXPLAINED, 9),
        ([BEGUN, client(bytes_edge=9)], [], None, -1, Verdict.NO_EDGE_LEDGER, 9),
        ([BEGUN, client(bytes_edge=9)], [edge(bytes_sent=4)], Part.EDGE, -1, Verdict.EDGE_LOST, 5),
        ([BEGUN, client(bytes_edge=9)], [edge(bytes_sent=4)], None, -1, Verdict.UNEXPLAINED, 5),
        ([BEGUN, client(bytes_edge=9)], [edge(bytes_sent=4)], None, 10, Verdict.FOLDED, 5),
    ],
)
def test_each_difference_has_a_name(theirs, ours, killed, folded_to, verdict, apart):
    """And a size, which is the most by which the two are known to differ."""
    found = reconcile(Books.of([ledger(1, theirs), ledger(2, ours, killed=killed, folded_to=folded_to)]))
    assert {verdict: 1} == {name: count for name, count in found.prompts.items() if name is not Verdict.AGREED} or (
        verdict is Verdict.AGREED and {Verdict.AGREED: 1} == found.prompts
    )
    assert apart == found.bound
    assert found.holds is not verdict.is_fault
    assert abs(found.sent - found.received) <= found.bound


@pytest.mark.parametrize(
    ("theirs", "ours", "full"),
    [
        ([client(prompt="cd" * 16)], [edge(bytes_sent=9)], Part.CLIENT),
        ([BEGUN, client(bytes_edge=9)], [edge(prompt="")], Part.EDGE),
    ],
)
def test_a_disk_that_was_full_explains_what_its_ledger_lacks(theirs, ours, full):
    """The ledger says so itself; without that it is a fault, and another's full disk explains nothing."""

    def told(client_dropped, edge_dropped):
        return reconcile(Books.of([ledger(1, theirs, dropped=client_dropped), ledger(2, ours, dropped=edge_dropped)]))

    client_full = full is Part.CLIENT
    found = told(int(client_full), int(not client_full))
    assert (1, True, 9) == (found.prompts[Verdict.DROPPED], found.holds, found.bound)
    for dropped in ((0, 0), (int(not client_full), int(client_full))):
        assert 1 == told(*dropped).prompts[Verdict.UNEXPLAINED]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100), st.booleans())),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100))),
)
def test_sent_and_received_never_differ_by_more_than_is_said(theirs, ours):
    """Whatever the two say."""
    clients = [client(prompt=f"{who:032x}", bytes_edge=count, requests_cut=int(cut)) for who, count, cut in theirs]
    edges = [edge(prompt=f"{who:032x}", bytes_sent=count) for who, count in ours]
    found = reconcile(Books.of([ledger(1, clients), ledger(2, edges)]))
    assert abs(found.sent - found.received) <= found.bound
    assert sum(found.prompts.values()) == len({one.key.prompt for one in (*clients, *edges)})


def test_bytes_without_a_prompt_are_told_apart():
    """Readers who do not count are served, too."""
    found = reconcile(Books.of([ledger(1, [edge(prompt="", bytes_sent=7), edge(bytes_sent=3)]), ledger(2, [BEGUN])]))
    assert (3, 7) == (found.sent, found.untied)


@pytest.mark.parametrize(
    ("sent", "filled", "killed", "dropped", "verdict"),
    [
        (9, 9, None, 0, Verdict.AGREED),
        (9, 5, None, 0, Verdict.IN_FLIGHT),
        (5, 9, None, 0, Verdict.UNEXPLAINED),
        (5, 9, Part.EDGE, 0, Verdict.EDGE_LOST),
        (5, 9, Part.CLIENT, 0, Verdict.UNEXPLAINED),
        (5, 9, None, 1, Verdict.DROPPED),
        (0, 9, None, 0, Verdict.NO_EDGE_LEDGER),
        (9, 0, None, 0, Verdict.NO_EDGE_LEDGER),
    ],
)
def test_edges_that_fill_from_edges_agree(sent, filled, killed, dropped, verdict):
    """In sum; more filled than sent is a fault, unless an edge was killed or had no room to write it down."""
    upper = [edge(prompt="", bytes_sent=sent + 3, bytes_tiers=sent)]
    lower = [edge(Outcome.FILLED, prompt="", tier_bytes=filled, origin_bytes=4)]
    found = reconcile(Books.of([ledger(1, upper, killed=killed), ledger(2, lower, dropped=dropped)]))
    assert (sent, filled, verdict, 3) == (found.tiers.sent, found.tiers.filled, found.tiers.verdict, found.untied)
    assert found.holds is not verdict.is_fault
    assert {"bytes_sent": sent, "bytes_filled": filled, "verdict": verdict.value} == found.to_json()["tiers"]


def test_an_edge_that_had_it_is_why_the_hit_was_lost():
    """The client only sees that nothing is there; a refusal is its own, whatever edges had."""
    lost = client(Outcome.MISSED, loss=Loss.NOT_PUBLISHED, tokens_lost=100, tokens_offered=100)
    refused = client(Outcome.MISSED, prompt="cd" * 16, loss=Loss.REFUSED, tokens_lost=50, tokens_offered=50)
    ours = [edge(Outcome.MATCHED, blocks_evicted=1), edge(Outcome.MATCHED, prompt="cd" * 16, blocks_evicted=1)]
    books = Books.of([ledger(1, [lost, refused]), ledger(2, ours)])
    (row,) = rows(books, By.ALL)
    assert {Loss.EVICTED: 100, Loss.REFUSED: 50} == row.lost
    assert 0 == row.hit_ratio


def test_a_prompt_ties_a_tenant_to_a_document():
    """The edge knows the tenant, the client the document; where a prompt has two tenants, neither is believed."""
    ours = [edge(bytes_sent=9), edge(prompt="ee" * 16, bytes_sent=5), edge(prompt="ee" * 16, tenant="bolt", bytes_sent=5)]
    books = Books.of([ledger(1, [client(bytes_edge=9), client(prompt="ee" * 16, bytes_edge=10)]), ledger(2, ours)]).tied()
    tenants = {row.name: (row.client.get("bytes_edge", 0), row.edge.get("bytes_sent", 0)) for row in rows(books, By.TENANT)}
    assert {"acme": (9, 14), "bolt": (0, 5), "(unknown)": (10, 0)} == tenants
    documents = {row.name: row.edge["bytes_sent"] for row in rows(books, By.DOCUMENT)}
    assert {"cd" * 32: 19} == documents


def test_ratios_are_of_tokens_and_of_bytes():
    """A prompt that offers nothing has no ratio."""
    found = [
        client(tokens_offered=100, tokens_lost=25, saved_ms=900),
        client(tokens_offered=100, tokens_lost=0, lost_ms=400),
        edge(bytes_sent=30),
        edge(Outcome.MISS, bytes_sent=50),
        edge(Outcome.EVICTED, bytes_sent=20),
    ]
    (row,) = rows(Books.of([ledger(1, found)]), By.ALL)
    assert (0.875, 0.3, 500) == (row.hit_ratio, row.edge_hit_ratio, row.saved_ms)
    (empty,) = rows(Books.of([ledger(1, [client(tokens_asked=5)])]), By.ALL)
    assert (None, None) == (empty.hit_ratio, empty.edge_hit_ratio)
    assert {"hit": 30, "miss": 50, "evicted": 20} == row.to_json()["edge_bytes"]


@pytest.mark.parametrize(("published", "holds"), [(4, True), (3, False)])
def test_nobody_reads_more_than_was_published(published, holds):
    """Of a document whose publication is in a ledger; two publications are one document."""
    origin = Entry(
        Key(Part.ORIGIN, 9, "press", "", "cd" * 32, "", Outcome.PUBLISHED), {"documents": 2, "tokens_published": 2 * published}
    )
    theirs, ours = [BEGUN, client(bytes_edge=9, tokens_begun=4)], [edge(bytes_sent=9, tokens_served=4)]
    found = reconcile(Books.of([ledger(1, theirs), ledger(2, ours), ledger(3, [origin])]))
    assert (holds, 1, 0) == (found.holds, found.documents, found.documents_unknown)


def test_a_prompt_that_goes_on_over_the_hour_is_one_prompt():
    """It belongs to the hour in which it began, with all its entries."""
    late = client(bytes_edge=9)
    late = Entry(late.key._replace(hour=11), late.counts)
    books = Books.of([ledger(1, [BEGUN, late]), ledger(2, [edge(bytes_sent=9)])])
    assert ({Verdict.AGREED: 1}, 9, 9) == (
        (found := reconcile(books, 10, 11)).prompts,
        found.sent,
        found.received,
    )
    assert {} == reconcile(books, 11, 12).prompts
