"""What `kvcdn usage` says of money: costs at list prices, and bills by tariff."""

from __future__ import annotations

import enum
import sys
from decimal import Decimal
from pathlib import Path

from kvcdn.accounting.books import Books
from kvcdn.accounting.costs import Cost, Prices
from kvcdn.accounting.entry import HOUR_SECONDS
from kvcdn.accounting.invoice import bill
from kvcdn.accounting.tariff import TariffBook
from kvcdn.cli.output import note, print_json
from kvcdn.cli.small_file import read_text
from kvcdn.economics.case import hourly
from kvcdn.economics.checks import known, number
from kvcdn.economics.pricebook import PriceBook
from kvcdn.errors import NotFoundError, UsageError

SHOWN_DECIMALS = 4
"""Of dollars, for people."""


_HEADINGS = {
    "edge_traffic": "edge traffic",
    "tier_traffic": "between edges",
    "origin_traffic": "origin traffic",
    "origin_requests": "origin requests",
    "publishing": "publishing",
    "saved": "prefill saved",
    "net": "net",
}
"""Of the table, by the field of a cost."""


class Export(enum.StrEnum):
    """Forms of bills."""

    CSV = "csv"
    JSON = "json"


def read_prices(
    store: str | None, delivery: str | None, device: str | None, gpu_hour: float | None, path: Path | None
) -> Prices:
    """The prices that options name, by default S3's and of edges of one's own. Raises UsageError, NotFoundError."""
    if device is None and gpu_hour is None:
        raise UsageError(
            "--cost needs the price of an hour of what readers prefill on", hint="--device h100, or --gpu-hour 2.50; 0 for none"
        )
    book = PriceBook.presets()
    if path is not None:
        book = book.with_toml(read_text(path), str(path))
    if device is None:
        hour, source = gpu_hour or 0.0, "given"
    else:
        chosen = known("device", device, book.devices)
        hour, price = hourly(chosen, gpu_hour)
        source = f"{chosen.name}: {price}"
    return Prices(
        known("store", store or "s3", book.stores),
        known("delivery", delivery or "own", book.deliveries),
        number("--gpu-hour", hour),
        source,
    )


def read_tariff(path: Path | None) -> TariffBook:
    """The tariffs at `path`. Raises UsageError, NotFoundError."""
    if path is None:
        raise UsageError("--export needs --tariff FILE", hint="infra/tariff.toml is a commented sample")
    return TariffBook.of_toml(read_text(path), str(path))


def show_bills(books: Books, book: TariffBook, first: int | None, last: int | None, *, as_csv: bool) -> None:
    """Bills for the hours from `first` to before `last`, by default those in which anything was counted."""
    hours = [entry.key.hour for entry in books]
    if not hours and (first is None or last is None):
        raise NotFoundError("nothing was counted", hint="name the period with --from and --to")
    first = min(hours) if first is None else first
    last = max(hours) + 1 if last is None else last
    if last <= first:
        raise UsageError("the period ends before it begins", hint="--from comes before --to")
    found = bill(books, book, first, last)
    if as_csv:
        sys.stdout.write(found.to_csv())
        sys.stdout.flush()
    else:
        print_json(found.to_json())
    for tenant in found.unbilled:
        who = tenant or "what is on nobody's account"
        note(f"kvcdn: {who} has counts and no tariff")
    days = Decimal(last - first) * HOUR_SECONDS / 86400
    note(f"{len(found.invoices)} bills, {found.total} {book.currency} together, for {last - first:,} hours ({days:.1f} days)")


def cost_pairs(cost: Cost, prices: Prices) -> list[tuple[str, str]]:
    """Names and amounts for people."""
    between = [("between edges", f"{dollars(cost.tier_traffic)} at the same price")] if cost.tier_traffic else []
    return [
        (
            "edges' traffic",
            f"{dollars(cost.edge_traffic)} at {prices.delivery.egress_usd_per_gb} USD/GB ({prices.delivery.name})",
        ),
        *between,
        (
            "origin's traffic",
            f"{dollars(cost.origin_traffic)} at {prices.store.egress_usd_per_gb} USD/GB ({prices.store.name})",
        ),
        ("origin's requests", dollars(cost.origin_requests)),
        ("publishing", f"{dollars(cost.publishing)} ({prices.device})"),
        ("prefill saved", f"{dollars(cost.saved)} of that device's time"),
        ("net", f"{dollars(cost.net)} {'saved' if cost.net >= 0 else 'lost'}, storage by the month not counted"),
    ]


def cost_table(found: list[tuple[str, Cost]], heading: str) -> tuple[list[str], list[list[str]]]:
    """The same by rows."""
    names = ("edge_traffic", "tier_traffic", "origin_traffic", "origin_requests", "publishing", "saved", "net")
    shown = [name for name in names if name != "tier_traffic" or any(cost.tier_traffic for _, cost in found)]
    return [heading, *map(_HEADINGS.__getitem__, shown)], [
        [title, *(dollars(getattr(cost, name)) for name in shown)] for title, cost in found
    ]


def dollars(amount: Decimal) -> str:
    """For people: rounded; --json has it whole."""
    return f"{amount:,.{SHOWN_DECIMALS}f} USD"
