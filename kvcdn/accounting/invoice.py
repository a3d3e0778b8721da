"""Invoices: what each tenant owes for a period, line by line, by its tariff.

A line is a quantity times a price, rounded once to the currency's decimals, halves to even; a bill's total is the sum of its
rounded lines, so that it can be added up by hand. Every line is made of one tenant's entries alone. A period is whole hours.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from typing import Any

from kvcdn.accounting.books import Books
from kvcdn.accounting.entry import Counts, Entry, Part
from kvcdn.accounting.tariff import Basis, Kind, Tariff, TariffBook

MILLION = Decimal(10**6)

GB = Decimal(10**9)

_EXACT = Context(prec=60)
"""Digits of products before they are rounded: counts have 16, prices 21."""

_MILLION = "10^6 tokens"

COLUMNS = (
    "tenant",
    "tariff",
    "kind",
    "model",
    "item",
    "quantity",
    "unit",
    "unit_price",
    "amount",
    "currency",
    "from_hour",
    "to_hour",
)


@dataclass(frozen=True)
class Line:
    """One line of a bill. `quantity` counts tokens, bytes or hours; the price is for one `unit` of them."""

    tenant: str
    tariff: str
    kind: Kind
    model: str
    """A model tag; empty where the line is for all models."""
    item: str
    quantity: int
    unit: str
    unit_price: Decimal
    amount: Decimal


@dataclass(frozen=True)
class Invoice:
    """All a tenant owes for a period."""

    tenant: str
    tariff: str
    lines: tuple[Line, ...]

    @property
    def total(self) -> Decimal:
        return sum((line.amount for line in self.lines), Decimal(0))


@dataclass(frozen=True)
class Billing:
    """The bills of all tenants, for the hours `first` to before `last`."""

    book: TariffBook
    first: int
    last: int
    invoices: tuple[Invoice, ...]
    unbilled: tuple[str, ...]
    """Tenants that have counts and no tariff; `` for what is on nobody's account."""

    @property
    def total(self) -> Decimal:
        return sum((invoice.total for invoice in self.invoices), Decimal(0))

    def rows(self) -> list[dict[str, str]]:
        """The lines as texts, by COLUMNS."""
        return [
            {
                "tenant": line.tenant,
                "tariff": line.tariff,
                "kind": line.kind.value,
                "model": line.model,
                "item": line.item,
                "quantity": str(line.quantity),
                "unit": line.unit,
                "unit_price": format(line.unit_price, "f"),
                "amount": format(line.amount, "f"),
                "currency": self.book.currency,
                "from_hour": str(self.first),
                "to_hour": str(self.last),
            }
            for invoice in self.invoices
            for line in invoice.lines
        ]

    def to_csv(self) -> str:
        """The lines as RFC 4180 has them."""
        out = io.StringIO()
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        writer.writerows(self.rows())
        return out.getvalue()

    def to_json(self) -> dict[str, Any]:
        """Money as text: no binary fractions."""
        rows = self.rows()
        return {
            "currency": self.book.currency,
            "decimals": self.book.decimals,
            "basis": self.book.basis.value,
            "from_hour": self.first,
            "to_hour": self.last,
            "invoices": [
                {
                    "tenant": invoice.tenant,
                    "tariff": invoice.tariff,
                    "total": format(invoice.total, "f"),
                    "lines": [row for row in rows if row["tenant"] == invoice.tenant],
                }
                for invoice in self.invoices
            ],
            "total": format(self.total, "f"),
            "unbilled": list(self.unbilled),
        }


def bill(books: Books, book: TariffBook, first: int, last: int) -> Billing:
    """What `books` say that tenants owe for the hours `first` to before `last`.

    Tenants named in the tariffs are billed whether they have counts or not: reserved hours are owed in any case.
    """
    by_tenant: dict[str, dict[tuple[str, int], Counts]] = {}
    for entry in books.between(first, last):
        found = _billable(entry, book.basis)
        if found:
            counts = by_tenant.setdefault(entry.key.tenant, {}).setdefault((entry.key.model, entry.key.hour), {})
            for name, count in found.items():
                counts[name] = counts.get(name, 0) + count
    named = {tenant for tenant in book.tenants if not set("*?[") & set(tenant)}
    invoices, unbilled = [], []
    for tenant in sorted({*by_tenant, *named}):
        tariff = book.of(tenant)
        if tariff is None:
            unbilled.append(tenant)
        else:
            lines = _lines(_Biller(tenant, tariff, book.decimals), by_tenant.get(tenant, {}), last - first)
            invoices.append(Invoice(tenant, tariff.name, tuple(lines)))
    return Billing(book, first, last, tuple(invoices), tuple(unbilled))


def _billable(entry: Entry, basis: Basis) -> Counts:
    """What of an entry is charged for: tokens reused, prefilled, published; bytes delivered."""
    counts = entry.counts
    match entry.key.part:
        case Part.ORIGIN:
            found = {"published": counts.get("tokens_computed", 0)}
        case Part.EDGE if basis is Basis.EDGE:
            found = {"reused": counts.get("tokens_served", 0), "delivered": counts.get("bytes_sent", 0)}
        case Part.CLIENT if basis is Basis.CLIENT:
            found = {
                "reused": sum(counts.get(name, 0) for name in ("tokens_fetched", "tokens_local", "tokens_kept")),
                "prefilled": counts.get("tokens_prefilled", 0) + counts.get("tokens_computed", 0),
                "delivered": counts.get("bytes_edge", 0) + counts.get("bytes_origin", 0),
            }
        case _:
            found = {}
    return {name: count for name, count in found.items() if count}


@dataclass(frozen=True)
class _Biller:
    """Makes the lines of one tenant."""

    tenant: str
    tariff: Tariff
    decimals: int

    def line(self, model: str, item: str, quantity: int, unit: str, price: str, per: Decimal = Decimal(1)) -> Iterator[Line]:
        """One line, or none where nothing is charged for that."""
        if quantity and price in self.tariff.prices:
            unit_price = self.tariff.prices[price]
            amount = rounded(quantity, unit_price, per, self.decimals)
            yield Line(self.tenant, self.tariff.name, self.tariff.kind, model, item, quantity, unit, unit_price, amount)

    def hours(self, found: Mapping[tuple[str, int], Counts], hours: int) -> Iterator[Line]:
        """What is owed by the hour, and what exceeded it."""
        if self.tariff.kind is Kind.DEDICATED:
            machines = int(self.tariff.prices.get("machines", Decimal(1)))
            yield from self.line("", "machine hours", hours * machines, "hour", "per_hour")
        elif self.tariff.kind is Kind.PROVISIONED:
            yield from self.line("", "reserved hours", hours, "hour", "per_hour")
            # Compared hour by hour: what one hour leaves unused does not pay for another.
            by_hour: dict[int, int] = {}
            for (_, hour), counts in found.items():
                by_hour[hour] = by_hour.get(hour, 0) + counts.get("reused", 0) + counts.get("prefilled", 0)
            reserved = int(self.tariff.price("tokens_per_hour"))
            over = sum(max(tokens - reserved, 0) for tokens in by_hour.values())
            yield from self.line("", "tokens over the reserved rate", over, _MILLION, "over_per_million", MILLION)

    def amounts(self, model: str, counts: Counts) -> Iterator[Line]:
        """What is owed by what was used of one model."""
        if self.tariff.kind is Kind.SERVERLESS:
            for item in ("reused", "prefilled"):
                yield from self.line(model, f"tokens {item}", counts.get(item, 0), _MILLION, f"{item}_per_million", MILLION)
        yield from self.line(model, "tokens published", counts.get("published", 0), _MILLION, "published_per_million", MILLION)
        yield from self.line(model, "bytes delivered", counts.get("delivered", 0), "10^9 bytes", "delivered_per_gb", GB)


def _lines(biller: _Biller, found: Mapping[tuple[str, int], Counts], hours: int) -> Iterator[Line]:
    yield from biller.hours(found, hours)
    models: dict[str, Counts] = {}
    for (model, _), counts in sorted(found.items()):
        total = models.setdefault(model, {})
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
    for model, counts in models.items():
        yield from biller.amounts(model, counts)


def rounded(quantity: int, price: Decimal, per: Decimal, decimals: int) -> Decimal:
    """`quantity` at `price` for each `per`, rounded to so many decimals, halves to even."""
    with localcontext(_EXACT):
        exact = quantity * price / per
        return exact.quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_HALF_EVEN)
