"""What `kvcdn usage --reconcile` shows, and the hours it is told by."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import typer

from kvcdn.accounting.entry import HOUR_SECONDS
from kvcdn.accounting.reconcile import Reconciliation, Verdict
from kvcdn.cli.output import note, print_json, print_pairs, size
from kvcdn.errors import CorruptError, UsageError

SHOWN_FAULTS = 10

_WORDS = {
    Verdict.AGREED: "sent and received to the byte",
    Verdict.IN_FLIGHT: "sent, and not received: on its way when a request was ended",
    Verdict.NOT_ENDED: "begun by a client that never ended it: at it still, or killed",
    Verdict.CLIENT_UNKNOWN: "of a client that was killed before it wrote",
    Verdict.EDGE_LOST: "received from an edge that was killed before it wrote",
    Verdict.NO_CLIENT_LEDGER: "of clients whose ledgers were not given",
    Verdict.NO_EDGE_LEDGER: "of edges whose ledgers were not given",
    Verdict.FOLDED: "added up already: no longer told apart",
    Verdict.UNEXPLAINED: "UNEXPLAINED",
}


_TIERS = {
    Verdict.AGREED: "the same",
    Verdict.IN_FLIGHT: "the rest broke off, or was on its way",
    Verdict.EDGE_LOST: "an edge was killed before it wrote",
    Verdict.DROPPED: "an edge had no room for what it counted",
    Verdict.NO_EDGE_LEDGER: "the ledgers of one side were not given",
    Verdict.UNEXPLAINED: "UNEXPLAINED",
}
"""Of what edges send to edges."""


def read_hour(text: str | None, option: str) -> int | None:
    """The hour since 1970 of `2026-11-01` or `2026-11-01T08`, UTC. Raises UsageError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{4}-\d{2}-\d{2})(?:T(\d{2})(?::00)?)?", text)
    try:
        if match is None:
            raise ValueError
        moment = datetime.strptime(f"{match[1]} {match[2] or '00'}", "%Y-%m-%d %H").replace(tzinfo=UTC)
    except ValueError:
        raise UsageError(f"{option} takes an hour of UTC, such as 2026-11-01 or 2026-11-01T08, not {text[:40]!r}") from None
    return int(moment.timestamp()) // HOUR_SECONDS


def show_hour(hour: int) -> str:
    """As `read_hour` reads it."""
    return datetime.fromtimestamp(hour * HOUR_SECONDS, UTC).strftime("%Y-%m-%dT%H")


def show_reconciliation(found: Reconciliation, *, as_json: bool) -> None:
    """Shows it. Raises typer.Exit with the code of CorruptError where it does not hold."""
    if as_json:
        print_json(found.to_json())
    else:
        pairs = [("edges sent", size(found.sent)), ("clients received", size(found.received)), ("of it used", size(found.used))]
        for verdict, count in sorted(found.prompts.items()):
            differ = found.at_most.get(verdict, 0)
            pairs.append((verdict.value, f"{count:,} prompts, {size(differ)} apart: {_WORDS[verdict]}"))
        pairs.append(("known to differ", f"by {size(found.bound)} at most"))
        if found.documents:
            elsewhere = f", {found.documents_unknown:,} published elsewhere" if found.documents_unknown else ""
            pairs.append(("documents", f"{found.documents:,} of as many tokens as were published{elsewhere}"))
        if found.untied:
            pairs.append(("without a tie", f"{size(found.untied)} sent to readers who do not count"))
        if found.tiers.sent or found.tiers.filled:
            pairs.append(
                (
                    "between edges",
                    f"{size(found.tiers.sent)} sent, {size(found.tiers.filled)} filled: {_TIERS[found.tiers.verdict]}",
                )
            )
        pairs.append(("verdict", _verdict(found)))
        print_pairs(pairs)
    for one in found.faults[:SHOWN_FAULTS]:
        note(f"kvcdn: prompt {one.prompt} at {show_hour(one.hour)}: {one.sent:,} bytes sent, {one.received:,} received")
    if not found.holds:
        note("       is the ledger of an edge or a client missing, or was one changed?")
        raise typer.Exit(CorruptError.exit_code)


def _verdict(found: Reconciliation) -> str:
    if found.holds:
        return "the counts reconcile"
    return (
        f"{len(found.faults):,} prompts do not reconcile"
        if found.faults
        else "edges and the edges that they fill from do not reconcile"
    )
