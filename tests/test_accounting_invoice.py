"""Bills: exact decimals, lines that add up, tenants that never mix, and prices of the one price book."""

from __future__ import annotations

import csv
import io
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.accounting.books import Books
from kvcdn.accounting.costs import Prices, cost_of, exact
from kvcdn.accounting.entry import Entry, Key, Outcome, Part
from kvcdn.accounting.hits import Row
from kvcdn.accounting.invoice import COLUMNS, bill, rounded
from kvcdn.accounting.snapshot import Head, LedgerId, Snapshot
from kvcdn.accounting.tariff import TariffBook
from kvcdn.economics.prices import DELIVERIES, STORES
from kvcdn.errors import UsageError

SAMPLE = (Path(__file__).parents[1] / "infra" / "tariff.toml").read_text("utf-8")

MODELS = ("", "aa" * 16, "bb" * 16)

USED = st.lists(
    st.tuples(
        st.sampled_from(["acme", "bolt", "corp", ""]),
        st.sampled_from(MODELS),
        st.integers(100, 103),
        st.sampled_from(list(Part)),
        st.dictionaries(
            st.sampled_from(["tokens_served", "bytes_sent", "tokens_computed", "tokens_prefilled", "tokens_fetched"]),
            st.integers(0, 10**12),
        ),
    )
)


def books(used):
    entries = [Entry(Key(part, hour, tenant, model, "", "", Outcome.HIT), counts) for tenant, model, hour, part, counts in used]
    return Books.of([Snapshot(Head(LedgerId(bytes(16)), 1, len(entries), -1, 0, 0), tuple(entries))])


def tariffs(tariff, *, decimals=2, basis="edge", tenants='"*" = "t"'):
    head = f'currency = "EUR"\ndecimals = {decimals}\nbasis = "{basis}"\n'
    return TariffBook.of_toml(f"{head}[tariff.t]\n{tariff}\n[tenants]\n{tenants}\n", "test")


def test_serverless_by_hand():
    """12,345,678 tokens at 0.10 a million are 1.2345678, so 1.23; 2.5 GB at 0.02 are 0.05; 3 million published at 1.5, 4.50."""
    book = tariffs('kind = "serverless"\nreused_per_million = 0.10\npublished_per_million = 1.5\ndelivered_per_gb = 0.02')
    used = [
        ("acme", MODELS[1], 100, Part.EDGE, {"tokens_served": 12_000_000, "bytes_sent": 2_500_000_000}),
        ("acme", MODELS[1], 101, Part.EDGE, {"tokens_served": 345_678}),
        ("acme", MODELS[1], 101, Part.ORIGIN, {"tokens_computed": 3_000_000}),
        ("acme", MODELS[1], 101, Part.CLIENT, {"tokens_fetched": 999_999_999}),
        ("acme", MODELS[1], 200, Part.EDGE, {"tokens_served": 10**12}),
    ]
    (invoice,) = bill(books(used), book, 100, 102).invoices
    assert [("tokens reused", "1.23"), ("tokens published", "4.50"), ("bytes delivered", "0.05")] == [
        (line.item, str(line.amount)) for line in invoice.lines
    ]
    assert Decimal("5.78") == invoice.total


def test_the_clients_own_counts_by_hand():
    """For who runs the clients: what they reused from anywhere, and what they prefilled or computed beside."""
    book = tariffs('kind = "serverless"\nreused_per_million = 1\nprefilled_per_million = 10', basis="client")
    counts = {
        "tokens_fetched": 10**6,
        "tokens_local": 10**6,
        "tokens_kept": 10**6,
        "tokens_prefilled": 10**6,
        "tokens_computed": 10**6,
    }
    used = [("acme", "", 100, Part.CLIENT, counts), ("acme", "", 100, Part.EDGE, {"tokens_served": 10**9})]
    (invoice,) = bill(books(used), book, 100, 101).invoices
    assert ["3.00", "20.00"] == [str(line.amount) for line in invoice.lines]


def test_provisioned_by_hand():
    """A rate of 1,000 tokens an hour for three hours: of 1,500, 0 and 1,200 tokens, 700 are over it, in hours of their own."""
    book = tariffs('kind = "provisioned"\ntokens_per_hour = 1000\nper_hour = 2.5\nover_per_million = 100', decimals=3)
    used = [("acme", MODELS[number], hour, Part.EDGE, {"tokens_served": tokens}) for number, hour, tokens in (
        (1, 100, 900), (2, 100, 600), (1, 102, 1200))]  # fmt: skip
    (invoice,) = bill(books(used), book, 100, 103).invoices
    assert [("reserved hours", 3, "7.500"), ("tokens over the reserved rate", 700, "0.070")] == [
        (line.item, line.quantity, str(line.amount)) for line in invoice.lines
    ]


def test_dedicated_by_hand():
    """Two machines for 720 hours at 4: owed, whether anything was asked or not."""
    book = tariffs('kind = "dedicated"\nmachines = 2\nper_hour = 4', tenants='acme = "t"')
    (invoice,) = bill(books([]), book, 0, 720).invoices
    assert [("machine hours", 1440, Decimal("5760.00"))] == [(line.item, line.quantity, line.amount) for line in invoice.lines]


@settings(deadline=None)
@given(USED, st.integers(0, 6), st.sampled_from(["edge", "client"]))
def test_lines_add_up_and_tenants_never_mix(used, decimals, basis):
    """A bill is the same whatever the others do; its lines are rounded to the currency, and sum to its total."""
    text = SAMPLE.replace("decimals = 2", f"decimals = {decimals}").replace('basis = "edge"', f'basis = "{basis}"')
    book = TariffBook.of_toml(text, "sample")
    together = bill(books(used), book, 100, 104)
    assert together.total == sum(invoice.total for invoice in together.invoices)
    for invoice in together.invoices:
        assert {invoice.tenant} == {line.tenant for line in invoice.lines} | {invoice.tenant}
        assert invoice.total == sum((line.amount for line in invoice.lines), Decimal(0))
        assert all(-decimals == line.amount.as_tuple().exponent for line in invoice.lines)
        alone = bill(books([one for one in used if one[0] == invoice.tenant]), book, 100, 104)
        assert [invoice] == [one for one in alone.invoices if one.tenant == invoice.tenant]
    assert {"acme", "bolt"} <= {invoice.tenant for invoice in together.invoices}
    assert "" not in {invoice.tenant for invoice in together.invoices}
    rows = list(csv.DictReader(io.StringIO(together.to_csv())))
    assert together.total == sum((Decimal(row["amount"]) for row in rows), Decimal(0))
    assert [tuple(row) for row in rows] == [COLUMNS] * len(rows)
    shown = together.to_json()
    assert [str(invoice.total) for invoice in together.invoices] == [one["total"] for one in shown["invoices"]]


@settings(deadline=None)
@given(st.integers(0, 10**15), st.decimals(0, 10**9, places=12), st.integers(0, 12))
def test_amounts_are_rounded_once(quantity, price, decimals):
    """To within half of the last decimal of the exact product."""
    amount = rounded(quantity, price, Decimal(10**6), decimals)
    from fractions import Fraction

    true = Fraction(quantity) * Fraction(price) / 10**6
    assert abs(Fraction(amount) - true) <= Fraction(1, 2 * 10**decimals)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[tariff.t]\nkind = 'serverless'\nreused_per_million = 1\n",
        "[tariff.t]\nkind = 'free'\n[tenants]\na = 't'",
        "[tariff.t]\nkind = 'serverless'\n[tenants]\na = 't'",
        "[tariff.t]\nkind = 'serverless'\nreused_per_million = -1\n[tenants]\na = 't'",
        "[tariff.t]\nkind = 'serverless'\nreused_per_million = nan\n[tenants]\na = 't'",
        "[tariff.t]\nkind = 'serverless'\nreused_per_million = 1e999\n[tenants]\na = 't'",
        "[tariff.t]\nkind = 'serverless'\nreused_per_million = 1e-30\n[tenants]\na = 't'",
        "[tariff.t]\nkind = 'serverless'\nreused_per_million = '1'\n[tenants]\na = 't'",
        "[tariff.t]\nkind = 'serverless'\nreused_per_million = true\n[tenants]\na = 't'",
        "[tariff.t]\nkind = 'dedicated'\nper_hour = 1\nmachines = 1.5\n[tenants]\na = 't'",
        "[tariff.t]\nkind = 'dedicated'\nper_hour = 1\nreused_per_million = 1\n[tenants]\na = 't'",
        "[tariff.t]\nkind = 'dedicated'\nper_hour = 1\n[tenants]\na = 'u'",
        "currency = 'dollars'\n[tariff.t]\nkind = 'dedicated'\nper_hour = 1\n[tenants]\na = 't'",
        "decimals = 13\n[tariff.t]\nkind = 'dedicated'\nper_hour = 1\n[tenants]\na = 't'",
        "basis = 'guess'\n[tariff.t]\nkind = 'dedicated'\nper_hour = 1\n[tenants]\na = 't'",
        "discount = 1\n[tariff.t]\nkind = 'dedicated'\nper_hour = 1\n[tenants]\na = 't'",
    ],
)
def test_what_is_no_tariff_is_refused(text):
    """With one line that names the file."""
    with pytest.raises(UsageError, match=r"tariffs\.toml"):
        TariffBook.of_toml(text, "tariffs.toml")


def test_costs_by_hand():
    """4 GB sent at 0.01, 2 GB read at 0.09, 3 reads at 0.0004 and 6 writes at 0.005 a thousand, 2 minutes of 60 USD an hour."""
    prices = Prices(STORES["s3"], DELIVERIES["bunny"], 60.0)
    row = Row(
        "all",
        client={"bytes_origin": 10**9, "requests_origin": 1, "saved_ms": 300_000, "lost_ms": 60_000},
        edge={"bytes_sent": 4 * 10**9, "origin_bytes": 10**9, "origin_requests": 2},
        origin={"blocks_uploaded": 5, "documents": 1, "prefill_ms": 120_000},
    )
    cost = cost_of(row, prices)
    assert (Decimal("0.04"), Decimal("0.18")) == (cost.edge_traffic, cost.origin_traffic)
    assert Decimal("0.0000312") == cost.origin_requests
    assert (Decimal(2), Decimal(4)) == (cost.publishing, cost.saved)
    assert cost.saved - cost.spent == cost.net == Decimal("1.7799688")
    assert "1.7799688" == cost.to_json()["net"]
    assert Decimal("0.09") == exact(0.09)
