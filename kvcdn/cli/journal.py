"""`kvcdn journal`: who published, removed, retired and revoked what at an origin, and whether that record is whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcdn.cli.inspect import SHORT
from kvcdn.cli.options import AsJson, Endpoint, OwnOrigin, TrustFile, open_origin, trust_list
from kvcdn.cli.output import counted, note, print_json, print_pairs, print_table, print_text, ticking
from kvcdn.errors import CorruptError, UsageError

if TYPE_CHECKING:
    from kvcdn.journal import Entry
    from kvcdn.origin.upkeep.journal_check import DocumentsCompared, JournalChecked
    from kvcdn.signing import PublicKey, TrustList
    from kvcdn.store import BlobStore

app = typer.Typer(help="See who did what at an origin, and check that record.", no_args_is_help=True, rich_markup_mode=None)

_SHOWN = 50
"""Findings shown to people; --json has all of them."""

_NAMED = 3
"""Documents of one entry that a table names."""


@app.command("ls")
def list_entries(
    origin: OwnOrigin = None,
    endpoint: Endpoint = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many entries, the newest.")] = 50,
    before: Annotated[int | None, typer.Option(min=1, help="Only entries before this number.")] = None,
    action: Annotated[
        str | None, typer.Option(help="Only this: publish, copy, remove, repair, retire, revoke or rotate.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="Only entries about this document: the beginning of its address.")] = None,
    signer: Annotated[
        str | None, typer.Option(help="Only entries by this signer: the key, its first digits, or its name on your trust list.")
    ] = None,
    trust: TrustFile = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List the newest entries of an origin's journal, the newest last. Signatures are checked; the chain is by verify."""
    from kvcdn.journal import ACTIONS, START  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.upkeep.journal import find_head  # noqa: PLC0415

    if action is not None and action not in ACTIONS:
        raise UsageError(f"{action[:40]!r} is no action", hint=f"one of {', '.join(ACTIONS)}")
    store, trusted = open_origin(origin, endpoint), trust_list(trust)
    last = find_head(store, START).number
    found: list[tuple[int, Entry]] = []
    for number, entry in _backwards(store, min(last, before - 1) if before else last):
        if len(found) == limit:
            break
        if entry is None:
            note(f"kvcdn: entry {number} cannot be read: kvcdn journal verify says why")
        elif (action is None or entry.deed.action == action) and _is_about(entry, address) and _is_by(entry, signer, trusted):
            found.append((number, entry))
    found.reverse()
    if as_json:
        entries = [{**entry.to_json(), "trusted": entry.signer in trusted.names} for _, entry in found]
        print_json({"origin": store.url, "last": last, "entries": entries})
    elif not found:
        note(f"the journal of {store.url} has no such entry" if last else f"{store.url} has no journal yet")
    else:
        rows = [_row(entry, trusted) for _, entry in found]
        print_table(["NUMBER", "TIME", "SIGNER", "ACTION", "WHAT"], rows)


@app.command()
def verify(
    origin: OwnOrigin = None,
    endpoint: Endpoint = None,
    trust: TrustFile = None,
    *,
    documents: Annotated[
        bool, typer.Option("--documents", help="Also compare the journal with what is published: reads every manifest.")
    ] = False,
    forget: Annotated[
        bool,
        typer.Option("--forget", help="The journal was begun anew, and you know why: forget the old one."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check an origin's journal: no number missing, every signature right and by somebody on your trust list, the chain whole.

    The last entry is kept on this machine, so that the next check sees if the end was cut off. Ends with 4 where something is
    wrong. What --documents finds is shown and changes no exit code: see docs/publishing.md.
    """
    from kvcdn.keyring import forget_journal_head, keep_journal_head, load_journal_head  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.upkeep.journal_check import Shelf, check_journal  # noqa: PLC0415

    store, trusted, progress = open_origin(origin, endpoint), trust_list(trust), ticking()
    if forget:
        forget_journal_head(store.url)
    shelf = Shelf()
    seen = load_journal_head(store.url)
    checked = check_journal(store, trusted, seen=seen, follow=shelf.follow, progress=progress)
    if not checked.findings and checked.head.number:
        keep_journal_head(store.url, checked.head)
    compared = shelf.compare(store, time.time(), progress) if documents else None
    if as_json:
        shown = {"origin": store.url, **checked.to_json(), "seen": seen.number if seen else None}
        print_json({**shown, "documents": compared.to_json() if compared else None})
    else:
        _show_checked(checked, trusted, store.url)
        if compared:
            _show_compared(compared)
    if checked.exit_code:
        raise typer.Exit(checked.exit_code)


def _backwards(store: BlobStore, last: int) -> Iterator[tuple[int, Entry | None]]:
    from kvcdn.journal import open_entry  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.upkeep.journal import read_entries  # noqa: PLC0415

    for number, data in read_entries(store, range(last, 0, -1)):
        try:
            yield number, None if data is None else open_entry(data, number, f"entry {number}")
        except CorruptError:
            yield number, None


def _is_about(entry: Entry, address: str | None) -> bool:
    if address is None:
        return True
    named = entry.deed.to_json()
    return any(text.startswith(address) for text in [named.get("address", ""), *named.get("addresses", [])] if text)


def _is_by(entry: Entry, signer: str | None, trusted: TrustList) -> bool:
    if signer is None or entry.signer is None:
        return signer is None
    return trusted.names.get(entry.signer) == signer or str(entry.signer).startswith(signer.removeprefix("ed25519:").lower())


def _row(entry: Entry, trusted: TrustList) -> list[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.time))
    return [str(entry.number), when, _name(entry.signer, trusted), entry.deed.action, _what(entry)]


def _name(signer: PublicKey | None, trusted: TrustList) -> str:
    if signer is None:
        return "-"
    short = str(signer)[:SHORT]
    return f"{short} {trusted.names[signer]}".strip() if signer in trusted.names else f"{short} (not trusted)"


def _what(entry: Entry) -> str:
    deed: dict[str, Any] = entry.deed.to_json()
    addresses = [deed["address"]] if "address" in deed else deed.get("addresses", [])
    words = [text[:SHORT] for text in addresses[:_NAMED]]
    if len(addresses) > _NAMED:
        words.append(f"and {len(addresses) - _NAMED:,} more")
    if "model" in deed:
        words.append(f"of model {deed['model'][:SHORT]}")
    if "version" in deed:
        words.append(f"number {deed['version']}")
    if "successor" in deed:
        words.append(f"in favour of {deed['successor'][:SHORT]}")
    if entry.tenant:
        words.append(f"for {entry.tenant}")
    return " ".join(words)


def _show_checked(checked: JournalChecked, trusted: TrustList, url: str) -> None:
    for finding in checked.findings[:_SHOWN]:
        print_text(f"{finding.fault}: entry {finding.number}: {finding.reason}")
    if len(checked.findings) > _SHOWN:
        print_text(f"and {len(checked.findings) - _SHOWN:,} more: see --json")
    actions = ", ".join(f"{count:,} {action}" for action, count in sorted(checked.actions.items()))
    signers = ", ".join(f"{_name(key, trusted)} {count:,}" for key, count in sorted(checked.signers.items()))
    print_pairs(
        [
            ("journal", f"{counted(checked.entries, 'entry')} at {url}" + (f": {actions}" if actions else "")),
            ("signers", signers or "none"),
            ("last", f"{checked.head.number} {checked.head.digest}"),
            ("chain", f"{counted(len(checked.findings), 'finding')}" if checked.findings else "whole"),
        ]
    )


def _show_compared(compared: DocumentsCompared) -> None:
    for addresses, words in (
        (compared.unrecorded, "there, and no entry published it"),
        (compared.returned, "there, though an entry says that it was removed"),
        (compared.gone, "published, not there, and no entry removed it"),
    ):
        for address in addresses[:_SHOWN]:
            print_text(f"{address}: {words}")
        if len(addresses) > _SHOWN:
            print_text(f"and {len(addresses) - _SHOWN:,} more: see --json")
    counts = f"{len(compared.unrecorded):,} unrecorded, {len(compared.returned):,} returned, {len(compared.gone):,} gone"
    print_pairs([("documents", f"{compared.documents:,} there, {counts}")])
