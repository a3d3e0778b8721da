"""`kvcdn usage`: what client, edge and origin have counted, merged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvcdn.accounting.books import Books
from kvcdn.accounting.costs import cost_of
from kvcdn.accounting.entry import Loss, hour_of
from kvcdn.accounting.hits import By, Row, rows
from kvcdn.accounting.reconcile import reconcile as compare
from kvcdn.cli.options import AsJson, Token
from kvcdn.cli.output import note, print_json, print_pairs, print_table, print_text, size
from kvcdn.cli.usage_money import Export, cost_pairs, cost_table, read_prices, read_tariff, show_bills
from kvcdn.cli.usage_ties import read_hour, show_hour, show_reconciliation
from kvcdn.errors import UsageError

SHOWN_ROWS = 50
"""Of a table for people; --json has all."""

SHOWN_DIGITS = 16
"""Of a model's tag, or a document's address."""


def usage(
    ledgers: Annotated[
        list[Path] | None,
        typer.Argument(help="Ledgers, or their snapshots; by default that of KVCDN_USAGE.", metavar="[LEDGER]..."),
    ] = None,
    edge: Annotated[
        list[str] | None, typer.Option("--edge", help="URL of an edge that keeps a ledger, where its administration is.")
    ] = None,
    token: Token = None,
    by: Annotated[By, typer.Option(help="What counts are told by.")] = By.ALL,
    since: Annotated[
        str | None, typer.Option("--from", help="First hour, UTC: 2026-11-01 or 2026-11-01T08.", metavar="TIME")
    ] = None,
    until: Annotated[str | None, typer.Option("--to", help="Hour before which it ends.", metavar="TIME")] = None,
    store: Annotated[str | None, typer.Option(help="With --cost: prices of the origin's store, such as s3 or r2.")] = None,
    delivery: Annotated[str | None, typer.Option(help="With --cost: prices of what edges send, such as own or bunny.")] = None,
    device: Annotated[str | None, typer.Option(help="With --cost: the device that readers prefill on, such as h100.")] = None,
    gpu_hour: Annotated[float | None, typer.Option(min=0, help="With --cost: USD for an hour of that device.")] = None,
    prices: Annotated[
        Path | None, typer.Option(help="With --cost: prices of your own; infra/prices.toml is a commented sample.")
    ] = None,
    export: Annotated[Export | None, typer.Option(help="Bills of all tenants, by --tariff, to standard output.")] = None,
    tariff: Annotated[
        Path | None, typer.Option(help="With --export: tariffs; infra/tariff.toml is a commented sample.")
    ] = None,
    *,
    cost: Annotated[bool, typer.Option("--cost", help="What it all came to, in US dollars.")] = False,
    reconcile: Annotated[
        bool, typer.Option("--reconcile", help="Compare what clients and edges say of each prompt; exit code 4 for a fault.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Merge ledgers of clients, edges and origins: hit ratios and who lost the hits, bytes, time saved; costs; bills.

    The same ledger given twice counts once.
    """
    from kvcdn.cli.usage_sources import read_books  # noqa: PLC0415 - see kvcdn.cli

    configured = os.environ.get("KVCDN_USAGE", "")
    paths = ledgers or ([Path(configured)] if configured and not edge else [])
    if not paths and not edge:
        raise UsageError("name a ledger, or an edge", hint="kvcdn usage FILE..., or --edge URL, or set KVCDN_USAGE")
    first, last = read_hour(since, "--from"), read_hour(until, "--to")
    book = None if export is None else read_tariff(tariff)
    everything = read_books(paths, edge or (), token)
    books = everything.between(first, last)
    _warn(everything)
    if book is not None:
        show_bills(books, book, first, last, as_csv=export is Export.CSV)
        return
    if reconcile:
        show_reconciliation(compare(everything, first, last), as_json=as_json)
        return
    found = rows(books.tied(), by)
    priced = read_prices(store, delivery, device, gpu_hour, prices) if cost else None
    if as_json:
        shown = [{**row.to_json(), **({"cost": cost_of(row, priced).to_json()} if priced else {})} for row in found]
        print_json({"by": by.value, "rows": shown, "ledgers": len(books.ledgers)})
        return
    if not found:
        print_text("nothing was counted")
        return
    if by is By.ALL:
        print_pairs([*_pairs(found[0]), *(cost_pairs(cost_of(found[0], priced), priced) if priced else [])])
    else:
        print_table(*_table(found, by))
        if priced:
            print_text("")
            print_table(*cost_table([(_named(row, by), cost_of(row, priced)) for row in found[:SHOWN_ROWS]], by.value))


def _warn(books: Books) -> None:
    if books.dropped or books.forgotten:
        note(f"{books.dropped:,} entries were never written, {books.forgotten:,} sums deleted for want of room")
    late = sum(entry.key.hour > hour_of() for entry in books)
    if late:
        note(f"{late:,} entries lie in hours to come: a clock was wrong where they were counted, and --to may leave them out")
    if books.runs:
        count = len(books.runs)
        who = "a process has not said that it" if count == 1 else f"{count:,} processes have not said that they"
        note(f"{who} ended: still counting, or killed; what was not written yet is missing")


def share(value: float | None) -> str:
    """A ratio for people."""
    return "-" if value is None else f"{100 * value:.1f} %"


def _pairs(row: Row) -> list[tuple[str, str]]:
    client, edge, origin = row.client, row.edge, row.origin
    found: list[tuple[str, str]] = []
    if client:
        begun, ended = client.get("begun", 0), client.get("prompts", 0)
        found.append(("prompts", f"{ended:,}" + (f", {begun - ended:,} begun and not ended" if begun != ended else "")))
        ways = ("fetched", "local", "kept", "computed", "prefilled")
        parts = ", ".join(f"{client[f'tokens_{way}']:,} {way}" for way in ways if client.get(f"tokens_{way}"))
        found.append(("tokens asked", f"{client.get('tokens_asked', 0):,}: {parts}"))
        found.append(("reused", f"{share(row.hit_ratio)} of {client.get('tokens_offered', 0):,} tokens that documents offered"))
        found.append(("lost", _losses(row) or "nothing"))
        received = client.get("bytes_edge", 0) + client.get("bytes_origin", 0)
        tiers = f"{size(client.get('bytes_edge', 0))} from edges, {size(client.get('bytes_origin', 0))} from the origin"
        found.append(("received", f"{tiers}; {size(received - client.get('bytes_used', 0))} of it in vain"))
        found.append(("time", f"{row.saved_ms / 1000:,.1f} s saved"))
    if edge:
        asked = edge.get("requests", 0) - edge.get("requests_tiers", 0)
        answers = ", ".join(f"{size(count)} {outcome}" for outcome, count in sorted(row.answers.items()))
        found.append(
            (
                "edges sent",
                f"{size(row.bytes_to_readers)} in {asked:,} answers: {answers or '-'}",
            )
        )
        found.append(
            ("edges' hits", f"{share(row.edge_hit_ratio)} of these bytes; {edge.get('tokens_served', 0):,} tokens served")
        )
        givers = {"origin": "the origin", "tier": "other edges", "peer": "edges of their site"}
        filled = [
            f"{size(edge.get(f'{giver}_bytes', 0))} in {count:,} requests to {who}"
            for giver, who in givers.items()
            if (count := edge.get(f"{giver}_requests", 0)) or giver == "origin"
        ]
        found.append(("edges filled", ", ".join(filled)))
    if origin:
        did = f"{origin.get('documents', 0):,} publications, {origin.get('tokens_published', 0):,} tokens"
        found.append(
            (
                "published",
                f"{did}, {origin.get('tokens_computed', 0):,} computed, {size(origin.get('bytes_uploaded', 0))} written",
            )
        )
    return found


def _losses(row: Row) -> str:
    lost = sorted(row.lost.items(), key=lambda item: -item[1])
    return ", ".join(f"{tokens:,} tokens {loss.value or 'for no known reason'}" for loss, tokens in lost)


def _table(found: list[Row], by: By) -> tuple[list[str], list[list[str]]]:
    headings = [
        by.value,
        "prompts",
        "asked",
        "reused",
        *(loss.value for loss in Loss if _any(found, loss)),
        "sent",
        "edge hits",
        "saved",
    ]
    shown = [
        [
            _named(row, by),
            f"{row.client.get('prompts', 0):,}",
            f"{row.client.get('tokens_asked', 0):,}",
            share(row.hit_ratio),
            *(f"{row.lost.get(loss, 0):,}" for loss in Loss if _any(found, loss)),
            size(row.bytes_to_readers),
            share(row.edge_hit_ratio),
            f"{row.saved_ms / 1000:,.1f} s",
        ]
        for row in found[:SHOWN_ROWS]
    ]
    if len(found) > SHOWN_ROWS:
        note(f"{len(found) - SHOWN_ROWS} more rows: --json has all")
    return headings, shown


def _named(row: Row, by: By) -> str:
    name = show_hour(int(row.name)) if by is By.HOUR else row.name
    return name[:SHOWN_DIGITS] if by in (By.MODEL, By.DOCUMENT) else name


def _any(found: list[Row], loss: Loss) -> bool:
    return any(row.lost.get(loss) for row in found)
